"""Rows that an arena is expected to fetch per step, from how often ids occur.

A row outside the fixed slots of its arena stays for as many steps as the ring of slots takes to come round. With `q` the chance
that a step looks a row up and `T` these steps, the row is there with probability `q T / (1 + q T)`; `T` is the number with which
all rows together fill the ring.

Ids that are expanded (`nn.embedding.multi_hot`) bring further rows, anywhere in the table and always the same ones: these rows
are as frequent as the id, so the first rows are not the most frequent ones. The most frequent ids are taken to have rows of
their own, as many as the table has room for; the rows of the others are taken to be all alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

IdShare = Callable[[np.ndarray], np.ndarray]
"""Share of a feature's ids below each of some numbers, between 0 and 1."""


@dataclass(frozen=True, slots=True)
class IdTraffic:
    """Frequency of the rows of a table among its lookups.

    Attributes:
        share: of its ids, before they are expanded.
        rows: of the table.
        drawn: further rows per id, on average.
    """

    share: IdShare
    rows: int
    drawn: float = 0.0


CLASSES = 600
"""Classes of rows of a table, of about equal frequency each."""
MOST_STEPS = 1e12

EXACT_ROWS = 4096
"""Most frequent rows of a range that are counted one by one; the others in blocks of rows about equally frequent."""
BLOCK_GROWTH = 1.01


def power_law_share(rows: int, exponent: float) -> IdShare:
    """Return the share of ids of synthetic clicks, `dataloading.randomness.power_law`; exponent 0 is uniform."""

    def share(numbers: np.ndarray) -> np.ndarray:
        below = np.clip(numbers, 0, rows) + 1.0
        if exponent == 1.0:
            return np.log(below) / np.log(rows + 1.0)
        gamma = 1.0 - exponent
        return (below**gamma - 1.0) / ((rows + 1.0) ** gamma - 1.0)

    return share


def counted_share(counts: np.ndarray) -> IdShare:
    """Return the share of ids from their counts, int64 [rows]."""
    below = np.concatenate([[0], np.cumsum(counts, dtype=np.float64)])

    def share(numbers: np.ndarray) -> np.ndarray:
        where = np.clip(numbers, 0, len(counts)).astype(np.int64)
        return below[where] / max(below[-1], 1.0)

    return share


def row_classes(
    traffic: IdTraffic, first: int, count: int, fixed: int, ids: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of rows beyond the fixed ones, and the chance that a step looks one of them up.

    Args:
        traffic: of the table.
        first: first row of the shard.
        count: rows of the shard.
        fixed: rows that keep their slots, the first ones.
        ids: of the table per step, before they are expanded.
    """
    if fixed >= count:
        return np.zeros(0), np.zeros(0)
    if traffic.drawn:
        rows, chance = _expanded_classes(traffic, first, count, fixed)
    else:
        rows, chance = _classes(traffic.share, first, fixed, count)
    return rows, -np.expm1(ids * np.log1p(-np.minimum(chance, 1 - 1e-12)))


def _classes(share: IdShare, first: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of rows between two ones of a shard, and the chance that an id is one of them."""
    # Finer where rows are more frequent.
    edges = np.unique(np.geomspace(low + 1, high + 1, CLASSES).astype(np.int64) - 1)
    edges[0], edges[-1] = low, high
    rows = np.diff(edges).astype(np.float64)
    mass = np.diff(share((first + edges).astype(np.float64)))
    return rows, np.clip(mass / np.maximum(rows, 1), 0, 1)


def _expanded_classes(
    traffic: IdTraffic, first: int, count: int, fixed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same of the rows beyond the fixed ones, of which ids bring further ones."""
    left = count - fixed
    alone = max(int(traffic.rows / traffic.drawn), 1)
    ids, chance = _classes(traffic.share, 0, 0, min(alone, traffic.rows))
    below = traffic.share(np.array([alone, first + fixed, first + count], dtype=np.float64))
    # Of the other ids, and of the rows' own ones.
    alike = (1 - below[0]) * traffic.drawn / traffic.rows + (below[2] - below[1]) / left
    return ids * left / ids.sum(), np.clip(chance + alike, 0, 1)


def expected_fetches(classes: Sequence[tuple[np.ndarray, np.ndarray]], ring: int) -> list[float]:
    """Return the rows that each of the shards of an arena fetches per step.

    Args:
        classes: results of `row_classes`.
        ring: slots whose rows change.
    """
    rows = np.concatenate([rows for rows, _ in classes])
    chance = np.concatenate([chance for _, chance in classes])
    if not len(rows) or not chance.any() or rows.sum() <= ring:
        return [0.0] * len(classes)
    low, high = 0.0, MOST_STEPS
    for _ in range(100):
        steps = (low * high) ** 0.5 if low else high / 1e6
        stay = chance * steps
        if (rows * stay / (1 + stay)).sum() < ring:
            low = steps
        else:
            high = steps
    return [float((rows * chance / (1 + chance * high)).sum()) for rows, chance in classes]


def expected_distinct(ids: float, share: IdShare, first: int, end: int) -> float:
    """Return how many rows of a range are among drawn ids: row i of probability p_i is missed with (1 - p_i) ** ids.

    Args:
        ids: number drawn, of all rows.
        share: of the ids of the table.
        first: first row of the range.
        end: end of the range.
    """
    if end <= first:
        return 0.0
    exact = np.arange(first, min(first + EXACT_ROWS, end) + 1)
    number = 1 + math.ceil(math.log(end / exact[-1]) / math.log(BLOCK_GROWTH))
    edges = np.unique(
        np.concatenate([exact, np.geomspace(exact[-1], end, number).round()]).astype(np.int64)
    )
    rows = np.diff(edges)
    chance = np.clip(np.diff(share(edges.astype(np.float64))) / rows, 0, 1 - 1e-16)
    return float((rows * -np.expm1(ids * np.log1p(-chance))).sum())
