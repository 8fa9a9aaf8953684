"""Speed of the map from raw keys to rows: new keys, known keys, and skewed keys with eviction, on the cores of this process.

python -m benchmarks.continuous.keys
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from configs.schema import DynamicConfig, Evict
from dataloading.keys.batch_keys import BatchKeys
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
    with ThreadPoolExecutor(cores) as pool:
        _compile()
        maps = [KeyMap("t", options.keys + 1, DynamicConfig()) for _ in range(cores)]
        _measure("new keys", pool, maps, drawn, options.batch, 0)
        known = np.stack([keys[rng.permutation(options.keys)] for keys in drawn])
        _measure("known keys, all alike", pool, maps, known, options.batch, 10_000)
        skewed = np.take_along_axis(drawn, _power_law(rng, drawn.shape), 1)
        _measure("known keys, power law 1.05", pool, maps, skewed, options.batch, 20_000)
        few = max(options.keys // 10, 2 * options.batch)
        for evict in (Evict.age, Evict.count):
            maps = [KeyMap("t", few, DynamicConfig(evict=evict)) for _ in maps]
            name = f"new keys, each evicts one by {evict.value}"
            _measure(name, pool, maps, drawn, options.batch, 0)
        maps = [KeyMap("t", options.keys + 1, DynamicConfig(admit_after=2)) for _ in maps]
        _measure("keys counted, not admitted", pool, maps, drawn, options.batch, 0)


def _power_law(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return ranks of keys, int64 `shape`, below its last number: rank r with a probability of r to the power of -1.05."""
    largest = shape[1] ** -0.05
    ranks = (largest + (1 - largest) * rng.random(shape)) ** -20
    return np.minimum(ranks.astype(np.int64), shape[1]) - 1


def _compile() -> None:
    small = KeyMap("t", 40, DynamicConfig(admit_after=2))
    for batch in range(1, 9):
        small.map([BatchKeys.alone(np.arange(batch * 10, batch * 10 + 20))], batch)


def _measure(
    name: str, pool: ThreadPoolExecutor, maps: list[KeyMap], keys: np.ndarray, size: int, first: int
) -> None:
    def run(table: KeyMap, column: np.ndarray) -> Callable[[], None]:
        def mapped() -> None:
            for at in range(0, len(column), size):
                table.map([BatchKeys.alone(column[at : at + size])], first + 1 + at // size)

        return mapped

    start, cpu = time.perf_counter(), time.process_time()
    running = [pool.submit(run(*pair)) for pair in zip(maps, keys, strict=True)]
    for future in running:
        future.result()
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    per_core = keys.size / used / MILLION
    print(
        f"{name:40} {keys.size / wall / MILLION:6.1f} million/s, {per_core:6.1f} per second of CPU time"
    )


if __name__ == "__main__":
    main()
