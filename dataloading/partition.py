"""Rows that a rank reads at a step: a pure function of the step, so resuming needs nothing else.

With `batch_size=8`, `world_size=2` and 19 rows, one epoch is three steps. At steps 0 and 1 each rank gets 4 rows. At step 2 only
3 rows are left: rank 0 gets 2 of them, rank 1 gets 1, and rank 1 pads its batch to 2 rows.
"""

from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import numpy as np

MAX_BLOCKS = 2**27
"""Most blocks of one permutation: 1 GiB of row numbers. Every reader process keeps those of two epochs."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Order of one epoch: blocks of consecutive rows are permuted, rows inside a block are not."""

    seed: int  # not negative
    epoch: int  # counted from 0; every epoch has its own order
    block: int  # rows that stay together. A partial last block stays at the end.

    def __post_init__(self) -> None:
        if self.seed < 0 or self.epoch < 0 or self.block < 1:
            raise ValueError(
                f"got {self}; want seed and epoch of at least 0 and block of at least 1"
            )


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows of one rank at one step."""

    runs: np.ndarray  # int64 [K, 2], half-open row ranges in the order of the batch
    num_valid: int  # rows in `runs`
    padded_to: int  # rows of the batch, the same on all ranks
    global_valid: int  # rows over all ranks
    # int32 [padded_to], of each row of the batch its number in the global batch
    global_rows: np.ndarray


def num_steps(num_rows: int, batch_size: int) -> int:
    """Return the steps of an epoch, including a partial last batch."""
    return -(-num_rows // batch_size)


def check_batch(batch_size: int, world_size: int, option: str = "batch_size") -> None:
    """Raise `ValueError` unless a full batch, which `option` sets, divides evenly over the ranks."""
    if batch_size < 1 or batch_size % world_size:
        fitting = max(batch_size // world_size, 1) * world_size
        raise ValueError(
            f"{option}={batch_size} does not divide evenly over {world_size} ranks; want a positive multiple of "
            f"{world_size}, such as {fitting}"
        )


def rows_at(
    step: int,
    *,
    num_rows: int,
    batch_size: int,
    rank: int,
    world_size: int,
    shuffle: Shuffle | None,
) -> RankRows:
    """Return the rows that `rank` reads at `step` of an epoch; over ranks and steps every row is read exactly once.

    `shuffle`: None keeps the order on disk. Raises ValueError: `world_size` does not divide `batch_size`, or the
    shuffle has too many blocks.
    """
    check_batch(batch_size, world_size)
    assert 0 <= rank < world_size
    assert 0 <= step < num_steps(num_rows, batch_size)
    start = step * batch_size
    global_valid = min(batch_size, num_rows - start)
    slots = -(-global_valid // world_size)
    first = start + min(rank * slots, global_valid)
    last = start + min((rank + 1) * slots, global_valid)
    runs = np.array([[first, last]], np.int64)
    if first == last:
        runs = runs[:0]
    elif shuffle is not None:
        runs = _shuffled(first, last, num_rows, shuffle)
    global_rows = np.arange(rank * slots, (rank + 1) * slots, dtype=np.int32)
    return RankRows(runs, last - first, slots, global_valid, global_rows)


def balanced(costs: np.ndarray, world_size: int, together: int = 1) -> np.ndarray:
    """Return the rows of a global batch that each rank gets, int64 [world_size, rows of a rank], ascending.

    Every rank gets equally many rows, in runs of `together`. Runs are dealt by descending cost, one to each rank at a time, the
    largest to the rank that has least. So costs are spread alike on all ranks, and what grows as their squares is balanced too.
    `costs`: of the rows, int64.
    """
    of_runs = costs.reshape(-1, together).sum(axis=1)
    dealt = np.argsort(-of_runs, kind="stable").reshape(-1, world_size)
    loads = np.zeros(world_size, np.int64)
    for one_each in dealt:
        ranks = np.argsort(loads, kind="stable")
        loads[ranks] += of_runs[one_each]
        one_each[ranks] = one_each.copy()
    runs = np.sort(dealt.T, axis=1)[:, :, None]
    return (runs * together + np.arange(together)).reshape(world_size, -1)


def _shuffled(first: int, last: int, num_rows: int, shuffle: Shuffle) -> np.ndarray:
    """Return the runs of rows at the positions [first, last) of the shuffled epoch."""
    block = shuffle.block
    order = block_order(num_rows // block, shuffle.seed, shuffle.epoch)
    numbers = np.arange(first // block, (last - 1) // block + 1)
    moved = numbers < len(order)  # all but a partial last block
    starts = numbers * block
    starts[moved] = order[numbers[moved]] * block
    ends = starts + block
    ends[-1] = starts[-1] + (last - 1) % block + 1
    starts[0] += first % block
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1  # neighbours that are one run on disk
    return np.stack([starts[np.r_[0, breaks]], ends[np.r_[breaks - 1, len(ends) - 1]]], axis=1)


def block_order(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    """Return the seeded permutation of `num_blocks` blocks, read-only; the last two epochs stay cached."""
    if num_blocks > MAX_BLOCKS:
        raise ValueError(
            f"shuffling {num_blocks} blocks needs {num_blocks * 8 / 2**30:.1f} GiB per reader process, and at most "
            f"{MAX_BLOCKS} blocks are allowed; make the shuffle block {-(-num_blocks // MAX_BLOCKS)} times as long or longer"
        )
    # Several reader threads call this at the start of an epoch; only one should compute.
    with _ORDER_LOCK:
        return _block_order(num_blocks, seed, epoch)


_ORDER_LOCK = Lock()


@lru_cache(maxsize=2)
def _block_order(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_blocks)
    order.flags.writeable = False
    return order
