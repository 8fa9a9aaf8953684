"""Columns that are synced while they grow: rows, records, and an error that only the early sync meets."""

from threading import Event

import numpy as np
import pytest

from preproc import column_store
from preproc.column_store import ColumnAppender, StoredColumn, size_and_crc32


@pytest.fixture
def columns(tmp_path, monkeypatch) -> list[StoredColumn]:
    """Return two columns that are synced again and again."""
    monkeypatch.setattr(column_store, "SYNC_SECONDS", 0.001)
    return [StoredColumn(tmp_path / "a.u4", "<u4"), StoredColumn(tmp_path / "b.f4", "<f4", 3)]


def test_rows_that_grow_beside_their_sync_are_complete(columns):
    appender = ColumnAppender(columns, [(0, 0), (0, 0)])
    for start in range(0, 5000, 10):
        rows = np.arange(start, start + 10)
        appender.append([rows.astype("<u4"), np.repeat(rows, 3).reshape(-1, 3).astype("<f4")])
    appender.sync()
    appender.close()
    assert columns[0].read(0, 5000).tolist() == list(range(5000))
    assert columns[1].read(4999, 5000).tolist() == [[4999] * 3]
    for column in columns:
        assert appender.records[column.path.name] == [[*size_and_crc32(column.path)]]


def test_rows_lost_by_an_early_sync_fail_the_next_one(columns, monkeypatch):
    lost, sync = Event(), column_store.sync_stream

    def once(stream):
        if not lost.is_set():
            lost.set()
            raise OSError(28, "No space left on device")
        sync(stream)

    monkeypatch.setattr(column_store, "sync_stream", once)
    appender = ColumnAppender(columns, [(0, 0), (0, 0)])
    assert lost.wait(10)
    appender._syncing.join(10)
    with pytest.raises(OSError, match="No space left"):
        appender.sync()
    appender.close()
