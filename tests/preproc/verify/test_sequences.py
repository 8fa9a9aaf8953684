"""`mode=verify` and `mode=convert` of sequence groups: damage is found by file and row, and a copy has the same events."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from dataloading.dataset import parquet
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from preproc.convert import rows as rows_module
from preproc.verify import run as verify
from tests.helpers.datasets import plant
from tests.helpers.event_datasets import TIMES, write_events
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
    monkeypatch.setattr(verify, "READ_ROWS", 7)


@pytest.mark.parametrize(
    ("form", "file_format"), [("own", "binary"), ("log", "binary"), ("own", "parquet")]
)
def test_nothing_is_wrong_with_what_the_writer_wrote(tmp_path, capsys, form, file_format):
    root = write_events(tmp_path / "data", form, file_format)
    assert found(root, capsys) == []


FOUND = "the first mistake that a reader finds"


@pytest.mark.parametrize(
    ("file", "dtype", "index", "value", "lines"),
    [
        (
            "train/history.slices.bin",
            "<i8",
            7,
            61,
            [f"train: {FOUND}: feature 'hist_item': row 3 runs from 31 to 61 in "],
        ),
        (
            "test/history.moments.bin",
            "<i8",
            3,
            TIMES[33],
            [f"test: {FOUND}: 'hist_time': an event of time {TIMES[33]} at row 3 of "],
        ),
        (
            "events/hist_time.bin",
            "<i8",
            31,
            TIMES[33],
            [
                f"{split}: {FOUND}: 'hist_time': an event of time {TIMES[32]} after one of {TIMES[33]} at row 3 of "
                for split in ("test", "train")
            ],
        ),
        (
            "events/hist_rating.bin",
            "<f4",
            33,
            np.inf,
            [
                f"{split}: {FOUND}: 'hist_rating': an event has inf at row 3 of "
                for split in ("test", "train")
            ],
        ),
        (
            "events/hist_genre.bin",
            "<i1",
            33,
            20,
            [
                f"{split}: {FOUND}: feature 'hist_genre': id 20 at row 3 of "
                for split in ("test", "train")
            ],
        ),
    ],
)
def test_a_wrong_event_is_found(tmp_path, capsys, file, dtype, index, value, lines):
    root = write_events(tmp_path / "data", "log")
    plant(root / file, index, value, dtype)
    assert [
        line.startswith(wanted) for line, wanted in zip(found(root, capsys), lines, strict=True)
    ] == [True] * len(lines)


def test_a_truncated_file_of_events_is_found(tmp_path, capsys):
    root = write_events(tmp_path / "data", "log")
    path = root / "events/hist_time.bin"
    path.write_bytes(path.read_bytes()[:-20])
    lines = found(root, capsys)
    assert "events/hist_time.bin: truncated: 460 bytes, want 480" in lines
    assert any(
        "hist_time.bin has 460 bytes, want 480 = 60 x 8 bytes for the 60 events" in line
        for line in lines
    )


def test_wrong_events_in_parquet_are_found(tmp_path, capsys):
    root = write_events(tmp_path / "data", file_format="parquet")
    file = root / "train/part_0.parquet"
    table = pq.read_table(file)
    moments = table.column("history").to_pylist()
    moments[3] = 5
    at = table.column_names.index("history")
    pq.write_table(table.set_column(at, "history", [moments]), file)
    wanted = f"train: {FOUND}: 'hist_time': an event of time {TIMES[31]} at row 3 of {file}"
    assert any(line.startswith(wanted) for line in found(root, capsys))


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
