"""Kept columns are read by any range of rows, in their order and with their types; mistakes are one line."""

from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloading.dataset import kept_columns
from dataloading.dataset.kept_columns import KeptColumns, KeptWriter, kept_file_name

ROWS = 103
TABLE = pa.table(
    {
        "order id": pa.array([f"o-{i}" if i % 7 else None for i in range(ROWS)]),
        "user": pa.array([2**62 + i for i in range(ROWS)]),
        "price": pa.array([i / 4 for i in range(ROWS)], pa.float32()),
        "day": pa.array([date.fromordinal(730_000 + i) for i in range(ROWS)]),
    }
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    """Write the table in row groups of 8 rows, in chunks of 16."""
    monkeypatch.setattr(kept_columns, "ROW_GROUP_ROWS", 8)
    with KeptWriter(tmp_path, "test", TABLE.schema) as writer:
        for start in range(0, ROWS, 16):
            writer.append(TABLE.slice(start, 16))
    assert list(writer.record) == [kept_file_name("test")]
    return tmp_path


def test_any_range_of_rows(root):
    kept = KeptColumns(root, "test", ROWS)
    assert kept.names == TABLE.column_names
    for names in (kept.names, ["day", "order id"], ["price"]):
        for start, stop in ((0, ROWS), (0, 0), (7, 9), (8, 16), (50, 51), (96, ROWS), (3, 90)):
            rows = kept.read(start, stop, names)
            assert rows.equals(TABLE.select(names).slice(start, stop - start))


def test_consecutive_ranges_decode_a_row_group_once(root, monkeypatch):
    kept, groups = KeptColumns(root, "test"), []
    table = kept._groups.table
    monkeypatch.setattr(
        kept._groups, "table", lambda group, names: groups.append(group) or table(group, names)
    )
    for start in range(0, 24, 3):
        kept.read(start, start + 3, ["user"])
    assert groups == [0, 1, 2]


def test_threads_read_the_same_rows(root):
    kept = KeptColumns(root, "test")
    with ThreadPoolExecutor(4) as pool:
        starts = range(0, ROWS - 5, 2)
        for start, rows in zip(
            starts, pool.map(lambda s: kept.read(s, s + 5, ["user"]), starts), strict=True
        ):
            assert rows.equals(TABLE.select(["user"]).slice(start, 5))


def test_a_dataset_without_kept_columns(tmp_path):
    kept = KeptColumns(tmp_path, "test", 5)
    assert kept.names == []
    with pytest.raises(ValueError, match="no kept column 'user' of split 'test'; it keeps none"):
        kept.read(0, 5, ["user"])


def test_mistakes_are_named(root):
    with pytest.raises(ValueError, match=r"'usr'.* it keeps order id, user, price, day: name"):
        KeptColumns(root, "test").read(0, 1, ["usr"])
    with pytest.raises(ValueError, match=r"test\.parquet holds 103 rows, want the 104 of split"):
        KeptColumns(root, "test", 104)
    path = root / kept_file_name("test")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="not a complete Parquet file"):
        KeptColumns(root, "test")
    pq.write_table(TABLE.select(["user", "day"]).rename_columns(["a", "a"]), path)
    with pytest.raises(ValueError, match="two columns are called 'a'"):
        KeptColumns(root, "test")
