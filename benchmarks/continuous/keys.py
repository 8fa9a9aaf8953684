"""Speed of the map from raw keys to rows: new keys, known keys, and skewed keys with eviction, on the cores of this process.

python -m benchmarks.continuous.keys
"""

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from configs.schema import DynamicConfig, Evict
from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.batch_mapper import BatchMapper
from dataloading.keys.described_keys import DescribedKeys, described
from dataloading.keys.key_map import KeyMap

MILLION = 1_000_000
T15 = Path(__file__).resolve().parents[2] / "configs/data/criteo_t15.yaml"


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
    _mapper(1, 40, DynamicConfig(admit_after=2)).map(_described([np.arange(20)]), 1)
    mapper = _mapper(cores, options.keys + 1, DynamicConfig())
    _measure("new keys", mapper, drawn, options.batch, 0)
    known = np.stack([keys[rng.permutation(options.keys)] for keys in drawn])
    _measure("known keys, all alike", mapper, known, options.batch, 10_000)
    skewed = np.stack([keys[_power_law(rng, options.keys, options.keys)] for keys in drawn])
    _measure("known keys, power law 1.05", mapper, skewed, options.batch, 20_000)
    _measure_tables(cores, rng, options.batch, options.keys)
    few = max(options.keys // 10, 2 * options.batch)
    for evict in (Evict.age, Evict.count):
        mapper = _mapper(cores, few, DynamicConfig(evict=evict))
        _measure(f"new keys, each evicts one by {evict.value}", mapper, drawn, options.batch, 0)
    mapper = _mapper(cores, options.keys + 1, DynamicConfig(admit_after=2))
    _measure("keys counted, not admitted", mapper, drawn, options.batch, 0)


def _measure_tables(cores: int, rng: np.random.Generator, batch: int, most: int) -> None:
    """Measure tables of T15's sizes, up to `most` rows, each with 16 batches of known keys."""
    rows = [min(size, most) for size in OmegaConf.load(T15).synthetic.cardinalities]
    maps = [KeyMap("t", size + 1, DynamicConfig()) for size in rows]
    mapper = BatchMapper(maps, DynamicConfig(), cores)
    owned = [rng.integers(1, 2**63, size, dtype=np.int64) for size in rows]
    mapper.release(mapper.map(_described(owned), 1))
    drawn = [keys[_power_law(rng, 16 * batch, len(keys))] for keys in owned]
    _measure("known keys of T15's 26 tables, power law 1.05", mapper, np.stack(drawn), batch, 1)


def _described(keys: Iterable[np.ndarray]) -> DescribedKeys:
    """Return keys of a batch, a column per table."""
    return described({table: [BatchKeys.alone(column)] for table, column in enumerate(keys)})


def _power_law(rng: np.random.Generator, count: int, keys: int) -> np.ndarray:
    """Return ranks of keys, int64 [count]: rank r has a probability of r to the power of -1.05."""
    largest = keys**-0.05
    ranks = (largest + (1 - largest) * rng.random(count)) ** -20
    return np.minimum(ranks.astype(np.int64), keys) - 1


def _mapper(tables: int, capacity: int, policy: DynamicConfig) -> BatchMapper:
    maps = [KeyMap("t", capacity, policy) for _ in range(tables)]
    return BatchMapper(maps, policy, tables)


def _measure(name: str, mapper: BatchMapper, keys: np.ndarray, size: int, first: int) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    for at in range(0, keys.shape[1], size):
        described_keys = _described(column[at : at + size] for column in keys)
        mapper.release(mapper.map(described_keys, first + 1 + at // size))
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    per_core = keys.size / used / MILLION
    print(
        f"{name:46} {keys.size / wall / MILLION:6.1f} million/s, {per_core:6.1f} per second of CPU time"
    )


if __name__ == "__main__":
    main()
