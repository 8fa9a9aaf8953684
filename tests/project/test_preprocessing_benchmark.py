"""The preprocessing benchmark: detection of differences and failures."""

import sys

import pytest

from benchmarks.preprocessing import count_lines, differing, measure, parse
from tests.helpers.preproc_command import write_lines


def test_files_that_differ_are_named(tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.bin").write_bytes(b"1")
    (tmp_path / "ours/other.bin").write_bytes(b"1")
    (tmp_path / "theirs/other.bin").write_bytes(b"2")
    (tmp_path / "ours/missing.bin").write_bytes(b"1")
    assert differing(tmp_path / "ours", tmp_path / "theirs") == ["missing.bin", "other.bin"]


def test_a_command_that_exceeds_the_memory_limit_is_stopped(tmp_path):
    command = [sys.executable, "-c", "x = bytearray(300 << 20); import time; time.sleep(60)"]
    result = measure(command, tmp_path / "work", 0.2)
    assert result.outcome == "stopped: over 0.2 GiB"
    assert result.seconds < 30


def test_a_command_that_fails_is_not_measured_as_fast(tmp_path, capsys):
    result = measure([sys.executable, "-c", "1 / 0"], tmp_path / "work", 1)
    assert result.outcome == "failed with 1"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_options_behind_preproc_are_passed_on():
    options, passed_on = parse(["rows=5", "preproc.memory_limit=1GB"])
    assert options["rows"] == "5"
    assert passed_on == ["memory_limit=1GB"]


@pytest.mark.parametrize("wrong", ["row=5", "peers=polars", "rows"])
def test_a_mistyped_option_is_refused(wrong):
    with pytest.raises(SystemExit):
        parse([wrong])


def test_lines_are_counted_in_plain_and_compressed_files(tmp_path):
    for compress in (False, True):
        path = write_lines(tmp_path / ("a.gz" if compress else "a"), ["x", "y"], compress)
        assert count_lines(str(path)) == 2
