"""Columns on disk between the stages: plain arrays that grow, can be truncated, and are read in chunks."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dataloading.dataset.durable_files import sync_stream


def bytes_of(values: np.ndarray) -> memoryview:
    """Return the bytes of an array, row-major."""
    # An empty array cannot be cast.
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")


class StoredColumn:
    """One file of fixed-width rows.

    Attributes:
        path: the file.
        dtype: of an item.
        width: items per row.
    """

    def __init__(self, path: Path, dtype: str, width: int = 1) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.width = width

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.dtype.itemsize * self.width

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows [stop - start] or [stop - start, width]."""
        values = np.fromfile(
            self.path, self.dtype, (stop - start) * self.width, offset=start * self.row_bytes
        )
        assert len(values) == (stop - start) * self.width, f"{self.path} is too short"
        return values if self.width == 1 else values.reshape(-1, self.width)

    def chunks(self, rows: range, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first row and the values of each chunk of `rows`."""
        for start in range(rows.start, rows.stop, size):
            yield start, self.read(start, min(start + size, rows.stop))


class ColumnAppender:
    """Appends rows to the files of several columns."""

    def __init__(self, columns: list[StoredColumn], num_rows: int) -> None:
        """Open the columns, truncated to `num_rows` rows."""
        self._columns = columns
        self._streams = []
        for column in columns:
            stream = column.path.open("r+b" if column.path.exists() else "wb", buffering=0)
            stream.truncate(num_rows * column.row_bytes)
            stream.seek(0, os.SEEK_END)
            self._streams.append(stream)

    def append(self, values: list[np.ndarray]) -> None:
        """Append one array per column."""
        for stream, array in zip(self._streams, values, strict=True):
            data = bytes_of(array)
            while data:
                data = data[stream.write(data) :]

    def sync(self) -> None:
        """Sync all files to disk."""
        for stream in self._streams:
            sync_stream(stream)

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams:
            stream.close()
