"""Writer of scores in a thread of its own, beside the GPU that computes the next ones."""

import time
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dataloading.dataset.parquet_writer import as_arrow
from nn.scores.kept_scores import KeptScores
from nn.scores.named_rows import NamedRows

CHUNK_ROWS = 1 << 20
"""Rows of a row group and of a kept chunk, rounded up to complete batches."""
MOST_PENDING = 8
"""Batches that the thread may be behind."""


class _Copy(NamedTuple):
    """Scores of a batch in host memory, once `ready` is reached; `buffer` is free after they are taken."""

    rows: np.ndarray
    ready: torch.cuda.Event | None
    buffer: Tensor | None


class ScoreWriter:
    """Writes scores to a file, batch after batch, and keeps them for a start after a kill.

    `schema`: its columns; the last ones are the scores. `num_rows`: rows that were restored or given to `put`, of which
    `num_written` are written. `wait_s`: time that `put` waited for the thread. `busy_s`: time that the thread worked.
    """

    def __init__(
        self,
        file: pc.CSVWriter | pq.ParquetWriter,
        schema: pa.Schema,
        named: NamedRows,
        kept: KeptScores,
    ) -> None:
        self._file = file
        self._schema = schema
        self._named = named
        self._kept = kept
        self.num_written = 0
        for rows in kept.restore():
            self._write(rows)
        self.num_rows = self.num_written
        self.wait_s = self.busy_s = 0.0
        self._free: SimpleQueue[Tensor | None] = SimpleQueue()
        for _ in range(MOST_PENDING):
            self._free.put(None)
        self._pending: SimpleQueue[_Copy | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._work, name="score-writer", daemon=True)
        self._thread.start()

    def put(self, scores: Tensor) -> None:
        """Take the scores of the next rows, [n, tasks] float64; the host does not wait for the device.

        Raises ValueError: a score is not finite. Raises OSError: the file cannot be written.
        """
        self._raise_error()
        started = time.perf_counter()
        buffer = self._free.get()
        self.wait_s += time.perf_counter() - started
        self._pending.put(_on_host(scores, buffer))
        self.num_rows += len(scores)

    def finish(self) -> None:
        """Wait for the thread, and complete the file; it is not synced. Raises ValueError, OSError: as `put`."""
        self._pending.put(None)
        self._thread.join()
        self._raise_error()
        self._file.close()
        self._kept.close()

    def abandon(self) -> None:
        """End the thread without completing the file; do nothing after `finish`."""
        if self._error is None:
            self._error = ValueError("the scores were abandoned")
        self._pending.put(None)
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        rows: list[np.ndarray] = []
        while (copy := self._pending.get()) is not None:
            if self._error is None:
                try:
                    self._take(copy, rows)
                except BaseException as error:  # raised by the next `put`
                    self._error = error
            self._free.put(copy.buffer)
        try:
            if self._error is None and rows:
                self._write_chunk(rows)
        except BaseException as error:  # raised by `finish`
            self._error = error

    def _take(self, copy: _Copy, rows: list[np.ndarray]) -> None:
        """Add a batch to `rows`, and write those once they are a chunk."""
        if copy.ready is not None:
            copy.ready.synchronize()
        started = time.perf_counter()
        if np.isnan(copy.rows).any():
            index = int(np.isnan(copy.rows).any(axis=1).argmax())
            row = self.num_written + sum(map(len, rows)) + index
            raise ValueError(
                f"the score of row {row:,} is not finite; the weights or a numerical value of the row are too large: clip or "
                "scale such values when preprocessing, or use another checkpoint"
            )
        rows.append(copy.rows if copy.buffer is None else copy.rows.copy())
        if sum(map(len, rows)) >= CHUNK_ROWS:
            self._write_chunk(rows)
            rows.clear()
        self.busy_s += time.perf_counter() - started

    def _write_chunk(self, rows: list[np.ndarray]) -> None:
        chunk = np.concatenate(rows)
        self._kept.append(chunk)
        self._write(chunk)

    def _write(self, scores: np.ndarray) -> None:
        start = self.num_written
        stop = start + len(scores)
        columns = [as_arrow(np.ascontiguousarray(column)) for column in scores.T]
        columns = [*self._named.read(start, stop), *columns]
        table = pa.Table.from_arrays(columns, schema=self._schema)
        self._file.write_table(table, len(scores))  # Parquet: one row group
        self.num_written = stop


def _on_host(scores: Tensor, buffer: Tensor | None) -> _Copy:
    """Start the copy of scores to pinned memory; on a CPU they are in host memory already."""
    if scores.device.type != "cuda":
        return _Copy(scores.numpy(), None, None)
    if buffer is None or len(buffer) < len(scores):
        buffer = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
    rows = buffer[: len(scores)]
    rows.copy_(scores, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return _Copy(rows.numpy(), ready, buffer)
