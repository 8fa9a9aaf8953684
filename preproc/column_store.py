"""Columns on disk between the phases: plain arrays that grow, can be truncated, and are read in chunks."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Lock, Thread

import numpy as np
from isal.isal_zlib import crc32

from dataloading.dataset.durable_files import sync_stream

READ_BYTES = 1 << 18
SYNC_SECONDS = 0.3


def size_and_crc32(path: Path, start: int = 0, num_bytes: int | None = None) -> tuple[int, int]:
    """Return size and CRC-32 of a file, or of the `num_bytes` bytes from `start` on, as far as the file has them."""
    size = checksum = 0
    with path.open("rb") as stream:
        stream.seek(start)
        most = READ_BYTES
        while data := stream.read(most if num_bytes is None else min(most, num_bytes - size)):
            checksum = crc32(data, checksum)
            size += len(data)
    return size, checksum


def bytes_of(values: np.ndarray) -> memoryview:
    """Return the bytes of an array, row-major."""
    # An empty array cannot be cast.
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")


class StoredColumn:
    def __init__(self, path: Path, dtype: str, width: int = 1) -> None:
        self.path = path  # the file
        self.dtype = np.dtype(dtype)  # of an item
        self.width = width  # items per row

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * self.width

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows [stop - start] or [stop - start, width]."""
        values = np.fromfile(
            self.path, self.dtype, (stop - start) * self.width, offset=start * self.row_bytes
        )
        if len(values) != (stop - start) * self.width:  # `python -O` would leave an assertion out
            raise RuntimeError(f"{self.path} is too short")
        return values if self.width == 1 else values.reshape(-1, self.width)

    def chunks(self, rows: range, size: int) -> Iterator[tuple[int, np.ndarray]]:
        for start in range(rows.start, rows.stop, size):
            yield start, self.read(start, min(start + size, rows.stop))


class ColumnAppender:
    """Appends rows to the files of columns and keeps their checksums; a thread syncs, so that `sync` waits for few."""

    def __init__(self, columns: list[StoredColumn], parts: list[tuple[int, int]]) -> None:
        """Open the columns, each truncated to the bytes of its part: bytes and CRC-32."""
        self._columns = columns
        self._parts = parts
        self._streams = []
        for column, (num_bytes, _) in zip(columns, parts, strict=True):
            stream = column.path.open("r+b" if column.path.exists() else "wb", buffering=0)
            stream.truncate(num_bytes)
            stream.seek(0, os.SEEK_END)
            self._streams.append(stream)
        self._ends = Event()
        self._lock = Lock()
        self._failed: OSError | None = None
        self._syncing = Thread(target=self._sync_early, daemon=True)
        self._syncing.start()

    def _sync_early(self) -> None:
        while self._failed is None and not self._ends.wait(SYNC_SECONDS):
            for stream in self._streams:
                # The system tells of lost rows once: `sync` waits until it is noted.
                with self._lock:
                    try:
                        sync_stream(stream)
                    except OSError as error:
                        self._failed = error
                        return

    @property
    def records(self) -> dict[str, list[list[int]]]:
        pairs = zip(self._columns, self._parts, strict=True)
        return {column.path.name: [list(part)] for column, part in pairs}

    def append(self, values: list[np.ndarray]) -> None:
        for index, array in enumerate(values):
            data = bytes_of(array)
            num_bytes, checksum = self._parts[index]
            self._parts[index] = num_bytes + len(data), crc32(data, checksum)
            while data:
                data = data[self._streams[index].write(data) :]

    def sync(self) -> None:
        """Sync all files to disk; OSError if rows were lost."""
        for stream in self._streams:
            with self._lock:
                sync_stream(stream)
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        self._ends.set()
        self._syncing.join()
        for stream in self._streams:
            stream.close()
