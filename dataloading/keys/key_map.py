"""Rows of a table for raw 64-bit keys: admitted after some sightings, evicted when the table is full."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from configs.messages import shown
from configs.schema import DynamicConfig, Evict
from dataloading.keys.key_table import (
    COUNT,
    MARKED_SHARE,
    KeyTable,
    Leaving,
    TableChange,
    TableState,
)
from dataloading.keys.rekeyed import KEYS

PROGRESS = "progress"
CANDIDATE = "candidate_"
"""Prefix of the state of keys that are not admitted yet."""

State = dict[str, np.ndarray]
Seen = Sequence[np.ndarray]
"""Slots whose key a batch has seen, and their facts before, parts of int32 [n, 3]."""


@dataclass(frozen=True, slots=True)
class MapChange:
    seen: Seen  # keys with rows
    rows: TableChange | None = None  # keys that got rows; None if none did
    candidates_seen: Seen = ()  # keys that are counted until they are admitted
    candidates: TableChange | None = None  # keys that are new among these


class KeyMap:
    """Rows of one table for keys; row 0 is that of missing keys, which are 0, and of keys without a row.

    All keys of a batch are counted first; then those with `admit_after` sightings get rows, in the order in which the batch has
    them. A key has the same row in the complete batch. Of keys that are not admitted, as many are counted as the table has rows,
    and those that were seen longest ago are forgotten. A key that leaves is counted from 0 again.
    """

    def __init__(self, name: str, capacity: int, policy: DynamicConfig) -> None:
        self.name = name
        self._policy = policy
        self.capacity = capacity  # rows of the table
        self.rows = KeyTable(capacity, policy.evict, counts_sightings=policy.evict is Evict.count)
        # With admission at the first sighting no key waits.
        size = capacity if policy.admit_after > 1 else 1
        self.candidates = KeyTable(size, Evict.age, counts_sightings=True)

    def before(self, keys: np.ndarray, rows: np.ndarray, pending: Iterable[MapChange]) -> None:
        """Replace the present rows of int64 keys [K] by those before the latest changes, in place."""
        changed = [
            part
            for change in pending
            if change.rows is not None
            for part in (
                (change.rows.old_keys, change.rows.slots),
                (change.rows.keys, np.zeros_like(change.rows.slots)),
            )
        ]
        if not any(len(keys) for keys, _ in changed):
            return
        all_keys = np.concatenate([keys for keys, _ in changed])
        all_rows = np.concatenate([rows for _, rows in changed])
        # A key that changes several times has the row before the oldest change.
        distinct, first = np.unique(all_keys, return_index=True)
        at = np.minimum(np.searchsorted(distinct, keys), len(distinct) - 1)
        is_changed = (distinct[at] == keys) & (keys != 0)
        rows[is_changed] = all_rows[first[at[is_changed]]]

    def state(self, batch: int, pending: Sequence[MapChange] = ()) -> State:
        """Return a copy of the state after `batch`, in arrays of constant shapes."""
        changes = [
            ((change.seen, change.rows), (change.candidates_seen, change.candidates))
            for change in reversed(pending)
        ]
        state: State = {PROGRESS: np.zeros(5, np.int64)}
        state[PROGRESS][0] = batch
        for number, (prefix, table) in enumerate(self._tables()):
            copied = table.state()
            for change in changes:
                copied.take_back(*change[number])
            leaving = copied.leaving
            left = leaving.slots[leaving.next :]
            padded = np.zeros(len(copied.keys) // MARKED_SHARE + 1, np.int64)
            padded[: len(left)] = left
            state[f"{prefix}{KEYS}"] = copied.keys
            state[f"{prefix}facts"] = copied.facts
            state[f"{prefix}leaving"] = padded
            state[PROGRESS][1 + 2 * number : 3 + 2 * number] = copied.used, leaving.batch
        return state

    def load(self, state: Mapping[str, np.ndarray]) -> int:
        """Load a state; return the number of its batch. Raises ValueError: it has numbers that no map has."""
        progress = state[PROGRESS]
        for number, (prefix, table) in enumerate(self._tables()):
            padded, facts = state[f"{prefix}leaving"], state[f"{prefix}facts"]
            used, marked_in = progress[1 + 2 * number : 3 + 2 * number].tolist()
            if table is self.rows and table.counts_sightings and not facts[:, COUNT].any():
                # Of a run that did not count them. Those of candidates are all 0 where each one was admitted.
                facts = facts.copy()
                facts[1:used, COUNT] = self._policy.admit_after
            leaving = Leaving(padded[padded != 0].copy(), 0, marked_in)
            loaded = TableState(state[f"{prefix}{KEYS}"], facts, used, leaving)
            problem = loaded.problem()
            if problem is not None:
                raise ValueError(
                    f"the stored keys of table {shown(self.name)} are invalid: {problem}; resume from another checkpoint"
                )
            table.load(loaded)
        return int(progress[0])

    def load_keys(self, keys: np.ndarray) -> None:
        """Load the keys of all rows alone, int64 [rows], for scores."""
        state = self.state(0)
        state[PROGRESS][1] = 1 + np.flatnonzero(keys).max(initial=0)
        self.load(state | {KEYS: keys})

    def _tables(self) -> list[tuple[str, KeyTable]]:
        return [("", self.rows), (CANDIDATE, self.candidates)]

    def is_full(self, left_out: np.ndarray, batch: int) -> str:
        """Return what is wrong, and what to do, if keys [n] of a batch find no row."""
        table = f"table {shown(self.name)} of {self.capacity:,} rows"
        count = len(np.unique(left_out))
        if self._policy.evict is Evict.never:
            return (
                f"{table} is full: data.dynamic.evict=never keeps all keys, and batch {batch:,} has {count:,} more; raise the "
                "feature's cardinality in feature_spec.yaml in a new run, or set data.dynamic.evict=age or count"
            )
        return (
            f"{table} is too small: data.dynamic.evict={self._policy.evict.value} has evicted all keys that batch {batch:,} does "
            f"not have, and {count:,} of its keys have no row; raise the feature's cardinality in feature_spec.yaml in a new "
            "run, raise data.dynamic.admit_after, or lower train.batch_size"
        )
