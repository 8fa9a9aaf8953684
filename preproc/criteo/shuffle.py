"""Out-of-core random permutation of all training rows: a pure function of the seed and the number of rows.

Every row draws a bucket, every bucket is permuted in memory, and the buckets are concatenated. If buckets and permutations are
drawn independently and uniformly, every order is equally likely: this is the first step of a radix sort by random numbers. The
number of buckets depends on the rows alone. The order is therefore the same for any memory limit and number of threads.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.durable_files import sync_stream
from dataloading.randomness import stream_key, uniform
from preproc.column_store import StoredColumn, bytes_of, size_and_crc32
from preproc.report.console import Phase, Progress
from preproc.work_directory import Work, memory_bytes

BUCKET_ROWS = 1 << 22
CHUNK_ROWS = 1 << 21


def buckets_of(seed: int, start: int, stop: int, buckets: int) -> np.ndarray:
    """Return the bucket of each row from `start` to `stop`, uint16."""
    numbers = uniform(stream_key("shuffle", seed, buckets), np.arange(start, stop, dtype=np.uint64))
    numbers *= buckets
    return numbers.astype(np.uint16)


def order_within(seed: int, bucket: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng([seed, bucket]).permutation(num_rows)


# Memory of Python, NumPy, Numba, Arrow and DuckDB themselves.
BASE_BYTES = 320 << 20


def shuffle_training(
    columns: list[StoredColumn],
    num_rows: int,
    config: PreprocConfig,
    work: Work,
    progress: Progress,
) -> None:
    """Shuffle the first `num_rows` rows of all columns, unless the record says that it is done."""
    if work.state.get("shuffled"):
        return
    with progress.phase(f"shuffle {num_rows:,} training rows") as phase:
        spare = memory_bytes(config) - BASE_BYTES
        threads = config.threads or os.cpu_count() or 1
        workers = max(1, min(threads, spare // worker_bytes(columns, num_rows)))
        shuffle_rows(columns, num_rows, config.seed, workers, work, phase)
    work.state["shuffled"] = True
    work.save()


def worker_bytes(columns: list[StoredColumn], num_rows: int) -> int:
    """Return the most memory per thread: a bucket of the widest column twice, and its order."""
    widest = max(column.row_bytes for column in columns)
    return min(num_rows, BUCKET_ROWS) * (2 * widest + np.dtype(np.int64).itemsize)


def shuffle_rows(
    columns: list[StoredColumn], num_rows: int, seed: int, threads: int, work: Work, phase: Phase
) -> None:
    """Put the first `num_rows` rows of all columns into the random order of `seed`.

    First, every column is partitioned into a second file, bucket after bucket. Once that is recorded, every
    bucket is permuted back into the first file. Both steps can be repeated from their start.
    """
    state = work.state.setdefault("shuffle", {"dealt": [], "permuted": []})
    shuffle = _Shuffle(num_rows, seed)
    checked = work.state["checked"]
    phase.total = 2 * len(columns)

    def permute(column: StoredColumn) -> dict[str, list]:
        head = shuffle.permute(column)
        return {column.path.name: [head, *checked[column.path.name][1:]]}

    with ThreadPoolExecutor(threads) as pool:
        for name, step in (("dealt", shuffle.deal), ("permuted", permute)):
            waiting = [column for column in columns if column.path.name not in state[name]]
            done = pool.map(step, waiting)
            for column, records in zip(waiting, done, strict=True):
                checked |= records
                state[name].append(column.path.name)
                if step is permute:
                    checked.pop(_dealt(column).name, None)
                work.save()
                if step is permute:
                    _dealt(column).unlink(missing_ok=True)
                phase.update(len(state["dealt"]) + len(state["permuted"]))


class _Shuffle:
    """Both steps of a shuffle of the first `num_rows` rows, for one column at a time; threads may share it."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._buckets = -(-num_rows // BUCKET_ROWS)
        self._sizes = np.zeros(self._buckets, np.int64)
        for start in range(0, num_rows, CHUNK_ROWS):
            dealt = buckets_of(seed, start, min(start + CHUNK_ROWS, num_rows), self._buckets)
            self._sizes += np.bincount(dealt, minlength=self._buckets)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])

    def deal(self, column: StoredColumn) -> dict[str, list]:
        """Partition a column into a second file; return the entries of both files in the record."""
        ends, checksums = self._starts[:-1].copy(), [0] * self._buckets
        with _dealt(column).open("wb", buffering=0) as stream:
            for start, values in column.chunks(range(self._num_rows), CHUNK_ROWS):
                dealt = buckets_of(self._seed, start, start + len(values), self._buckets)
                # Stable, so the order within a bucket does not depend on the chunk size.
                values = values[np.argsort(dealt, kind="stable")]
                at = 0
                for bucket, count in enumerate(np.bincount(dealt, minlength=self._buckets)):
                    part = np.ascontiguousarray(values[at : at + count])
                    _write_at(stream.fileno(), part, int(ends[bucket]) * column.row_bytes)
                    checksums[bucket] = crc32(bytes_of(part), checksums[bucket])
                    ends[bucket] += count
                    at += count
            sync_stream(stream)
        parts = zip((self._sizes * column.row_bytes).tolist(), checksums, strict=True)
        # From here on the first rows of the column are read no more, until they are complete again.
        head = self._num_rows * column.row_bytes
        rest = [[head, None], list(size_and_crc32(column.path, head))]
        return {_dealt(column).name: [list(part) for part in parts], column.path.name: rest}

    def permute(self, column: StoredColumn) -> list[int]:
        """Write the rows of a column back in random order; return their bytes and CRC-32."""
        source = StoredColumn(_dealt(column), column.dtype.str, column.width)
        checksum = 0
        with column.path.open("r+b", buffering=0) as stream:
            for bucket in range(self._buckets):
                first, last = int(self._starts[bucket]), int(self._starts[bucket + 1])
                values = source.read(first, last)[order_within(self._seed, bucket, last - first)]
                _write_at(stream.fileno(), values, first * column.row_bytes)
                checksum = crc32(bytes_of(values), checksum)
                del values  # so that the bucket is freed before the next one is read
            sync_stream(stream)
        return [self._num_rows * column.row_bytes, checksum]


def _dealt(column: StoredColumn) -> Path:
    return column.path.with_name(f"{column.path.name}.dealt")


def _write_at(descriptor: int, values: np.ndarray, offset: int) -> None:
    data = bytes_of(values)
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
