"""Shares of the threads in the keys of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dataloading.keys.kernels.layouts import Part

LARGE_ROWS = 100_000
"""Tables from this size on have an index that is in no core's own cache."""
LARGE_COST = 3.0
"""Time of a key of such a table, in times of one of a small table."""
MIN_KEYS = 8192
"""Fewer keys of a table are not shared by threads."""


@dataclass(frozen=True, slots=True)
class TableSize:
    """Size of a table, on which the cost of its keys depends."""

    rows: int  # of the table
    counts_sightings: bool  # whether only one thread at a time may see its keys


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the columns of a batch, and the threads that see them."""

    parts: np.ndarray  # columns and spans, int64 [P, Part], in the order of the columns
    order: np.ndarray  # indices of parts, share after share, int64 [P]
    starts: np.ndarray  # of the shares in `order`, int64 [shares + 1]

    def copy(self) -> "Shares":
        return Shares(self.parts.copy(), self.order, self.starts)


def shares_of(
    tables: Sequence[int], counts: Sequence[int], sizes: Sequence[TableSize], workers: int
) -> Shares:
    """Return shares of about equal cost: the most expensive units first, each to the least share.

    A table is one unit, and has threads of its own only if it costs as much as two of them should do, or more. Cores that share
    a table take from each other the cells that they write to.
    """
    keys_of = dict.fromkeys(tables, 0)
    for table, count in zip(tables, counts, strict=True):
        keys_of[table] += count
    costs = {
        table: keys * (LARGE_COST if sizes[table].rows >= LARGE_ROWS else 1.0)
        for table, keys in keys_of.items()
    }
    total = sum(costs.values())
    spans: list[tuple[int, int, int]] = []
    units: list[tuple[float, list[int]]] = []
    for table, columns in groupby(range(len(tables)), lambda column: tables[column]):
        number = int(costs[table] * workers / total) if total else 1
        number = min(number, keys_of[table] // MIN_KEYS)
        if sizes[table].counts_sightings:
            number = 1
        number = max(1, number)
        for unit in _cut([*columns], counts, number):
            units.append((costs[table] / number, [len(spans) + at for at in range(len(unit))]))
            spans += unit
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    for cost, own in sorted(units, key=lambda unit: -unit[0]):
        least = loads.index(min(loads))
        loads[least] += cost
        shares[least] += own
    parts_array = np.zeros((len(spans), len(Part)), np.int64)
    parts_array[:, [Part.COLUMN, Part.BEGIN, Part.END]] = np.array(spans, np.int64).reshape(-1, 3)
    order = np.array([part for share in shares for part in share], np.int64)
    starts = np.cumsum([0, *map(len, shares)], dtype=np.int64)
    return Shares(parts_array, order, starts)


def _cut(
    columns: Sequence[int], counts: Sequence[int], number: int
) -> list[list[tuple[int, int, int]]]:
    """Return the columns and half-open spans of `number` units of equal length, in the order of the keys."""
    total = sum(counts[column] for column in columns)
    ends = [total * (unit + 1) // number for unit in range(number)]
    units: list[list[tuple[int, int, int]]] = [[] for _ in ends]
    first = 0
    for column in columns:
        count, begin = counts[column], 0
        for unit, end in zip(units, ends, strict=True):
            until = min(count, end - first)
            if until > begin:
                unit.append((column, begin, until))
                begin = until
        first += count
    return units
