"""Parsing in several threads: the same bytes in the same order, and no thread left at the end."""

import threading
import time
from itertools import count

import numpy as np
import pytest

from preproc.criteo import parse
from preproc.criteo.parse_block import BlockParser
from preproc.criteo.tokenizer import LEAST, MOST
from preproc.ordered_map import ordered_map
from preproc.vocabulary_sql import NUM_CATEGORICAL, NUM_NUMERICAL
from tests.helpers.preproc_command import preproc, write_lines
from tests.preproc.criteo.test_restart import all_files, noise


def test_two_threads_write_the_bytes_of_one(tmp_path, monkeypatch):
    lines = noise(3000)
    lines[700] = "no line"
    for day, part in enumerate((lines[:2000], lines[2000:])):
        write_lines(tmp_path / f"day_{day}.gz", part, compress=True)
    options = [f"source={tmp_path}/day_*", "on_bad=quarantine"]
    preproc(*options, f"output={tmp_path / 'whole'}", "threads=1")
    monkeypatch.setattr(parse, "BLOCK_BYTES", 20_000)
    threads = []
    monkeypatch.setattr(
        parse, "ordered_map", lambda *args: threads.append(args[2]) or ordered_map(*args)
    )
    preproc(*options, f"output={tmp_path / 'one'}", "threads=1")
    preproc(*options, f"output={tmp_path / 'two'}", "threads=2")
    assert threads == [1, 1, 2, 2]
    assert all_files(tmp_path / "one") == all_files(tmp_path / "whole")
    assert all_files(tmp_path / "two") == all_files(tmp_path / "whole")
    assert b"day_0.gz\t701\t" in (tmp_path / "two/bad_rows.tsv").read_bytes()


def test_results_come_in_order_for_any_durations():
    def slow(number: int) -> int:
        time.sleep(0.002 * (number % 3 == 0))
        return number

    assert list(ordered_map(slow, range(50), threads=4, ahead=8)) == list(range(50))


def test_no_more_items_than_allowed_are_in_flight():
    taken = count()
    results = ordered_map(lambda item: item, taken, threads=2, ahead=3)
    next(results)
    time.sleep(0.05)
    # One item is yielded, three are in flight, and one more is waiting.
    assert next(taken) <= 5
    results.close()


def test_errors_of_items_and_function_are_raised_in_order():
    def items():
        yield from (1, 2, 3)
        raise ValueError("no more")

    results = ordered_map(str, items(), threads=2, ahead=9)
    assert [next(results) for _ in range(3)] == ["1", "2", "3"]
    with pytest.raises(ValueError, match="no more"):
        next(results)
    results = ordered_map(lambda item: 1 // item, (1, 0, 1), threads=2, ahead=9)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_no_thread_outlives_a_stream_that_is_closed():
    before = threading.active_count()
    results = ordered_map(str, count(), threads=2, ahead=3)
    next(results)
    assert threading.active_count() > before
    results.close()
    assert threading.active_count() == before


def test_a_block_in_the_memory_of_another_has_the_columns_of_its_own():
    parser = BlockParser("float32")
    fields = [f"{number}\t" * 13 + "\t".join([f"{number:08x}"] * 25) for number in (3, 70, 9)]
    long, short = (
        "".join(f"1\t{body}\t{last}\n" for body in fields * times).encode()
        for times, last in ((40, "text"), (20, "0000000a"))
    )
    first, wanted = parser(long), parser(short)
    parser.reuse(first.arrays)
    found = parser(short)
    assert found.arrays is first.arrays
    for column, as_wanted in zip(found.columns, wanted.columns, strict=True):
        assert np.array_equal(column, as_wanted)
    parser.reuse(found.arrays)
    assert parser(long * 2).arrays is not first.arrays


def test_integers_of_any_length_and_sign_are_those_of_python():
    draw = np.random.default_rng(0)
    some = [str(draw.integers(10**length)) for length in range(1, 19) for _ in range(40)]
    ends = [number + step for number in (LEAST, 0, MOST, 10**7) for step in (-1, 0, 1, 2)]
    texts = ["", "", "", "007", "+5", "-0", *map(str, ends), *some, *(f"-{x}" for x in some[:99])]
    rows = draw.choice(texts, (500, NUM_NUMERICAL))
    rows[-2:] = draw.choice(["", "12"], (2, NUM_NUMERICAL))  # whose tabs are found one by one
    lines = ["0\t" + "\t".join(row) + "\t" * NUM_CATEGORICAL + "\n" for row in rows]
    parsed = BlockParser("int64")("".join(lines).encode())
    assert parsed.columns[1].tolist() == [[int(text or 0) for text in row] for row in rows]
    is_missing = np.unpackbits(parsed.columns[2], axis=1, count=NUM_NUMERICAL)
    assert np.array_equal(is_missing, rows == "")


@pytest.mark.parametrize(
    "text", ["12:", "1/", "-", "1 ", "1\x00", "é", "123456789a", "1\r", "12345678901234567890"]
)
def test_what_is_no_integer_is_a_bad_line(text):
    line = "0\t" + "3\t" * 12 + text + "\t" + "\t".join(["0000000a"] * NUM_CATEGORICAL) + "\n"
    parsed = BlockParser("float32")(line.encode() * 3)
    assert parsed.num_rows == 0
    assert [index for index, _, _ in parsed.bad] == [0, 1, 2]
