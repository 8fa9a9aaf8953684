"""Rows that an arena is expected to fetch per step, and host memory to read from disk, from how often ids occur.

A row outside the fixed slots of its arena stays for as many steps as the ring of slots takes to come round, and again as long if
a live batch needs it then. With `q` the chance that a step looks a row up and `T` these steps, the row is there with probability
`q T / (1 + q T)`; `T` follows from the number with which all rows together fill the ring. The buffer rows of
tables on disk are such a ring too, in which a row also stays while the device has it, or an announced batch needs it.

Ids that are expanded (`nn.embedding.multi_hot`) bring further rows, anywhere in the table and always the same ones: these rows
are as frequent as the id, so the first rows are not the most frequent ones. The rows are divided by the most frequent one of the
ids that bring them; the others bring all rows alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

IdShare = Callable[[np.ndarray], np.ndarray]
"""Share of a feature's ids below each of some numbers, between 0 and 1."""


@dataclass(frozen=True, slots=True)
class IdTraffic:
    """Frequency of a table's rows by the share of its ids, each of which brings `drawn` further rows on average."""

    share: IdShare
    rows: int
    drawn: float = 0.0


Classes = tuple[np.ndarray, np.ndarray]
"""Numbers of rows, and the chance that a step looks one of them up."""
CLASSES = 600
"""Classes of rows of a table, of about equal frequency each."""
BRINGING_CLASSES, OWN_CLASSES = 200, 20
"""Classes of rows by the ids that bring them, and by their own ids; a table has all pairs."""
LIVE_BATCHES = 3
"""Batches whose rows stay on the device: the one that is mapped, and the two before it."""
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


def row_classes(traffic: IdTraffic, first: int, count: int, fixed: int, ids: float) -> Classes:
    """Return numbers of rows beyond the `fixed` ones of a shard, and the chance that `ids` of a step look one of them up."""
    if fixed >= count:
        return np.zeros(0), np.zeros(0)
    if traffic.drawn:
        rows, chance = _expanded_classes(traffic, first, count, fixed)
    else:
        rows, chance = _classes(traffic.share, first, fixed, count)
    return rows, -np.expm1(ids * np.log1p(-np.minimum(chance, 1 - 1e-12)))


def _edges(low: int, high: int, number: int) -> np.ndarray:
    """Return edges of classes of rows between two ones, finer where rows are more frequent."""
    edges = np.unique(np.geomspace(low + 1, high + 1, number).astype(np.int64) - 1)
    edges[0], edges[-1] = low, high
    return edges


def _classes(
    share: IdShare, first: int, low: int, high: int, number: int = CLASSES
) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers of rows between two ones of a shard, and the chance that an id is one of them."""
    edges = _edges(low, high, number)
    rows = np.diff(edges).astype(np.float64)
    mass = np.diff(share((first + edges).astype(np.float64)))
    return rows, np.clip(mass / np.maximum(rows, 1), 0, 1)


def _expanded_classes(
    traffic: IdTraffic, first: int, count: int, fixed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same of the rows beyond the fixed ones, of which ids bring further ones."""
    edges = _edges(0, traffic.rows, BRINGING_CLASSES).astype(np.float64)
    below = traffic.share(edges)
    mass = np.diff(below)
    # Rows that none of the ids below an edge has brought, of one.
    not_brought = np.exp(-traffic.drawn / traffic.rows * edges)
    rarer = traffic.drawn / traffic.rows * (1 - below[1:] + mass / 2)
    brought = np.append(-np.diff(not_brought), not_brought[-1])
    chance = np.append(mass / np.diff(edges) + rarer, 0.0)
    own, of_own = _classes(traffic.share, first, fixed, count, OWN_CLASSES)
    chances = np.clip(of_own[:, None] + chance, 0, 1)
    return np.outer(own, brought / brought.sum()).ravel(), chances.ravel()


def expected_fetches(classes: Sequence[Classes], ring: int) -> list[float]:
    """Return the rows that each shard of an arena, of which `ring` slots change, fetches per step; see `row_classes`."""
    rows, chance = _joined(classes)
    stay = _stay(rows, chance, _is_needed(chance, LIVE_BATCHES), ring)
    return _sums(classes, rows * chance / (1 + stay))


def expected_reads(
    classes: Sequence[Classes], ring: int, buffer_rows: int, group_batches: int
) -> list[float]:
    """Return the rows that each shard of an arena reads from disk per step, with so many `buffer_rows`, and `ring` slots."""
    rows, chance = _joined(classes)
    on_device = _stay(rows, chance, _is_needed(chance, LIVE_BATCHES), ring)
    stays = 1 - (1 - _is_needed(chance, 2 * group_batches)) / (1 + on_device)
    # A row leaves that two groups do not need, and comes back one and a half before it is looked up, on average.
    absent = 1 + chance * group_batches / 2
    stay = _stay(rows, chance, stays, buffer_rows, absent)
    return _sums(classes, rows * chance / (absent + stay))


def expected_looked_up(classes: Sequence[Classes], steps: int) -> list[float]:
    """Return the rows of each shard, beyond the fixed ones, that some steps look up; see `row_classes`."""
    rows, chance = _joined(classes)
    return _sums(classes, rows * _is_needed(chance, steps))


def _is_needed(chance: np.ndarray, batches: int) -> np.ndarray:
    """Return the chance that some batches look a row up."""
    return 1 - (1 - chance) ** batches


def _stay(
    rows: np.ndarray,
    chance: np.ndarray,
    stays: np.ndarray,
    room: int,
    absent: np.ndarray | float = 1.0,
) -> np.ndarray:
    """Return the steps for which rows stay in a ring, times their chance; infinite if all have room.

    A row stays once more with the chance `stays` when the ring of `room` rows has come round; between leaving and coming back
    it is `absent` steps, times the chance.
    """
    if not chance.any() or rows.sum() <= room:
        return np.full(len(rows), np.inf)
    of_round = chance / np.maximum(1 - stays, 1e-12)
    low, high = 0.0, MOST_STEPS
    for _ in range(100):
        steps = (low * high) ** 0.5 if low else high / 1e6
        stay = of_round * steps
        if (rows * stay / (absent + stay)).sum() < room:
            low = steps
        else:
            high = steps
    return of_round * high


def _joined(classes: Sequence[Classes]) -> Classes:
    return np.concatenate([rows for rows, _ in classes]), np.concatenate([c for _, c in classes])


def _sums(classes: Sequence[Classes], values: np.ndarray) -> list[float]:
    ends = np.cumsum([len(rows) for rows, _ in classes])[:-1]
    return [float(of_shard.sum()) for of_shard in np.split(values, ends)]


def expected_distinct(ids: float, share: IdShare, first: int, end: int) -> float:
    """Return how many rows of a range are among drawn ids: row i of probability p_i is missed with (1 - p_i) ** ids."""
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
