"""Out-of-core random permutation of all training rows: a pure function of the seed and the number of rows.

Every row draws a bucket, every bucket is permuted in memory, and the buckets are concatenated. If buckets and
permutations are drawn independently and uniformly, every order is equally likely: this is the first step of a
radix sort by random numbers. The number of buckets depends on the rows alone. The order is therefore the same
for any memory limit and number of threads.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dataloading.dataset.durable_files import sync_stream
from dataloading.randomness import stream_key, uniform
from preproc.column_store import StoredColumn, bytes_of
from preproc.report.console import Stage
from preproc.work_directory import Work

BUCKET_ROWS = 1 << 22
CHUNK_ROWS = 1 << 21


def num_buckets(num_rows: int) -> int:
    """Return the number of buckets for `num_rows` rows."""
    return -(-num_rows // BUCKET_ROWS)


def buckets_of(seed: int, start: int, stop: int, buckets: int) -> np.ndarray:
    """Return the bucket of each row from `start` to `stop`, uint16."""
    numbers = uniform(stream_key("shuffle", seed, buckets), np.arange(start, stop, dtype=np.uint64))
    numbers *= buckets
    return numbers.astype(np.uint16)


def order_within(seed: int, bucket: int, num_rows: int) -> np.ndarray:
    """Return the order of the rows of one bucket."""
    return np.random.default_rng([seed, bucket]).permutation(num_rows)


def worker_bytes(columns: list[StoredColumn], num_rows: int) -> int:
    """Return the most memory per thread: a bucket of the widest column twice, and its order."""
    widest = max(column.row_bytes for column in columns)
    rows = min(num_rows, BUCKET_ROWS)
    return rows * (2 * widest + np.dtype(np.int64).itemsize)


def shuffle_rows(
    columns: list[StoredColumn], num_rows: int, seed: int, threads: int, work: Work, stage: Stage
) -> None:
    """Put the first `num_rows` rows of all columns into the random order of `seed`.

    First, every column is partitioned into a second file, bucket after bucket. Once that is recorded, every
    bucket is permuted back into the first file. Both steps can be repeated from their start.
    """
    state = work.state.setdefault("shuffle", {"dealt": [], "permuted": []})
    buckets = num_buckets(num_rows)
    sizes = np.zeros(buckets, np.int64)
    for start in range(0, num_rows, CHUNK_ROWS):
        dealt = buckets_of(seed, start, min(start + CHUNK_ROWS, num_rows), buckets)
        sizes += np.bincount(dealt, minlength=buckets)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    stage.total = 2 * len(columns)

    def deal(column: StoredColumn) -> None:
        ends = starts[:-1].copy()
        with _dealt(column).open("wb", buffering=0) as stream:
            for start, values in column.chunks(range(num_rows), CHUNK_ROWS):
                dealt = buckets_of(seed, start, start + len(values), buckets)
                # Stable, so the order within a bucket does not depend on the chunk size.
                values = values[np.argsort(dealt, kind="stable")]
                at = 0
                for bucket, count in enumerate(np.bincount(dealt, minlength=buckets)):
                    part = np.ascontiguousarray(values[at : at + count])
                    _write_at(stream.fileno(), part, int(ends[bucket]) * column.row_bytes)
                    ends[bucket] += count
                    at += count
            sync_stream(stream)

    def permute(column: StoredColumn) -> None:
        source = StoredColumn(_dealt(column), column.dtype.str, column.width)
        with column.path.open("r+b", buffering=0) as stream:
            for bucket in range(buckets):
                first, last = int(starts[bucket]), int(starts[bucket + 1])
                # Not bound to a name, so that the bucket is freed before the next one is read.
                _write_at(
                    stream.fileno(),
                    source.read(first, last)[order_within(seed, bucket, last - first)],
                    first * column.row_bytes,
                )
            sync_stream(stream)

    with ThreadPoolExecutor(threads) as pool:
        for name, step in (("dealt", deal), ("permuted", permute)):
            waiting = [column for column in columns if column.path.name not in state[name]]
            done = pool.map(step, waiting)
            for column, _ in zip(waiting, done, strict=True):
                state[name].append(column.path.name)
                work.save()
                if step is permute:
                    _dealt(column).unlink(missing_ok=True)
                stage.update(len(state["dealt"]) + len(state["permuted"]))


def _dealt(column: StoredColumn) -> Path:
    return column.path.with_name(f"{column.path.name}.dealt")


def _write_at(descriptor: int, values: np.ndarray, offset: int) -> None:
    data = bytes_of(values)
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
