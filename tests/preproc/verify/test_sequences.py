"""`mode=verify` and `mode=convert` of sequence groups: damage is found by file and row, and a copy has the same events."""

import re

import numpy as np
import pytest

from dataloading.dataset import parquet
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from preproc.convert import rows as rows_module
from preproc.verify import binary as verify_binary
from preproc.verify import run as verify
from tests.helpers.datasets import plant
from tests.helpers.event_datasets import TIMES, rows_of, write_events
from tests.helpers.preproc_command import data_files, preproc


def found(path, capsys):
    """Return the lines of mistakes."""
    try:
        preproc("mode=verify", f"path={path}")
        lines = []
    except SystemExit:
        out = capsys.readouterr().out.splitlines()
        lines = [line.removeprefix(f"wrong: {path}/") for line in out if line.startswith("wrong")]
    # Checksums differ as well.
    return [line for line in lines if "CRC-32" not in line]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Read and convert a few rows at a time, so that every boundary is tested."""
    monkeypatch.setattr(rows_module, "CHUNK_ROWS", 7)
    monkeypatch.setattr(verify, "CHUNK_BYTES", 64)
    monkeypatch.setattr(verify_binary, "ROWS_OF_EVENTS", 3)


@pytest.mark.parametrize(
    ("form", "file_format"), [("own", "binary"), ("log", "binary"), ("own", "parquet")]
)
def test_nothing_is_wrong_with_what_the_writer_wrote(tmp_path, capsys, form, file_format):
    root = write_events(tmp_path / "data", form, file_format)
    assert found(root, capsys) == []


@pytest.mark.parametrize(
    ("file", "dtype", "index", "value", "line"),
    [
        ("train/history.slices.bin", "<i8", 7, 61, "train/history.slices.bin: 1 slices that lie outside the 60 events or have more than 8, the first 31 at row 3"),
        ("train/history.slices.bin", "<i8", 6, 2, "train/history.slices.bin: 1 slices that lie outside the 60 events or have more than 8, the first 2 at row 3"),
        ("test/history.moments.bin", "<i8", 3, TIMES[33], f"test/history.moments.bin: 1 moments of 'history' whose row has an event that is not earlier, or events that are not oldest first, the first {TIMES[33]} at row 3"),
        ("events/hist_rating.bin", "<f4", 33, np.inf, "events/hist_rating.bin: 1 numbers of 'hist_rating' that are not finite, the first inf at event 33"),
        ("events/hist_genre.bin", "<i1", 33, 20, "events/hist_genre.bin: 1 ids of 'hist_genre' outside [0, 20), the first 20 at event 33"),
    ],
)  # fmt: skip
def test_a_wrong_event_is_found(tmp_path, capsys, file, dtype, index, value, line):
    root = write_events(tmp_path / "data", "log")
    plant(root / file, index, value, dtype)
    assert found(root, capsys) == [line]


def test_times_that_are_not_sorted_are_found_in_every_row_that_has_them(tmp_path, capsys):
    root = write_events(tmp_path / "data", "log")
    plant(root / "events/hist_time.bin", 32, TIMES[0], "<i8")
    for line in found(root, capsys):
        assert re.fullmatch(
            r"(train|test)/history.moments.bin: \d+ moments of 'history' .*, the first \d+ at row \d+",
            line,
        )
    starts, ends = rows_of("train")[0].T
    wrong = int(((starts < 32) & (ends > 32)).sum())
    assert f"train/history.moments.bin: {wrong} moments" in found(root, capsys)[-1]


def test_a_truncated_file_of_events_is_found(tmp_path, capsys):
    root = write_events(tmp_path / "data", "log")
    path = root / "events/hist_time.bin"
    path.write_bytes(path.read_bytes()[:-20])
    assert "events/hist_time.bin: truncated: 460 bytes, want 480" in found(root, capsys)


def test_wrong_events_in_parquet_are_found(tmp_path, capsys):
    import pyarrow.parquet as pq

    root = write_events(tmp_path / "data", file_format="parquet")
    file = root / "train/part_0.parquet"
    table = pq.read_table(file)
    moments = table.column("history").to_pylist()
    moments[3] = 5
    at = table.column_names.index("history")
    pq.write_table(table.set_column(at, "history", [moments]), file)
    # The file has another size as well.
    [line] = [line for line in found(root, capsys) if "bytes, want" not in line]
    assert line.startswith(
        f"train/part_0.parquet: 1 row groups with wrong events of 'history', the first 'hist_time': an event of time {TIMES[31]} at row 3"
    )


@pytest.mark.parametrize("kept_bytes", [parquet.KEPT_BYTES, 0])
def test_groups_survive_a_conversion_to_parquet_and_back(tmp_path, monkeypatch, kept_bytes):
    monkeypatch.setattr(parquet, "KEPT_BYTES", kept_bytes)
    own, log = write_events(tmp_path / "own"), write_events(tmp_path / "log", "log")
    for root in (own, log):
        there, back = tmp_path / f"{root.name}_there", tmp_path / f"{root.name}_back"
        preproc("mode=convert", f"path={root}", f"output={there}", "to=parquet")
        preproc("mode=convert", f"path={there}", f"output={back}")
        # A log of events becomes the events of the rows.
        assert data_files(back) == data_files(own)
        assert FeatureSpec.load(back).sequences == FeatureSpec.load(root).sequences
        wanted = open_dataset(FeatureSpec.load(root)).read("test", np.array([[0, 21]]))
        copied = open_dataset(FeatureSpec.load(there)).read("test", np.array([[0, 21]]))
        assert [n.tolist() for n in copied.events] == [n.tolist() for n in wanted.events]
