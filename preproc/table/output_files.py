"""Writer of the files of a table dataset from the Parquet files of an engine: the same bytes from any engine."""

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.table_schema import Categorical
from dataloading.dataset.column_files import column_file_name
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.lineage import RARE, VOCABULARY
from preproc.dataset_writer import GrowingFile
from preproc.report.console import LabelSum, ListCounts, NumericalRange
from preproc.table.expressions import RELATION_FILE, quoted, text
from preproc.table.extension import DAYS_COLUMNS
from preproc.table.transformation import stored_ids, stored_lists, stored_numericals
from preproc.work_directory import Work, small_database

if TYPE_CHECKING:
    import pyarrow as pa

ZERO_BYTES = 1 << 20
CHUNK_ROWS = 1 << 20
# Kept columns may be long texts.
KEPT_CHUNK_ROWS = 1 << 18
GROUP_ROWS = 122_880
"""Rows of a row group of Parquet: a multiple of the 2,048 in which DuckDB computes."""
WrittenIds = dict[str, tuple[int, int]]
"""Ids of a feature that are not 0, and those that are, per split."""


class TableFiles:
    def __init__(self, work: Work, dataset: Path, splits: dict[str, range]) -> None:
        self.directory = work.directory
        self.rows_in = work.state["rows_in"]
        self.dataset = dataset
        self.splits = splits
        self.records: dict[str, dict[str, Any]] = {}  # bytes and CRC-32 per written file
        self.present: dict[tuple[str, str], int] = {}
        self.lists: dict[tuple[str, str], ListCounts] = {}
        self._connection = small_database()
        spill = text(str(work.directory / "spill_files"))
        self._connection.execute(
            f"SET preserve_insertion_order = true; SET temp_directory = {spill}"
        )

    def __enter__(self) -> "TableFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _files(self, relation: str) -> str:
        return text(glob.escape(str(self.directory / relation)) + "/*.parquet")

    def _in_order(self, relation: str, order_by: str) -> str:
        """Return ORDER BY, unless DuckDB has written the relation: one file in order, which one thread reads.

        A sort would hold all values in memory. The files of other engines need not be in the order of their names: Spark
        reads the largest first, and so writes its rows as the first file.
        """
        is_one = (self.directory / relation / RELATION_FILE).exists()
        return "" if is_one else f" ORDER BY {order_by}"

    def _chunks(
        self, relation: str, columns: str, rows: range, order_by: str = "row_"
    ) -> Iterator[tuple[range, dict[str, np.ndarray]]]:
        """Yield chunks of `rows` and their columns, and `row_`, in the order of `order_by`."""
        files = self._files(relation)
        in_order = self._in_order(relation, order_by)
        # Several threads may read several relations.
        with self._connection.cursor() as cursor:
            for start in range(rows.start, rows.stop, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, rows.stop)
                chunk = cursor.execute(
                    f"SELECT row_, {columns} FROM read_parquet({files}) "
                    f"WHERE row_ >= {start} AND row_ < {stop}{in_order}"
                ).fetchnumpy()
                # Of lists, a row of the dataset has several rows here.
                _expect((np.diff(np.asarray(chunk["row_"])) >= 0).all(), relation)
                yield range(start, stop), chunk

    def batches(
        self, relation: str, columns: list[str], rows: range | None = None
    ) -> Iterator["pa.RecordBatch"]:
        """Yield columns of rows of a relation, by default of all, in the order of `row_`."""
        files, in_order = self._files(relation), self._in_order(relation, "row_")
        with self._connection.cursor() as cursor:
            if rows is None:
                count = f"SELECT count(*) FROM read_parquet({files})"
                rows = range(cursor.execute(count).fetchall()[0][0])
            for start in range(rows.start, rows.stop, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, rows.stop)
                found = cursor.sql(
                    f"SELECT {', '.join(columns)} FROM read_parquet({files}) "
                    f"WHERE row_ >= {start} AND row_ < {stop}{in_order}"
                ).to_arrow_table()
                _expect(len(found) == stop - start, relation)
                yield from found.combine_chunks().to_batches()

    def write_row_columns(self, columns: Mapping[str, RowColumn]) -> dict[str, dict[str, LabelSum]]:
        """Write labels, weight and keep rate of relation `rows_`; return the sums of the labels per split."""
        labels = [column for column in columns.values() if column.channel is Channel.label]
        sums: dict[str, dict[str, LabelSum]] = {split: {} for split in self.splits}
        for name, column in columns.items():
            found = self._write_row_column(name, column, column_file_name(labels, column))
            if column in labels:
                for split, total in found.items():
                    sums[split][column.name] = total
        return sums

    def _write_row_column(
        self, name: str, column: RowColumn, file_name: str
    ) -> dict[str, LabelSum]:
        """Write one of them; return its sum per split."""
        sums = {}
        for split, rows in self.splits.items():
            sums[split] = LabelSum(0, column.is_binary)
            with GrowingFile(self.dataset, f"{split}/{file_name}") as file:
                for part, chunk in self._chunks(self.rows_in, name, rows):
                    values = np.asarray(chunk[name], column.stored)
                    _expect(len(values) == len(part), name)
                    sums[split].add(values)
                    file.append(values)
            self.records |= file.record
        return sums

    def write_kept(self, names: list[str]) -> None:
        """Write the columns of relation `rows_` that the dataset keeps, called `names`."""
        if not names:
            return
        # Imported here, since pyarrow takes 25 MB of memory.
        from dataloading.dataset.kept_columns import ROW_GROUP_ROWS, KeptWriter

        assert KEPT_CHUNK_ROWS % ROW_GROUP_ROWS == 0
        columns = ", ".join(f"keep{i}_ AS {quoted(name)}" for i, name in enumerate(names))
        files = self._files(self.rows_in)
        for split, rows in self.splits.items():
            writer = None
            for start in range(rows.start, rows.stop, KEPT_CHUNK_ROWS):
                stop = min(start + KEPT_CHUNK_ROWS, rows.stop)
                chunk = self._connection.sql(
                    f"SELECT {columns} FROM read_parquet({files}) "
                    f"WHERE row_ >= {start} AND row_ < {stop} ORDER BY row_"
                ).to_arrow_table()
                _expect(len(chunk) == stop - start, "kept columns")
                writer = writer or KeptWriter(self.dataset, split, chunk.schema)
                writer.append(chunk)
            assert writer is not None, "a split without rows"
            self.records |= writer.close()

    def write_numericals(
        self,
        relation: str,
        columns: list[str],
        names: list[str],
        dtype: str,
        refuse: Callable[[], None],
    ) -> dict[str, NumericalRange]:
        """Write the numericals, row-major, all finite as `dtype`; return their ranges in the training rows.

        `columns`: expressions of the numericals, in the order of `names`. `refuse`: called if a value is not finite;
        raises an error.
        """
        ranges = {name: NumericalRange() for name in names}
        for split, rows in self.splits.items():
            with GrowingFile(self.dataset, f"{split}/numerical.bin") as file:
                for part, chunk in self._chunks(relation, ", ".join(columns), rows):
                    del chunk["row_"]
                    of_columns = [np.asarray(column) for column in chunk.values()]
                    values = stored_numericals(of_columns, dtype)
                    _expect(len(values) == len(part), relation)
                    if not np.isfinite(values).all():
                        refuse()
                    file.append(values)
                    if split == "train":
                        for name, column in zip(names, of_columns, strict=True):
                            ranges[name].add(column)
            self.records |= file.record
        return ranges

    def write_ids(
        self, relation: str, feature: CategoricalFeature, described: Categorical
    ) -> dict[str, tuple[int, int]]:
        """Write the ids of a feature; return per split the ids that are not 0, and those that are."""
        counts = {}
        order_by = "row_, position_" if described.is_list else "row_"
        for split, rows in self.splits.items():
            nonzero = zeros = total = 0
            with GrowingFile(self.dataset, f"{split}/{feature.name}.bin") as file:
                offsets = GrowingFile(self.dataset, f"{split}/{feature.name}.offsets.bin")
                if feature.hotness is None:
                    offsets.__enter__()
                    offsets.append(np.zeros(1, "<i8"))
                for part, chunk in self._chunks(relation, "id", rows, order_by):
                    nonzero += int(np.count_nonzero(chunk["id"]))
                    ids, lengths = stored_ids(chunk, part, feature, described)
                    if lengths is not None:
                        ends = total + np.cumsum(lengths, dtype=np.int64)
                        offsets.append(ends.astype("<i8"))
                        total += len(ids)
                    zeros += ids.size - int(np.count_nonzero(ids))
                    file.append(ids)
                if feature.hotness is None:
                    offsets.__exit__(None)
                    self.records |= offsets.record
            self.records |= file.record
            counts[split] = (nonzero, zeros)
        return counts

    def write_coded(
        self,
        column: str,
        ids: str,
        feature: CategoricalFeature,
        described: Categorical,
        *,
        drops_empty: bool,
    ) -> WrittenIds:
        """Write the ids of a feature whose values relation `rows_` holds as codes in `column`.

        `ids`: relation (row_, id) of the ids of all codes from 0, in any order. `described`: its description, which
        says whether the column has lists. `drops_empty`: leave the empty items of lists out; else they have id 0.
        """
        # Imported here, since pyarrow takes 25 MB of memory.
        from preproc.table.text_codes import read_codes, without_empty

        is_list = described.is_list

        of_codes = self._ids_of_codes(ids, feature)
        counts = {}
        for split, rows in self.splits.items():
            nonzero = zeros = present = 0
            lists = ListCounts()
            with ExitStack() as stack:
                file = stack.enter_context(GrowingFile(self.dataset, f"{split}/{feature.name}.bin"))
                offsets = None
                if feature.hotness is None:
                    name = f"{split}/{feature.name}.offsets.bin"
                    offsets = stack.enter_context(GrowingFile(self.dataset, name))
                    offsets.append(np.zeros(1, "<i8"))
                    total = 0
                for codes, lengths in read_codes(
                    self.directory / self.rows_in, column, rows, is_list
                ):
                    if is_list:
                        lists.empty_items += int(np.count_nonzero(codes < 0))
                        if drops_empty:
                            codes, lengths = without_empty(codes, lengths)
                        lists.add(lengths, feature.hotness)
                    found = of_codes.take(codes)
                    present += int(np.count_nonzero(codes >= 0))
                    nonzero += int(np.count_nonzero(found))
                    stored = (
                        stored_lists(found, lengths, feature, described.take) if is_list else found
                    )
                    if offsets is not None:
                        ends = total + np.cumsum(lengths, dtype=np.int64)
                        offsets.append(ends.astype("<i8"))
                        total += len(stored)
                    zeros += stored.size - int(np.count_nonzero(stored))
                    file.append(stored)
            self.present[split, feature.name] = present
            if is_list:
                self.lists[split, feature.name] = lists
            self.records |= file.record | (offsets.record if offsets else {})
            counts[split] = (nonzero, zeros)
        return counts

    def write_history(
        self, items: str, slices: str, feature: CategoricalFeature
    ) -> dict[str, tuple[int, int]]:
        """Write the ids of a history: slices of an array of items, the latest item first, and then id 0.

        Returns per split the ids that are not 0, and those that are.
        """
        hotness = feature.hotness
        assert hotness is not None
        ids, counts = self._array(items, feature), {}
        back = np.arange(hotness)
        # Memory of a few arrays of this many items.
        rows_at_once = max(CHUNK_ROWS // hotness, 1)
        for split, rows in self.splits.items():
            nonzero = 0
            with GrowingFile(self.dataset, f"{split}/{feature.name}.bin") as file:
                for part, chunk in self._chunks(slices, "stop_, length_", rows):
                    _expect(len(chunk["stop_"]) == len(part), feature.name)
                    for first in range(0, len(part), rows_at_once):
                        some = slice(first, first + rows_at_once)
                        stop = np.asarray(chunk["stop_"][some], np.int64)[:, None]
                        inside = back < np.asarray(chunk["length_"][some], np.int64)[:, None]
                        found = np.where(inside, ids[np.where(inside, stop - 1 - back, 0)], 0)
                        nonzero += int(np.count_nonzero(found))
                        file.append(found.astype(feature.dtype.newbyteorder("<")))
            self.records |= file.record
            counts[split] = (nonzero, len(rows) * hotness - nonzero)
        return counts

    def _ids_of_codes(self, relation: str, feature: CategoricalFeature) -> np.ndarray:
        """Return the ids of codes as an array in a file of the work directory, and behind them a 0, for no code."""
        import pyarrow.parquet as pq

        path = self.directory / f"{relation}.bin"
        dtype = feature.dtype.newbyteorder("<")
        with pq.ParquetFile(self.directory / relation / RELATION_FILE) as file:
            count = file.metadata.num_rows + 1
            allocate(path, count * dtype.itemsize)
            ids = np.memmap(path, dtype, "r+", shape=(count,))
            for batch in file.iter_batches(CHUNK_ROWS, use_threads=False):
                ids[np.asarray(batch.column("row_"))] = np.asarray(batch.column("id"))
        return np.asarray(ids)

    def _array(self, relation: str, feature: CategoricalFeature) -> np.ndarray:
        """Return the ids of a relation (row_, id) as an array in a file of the work directory; at least one."""
        query = f"SELECT count(*) FROM read_parquet({self._files(relation)})"
        with self._connection.cursor() as cursor:
            ((num_items,),) = cursor.execute(query).fetchall()
        path = self.directory / f"{relation}.bin"
        dtype = np.dtype(np.int64 if feature.is_dynamic else np.int32)
        with path.open("wb") as stream:
            for part, chunk in self._chunks(relation, "id", range(num_items)):
                _expect(len(chunk["id"]) == len(part), relation)
                np.asarray(chunk["id"], dtype).tofile(stream)
        return np.memmap(path, dtype, "r") if num_items else np.zeros(1, dtype)

    def write_vocabulary(self, relation: str, name: str, *, has_days: bool = False) -> None:
        """Write vocabulary/NAME.parquet: value, id and count, in the order of ids, and the columns of a later day."""
        columns = {"value": "VARCHAR", "id": "BIGINT", "count": "BIGINT"}
        order = self._in_order(relation, "id")
        if has_days:
            columns |= dict.fromkeys(DAYS_COLUMNS, "BIGINT") | {"retired": "BOOLEAN"}
            order = " ORDER BY id"
        self._write_rows(relation, columns, order, f"{VOCABULARY}/{name}.parquet")

    def write_rare(self, relation: str, name: str) -> None:
        """Write rare/NAME.parquet: value and count of the values without an id, in the order of values."""
        columns = {"value": "VARCHAR", "count": "BIGINT"}
        order = self._in_order(relation, "value")
        self._write_rows(relation, columns, order, f"{RARE}/{name}.parquet")

    def _write_rows(self, relation: str, columns: dict[str, str], order: str, name: str) -> None:
        """Write a relation in an order, as Parquet.

        By pyarrow, since the bytes of DuckDB's writer depend on the number of files that the engine wrote.
        """
        import pyarrow.parquet as pq

        selected = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in columns.items())
        query = f"SELECT {selected} FROM read_parquet({self._files(relation)}){order}"
        with self._connection.cursor() as cursor:
            batches = cursor.sql(query).to_arrow_reader(GROUP_ROWS)
            with pq.ParquetWriter(
                self.dataset / name, batches.schema, compression="zstd"
            ) as writer:
                # One thread fills each batch, but the last, whatever files it reads.
                for batch in batches:
                    writer.write_batch(batch)


def _expect(is_right: bool | np.bool_, what: str) -> None:
    """Raise RuntimeError if rows are missing or out of order; `python -O` would leave an assertion out."""
    if not is_right:
        raise RuntimeError(f"{what}: rows are missing, or not in their order")


def allocate(path: Path, num_bytes: int) -> None:
    """Write a file of zeros; OSError if the disk is full, where writing to a mapped hole would end the process."""
    try:
        with path.open("wb") as stream:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(stream.fileno(), 0, num_bytes)
                return
            for first in range(0, num_bytes, ZERO_BYTES):
                stream.write(bytes(min(ZERO_BYTES, num_bytes - first)))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
