"""Shares of the threads: every key once, loads alike, and tables that are not shared without need."""

from collections import Counter

import numpy as np
import pytest

from dataloading.keys.kernels.layouts import Part
from dataloading.keys.shares import LARGE_COST, LARGE_ROWS, TableSize, shares_of

SMALL, LARGE = TableSize(1000, False), TableSize(LARGE_ROWS, False)


def threads_of(tables, counts, sizes, workers):
    """Return the threads of each table, and their loads in keys of small tables."""
    found = shares_of(tables, counts, sizes, workers)
    threads, loads = {}, []
    for thread, own in enumerate(np.split(found.order, found.starts[1:-1])):
        load = 0.0
        for column, begin, end, *_ in found.parts[own].tolist():
            table = tables[column]
            threads.setdefault(table, set()).add(thread)
            load += (end - begin) * (LARGE_COST if sizes[table].rows >= LARGE_ROWS else 1.0)
        loads.append(load)
    return threads, loads


@pytest.mark.parametrize("workers", [1, 2, 5, 12])
def test_every_key_is_in_one_part(workers):
    rng = np.random.default_rng(0)
    for _ in range(50):
        num = int(rng.integers(1, 8))
        tables = sorted(rng.integers(0, 3, num).tolist())
        counts = (rng.integers(0, 60_000, num) * rng.integers(0, 2, num)).tolist()
        sizes = [TableSize(int(rng.choice([10, LARGE_ROWS])), bool(rng.integers(2))) for _ in "abc"]
        found = shares_of(tables, counts, sizes, workers)
        assert sorted(found.order.tolist()) == [*range(len(found.parts))]
        assert len(found.starts) == workers + 1
        ends = dict.fromkeys(range(num), 0)
        for part in found.parts:
            column, begin, end = part[[Part.COLUMN, Part.BEGIN, Part.END]].tolist()
            assert ends[column] == begin
            assert end > begin
            ends[column] = end
        assert [*ends.values()] == counts
        # Parts are in the order of the columns, so tables ascend.
        columns = found.parts[:, Part.COLUMN]
        assert (np.diff(columns) >= 0).all()
        threads, _ = threads_of(tables, counts, sizes, workers)
        assert all(
            len(threads.get(table, "")) <= 1 for table in range(3) if sizes[table].counts_sightings
        )


def test_more_tables_than_threads_are_not_shared():
    sizes = [LARGE] * 8 + [SMALL] * 18
    threads, loads = threads_of([*range(26)], [65_536] * 26, sizes, 12)
    assert {len(own) for own in threads.values()} == {1}
    assert max(loads) < 1.5 * sum(loads) / 12


def test_an_expensive_table_has_threads_of_its_own():
    threads, loads = threads_of([0, 1, 2], [65_536 * 100, 65_536, 65_536], [SMALL, SMALL, LARGE], 8)
    assert len(threads[0]) >= 7
    assert len(threads[1]) == len(threads[2]) == 1
    assert max(loads) < 1.3 * sum(loads) / 8


def test_features_of_one_table_are_cut_across():
    found = shares_of([0, 0, 0], [50_000, 10, 40_000], [LARGE], 3)
    sizes = Counter()
    for thread, own in enumerate(np.split(found.order, found.starts[1:-1])):
        for _, begin, end, *_ in found.parts[own].tolist():
            sizes[thread] += end - begin
    assert sorted(sizes.values()) == [30_003, 30_003, 30_004]


def test_a_single_table_has_all_threads():
    for workers in range(1, 65):
        threads, _ = threads_of([0], [1_000_000], [LARGE], workers)
        assert len(threads[0]) == workers


def test_few_keys_have_one_thread():
    threads, _ = threads_of([0], [4000], [LARGE], 8)
    assert len(threads[0]) == 1
