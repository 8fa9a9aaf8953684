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
PART_KEYS = 8192
"""Keys of a large table that a thread takes at once; a small table is seen by one thread, which keeps it in its cache."""


@dataclass(frozen=True, slots=True)
class TableSize:
    """Size of a table, on which the cost of its keys depends.

    Attributes:
        rows: of the table.
        counts_sightings: whether only one thread at a time may see its keys.
    """

    rows: int
    counts_sightings: bool


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the columns of a batch, and the threads that see them.

    Attributes:
        parts: columns and spans, int64 [P, Part], in the order of the columns.
        order: indices of parts, share after share, int64 [P].
        starts: of the shares in `order`, int64 [shares + 1].
    """

    parts: np.ndarray
    order: np.ndarray
    starts: np.ndarray

    def copy(self) -> "Shares":
        """Return the same shares, with parts that a batch may write to."""
        return Shares(self.parts.copy(), self.order, self.starts)


def shares_of(
    tables: Sequence[int], counts: Sequence[int], sizes: Sequence[TableSize], workers: int
) -> Shares:
    """Return shares of about equal cost: the most expensive units first, each to the least share.

    Args:
        tables: of the columns, ascending.
        counts: keys of the columns.
        sizes: of the tables.
        workers: threads.
    """
    spans: list[tuple[int, int, int]] = []
    units: list[tuple[float, list[int]]] = []
    for table, columns in groupby(range(len(tables)), lambda column: tables[column]):
        size = sizes[table]
        is_large = size.rows >= LARGE_ROWS
        cost = LARGE_COST if is_large else 1.0
        parts = []
        for column in columns:
            ends = _cuts(counts[column], PART_KEYS if is_large else counts[column])
            for begin, end in zip([0, *ends], ends, strict=False):
                parts.append(len(spans))
                spans.append((column, begin, end))
        for own in [parts] if size.counts_sightings else [[part] for part in parts]:
            units.append((cost * sum(spans[part][2] - spans[part][1] for part in own), own))
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


def _cuts(count: int, most: int) -> list[int]:
    """Return the ends of parts of equal length, at most `most`."""
    number = max(1, -(-count // max(1, most)))
    return [count * (part + 1) // number for part in range(number)]
