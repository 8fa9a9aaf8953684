"""Generated day files are in Criteo's format, the same for the same seed, and as sparse and skewed as the real ones."""

import re
import sys

import numpy as np
import pytest

from benchmarks.day_files import (
    CARDINALITIES,
    CATEGORICAL_MISSING,
    CLICK_RATE,
    NUMERICAL_MISSING,
    _scrambled,
    lines,
    main,
    write_day,
    write_days,
)
from tests.helpers.preproc_command import preproc

NUM_ROWS = 20_000


@pytest.fixture(scope="module")
def fields() -> np.ndarray:
    """All fields of one day, [NUM_ROWS, 40]."""
    text = lines(1, 0, range(NUM_ROWS)).decode()
    return np.array([line.split("\t") for line in text.splitlines()])


def test_every_line_has_criteos_form():
    text = lines(1, 0, range(300)).decode()
    form = re.compile(r"[01](\t(-?[0-9]{1,7})?){13}(\t([0-9a-f]{8})?){26}")
    assert text.count("\n") == 300
    assert all(form.fullmatch(line) for line in text.splitlines())


def test_the_same_rows_come_out_in_any_chunks_and_of_any_length(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.day_files.CHUNK_ROWS", 7)
    size = write_day(tmp_path / "day", 3, 1, 20)
    whole = (tmp_path / "day").read_bytes()
    assert size == len(whole)
    assert whole == lines(3, 1, range(20))
    assert whole.startswith(lines(3, 1, range(5)))


def test_days_and_seeds_differ_and_processes_do_not_matter(tmp_path):
    def days(name: str, seed: int, processes: int) -> list[bytes]:
        written = write_days(tmp_path / name, 2, 50, seed, processes)
        return [path.read_bytes() for path, _ in written]

    one, two = days("a", 1, 1)
    assert one != two
    assert days("b", 1, 2) == [one, two]
    assert days("c", 2, 1)[0] != one


def test_clicks_and_missing_values_are_as_frequent_as_asked_for(fields):
    assert (fields[:, 0] == "1").mean() == pytest.approx(CLICK_RATE, abs=0.005)
    missing = (fields[:, 1:] == "").mean(axis=0)
    np.testing.assert_allclose(missing, NUMERICAL_MISSING + CATEGORICAL_MISSING, atol=0.015)


def test_no_column_has_more_values_than_its_table(fields):
    distinct = [len(set(fields[:, 14 + i]) - {""}) for i in range(26)]
    assert all(got <= most for got, most in zip(distinct, CARDINALITIES, strict=True))
    assert [got for got, most in zip(distinct, CARDINALITIES, strict=True) if most < 65] == [
        most for most in CARDINALITIES if most < 65
    ]


def test_the_large_tables_have_a_long_tail(fields):
    values = fields[:, 14][fields[:, 14] != ""]
    counts = np.unique(values, return_counts=True)[1]
    assert counts.max() > 0.1 * len(values)
    assert 0.5 < (counts == 1).mean() < 0.9


def test_no_two_ranks_share_a_value():
    ranks = np.arange(1 << 16, dtype=np.float64)
    assert len(np.unique(_scrambled(ranks, 12345))) == 1 << 16
    assert not np.array_equal(_scrambled(ranks, 1), _scrambled(ranks, 2))


def test_preprocessing_reads_them(tmp_path, capsys):
    list(write_days(tmp_path / "days", 2, 400))
    options = (f"source={tmp_path}/days/day_*", f"output={tmp_path}/out")
    # A directory for temporary files is made if it is missing.
    preproc("dataset=criteo_1tb", *options, f"temp_directory={tmp_path}/deep/er")
    assert "400" in capsys.readouterr().out


def test_days_that_are_there_are_not_overwritten(tmp_path, monkeypatch):
    (tmp_path / "day_0").write_text("real\n")
    monkeypatch.setattr(sys, "argv", ["day_files", f"output={tmp_path}", "rows=10"])
    with pytest.raises(SystemExit, match="day_0 exists, and may be real"):
        main()
    assert (tmp_path / "day_0").read_text() == "real\n"
