"""Writer of a split as Parquet, with the interface and the checks of the split binary writer.

Every feature is one column: a binary label int8, numericals float16 or float32, ids in the spec's dtype, or lists
of it for several ids per row. Values are stored without dictionaries, which take five times as long to read.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataloading.dataset.column_files import GrowingFile
from dataloading.dataset.counted_file import CountedFile
from dataloading.dataset.documents import FILE_LIST, file_list_text
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.split_files import SplitFiles
from dataloading.dataset.split_writer import SplitWriter

ROW_GROUP_ROWS = 16_384
"""Rows of a row group, which are read together and stay together in a shuffle."""
PART_ROWS = 1024 * ROW_GROUP_ROWS
"""Most rows of a file: its footer is read completely, so its size must be bounded."""


class PendingColumn(GrowingFile):
    """A column whose rows are buffered until a row group is full; it has no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_rows = self._num_bytes = 0
        self._pieces: list[np.ndarray] = []

    def append(self, values: np.ndarray, num_rows: int) -> None:
        self._pieces.append(np.array(values))
        self._num_bytes += values.nbytes
        self.num_rows += num_rows

    def take(self, num_items: int) -> np.ndarray:
        """Remove and return the oldest items, along the first axis."""
        joined = np.concatenate(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces = [joined[num_items:]]
        return joined[:num_items]

    def close(self) -> None:
        self._pieces = []


class ParquetSplitWriter(SplitWriter):
    """Appends chunks of rows to the Parquet files of one split.

    Columns should grow together: rows that some column still lacks are kept in memory. `part_rows`: rows of each file,
    which a file list then names; None begins a file after every `PART_ROWS`.
    """

    file_type = PendingColumn

    def __init__(
        self,
        directory: Path,
        split: str,
        spec: FeatureSpec,
        absent: Collection[str] = (),
        part_rows: Sequence[int] | None = None,
    ) -> None:
        super().__init__(directory, split, spec, absent)
        self._has_list = part_rows is not None
        self._part_rows = repeat(PART_ROWS) if part_rows is None else iter(part_rows)
        self._rows_left = next(self._part_rows)
        self._begins_part = True
        self._list_record: dict[str, Any] = {}
        (directory / split).mkdir(exist_ok=True)
        self._folder = directory / split
        self._written = 0
        self._ends = dict.fromkeys(self._offsets, 0)
        self._parts: list[PartWriter] = []
        for offsets in self._offsets.values():
            _take(offsets, 1)  # the leading zero of the binary format

    def append(self, **columns: Any) -> None:
        """Append rows, as `SplitWriter.append` does, and write the row groups that are full."""
        super().append(**columns)
        # A file may end with a smaller row group.
        while 0 < (num_rows := min(ROW_GROUP_ROWS, self._rows_left)) <= self._complete():
            self._write_group(num_rows)

    def close(self) -> SplitFiles:
        """Write buffered rows, close all files and return them; ValueError unless all columns have the same rows."""
        num_rows = self._checked_rows()
        if self._complete():
            self._write_group(self._complete())
        self._parts[-1].close()
        assert not (self._has_list and self._rows_left), "fewer rows than planned"
        if self._has_list:
            with CountedFile(self._folder / FILE_LIST) as file:
                file.write(file_list_text([part.stream.path.name for part in self._parts]).encode())
                file.sync()
                self._list_record = file.record
        paths = tuple(part.stream.path for part in self._parts)
        return SplitFiles(num_rows, parquet=paths, absent=self.absent)

    def abandon(self) -> None:
        super().abandon()
        if self._parts:
            self._parts[-1].abandon()

    def checksums(self, root: Path) -> dict[str, dict[str, Any]]:
        written = {part.stream.path: part.stream.record for part in self._parts}
        if self._has_list:
            written[self._folder / FILE_LIST] = self._list_record
        return {path.relative_to(root).as_posix(): record for path, record in written.items()}

    def _complete(self) -> int:
        return min(file.num_rows for file in self._files()) - self._written

    def _write_group(self, num_rows: int) -> None:
        columns = {}
        for column in self.spec.row_columns:
            if column.name in self.absent:
                continue
            numbers = _take(self._columns[column.name], num_rows)
            columns[column.name] = pa.array(numbers.view(np.int8) if column.is_binary else numbers)
        if self._numerical is not None:
            numerical = _take(self._numerical, num_rows)
            for index, name in enumerate(self.spec.numerical):
                columns[name] = pa.array(np.ascontiguousarray(numerical[:, index]))
        for group in self.spec.sequences:
            slices = _take(self._slices[group.name], num_rows)
            ends = np.append(slices[:, 0], slices[-1:, 1]) - slices[0, 0]
            for name, file in self._events[group.name].files.items():
                values = pa.array(_take(file, int(ends[-1])))
                columns[name] = pa.ListArray.from_arrays(ends.astype(np.int32), values)
            if group.time is not None:
                columns[group.name] = pa.array(_take(self._moments[group.name], num_rows))
        for feature in self.spec.categorical:
            if feature.name in columns:
                continue
            ids = self._ids[feature.name]
            if feature.hotness == 1:
                columns[feature.name] = pa.array(_take(ids, num_rows).reshape(-1))
            elif feature.hotness is not None:
                values = pa.array(_take(ids, num_rows).reshape(-1))
                offsets = np.arange(num_rows + 1, dtype=np.int32) * feature.hotness
                columns[feature.name] = pa.ListArray.from_arrays(offsets, values)
            else:
                begin = self._ends[feature.name]
                ends = _take(self._offsets[feature.name], num_rows)
                self._ends[feature.name] = int(ends[-1])
                offsets = np.concatenate([[0], ends - begin]).astype(np.int32)
                values = pa.array(_take(ids, int(offsets[-1])))
                columns[feature.name] = pa.ListArray.from_arrays(offsets, values)
        table = pa.table(columns)
        if self._begins_part:
            self._begins_part = False
            if self._parts:
                self._parts[-1].close()
            path = self._folder / f"part_{len(self._parts)}.parquet"
            how = {"compression": "none", "use_dictionary": False, "write_statistics": False}
            self._parts.append(PartWriter(path, table.schema, **how))
        self._parts[-1].writer.write_table(table, row_group_size=num_rows)
        self._written += num_rows
        self._rows_left -= num_rows
        if not self._rows_left:
            self._rows_left = next(self._part_rows, 0)
            self._begins_part = True


def _take(column: GrowingFile, num_items: int) -> np.ndarray:
    """Remove and return the oldest items of a column of a `ParquetSplitWriter`."""
    assert isinstance(column, PendingColumn)
    return column.take(num_items)


class PartWriter:
    """Writes a Parquet file, whose bytes are counted; it is not complete if the block ends with an error."""

    def __init__(self, path: Path, schema: pa.Schema, **options: Any) -> None:
        self.stream = CountedFile(path)
        self.writer = pq.ParquetWriter(self.stream, schema, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self.abandon()

    def close(self) -> None:
        self.writer.close()
        self.stream.sync()
        self.stream.close()

    def abandon(self) -> None:
        """Close what is still open without a check."""
        if self.stream.closed:
            return
        if self.writer.is_open:
            # An error is most likely that of a full disk.
            with suppress(OSError, pa.ArrowException):
                self.writer.close()
            # Otherwise the end of the writer closes it again, and prints a traceback.
            self.writer.is_open = False
        self.stream.close()


def as_arrow(numbers: np.ndarray) -> pa.Array:
    """Return contiguous numbers as an array of Arrow; `pyarrow.array` would import pandas, which takes seconds."""
    dtype = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(dtype, len(numbers), [None, pa.py_buffer(numbers)])


def as_scalar(number: np.generic) -> pa.Scalar:
    """Return a number as a scalar of Arrow; `pyarrow.scalar` would import pandas too."""
    return as_arrow(np.array([number]))[0]
