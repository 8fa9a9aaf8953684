"""Rows of a table for raw 64-bit keys: admitted after some sightings, evicted when the table is full."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass

import numpy as np

from configs.messages import shown
from configs.schema import DynamicConfig, Evict
from dataloading.dataset.source import Keys
from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.key_table import (
    COUNT,
    MARKED_SHARE,
    KeyTable,
    Leaving,
    TableChange,
    TableState,
)
from dataloading.keys.new_rows import KEYS, TableFullError

PROGRESS = "progress"
CANDIDATE = "candidate_"
"""Prefix of the state of keys that are not admitted yet."""

SHARED_ROWS = 100_000
"""Tables from this size on share the keys of a batch with a helper."""
LEAST_HALF = 8192
"""Fewer keys are not worth a helper."""

State = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class MapChange:
    """Changes that one batch makes to a map.

    Attributes:
        rows: of keys with rows.
        candidates: of keys that are counted until they are admitted.
    """

    rows: TableChange
    candidates: TableChange


class FullMapError(TableFullError):
    """The error of a map, with what the batch has changed before it.

    Args:
        text: what is wrong, and what to do.
        change: of the map.
    """

    def __init__(self, text: str, change: MapChange) -> None:
        super().__init__(text)
        self.change = change


class KeyMap:
    """Rows of one table for keys; row 0 is that of missing keys, which are 0, and of keys without a row.

    All keys of a batch are counted first; then those with `admit_after` sightings get rows, in the order in which the batch has
    them. A key has the same row in the complete batch. Of keys that are not admitted, as many are counted as the table has rows,
    and those that were seen longest ago are forgotten. A key that leaves is counted from 0 again.

    Args:
        name: of the table.
        capacity: rows of the table.
        policy: admission and eviction.
        helpers: threads that share the keys of large tables, since their index is in no core's own cache.
    """

    def __init__(
        self, name: str, capacity: int, policy: DynamicConfig, helpers: Executor | None = None
    ) -> None:
        self.name = name
        self._policy = policy
        self._capacity = capacity
        self._rows = KeyTable(capacity, policy.evict, counts_sightings=policy.evict is Evict.count)
        # With admission at the first sighting no key waits.
        size = capacity if policy.admit_after > 1 else 1
        shares = capacity >= SHARED_ROWS and policy.evict is not Evict.count
        self._helpers = helpers if shares else None
        self._candidates = KeyTable(size, Evict.age, counts_sightings=True)

    def map(self, columns: Sequence[BatchKeys], batch: int) -> MapChange:
        """Write the rows of the keys of a batch, and return what changed.

        Args:
            columns: the keys of each feature of the table.
            batch: its number, from 1; larger than that of the batch before.

        Raises:
            FullMapError: more keys need rows than there are.
        """
        found = [self._see(column, batch) for column in columns]
        seen = found[0][0] if len(found) == 1 else np.concatenate([seen for seen, _ in found])
        if not any(len(missing) for _, missing in found):
            none = self._candidates.unchanged()
            return MapChange(self._rows.unchanged(seen), none)
        keys = np.concatenate([missing[:, 0] for _, missing in found])
        admitted, counts, candidates = self._admitted(keys, batch)
        rows, done = self._rows.insert(admitted, counts, batch)
        rows.seen = seen
        if done < len(admitted):
            full = self._exhausted(admitted, done, batch)
            raise FullMapError(full, MapChange(rows, candidates))
        for column, (_, missing) in zip(columns, found, strict=True):
            own = (missing[:, 1] >= 0) & (missing[:, 1] < len(column.rows))
            column.rows[missing[own, 1]] = self._rows.look_up(missing[own, 0])
        return MapChange(rows, candidates)

    def _see(self, column: BatchKeys, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Note that the batch has keys, as `KeyTable.see`; a helper takes half of them."""
        keys, rows, first = column.keys, column.rows, column.first
        if self._helpers is None or (half := keys.count // 2) < LEAST_HALF:
            return self._rows.see(keys, batch, rows, first)
        before, after = keys.halves()
        second = self._helpers.submit(self._rows.see, after, batch, rows, first - half)
        try:
            seen, missing = self._rows.see(before, batch, rows, first)
        finally:
            # The helper writes to the batch, also if this half has failed.
            wait([second])
        more_seen, more_missing = second.result()
        return np.concatenate([seen, more_seen]), np.concatenate([missing, more_missing])

    def look_up(self, keys: np.ndarray, pending: Iterable[MapChange] = ()) -> np.ndarray:
        """Return the rows of int64 keys [K], int32 [K], without counting them.

        Args:
            keys: to look up.
            pending: the latest changes, the oldest first; the rows are those before them.
        """
        ids = self._rows.look_up(keys)
        changed = [
            part
            for change in pending
            for part in (
                (change.rows.old_keys, change.rows.slots),
                (change.rows.keys, np.zeros_like(change.rows.slots)),
            )
        ]
        if not changed:
            return ids
        all_keys = np.concatenate([keys for keys, _ in changed])
        all_rows = np.concatenate([rows for _, rows in changed])
        # A key that changes several times has the row before the oldest change.
        distinct, first = np.unique(all_keys, return_index=True)
        if not len(distinct):
            return ids
        at = np.minimum(np.searchsorted(distinct, keys), len(distinct) - 1)
        is_changed = (distinct[at] == keys) & (keys != 0)
        ids[is_changed] = all_rows[first[at[is_changed]]]
        return ids

    def state(self, batch: int, pending: Sequence[MapChange] = ()) -> State:
        """Return a copy of the state after `batch`, in arrays of constant shapes.

        Args:
            batch: number of that batch.
            pending: changes of later batches, the oldest first.
        """
        changes = [(change.rows, change.candidates) for change in reversed(pending)]
        state: State = {PROGRESS: np.zeros(5, np.int64)}
        state[PROGRESS][0] = batch
        for number, (prefix, table) in enumerate(self._tables()):
            copied = table.state()
            for change in changes:
                copied.take_back(change[number])
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
        """Load a state; return the number of its batch."""
        progress = state[PROGRESS]
        for number, (prefix, table) in enumerate(self._tables()):
            padded, facts = state[f"{prefix}leaving"], state[f"{prefix}facts"]
            used, marked_in = progress[1 + 2 * number : 3 + 2 * number].tolist()
            if len(table.counts) and not facts[:, COUNT].any():
                # Of a run that did not count them.
                facts = facts.copy()
                facts[1:used, COUNT] = self._policy.admit_after
            table.load(
                TableState(
                    state[f"{prefix}{KEYS}"],
                    facts,
                    used,
                    Leaving(padded[padded > 0].copy(), 0, marked_in),
                )
            )
        return int(progress[0])

    def load_keys(self, keys: np.ndarray) -> None:
        """Load the keys of all rows alone, int64 [rows], for scores."""
        state = self.state(0)
        state[PROGRESS][1] = 1 + np.flatnonzero(keys).max(initial=0)
        self.load(state | {KEYS: keys})

    def _tables(self) -> list[tuple[str, KeyTable]]:
        return [("", self._rows), (CANDIDATE, self._candidates)]

    def _admitted(self, keys: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray, TableChange]:
        """Count keys [n] that have no rows; return those to admit, their sightings, and the changed candidates."""
        candidates = self._candidates
        if self._policy.admit_after == 1:
            none = candidates.unchanged()
            return keys, np.ones(len(keys), np.int64), none
        seen, new = candidates.see(Keys.of(keys), batch, np.zeros(0, np.int32), 0)
        # If the batch alone has more keys than are counted, the last ones are not.
        change, _ = candidates.insert(new[:, 0].copy(), np.ones(len(new), np.int64), batch)
        change.seen = seen
        slots = candidates.look_up(keys)
        is_due = (slots > 0) & (candidates.counts[slots] >= self._policy.admit_after)
        due, first = np.unique(keys[is_due], return_index=True)
        due = due[np.argsort(first)]
        slots = candidates.look_up(due)
        counts = candidates.counts[slots].astype(np.int64)
        candidates.counts[slots] = 0
        return due, counts, change

    def _exhausted(self, admitted: np.ndarray, done: int, batch: int) -> str:
        table = f"table {shown(self.name)} of {self._capacity:,} rows"
        if self._policy.evict is Evict.never:
            return (
                f"{table} is full: data.dynamic.evict=never keeps all keys, and batch {batch:,} has "
                f"{len(np.unique(admitted[done:])):,} more; raise the feature's cardinality in feature_spec.yaml in a new run, "
                "or set data.dynamic.evict=age or count"
            )
        return (
            f"{table} is too small: data.dynamic.evict={self._policy.evict.value} has evicted all keys that batch {batch:,} does "
            f"not have, and {len(np.unique(admitted[done:])):,} of its keys have no row; raise the feature's cardinality in "
            "feature_spec.yaml in a new run, raise data.dynamic.admit_after, or lower train.batch_size"
        )
