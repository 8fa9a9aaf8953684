"""Writer of the files of a table dataset from the Parquet files of an engine: the same bytes from any engine."""

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.table_schema import Categorical
from dataloading.dataset.column_files import column_file_name
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.lineage import RARE, VOCABULARY
from preproc.dataset_writer import RecordedFile, sync_named
from preproc.report.console import LabelSum, ListCounts, NumericalRange
from preproc.table.expressions import CODED_FILE, RELATION_FILE, quoted, text
from preproc.table.extension import DAYS_COLUMNS
from preproc.table.transformation import NO_VALUE, stored_ids, stored_numericals
from preproc.work_directory import Work, small_database

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

CHUNK_ROWS = 1 << 20
# So few that their arrays stay in a cache of the processor.
BATCH_ROWS = 1 << 15
# Kept columns may be long texts.
KEPT_CHUNK_ROWS = 1 << 18
GROUP_ROWS = 122_880
"""Rows of a row group of Parquet: a multiple of the 2,048 in which DuckDB computes."""
ReadIds = Callable[[range], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Yields the ids of some rows, flat, `NO_VALUE` where there is no value, and the lengths of the rows' lists, if any."""


@dataclass(slots=True)
class IdCounts:
    """Ids that the values of a feature in the rows of a split became."""

    values: int = 0
    known: int = 0  # of them, those with an id that is not 0
    ids: int = 0  # that are stored
    zeros: int = 0  # of them, those that are 0
    lists: ListCounts | None = None


class TableFiles(AbstractContextManager["TableFiles"]):
    def __init__(self, work: Work, rows_in: str, splits: dict[str, range]) -> None:
        self.directory = work.directory
        self.rows_in = rows_in  # relation whose files have the rows
        self.dataset = work.dataset
        self.splits = splits
        self.records: dict[str, dict[str, Any]] = {}  # bytes and CRC-32 per written file
        self._connection = small_database()
        spill = text(str(work.directory / "spill_files"))
        self._connection.execute(
            f"SET preserve_insertion_order = true; SET temp_directory = {spill}"
        )

        # A thread waits for the disk, while others compute.
        self._disk = ThreadPoolExecutor(1)
        self._queued: list[Future[object]] = []

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connection.close()
        self._disk.shutdown(cancel_futures=kind is not None)
        for queued in self._queued if kind is None else ():
            queued.result()

    def file(self, name: str) -> RecordedFile:
        """Return a file of the dataset, which is synced later; the context's end waits for that."""
        return RecordedFile(self.dataset, name, partial(self._later, sync_named))

    def remove(self, name: str) -> None:
        """Remove a file of the dataset, behind its sync."""
        del self.records[name]
        self._later(Path.unlink, self.dataset / name)

    def _later(self, work: Callable[[Path], object], path: Path) -> None:
        self._queued.append(self._disk.submit(work, path))

    def _files(self, relation: str) -> str:
        return text(glob.escape(str(self.directory / relation)) + "/*.parquet")

    def _rows(self, connection: "duckdb.DuckDBPyConnection", relation: str) -> str:
        """Return the rows of a relation for a query of the connection: those of Parquet files, or of a coded file."""
        if not (self.directory / relation / CODED_FILE).exists():
            return f"read_parquet({self._files(relation)})"
        from preproc.table.text_codes import mapped_rows  # and pyarrow, of 25 MB

        connection.register("coded_", mapped_rows(self.directory / relation))
        return "coded_"

    def _in_order(self, relation: str, order_by: str) -> str:
        """Return ORDER BY, unless DuckDB has written the relation: one file in order, which one thread reads.

        A sort would hold all values in memory. The files of other engines need not be in the order of their names: Spark
        reads the largest first, and so writes its rows as the first file.
        """
        folder = self.directory / relation
        is_one = any((folder / name).exists() for name in (RELATION_FILE, CODED_FILE))
        return "" if is_one else f" ORDER BY {order_by}"

    def batches(
        self, relation: str, columns: list[str], rows: range | None = None
    ) -> Iterator["pa.RecordBatch"]:
        """Yield columns of rows of a relation, by default of all, in the order of `row_`."""
        in_order = self._in_order(relation, "row_")
        with self._connection.cursor() as cursor:
            source = self._rows(cursor, relation)
            if rows is None:
                count = f"SELECT count(*) FROM {source}"
                rows = range(cursor.execute(count).fetchall()[0][0])
            # One stream, but for what is sorted within memory.
            step = CHUNK_ROWS if in_order else max(len(rows), 1)
            for start in range(rows.start, rows.stop, step):
                stop, found = min(start + step, rows.stop), 0
                query = (
                    f"SELECT {', '.join(columns)}, row_ FROM {source} "
                    f"WHERE row_ >= {start} AND row_ < {stop}{in_order}"
                )
                with cursor.sql(query).to_arrow_reader(BATCH_ROWS) as reader:
                    for batch in reader:
                        # numpy.asarray would import pandas.
                        numbers = np.from_dlpack(batch.column(len(columns)))
                        _expect((np.diff(numbers, prepend=start + found - 1) == 1).all(), relation)
                        found += len(batch)
                        yield batch.select(list(range(len(columns))))
                _expect(found == stop - start, relation)

    def write_row_columns(self, columns: Mapping[str, RowColumn]) -> dict[str, dict[str, LabelSum]]:
        """Write labels, weight and keep rate of relation `rows_`; return the sums of the labels per split."""
        labels = [column for column in columns.values() if column.channel is Channel.label]
        sums: dict[str, dict[str, LabelSum]] = {split: {} for split in self.splits}
        for (name, column), (split, rows) in product(columns.items(), self.splits.items()):
            total = LabelSum(0, column.is_binary)
            file_name = column_file_name(labels, column)
            with self.file(f"{split}/{file_name}") as file:
                for batch in self.batches(self.rows_in, [name], rows):
                    values = np.from_dlpack(batch.column(0)).astype(column.stored)
                    total.add(values)
                    file.append(values)
            self.records |= file.record
            if column in labels:
                sums[split][column.name] = total
        return sums

    def write_kept(self, names: list[str]) -> None:
        """Write the columns of relation `rows_` that the dataset keeps, called `names`."""
        if not names:
            return
        # Imported here, since pyarrow takes 25 MB of memory.
        from dataloading.dataset.kept_columns import ROW_GROUP_ROWS, KeptWriter

        assert KEPT_CHUNK_ROWS % ROW_GROUP_ROWS == 0
        columns = ", ".join(f"keep{i}_ AS {quoted(name)}" for i, name in enumerate(names))
        query = f"SELECT {columns} FROM {self._rows(self._connection, self.rows_in)}"
        schema = self._connection.sql(f"{query} LIMIT 0").to_arrow_table().schema
        for split, rows in self.splits.items():
            with KeptWriter(self.dataset, split, schema) as writer:
                for start in range(rows.start, rows.stop, KEPT_CHUNK_ROWS):
                    stop = min(start + KEPT_CHUNK_ROWS, rows.stop)
                    chunk = self._connection.sql(
                        f"{query} WHERE row_ >= {start} AND row_ < {stop} ORDER BY row_"
                    ).to_arrow_table()
                    _expect(len(chunk) == stop - start, "kept columns")
                    writer.append(chunk)
            self.records |= writer.record

    def write_numericals(
        self,
        relation: str,
        columns: list[str],
        names: list[str],
        dtype: str,
        refuse: Callable[[], None],
    ) -> dict[str, NumericalRange]:
        """Write the numericals, row-major, all finite as `dtype`; return their ranges in the training rows.

        `columns`: expressions of the numericals, in the order of `names`. `refuse`: raises an error if a value is not finite.
        """
        if not names:
            return {}
        ranges = {name: NumericalRange() for name in names}
        for split, rows in self.splits.items():
            with self.file(f"{split}/numerical.bin") as file:
                for batch in self.batches(relation, columns, rows):
                    of_columns = [np.from_dlpack(column) for column in batch.columns]
                    values = stored_numericals(of_columns, dtype)
                    if not np.isfinite(values).all():
                        refuse()
                    file.append(values)
                    if split == "train":
                        for name, column in zip(names, of_columns, strict=True):
                            ranges[name].add(column)
            self.records |= file.record
        return ranges

    def read_ids(
        self, relation: str, feature: CategoricalFeature, is_list: bool, rows: range
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids of a relation (row_, id), of lists (row_, position_, id), as `ReadIds`."""
        order_by = "row_, position_" if is_list else "row_"
        # Several threads may read several relations.
        with self._connection.cursor() as cursor:
            for start in range(rows.start, rows.stop, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, rows.stop)
                chunk = cursor.execute(
                    f"SELECT row_, id FROM read_parquet({self._files(relation)}) WHERE row_ >= {start} AND row_ < {stop}"
                    + self._in_order(relation, order_by)
                ).fetchnumpy()
                of_row, lengths = np.asarray(chunk["row_"]), np.zeros(0, np.int64)
                if is_list:  # a row of the dataset has several rows here
                    _expect((np.diff(of_row) >= 0).all(), relation)
                    lengths = np.bincount(of_row - start, minlength=stop - start)
                else:
                    _expect(np.array_equal(of_row, np.arange(start, stop)), relation)
                yield np.asarray(chunk["id"]).astype(feature.dtype.newbyteorder("<")), lengths

    def write_ids(
        self,
        feature: CategoricalFeature,
        described: Categorical,
        read: ReadIds,
        *,
        drops_empty: bool,
    ) -> dict[str, IdCounts]:
        """Write the ids of a feature; return what became of its values per split. The arguments are those of `stored_ids`."""
        counts = {}
        for split, rows in self.splits.items():
            counts[split] = count = IdCounts(lists=ListCounts() if described.is_list else None)
            with ExitStack() as stack:
                file = stack.enter_context(self.file(f"{split}/{feature.name}.bin"))
                offsets, total = None, 0
                if feature.hotness is None:
                    name = f"{split}/{feature.name}.offsets.bin"
                    offsets = stack.enter_context(self.file(name))
                    offsets.append(np.zeros(1, "<i8"))
                for found, lengths in read(rows):
                    missing = int(np.count_nonzero(found == NO_VALUE))
                    count.values += found.size - missing
                    count.known += int(np.count_nonzero(found)) - missing
                    ids, lengths = stored_ids(
                        found, lengths, feature, described, drops_empty=drops_empty
                    )
                    if count.lists is not None:
                        count.lists.empty_items += missing
                        count.lists.add(lengths, feature.hotness)
                    if offsets is not None:
                        ends = total + np.cumsum(lengths, dtype=np.int64)
                        offsets.append(ends.astype("<i8"))
                        total += len(ids)
                    count.ids += ids.size
                    count.zeros += ids.size - int(np.count_nonzero(ids))
                    file.append(ids)
            self.records |= file.record | (offsets.record if offsets else {})
        return counts

    def write_history(
        self, items: str, slices: str, feature: CategoricalFeature
    ) -> dict[str, IdCounts]:
        """Write the ids of a history: slices of an array of items, the latest item first, and then id 0."""
        hotness = feature.hotness
        assert hotness is not None
        ids, counts = self.array(items, feature), {}
        back = np.arange(hotness)
        # Memory of a few arrays of this many items.
        rows_at_once = max(CHUNK_ROWS // hotness, 1)
        for split, rows in self.splits.items():
            counts[split] = count = IdCounts()
            with self.file(f"{split}/{feature.name}.bin") as file:
                for batch in self.batches(slices, ["stop_", "length_"], rows):
                    stops, lengths = (np.asarray(of).astype(np.int64) for of in batch.columns)
                    for first in range(0, len(batch), rows_at_once):
                        some = slice(first, first + rows_at_once)
                        stop, inside = stops[some, None], back < lengths[some, None]
                        found = np.where(inside, ids[np.where(inside, stop - 1 - back, 0)], 0)
                        count.values += int(np.count_nonzero(inside))
                        count.known += int(np.count_nonzero(found))
                        file.append(found.astype(feature.dtype.newbyteorder("<")))
            self.records |= file.record
            count.ids = len(rows) * hotness
            count.zeros = count.ids - count.known
        return counts

    def array(self, relation: str, feature: CategoricalFeature, stem: str = "") -> np.ndarray:
        """Return the ids of a relation (row_, id) as an array in a file, of a thread, of the work directory, then `NO_VALUE`."""
        import pyarrow.parquet as pq

        files = sorted((self.directory / relation).glob("*.parquet"))
        path = self.directory / f"{stem or relation}.bin"
        dtype = feature.dtype.newbyteorder("<")
        count = sum(pq.read_metadata(file).num_rows for file in files) + 1
        allocate(path, count * dtype.itemsize)
        ids = np.memmap(path, dtype, "r+", shape=(count,))
        ids[-1] = NO_VALUE
        for name in files:
            with pq.ParquetFile(name) as file:
                for batch in file.iter_batches(CHUNK_ROWS, use_threads=False):
                    rows, found = (np.from_dlpack(batch.column(name)) for name in ("row_", "id"))
                    ids[rows] = found
        return np.asarray(ids)

    def texts(self, relation: str, column: str, stem: str) -> "pa.LargeStringArray":
        """Return the texts of a relation, none missing, in its order, as an array in files `stem` of the work directory."""
        import pyarrow as pa

        paths = [self.directory / f"{stem}.{part}.bin" for part in ("ends", "texts")]
        last = np.zeros(1, np.int64)
        with self._connection.cursor() as cursor, ExitStack() as stack:
            query = f"SELECT {column} FROM {self._rows(cursor, relation)}"
            query += self._in_order(relation, "row_")
            ends, texts = (stack.enter_context(path.open("wb")) for path in paths)
            last.tofile(ends)
            for batch in cursor.sql(query).to_arrow_reader(GROUP_ROWS):
                _, of_ends, of_texts = batch.column(0).cast(pa.large_string()).buffers()
                stops = np.frombuffer(of_ends, np.int64, batch.num_rows + 1)
                texts.write(of_texts[: stops[-1]])
                (stops[1:] + last).tofile(ends)
                last += stops[-1]
            texts.write(b"\0")  # an empty file cannot be mapped
        buffers = [pa.py_buffer(np.memmap(path, np.uint8, "r")) for path in paths]
        return pa.LargeStringArray.from_buffers(buffers[0].size // 8 - 1, *buffers)

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
            with (
                self.file(name) as file,
                pq.ParquetWriter(file, batches.schema, compression="zstd") as writer,
            ):
                # One thread fills each batch, but the last, whatever files it reads.
                for batch in batches:
                    writer.write_batch(batch)
        self.records |= file.record


def _expect(is_right: bool | np.bool_, what: str) -> None:
    """Raise RuntimeError if rows are missing or out of order; `python -O` would leave an assertion out."""
    if not is_right:
        raise RuntimeError(f"{what}: rows are missing, or not in their order")


def allocate(path: Path, num_bytes: int) -> None:
    """Write a file of zeros; OSError if the disk is full, where writing to a mapped hole would end the process."""
    try:
        with path.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, num_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
