"""Bad input of `python -m preproc`: one message, and no files left."""

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import duckdb
import pyarrow as pa
import pytest

from configs.exit_codes import INTERRUPTED_EXIT_CODE, USER_ERROR_EXIT_CODE
from configs.options import describe
from configs.preproc_schema import PreprocConfig
from preproc import dataset_writer as output_module
from preproc import work_directory as work
from preproc.criteo import parse
from preproc.criteo import pipeline as criteo
from preproc.line_blocks import blocks
from preproc.raw_files import RawFile, find_gap, zstd_is_complete
from tests.helpers.forks import python
from tests.helpers.preproc_command import Refused, data_files, preproc, raw_line, write_lines

GOOD = [raw_line(i % 2, i1=i, c1=f"{i % 7:08x}") for i in range(100)]
INTERRUPTED = "interrupted: nothing was written to output; rerun the same command to resume"
ARGUMENTS = ["-m", "preproc"]
ROOT = Path(__file__).resolve().parents[3]


def fails(message: str, *overrides: str) -> None:
    """Assert that the command fails with exactly this message (a regular expression)."""
    with pytest.raises(Refused) as caught:
        preproc(*overrides)
    assert re.fullmatch(f"error: {message}", caught.value.message), caught.value.message
    assert caught.value.exit_code == USER_ERROR_EXIT_CODE


def spoiled(tmp_path: Path, line: str, number: int = 42) -> Path:
    """Write good lines, and `line` as line `number`."""
    return write_lines(tmp_path / "raw.tsv", [*GOOD[: number - 1], line, *GOOD[number:]])


@pytest.fixture
def output(tmp_path):
    """Return the output directory; at the end check that neither it nor a hidden sibling exists."""
    yield tmp_path / "out"
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_a_line_of_39_columns_is_named(tmp_path, output):
    source = spoiled(tmp_path, GOOD[0].removesuffix("\t"))
    fails(
        rf"{source}, line 42: 39 columns, wanted 40 \(label, 13 integers, 26 categories, "
        r"separated by tabs\); correct or remove the line, or give a file that has labels",
        f"source={source}",
        f"output={output}",
    )


def test_a_line_of_41_columns_is_named(tmp_path, output):
    source = spoiled(tmp_path, GOOD[0] + "\tx")
    fails(
        rf"{source}, line 42: 41 columns, wanted 40 \(.*\); correct or remove the line",
        f"source={source}",
        f"output={output}",
    )


@pytest.mark.parametrize("value", ["12a", "1.5", "1e3", " 1", "1_000", "9" * 19])
def test_a_value_that_is_no_integer_is_named(tmp_path, output, value):
    source = spoiled(tmp_path, raw_line(0, i5=value))
    fails(
        rf"{source}, line 42: column 6 \(num_4\) is '{re.escape(value)}', wanted an integer of "
        "at most 18 digits; correct it or leave the field empty",
        f"source={source}",
        f"output={output}",
    )


@pytest.mark.parametrize("label", ["2", "", "yes"])
def test_a_label_that_is_not_0_or_1_is_named(tmp_path, output, label):
    source = spoiled(tmp_path, raw_line(label, c1="a"))
    fails(
        rf"{source}, line 42: column 1 \(label\) is '{label}', wanted 0 or 1; "
        "correct or remove the line",
        f"source={source}",
        f"output={output}",
    )


def test_line_numbers_count_blank_lines_and_all_blocks_of_a_file(tmp_path, output, monkeypatch):
    monkeypatch.setattr(parse, "BLOCK_BYTES", 10_000)
    lines = GOOD * 15
    lines[10] = ""
    lines[1233] = GOOD[0].replace("0", "x", 1)
    source = write_lines(tmp_path / "raw.tsv.gz", lines, compress=True)
    fails(f"{source}, line 1234: column 1 .*", f"source={source}", f"output={output}")


def test_the_file_among_many_is_named_and_only_it_is_read_again(tmp_path, monkeypatch):
    output = tmp_path / "out"
    write_lines(tmp_path / "day_0", GOOD)
    write_lines(tmp_path / "day_1", [*GOOD, raw_line(7)])
    fails(
        f"{tmp_path}/day_1, line 101: column 1 .*", f"source={tmp_path}/day_*", f"output={output}"
    )
    assert not output.exists()
    write_lines(tmp_path / "day_1", [*GOOD, raw_line(1)])
    read = []
    blocks = parse.blocks
    monkeypatch.setattr(
        parse, "blocks", lambda file, *more: read.append(file) or blocks(file, *more)
    )
    preproc(f"source={tmp_path}/day_*", f"output={output}")
    assert [file.path.name for file in read] == ["day_1"]
    assert len(data_files(output)["train/label.bin"] + data_files(output)["test/label.bin"]) == 201


def test_a_line_that_is_not_utf8_is_named(tmp_path, output):
    source = tmp_path / "raw.tsv"
    source.write_bytes("\n".join(GOOD).encode().replace(b"00000003", b"0000\xff003", 1))
    fails(
        f"{source}, line 4: not UTF-8 text; correct or remove the line",
        f"source={source}",
        f"output={output}",
    )


def test_a_lone_carriage_return_is_not_tab_separated_text(tmp_path, output):
    source = spoiled(tmp_path, raw_line(0, c2="a\rb"))
    fails(f"{source}.*: not tab-separated text: .*", f"source={source}", f"output={output}")


@pytest.mark.parametrize("missing", [1, 8, 9, 200])
def test_a_truncated_gzip_is_named(tmp_path, output, missing):
    source = write_lines(tmp_path / "raw.tsv.gz", GOOD, compress=True)
    source.write_bytes(source.read_bytes()[:-missing])
    fails(
        f"{source}: the compressed data ends before its end marker, so the file was cut short; "
        "fetch it again",
        f"source={source}",
        f"output={output}",
    )


def zstandard(path: Path, rows: int) -> bytes:
    """Write `rows` numbered lines of text to `path`, compressed."""
    duckdb.sql(
        f"COPY (SELECT hash(range) FROM range({rows})) TO '{path}' (FORMAT csv, COMPRESSION zstd)"
    )
    return path.read_bytes()


def test_a_truncated_zstandard_is_named(tmp_path, output):
    source = tmp_path / "raw.zst"
    source.write_bytes(zstandard(source, 1000)[:-1])
    fails(
        f"{source}: the compressed data ends before its end marker, .*",
        f"source={source}",
        f"output={output}",
    )


def test_no_truncated_zstandard_file_counts_as_complete(tmp_path):
    # Two frames with a skippable one between them; the first spans several blocks.
    frames = zstandard(tmp_path / "a", 30_000), zstandard(tmp_path / "b", 3)
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    whole = frames[0] + skippable + frames[1]
    ends = {len(frames[0]), len(frames[0] + skippable), len(whole)}
    cut = tmp_path / "cut"
    lengths = [
        *range(1, 40),
        *range(40, len(whole) - 200, 997),
        *range(len(whole) - 200, len(whole) + 1),
    ]
    for length in sorted({*lengths, *ends}):
        cut.write_bytes(whole[:length])
        assert zstd_is_complete(cut) == (length in ends), length


def test_a_damaged_zstandard_is_named(tmp_path, output):
    source = tmp_path / "raw.zst"
    packed = bytearray(pa.compress("\n".join(GOOD).encode(), "zstd", asbytes=True))
    packed[len(packed) // 2 :] = bytes(len(packed) - len(packed) // 2)
    packed[-1] = 1
    source.write_bytes(packed)
    file = RawFile(source, "zstd")
    with pytest.raises(ValueError, match=r"damaged Zstandard data \(.*\); fetch it again"):
        list(blocks(file, 0))


def test_a_zstandard_file_of_several_frames_is_read_from_any_byte(tmp_path):
    text = "".join(f"{line}\n" for line in GOOD).encode()
    parts = text[:1000], b"", text[1000:]
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    source = tmp_path / "raw.zst"
    source.write_bytes(skippable.join(pa.compress(part, "zstd", asbytes=True) for part in parts))
    assert zstd_is_complete(source)
    for offset in (0, 1, 999, 1000, 1001, len(text) - 1, len(text)):
        assert b"".join(blocks(RawFile(source, "zstd"), offset, 100)) == text[offset:]


@pytest.mark.parametrize("name", ["raw.tsv", "raw.tsv.gz"])
def test_an_empty_file_is_named(tmp_path, output, name):
    source = tmp_path / name
    source.write_bytes(b"")
    fails(
        f"{source}: the file is empty; drop it from source, or fetch it again",
        f"source={source}",
        f"output={output}",
    )


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_of_blank_lines_only_is_named(tmp_path, output, compress):
    source = write_lines(tmp_path / "raw.tsv", ["", ""], compress)
    fails(
        f"{source}: no line in it; drop it from the sources, or fetch it again",
        f"source={source}",
        f"output={output}",
    )


def test_a_missing_file_is_named(tmp_path, output):
    source = tmp_path / "raw.tsv"
    fails(
        f"{source}: no such file; set source to the raw logs",
        f"source={source}",
        f"output={output}",
    )


def test_a_glob_that_matches_nothing_is_named(tmp_path, output):
    fails(
        rf"{tmp_path}/day_\*: no file matches; set source to the raw logs",
        f"source={tmp_path}/day_*",
        f"output={output}",
    )


def test_a_directory_is_not_a_source(tmp_path, output):
    fails(
        rf"{tmp_path}: a directory; set source to the files in it, such as '{tmp_path}/\*.gz'",
        f"source={tmp_path}",
        f"output={output}",
    )


def test_an_archive_is_not_a_source(tmp_path, output):
    source = tmp_path / "raw.zip"
    source.write_bytes(b"PK\x03\x04" + b"\0" * 30)
    fails(
        f"{source}: a zip file; only plain text, .gz and .zst can be read, so unpack it first",
        f"source={source}",
        f"output={output}",
    )


def test_a_file_named_twice_is_refused(tmp_path, output):
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    fails(
        f"source names {source} twice; its rows would count twice",
        f"source=[{source},{tmp_path}/*.tsv]",
        f"output={output}",
    )


def test_training_rows_do_not_test(tmp_path, output):
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    fails(
        f"source and test_source both name {source}; test on other rows",
        f"source={source}",
        f"test_source={source}",
        f"output={output}",
    )


def test_a_split_without_rows_is_refused(tmp_path, output):
    source = write_lines(tmp_path / "raw.tsv", GOOD[:1])
    fails(
        "train_fraction=0.9 of 1 rows leaves no rows for train; "
        "change train_fraction or give more rows",
        f"source={source}",
        f"output={output}",
    )


def test_no_rows_left_for_test_is_refused(tmp_path, output):
    write_lines(tmp_path / "day_0", GOOD)
    write_lines(tmp_path / "day_1", GOOD[:1])
    fails(
        "split=last_file over 2 files, the last of 1 rows, leaves no rows for test; "
        "give at least two files, or choose split=fraction",
        "dataset=criteo_1tb",
        f"source={tmp_path}/day_*",
        f"output={output}",
    )


def test_a_directory_with_other_things_in_it_is_not_written_to(tmp_path):
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    fails(
        f"{tmp_path} is not empty and holds no feature_spec.yaml; .*",
        f"source={source}",
        f"output={tmp_path}",
        "overwrite=true",
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["source=a"], "no output: set output=DIR, the dataset directory to write"),
        (
            ["output=OUT"],
            r"no source: set source=FILE, a glob or '\[FILE,FILE\]', the raw logs to read",
        ),
        (["output=OUT", "source=5"], "source must be a file, a glob or a list of them, got 5"),
        (
            ["output=OUT", "source=a", "train_fraction=1"],
            "train_fraction must lie between 0 and 1, got 1.0",
        ),
        (
            ["output=OUT", "source=a", "frequency_limit=-1"],
            "frequency_limit must not be negative, got -1",
        ),
        (["output=OUT", "source=a", "threads=0"], "threads must be positive or null, got 0"),
        (
            ["output=OUT", "dataset=synthetic", "source=a"],
            "dataset=synthetic reads no files, got source=a; drop it or choose .*",
        ),
        (
            ["output=OUT", "dataset=synthetic", "data.synthetic.cardinalities=[]"],
            "dataset=synthetic needs data.synthetic.cardinalities, one entry per table",
        ),
    ],
)
def test_an_invalid_option_is_refused(output, overrides, message):
    fails(message, *[option.replace("OUT", str(output)) for option in overrides])


def test_a_memory_limit_that_is_no_size_is_refused(tmp_path, output):
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    fails(
        r"memory_limit=lots: write it as 8GB or 512MB \(a number and a unit\)",
        f"source={source}",
        f"output={output}",
        "memory_limit=lots",
    )


def test_too_little_memory_is_reported(tmp_path):
    source, output = write_lines(tmp_path / "raw.tsv", GOOD), tmp_path / "out"
    fails(
        r"DuckDB ran out of memory; raise memory_limit \(now 1MB\) or lower threads: .*",
        f"source={source}",
        f"output={output}",
        "memory_limit=1MB",
    )


def test_an_interrupted_query_leaves_nothing(tmp_path, output, monkeypatch):
    def interrupted(*_):
        raise RuntimeError("Query interrupted")  # what DuckDB raises at Ctrl-C

    monkeypatch.setattr(criteo, "parse_files", interrupted)
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    with pytest.raises(Refused) as caught:
        preproc(f"source={source}", f"output={output}")
    assert caught.value.message == INTERRUPTED
    assert caught.value.exit_code == INTERRUPTED_EXIT_CODE


def test_ctrl_c_ends_the_command_with_one_message(tmp_path, output):
    source = write_lines(tmp_path / "raw.tsv", GOOD * 500)
    run = subprocess.Popen(
        [python(), *ARGUMENTS, f"source={source}", f"output={output}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts jobs in the background with SIGINT ignored, and Python would leave it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / ".out.preproc" / "label.u8").exists():
        assert run.poll() is None, "the run was over before it could be interrupted"
        time.sleep(0.001)
    run.send_signal(signal.SIGINT)
    assert run.communicate()[1] == f"{INTERRUPTED}\n"
    assert run.returncode == INTERRUPTED_EXIT_CODE
    preproc(f"source={source}", f"output={output}")
    shutil.rmtree(output)


def test_temporary_files_are_local(tmp_path, output):
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    for mode in ("fit", "describe"):
        options = f"mode={mode}", f"source={source}", f"output={output}"
        fails(
            "temp_directory=s3://b/x must be a local directory", *options, "temp_directory=s3://b/x"
        )


def test_a_full_disk_is_reported_and_the_next_run_resumes(tmp_path, monkeypatch):
    source, output = write_lines(tmp_path / "raw.tsv", GOOD), tmp_path / "out"
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(output_module.RecordedFile, "append", full)
        fails(
            rf"No space left on device: output={output}; free some space and rerun the same command "
            "\\(it resumes\\), or move output or temp_directory",
            f"source={source}",
            f"output={output}",
        )
    assert not output.exists()
    monkeypatch.setattr(parse, "blocks", None)  # the lines are not read again
    preproc(f"source={source}", f"output={output}")
    assert len(data_files(output)) == 2 * 28


def test_too_little_disk_space_is_reported_before_anything_is_written(
    tmp_path, output, monkeypatch
):
    monkeypatch.setattr(work.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    fails(
        rf"the run needs about 0.00 GB at {tmp_path}, where 0.00 GB are free; free some, or move "
        "output or temp_directory",
        f"source={source}",
        f"output={output}",
    )


def test_too_little_disk_space_for_the_dataset_alone_is_reported(tmp_path, output, monkeypatch):
    # Work and output are on two disks: 100 rows of 133 bytes here, of 90 bytes there.
    free = {tmp_path / "work": 13_500, tmp_path: 8_000}
    monkeypatch.setattr(work.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path]))
    monkeypatch.setattr(criteo, "same_disk", lambda *_: False)
    (tmp_path / "work").mkdir()
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    options = [f"source={source}", f"output={output}", f"temp_directory={tmp_path / 'work'}"]
    fails(f"the dataset needs about 0.00 GB at {tmp_path}, where .*", *options)
    free[tmp_path / "work"] = 13_000
    fails(f"the work directory needs about 0.00 GB at {tmp_path / 'work'}, where .*", *options)
    monkeypatch.setattr(criteo, "same_disk", lambda *_: True)
    free[tmp_path / "work"] = 17_000
    fails(f"the run needs about 0.00 GB at {tmp_path / 'work'}, where .*", *options)


def test_a_copy_of_a_file_is_refused(tmp_path, output):
    first = write_lines(tmp_path / "day_0", GOOD)
    second = write_lines(tmp_path / "day_1", GOOD)
    fails(
        f"{second} is a copy of {first}; its rows would count twice, so drop one",
        f"source={tmp_path}/day_*",
        f"output={output}",
    )


def test_a_missing_day_is_refused(tmp_path, output):
    for day in (0, 1, 3):
        write_lines(tmp_path / f"day_{day}", GOOD[day:])
    fails(
        "day_2 is missing between day_0 and day_3; fetch it, or give the files one by one",
        "dataset=criteo_1tb",
        f"source={tmp_path}/day_*",
        f"output={output}",
    )


def test_a_comma_separated_file_is_led_to_the_table_route(tmp_path, output):
    lines = [",".join(["label", *(f"I{n}" for n in range(39))]), ",".join(["0"] * 40)]
    source = write_lines(tmp_path / "raw.csv", lines)
    fails(
        rf"{source}, line 1: 39 commas and no tab, wanted 40 columns separated by tabs; describe comma-separated files as "
        r"a table \(layout=table, docs/your_data\.md\)",
        f"source={source}",
        f"output={output}",
    )


def test_a_header_line_is_named(tmp_path, output):
    source = write_lines(tmp_path / "raw.tsv", [raw_line("label", i1="I1"), *GOOD])
    fails(
        rf"{source}, line 1: column 1 \(label\) is 'label', wanted 0 or 1; correct or remove the "
        r"line \(a header line\? on_bad=skip leaves it out\)",
        f"source={source}",
        f"output={output}",
    )


def test_a_byte_order_mark_is_named(tmp_path, output):
    (source := tmp_path / "raw.tsv").write_text("\n".join(GOOD), encoding="utf-8-sig")
    fails(
        rf"{source}, line 1: column 1 .* \(a byte order mark\? remove the first three bytes\)",
        f"source={source}",
        f"output={output}",
    )


def test_a_gap_is_found_however_far_the_numbers_reach():
    files = [RawFile(Path(f"day_{number}"), "none") for number in (10**15, 2, 10**15 + 1, 1)]
    assert find_gap(files) == (
        "day_3 is missing between day_1 and day_1000000000000001; fetch it, or give the files one "
        "by one"
    )
    assert find_gap(files[:1] + files[2:3]) is None


def test_a_damaged_gzip_is_named(tmp_path, output):
    source = write_lines(tmp_path / "raw.tsv.gz", GOOD * 20, compress=True)
    packed = bytearray(source.read_bytes())
    packed[-7] ^= 1  # its checksum; the text itself is intact
    source.write_bytes(packed)
    fails(
        rf"{source}: damaged gzip data \(.*\); fetch it again",
        f"source={source}",
        f"output={output}",
    )


BAD = {
    2: b"label\tI1",
    11: GOOD[3].encode() + b"\tx",
    12: raw_line(2).encode(),
    30: raw_line(1, i3="1e3").encode(),
    31: b"\xff" + GOOD[0].encode(),
    32: GOOD[0].encode() + b"\x01\rx",
    99: raw_line(1, i3="9" * 19).encode(),
}


@pytest.fixture(scope="module")
def without_bad(tmp_path_factory) -> dict[str, bytes]:
    """Return what the good lines become."""
    directory = tmp_path_factory.mktemp("good")
    lines = [line for number, line in enumerate(GOOD, start=1) if number not in BAD]
    source = write_lines(directory / "good", lines)
    preproc(f"source={source}", f"output={directory / 'out'}")
    return data_files(directory / "out")


@pytest.mark.parametrize(("on_bad", "packed"), [("skip", False), ("quarantine", True)])
def test_bad_rows_are_left_out_counted_and_quarantined(tmp_path, without_bad, on_bad, packed):
    lines = [BAD.get(number, line.encode()) for number, line in enumerate(GOOD, start=1)]
    source = tmp_path / "raw.tsv"
    text = b"\r\n".join(lines)
    source.write_bytes(pa.compress(text, "zstd", asbytes=True) if packed else text)
    preproc(f"source={source}", f"output={tmp_path / 'out'}", f"on_bad={on_bad}")
    assert data_files(tmp_path / "out") == without_bad
    assert json.loads((tmp_path / "out/report.json").read_text())["rows"]["bad"] == len(BAD)
    aside = tmp_path / "out" / "bad_rows.tsv"
    if on_bad == "skip":
        assert not aside.exists()
        return
    kept = [line.split(b"\t", 3) for line in aside.read_bytes().removesuffix(b"\n").split(b"\n")]
    assert [(int(line), text) for _, line, _, text in kept] == list(BAD.items())
    assert {Path(file.decode()) for file, *_ in kept} == {source}
    assert kept[3][2].startswith(b"column 4 (num_2) is '1e3', wanted an integer")


def test_the_command_reports_a_mistake_in_one_line_and_fails(tmp_path, output):
    source = spoiled(tmp_path, raw_line(3))
    done = subprocess.run(
        [python(), *ARGUMENTS, f"source={source}", f"output={output}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == USER_ERROR_EXIT_CODE
    assert done.stderr == (
        f"error: {source}, line 42: column 1 (label) is '3', wanted 0 or 1; "
        "correct or remove the line\n"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("frequency_limit=abc", "'abc' of type 'str' could not be converted to Integer"),
        ("dataset=criteo", "there is no dataset=criteo; did you mean criteo_"),
        ("frequencylimit=1", "there is no option frequencylimit; did you mean frequency_limit?"),
    ],
)
def test_an_invalid_option_is_refused_in_one_line(option, message):
    command = [python(), *ARGUMENTS, option]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == USER_ERROR_EXIT_CODE
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_killed_run_leaves_no_complete_dataset_and_the_next_one_works(tmp_path):
    noise = [raw_line(i % 2, c1=f"{zlib.crc32(b'%d' % i):08x}") for i in range(100_000)]
    source, output = write_lines(tmp_path / "raw.tsv", noise), tmp_path / "out"
    # A fork would be killed a moment later than the program that stands for it.
    run = subprocess.Popen(
        [sys.executable, *ARGUMENTS, f"source={source}", f"output={output}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    while not list(tmp_path.glob(".out.partial-*/train/cat_3.bin")):
        assert run.poll() is None, "the run was over before it could be killed"
        time.sleep(0.001)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not output.exists()
    assert not list(tmp_path.rglob("feature_spec.yaml"))
    preproc(f"source={source}", f"output={output}")
    assert len(data_files(output)) == 2 * 28
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw.tsv"]


def test_help_lists_every_option_with_its_meaning(tmp_path):
    done = subprocess.run(
        [python(), *ARGUMENTS, "--help", "frequency_limit=20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert "frequency_limit=20 a value that occurs less often gets id 0" in text
    for key, meaning in describe(PreprocConfig):
        assert f" {key}=" in text
        assert f" {meaning}" in text


@pytest.mark.doors
def test_hydra_writes_nothing_of_its_own(tmp_path):
    source = write_lines(tmp_path / "raw.tsv", GOOD)
    subprocess.run(
        [python(), *ARGUMENTS, "source=raw.tsv", "output=out"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=True,
        capture_output=True,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", source.name]
