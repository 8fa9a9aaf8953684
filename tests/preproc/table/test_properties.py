"""Any table of strings gives the ids of a reference of ten lines of Python."""

import math
import shutil
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from tests.helpers.preproc_command import preproc, raw_line, write_lines
from tests.preproc.table.test_pipeline import _hydra

pytest.importorskip("hypothesis", reason="hypothesis is not installed (group `dev`)")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preproc.criteo.parse import BLOCK_BYTES, MEMORY_BYTES
from preproc.criteo.parse_block import BlockParser
from preproc.criteo.tokenizer import MISSING, NON_HEX
from preproc.line_blocks import mistake_in

SETTINGS = settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Fields of raw text: anything but what separates fields and lines; hexadecimals often.
TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\r\n\0", exclude_categories=["Cs"]),
    max_size=9,
)
HEX = st.integers(0, 2**32 - 1).map("{:08x}".format)
FEW = st.sampled_from(["", "00000000", "ffffffff", "fffffffe", "0000000A", "a", "é", "NULL", " "])
FIELD = st.one_of(FEW, FEW, HEX, TEXT)


def reference_ids(values: list[str], num_train: int, frequency_limit: int) -> list[int]:
    """The semantics, in plain Python."""
    counts = Counter(value for value in values[:num_train] if value)
    ranked = sorted(counts, key=lambda value: (-counts[value], value.encode()))
    kept = [value for value in ranked if counts[value] >= frequency_limit]
    ids = {value: number for number, value in enumerate(kept, start=1)}
    return [ids.get(value, 0) for value in values]


def reference_number(field: str) -> float:
    return math.log(int(field) + 3) if field and int(field) > -3 else 0.0


@SETTINGS
@given(
    rows=st.lists(
        st.tuples(FIELD, FIELD, st.integers(-(10**18) + 1, 10**18 - 1)), min_size=5, max_size=40
    ),
    frequency_limit=st.integers(0, 4),
)
def test_any_raw_logs_give_the_ids_and_numbers_of_the_reference(rows, frequency_limit):
    lines = [raw_line(i % 2, i1=n, c1=a, c2=b) for i, (a, b, n) in enumerate(rows)]
    with tempfile.TemporaryDirectory() as directory:
        source, output = write_lines(Path(directory) / "raw.tsv", lines), Path(directory) / "out"
        preproc(f"source={source}", f"output={output}", f"frequency_limit={frequency_limit}")
        num_train = FeatureSpec.load(output).rows_of("train")
        for number in (0, 1):
            wanted = reference_ids([row[number] for row in rows], num_train, frequency_limit)
            assert read(output, f"cat_{number}") == wanted
        numbers = np.concatenate(
            [np.fromfile(output / s / "numerical.bin", "<f2").reshape(-1, 13)[:, 0] for s in SPLITS]
        )
        wanted = np.array([reference_number(str(n)) for *_, n in rows], np.float32).astype("<f2")
        assert numbers.tolist() == wanted.tolist()


SPLITS = ("train", "test")


def read(output: Path, name: str) -> list[int]:
    spec = FeatureSpec.load(output)
    dtype = next(f.dtype for f in spec.categorical if f.name == name)
    return np.concatenate([np.fromfile(output / s / f"{name}.bin", dtype) for s in SPLITS]).tolist()


def csv_field(value: str) -> str:
    return '"' + value.replace('"', '""') + '"' if value else ""


@SETTINGS
@given(
    rows=st.lists(st.tuples(FIELD, FIELD), min_size=5, max_size=40),
    frequency_limit=st.integers(0, 3),
)
def test_any_csv_gives_the_ids_of_the_reference(rows, frequency_limit):
    directory = Path(tempfile.mkdtemp())
    try:
        lines = [
            "y,a,b",
            *(f"{i % 2},{csv_field(a)},{csv_field(b)}" for i, (a, b) in enumerate(rows)),
        ]
        source = write_lines(directory / "t.csv", lines)
        table = {
            "sources": {"t": {"files": str(source)}},
            "label": {"name": "y"},
            "categorical": ["a", "b", {"name": "ab", "cross": ["a", "b"]}],
        }
        preproc(
            "dataset=any",
            f"table={_hydra(table)}",
            f"output={directory / 'out'}",
            f"frequency_limit={frequency_limit}",
        )
        num_train = FeatureSpec.load(directory / "out").rows_of("train")
        crossed = [f"{a}\x1f{b}" if a and b else "" for a, b in rows]
        for name, values in (
            ("a", [a for a, _ in rows]),
            ("b", [b for _, b in rows]),
            ("ab", crossed),
        ):
            wanted = reference_ids(values, num_train, frequency_limit)
            assert read(directory / "out", name) == wanted
    finally:
        shutil.rmtree(directory)


INTEGER_TEXT = st.one_of(
    st.integers(-(10**18) + 1, 10**18 - 1).map(str),
    st.integers(0, 10**6).map("+{:09}".format),
    st.integers(-20, 70_000).map(str),
    st.sampled_from(
        ["-", "+", "--1", "-0", "1.0", "1e3", "٣", "9" * 19, " 1", "12:4", "+-12", "1\r"]
    ),
)
NEARLY_HEX = st.sampled_from(
    ["0000001g", "0000001/", "0000001:", "0000001`", "0000001G", "1234567", "123456789", "é234567"]
)


def line(label: str, number: str, first: str, last: str) -> bytes:
    return "\t".join([label, *[""] * 11, number, "7", first, *[""] * 24, last]).encode()


def with_other_tab(row: bytes, number: int, other: bytes) -> bytes:
    """Return the line with `other` in place of one of its tabs."""
    fields = row.split(b"\t")
    return b"\t".join(fields[: number + 1]) + other + b"\t".join(fields[number + 1 :])


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.one_of(
            st.builds(line, st.sampled_from("01"), INTEGER_TEXT, st.one_of(FIELD, NEARLY_HEX), HEX),
            st.builds(line, st.sampled_from("01"), st.just(""), HEX, st.one_of(FIELD, NEARLY_HEX)),
            st.builds(line, st.sampled_from(["2", "", "10", "x"]), st.just("1"), HEX, HEX),
            st.builds(
                bytes.__add__,
                st.builds(line, st.just("1"), st.just("1"), HEX, FIELD),
                st.sampled_from([b"\xff", b"\xc3", b"\xc3\xa9"]),
            ),
            st.builds(
                with_other_tab,
                st.builds(line, st.just("1"), st.just("1"), HEX, HEX),
                st.integers(0, 38),
                st.sampled_from([b"", b"\t\t", b"\r", b"\r\t", b"\xff", b"\n", b"7"]),
            ),
            st.binary(max_size=9),
        ),
        max_size=12,
    ),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_a_block_of_any_bytes_gives_the_rows_of_its_good_lines(rows, line_end):
    text = b"".join(row + line_end for row in rows)
    found = parser()(text)
    lines = [raw.removesuffix(b"\r") for raw in text.split(b"\n")[:-1]]
    reasons = [mistake_in(raw) if raw else None for raw in lines]
    wrong = [
        (number, reason, raw)
        for number, (reason, raw) in enumerate(zip(reasons, lines, strict=True))
        if reason
    ]
    assert (found.num_lines, found.num_bytes, found.bad) == (len(lines), len(text), wrong)
    good = [
        raw.decode().split("\t")
        for reason, raw in zip(reasons, lines, strict=True)
        if raw and not reason
    ]
    labels, numericals, missing, *codes = found.columns
    assert labels.tolist() == [int(row[0]) for row in good]
    wanted = np.array([[reference_number(each) for each in row[1:14]] for row in good], np.float32)
    assert numericals.tolist() == wanted.reshape(-1, 13).tolist()
    bits = [[int(not each) for each in row[1:14]] for row in good]
    assert np.unpackbits(missing, axis=1, count=13).tolist() == bits
    wanted_codes = [[reference_code(each) for each in row[14:]] for row in good]
    assert np.array(codes).T.tolist() == wanted_codes
    non_hex = {
        (column, number): value
        for number, row in enumerate(good)
        for column, value in enumerate(row[14:])
        if reference_code(value) == NON_HEX
    }
    texts = {
        (column, number): value
        for part in found.non_hex
        for column, number, value in zip(
            part.columns.to_pylist(), part.rows.to_pylist(), part.texts.to_pylist(), strict=True
        )
    }
    assert texts == non_hex


@pytest.mark.parametrize("category", ["", "0123abcd", "x", "a longer text than eight"])
def test_a_parsed_block_stays_within_its_memory_estimate(category):
    line = "1" + "\t" * 13 + f"\t{category}" * 26 + "\n"
    text = line.encode() * ((1 << 18) // len(line))
    found = parser()(text)
    non_hex_bytes = sum(part.num_bytes for part in found.non_hex)
    assert bool(non_hex_bytes) == (len(category) not in (0, 8))
    kept_bytes = len(text) + sum(column.nbytes for column in found.columns) + non_hex_bytes
    assert kept_bytes < MEMORY_BYTES / BLOCK_BYTES * len(text)


@cache
def parser() -> BlockParser:
    return BlockParser("float32")


def reference_code(value: str) -> int:
    if not value:
        return MISSING
    is_code = len(value) == 8 and set(value) <= set("0123456789abcdef")
    return min(int(value, 16), NON_HEX) if is_code else NON_HEX
