"""Speed of the map from raw keys to rows: new keys, known keys, and skewed keys with eviction, on the cores of this process.

python -m benchmarks.continuous.keys
"""

import argparse
import os
import time

import numpy as np

from configs.schema import DynamicConfig, Evict
from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.batch_mapper import BatchMapper
from dataloading.keys.described_keys import described
from dataloading.keys.key_map import KeyMap

MILLION = 1_000_000


def main() -> None:
    """Print million keys per second."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--keys", type=int, default=10 * MILLION, help="keys per table")
    parser.add_argument("--batch", type=int, default=65_536, help="keys per batch and table")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rng = np.random.default_rng(0)
    drawn = rng.integers(1, 2**63, (cores, options.keys), dtype=np.int64)
    print(f"{cores} tables of {options.keys:,} keys, one per core, batches of {options.batch:,}")
    _mapper(1, 40, DynamicConfig(admit_after=2)).map({0: [BatchKeys.alone(np.arange(20))]}, 1)
    mapper = _mapper(cores, options.keys + 1, DynamicConfig())
    _measure("new keys", mapper, drawn, options.batch, 0)
    known = np.stack([keys[rng.permutation(options.keys)] for keys in drawn])
    _measure("known keys, all alike", mapper, known, options.batch, 10_000)
    skewed = np.take_along_axis(drawn, _power_law(rng, drawn.shape), 1)
    _measure("known keys, power law 1.05", mapper, skewed, options.batch, 20_000)
    few = max(options.keys // 10, 2 * options.batch)
    for evict in (Evict.age, Evict.count):
        mapper = _mapper(cores, few, DynamicConfig(evict=evict))
        _measure(f"new keys, each evicts one by {evict.value}", mapper, drawn, options.batch, 0)
    mapper = _mapper(cores, options.keys + 1, DynamicConfig(admit_after=2))
    _measure("keys counted, not admitted", mapper, drawn, options.batch, 0)


def _power_law(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return ranks of keys, int64 `shape`, below its last number: rank r with a probability of r to the power of -1.05."""
    largest = shape[1] ** -0.05
    ranks = (largest + (1 - largest) * rng.random(shape)) ** -20
    return np.minimum(ranks.astype(np.int64), shape[1]) - 1


def _mapper(tables: int, capacity: int, policy: DynamicConfig) -> BatchMapper:
    maps = [KeyMap("t", capacity, policy) for _ in range(tables)]
    return BatchMapper(maps, policy, tables)


def _measure(name: str, mapper: BatchMapper, keys: np.ndarray, size: int, first: int) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    for at in range(0, keys.shape[1], size):
        columns = {
            table: [BatchKeys.alone(column[at : at + size])] for table, column in enumerate(keys)
        }
        change = mapper.map(described(columns), first + 1 + at // size)
        mapper.release(change)
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    per_core = keys.size / used / MILLION
    print(
        f"{name:40} {keys.size / wall / MILLION:6.1f} million/s, {per_core:6.1f} per second of CPU time"
    )


if __name__ == "__main__":
    main()
