"""Slots of keys in a table of fixed capacity: counted, stamped, and evicted when the table is full.

Everything here is a function of the keys of the batches alone. Batches are numbered from 1. A slot has a key, the number of its
sightings, if they matter, and the batch that saw it last.

Eviction: when a new key finds no free slot, the sixteenth of the keys that the policy values least is marked, without those of
the batch. Marked keys leave one by one as slots are needed; one that was seen after it was marked stays. By `age` these are
exactly the keys that were seen longest ago. Equal keys leave in the order of their slots.
"""

from dataclasses import dataclass

import numpy as np

from configs.schema import Evict
from dataloading.dataset.source import Keys
from dataloading.keys.compiled import kernel
from dataloading.keys.hash_index import (
    DRAWN,
    cell_of,
    cells_for,
    fill,
    find,
    insert,
    last_batches,
    look_up,
    place_of,
    remove,
)

MARKED_SHARE = 16

COUNT, LAST = 0, 1
"""Columns of a slot's facts."""

# K: keys of a batch, C: slots


@dataclass(slots=True)
class TableChange:
    """Changes that a batch makes to a table; enough to take them back.

    Attributes:
        seen: slots whose key the batch has seen, and their facts before, int32 [n, 3].
        slots: slots that got another key, int64 [m].
        keys: their new keys, int64 [m].
        old_keys: their old keys, 0 of free slots, int64 [m].
        old_facts: of these slots, int32 [m, 2].
        used: slots in use before.
        leaving: the marked keys before.
    """

    seen: np.ndarray
    slots: np.ndarray
    keys: np.ndarray
    old_keys: np.ndarray
    old_facts: np.ndarray
    used: int
    leaving: "Leaving"


@dataclass(frozen=True, slots=True)
class Leaving:
    """Slots that are evicted next.

    Attributes:
        slots: in their order, int64.
        next: index of the next one.
        batch: in which they were marked.
    """

    slots: np.ndarray
    next: int
    batch: int


NONE_LEAVING = Leaving(np.zeros(0, np.int64), 0, 0)
NO_SLOTS = np.zeros(0, np.int64)
NO_FACTS = np.zeros((0, 2), np.int32)
NONE_SEEN = np.zeros((0, 3), np.int32)


@dataclass(slots=True)
class TableState:
    """Content of a table after a batch.

    Attributes:
        keys: of each slot, int64 [C]; 0 of free slots and of slot 0.
        facts: sightings, 0 if they do not matter, and batch that saw the key last, int32 [C, 2].
        used: slots in use, with slot 0; they are the first ones.
        leaving: slots that are evicted next.
    """

    keys: np.ndarray
    facts: np.ndarray
    used: int
    leaving: Leaving

    def take_back(self, change: TableChange) -> None:
        """Take the latest change back."""
        seen = change.seen
        self.facts[seen[:, 0]] = seen[:, 1:]
        self.keys[change.slots] = change.old_keys
        self.facts[change.slots] = change.old_facts
        self.used, self.leaving = change.used, change.leaving


class KeyTable:
    """Slots 1 to C - 1 for keys; slot 0 is that of all others.

    Args:
        capacity: C, at least 2.
        evict: policy.
        counts_sightings: count the sightings of every key, which takes another place in memory per key.

    Attributes:
        counts: sightings by slot, int32 [C]; of length 0 if they are not counted.
    """

    def __init__(self, capacity: int, evict: Evict, *, counts_sightings: bool) -> None:
        self._evict = evict
        self._marked = max(1, capacity // MARKED_SHARE)
        self.counts = np.zeros(capacity if counts_sightings else 0, np.int32)
        self._keys = np.zeros(capacity, np.int64)
        self._used, self._leaving = 1, NONE_LEAVING
        self._cells, self._marks = cells_for(capacity)

    def state(self) -> TableState:
        """Return a copy of the content."""
        facts = np.zeros((len(self._keys), 2), np.int32)
        if len(self.counts):
            facts[:, COUNT] = self.counts
        facts[:, LAST] = self._last_batches()
        return TableState(self._keys.copy(), facts, self._used, self._leaving)

    def load(self, state: TableState) -> None:
        """Replace the content."""
        self._keys[:] = state.keys
        if len(self.counts):
            self.counts[:] = state.facts[:, COUNT]
        self._used, self._leaving = state.used, state.leaving
        self._cells[:] = 0
        fill(self._cells, self._marks, self._keys, state.facts[:, LAST].copy(), DRAWN)

    def look_up(self, keys: np.ndarray) -> np.ndarray:
        """Return the slots of int64 keys [K], int32 [K]; 0 of keys without one."""
        slots = np.empty(len(keys), np.int32)
        look_up(self._cells, self._marks, keys, slots, DRAWN)
        return slots

    def see(
        self, keys: Keys, batch: int, slots: np.ndarray, first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Note that a batch has keys, and write slots of some of them; all in one call that holds no lock of Python's.

        Threads may see parts of a batch at the same time unless sightings are counted. A slot may then stand in `seen` of
        several parts, each time with the same facts.

        Args:
            keys: of the batch; key 0 is none.
            batch: number of the batch.
            slots: receives those of its keys, integers; 0 of keys without a slot.
            first: position of the first key of `slots` among all keys.

        Returns:
            `seen` of `TableChange`, and the keys without slots with their positions in `slots`, which may lie outside, int64
            [n, 2].
        """
        count = keys.count
        seen, missing = np.empty((count, 3), np.int32), np.empty((count, 2), np.int64)
        num_seen, num_missing = _see(
            (keys.column, keys.runs, batch),
            (slots, first),
            (self._cells, self._marks, self.counts),
            (seen, missing),
            DRAWN,
        )
        return seen[:num_seen].copy(), missing[:num_missing]

    def unchanged(self, seen: np.ndarray = NONE_SEEN) -> TableChange:
        """Return the change of a batch whose keys all have slots."""
        return TableChange(seen, NO_SLOTS, NO_SLOTS, NO_SLOTS, NO_FACTS, self._used, self._leaving)

    def insert(self, keys: np.ndarray, counts: np.ndarray, batch: int) -> tuple[TableChange, int]:
        """Give slots to keys [n] that have none; a key that occurs again adds its count.

        Returns:
            The change, without the slots seen; and the keys that were handled, fewer than n if all slots hold keys that may
            not leave.
        """
        before = self._used, self._leaving
        size = len(keys)
        slots, new_keys, old_keys = (np.empty(size, np.int64) for _ in range(3))
        old_facts = np.empty((size, 2), np.int32)
        done = num_new = 0
        while True:
            leaving = self._leaving
            done, num_new, self._used, following = _insert(
                (keys, counts, done, batch),
                (self._cells, self._marks, self._keys, self.counts, self._used),
                (leaving.slots, leaving.next, leaving.batch),
                (slots, new_keys, old_keys, old_facts, num_new),
                DRAWN,
            )
            self._leaving = Leaving(leaving.slots, following, leaving.batch)
            if done == size or not self._mark(batch):
                break
        change = TableChange(
            NONE_SEEN,
            slots[:num_new].copy(),
            new_keys[:num_new].copy(),
            old_keys[:num_new].copy(),
            old_facts[:num_new].copy(),
            *before,
        )
        return change, done

    def _mark(self, batch: int) -> bool:
        """Mark keys that leave next; return whether there are any."""
        if self._evict is Evict.never:
            return False
        last = self._last_batches()[1:]
        worth = last
        if self._evict is Evict.count:
            worth = self.counts[1:].astype(np.int64) << 32 | last
        eligible = np.flatnonzero(last < batch)
        if not len(eligible):
            return False
        worth = worth[eligible]
        if len(eligible) > self._marked:
            border = np.partition(worth, self._marked - 1)[self._marked - 1]
            below = np.flatnonzero(worth < border)
            equal = np.flatnonzero(worth == border)[: self._marked - len(below)]
            # In the order of slots, which a stable sort by worth keeps among equal ones.
            chosen = np.sort(np.concatenate([below, equal]))
        else:
            chosen = np.arange(len(eligible))
        order = np.argsort(worth[chosen], kind="stable")
        self._leaving = Leaving(eligible[chosen[order]] + 1, 0, batch)
        return True

    def _last_batches(self) -> np.ndarray:
        """Return the batches that saw the keys last, by slot, int32 [C]."""
        last = np.zeros(len(self._keys), np.int32)
        last_batches(self._marks, last)
        return last


@kernel
def _see(keys, own, table, found, drawn):
    """Handle keys in blocks: first their places, which are in memory at independent addresses, then their cells."""
    column, runs, batch = keys
    slots, first = own
    cells, entries, counts = table
    seen, missing = found
    num_seen = num_missing = 0
    mask = len(cells) - 1
    is_counted = len(counts) > 0
    block = np.empty(256, np.int64)
    places = np.empty(256, np.int64)
    run = at = 0
    if len(runs):
        at = runs[0, 0]
    position = -first
    while run < len(runs):
        size = 0
        while size < 256 and run < len(runs):
            num = min(256 - size, runs[run, 1] - at)
            for i in range(num):
                block[size + i] = column[at + i]
            size += num
            at += num
            if at == runs[run, 1]:
                run += 1
                if run < len(runs):
                    at = runs[run, 0]
        for i in range(size):
            places[i] = place_of(block[i], mask, drawn)
        for i in range(size):
            # Nearly always the first cell is the key's, or empty.
            place, key = places[i], block[i]
            if entries[place, 2] != 0 and cells[place, 0] != key:
                place = cell_of(cells, entries, key, place)
                places[i] = place
            if 0 <= position + i < len(slots):
                slots[position + i] = entries[place, 2]
        for i in range(size):
            place = places[i]
            slot = entries[place, 2]
            if slot == 0:
                missing[num_missing, 0] = block[i]
                missing[num_missing, 1] = position + i
                num_missing += block[i] != 0
                continue
            last = entries[place, 3]
            if last != batch:
                seen[num_seen, 0] = slot
                seen[num_seen, 1] = counts[slot] if is_counted else 0
                seen[num_seen, 2] = last
                num_seen += 1
                entries[place, 3] = batch
            if is_counted:
                counts[slot] += counts[slot] < 2147483647
        position += size
    return num_seen, num_missing


@kernel
def _insert(new, table, leaving, change, drawn):
    """Insert keys from `begin` on; stop where the marked slots are used up."""
    keys, times, begin, batch = new
    cells, entries, keys_of, counts, used = table
    marked, following, marked_in = leaving
    slots, new_keys, old_keys, old_facts, num_new = change
    is_counted = len(counts) > 0
    for i in range(begin, len(keys)):
        slot = entries[find(cells, entries, keys[i], drawn), 2]
        if slot != 0:
            if is_counted:
                counts[slot] = min(np.int64(counts[slot]) + times[i], 2147483647)
            continue
        last = 0
        if used < len(keys_of):
            slot = used
            used += 1
        else:
            old = np.int64(0)
            while following < len(marked):
                slot = marked[following]
                following += 1
                key = keys_of[slot]
                at = find(cells, entries, key, drawn)
                if entries[at, 3] < marked_in:
                    old = key
                    break
            if old == 0:
                return i, num_new, used, following
            last = entries[at, 3]
            remove(cells, entries, at, drawn)
        slots[num_new] = slot
        new_keys[num_new] = keys[i]
        old_keys[num_new] = keys_of[slot]
        old_facts[num_new, 0] = counts[slot] if is_counted else 0
        old_facts[num_new, 1] = last
        num_new += 1
        keys_of[slot] = keys[i]
        if is_counted:
            counts[slot] = times[i]
        insert(cells, entries, keys[i], slot, batch, drawn)
    return len(keys), num_new, used, following
