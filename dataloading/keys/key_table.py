"""Table of 64-bit keys with a fixed capacity: counted, stamped, and evicted when the table is full.

Everything here is a function of the keys of the batches alone. Batches are numbered from 1. A slot has a key, the number of its
sightings, if they matter, and the batch that saw it last.

Eviction: when a new key finds no free slot, the sixteenth of the keys that the policy values least is marked, without those of
the batch. Marked keys leave one by one as slots are needed; one that was seen after it was marked stays. By `age` these are
exactly the keys that were seen longest ago. Equal keys leave in the order of their slots. Slots whose key was removed have no
key, and are used again first, once no slot is new.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs.schema import Evict
from dataloading.keys.kernels.hash_index import DRAWN, cells_for, fill, last_batches, look_up
from dataloading.keys.kernels.layouts import Field, address_of

MARKED_SHARE = 16

COUNT, LAST = 0, 1
"""Columns of a slot's facts."""

# C: slots


@dataclass(frozen=True, slots=True)
class Leaving:
    """Slots that are evicted next."""

    slots: np.ndarray  # in their order, int64
    next: int  # index of the next one
    batch: int  # in which they were marked


@dataclass(frozen=True, slots=True)
class TableChange:
    """Keys that a batch brings to a table; enough to take them back."""

    slots: np.ndarray  # slots that got another key, int64 [m]
    keys: np.ndarray  # their new keys, int64 [m]
    old_keys: np.ndarray  # their old keys, 0 of free slots, int64 [m]
    old_facts: np.ndarray  # of these slots, int32 [m, 2]
    used: int  # slots in use before
    leaving: Leaving  # the marked keys before


@dataclass(slots=True)
class TableState:
    keys: np.ndarray  # of each slot, int64 [C]; 0 of free slots and of slot 0
    # sightings, 0 if they do not matter, and batch that saw the key last, int32 [C, 2]
    facts: np.ndarray
    used: int  # slots in use, with slot 0; they are the first ones
    leaving: Leaving  # slots that are evicted next

    def problem(self) -> str | None:
        """Return what is wrong with numbers that kernels would take for places in memory, or None."""
        used, capacity = self.used, len(self.keys)
        if not 1 <= used <= capacity:
            return f"{used:,} of {capacity:,} slots are in use"
        if self.keys[0] != 0 or self.keys[used:].any():
            return "slots that are not in use have keys"
        if (self.facts < 0).any():
            return "a number of sightings or of a batch is negative"
        slots = self.leaving.slots
        if slots.min(initial=1) < 1 or slots.max(initial=0) >= used:
            return "slots that are not in use are evicted next"
        return None

    def take_back(self, seen: Sequence[np.ndarray], change: TableChange | None) -> None:
        """Take the latest batch back; `seen` has slots and their facts before, parts of int32 [n, 3]."""
        for part in seen:
            self.facts[part[:, 0]] = part[:, 1:]
        if change is not None:
            self.keys[change.slots] = change.old_keys
            self.facts[change.slots] = change.old_facts
            self.used, self.leaving = change.used, change.leaving


class KeyTable:
    """Slots 1 to C - 1 for keys; slot 0 is that of all others. Kernels read and write it by its `fields`."""

    def __init__(self, capacity: int, evict: Evict, *, counts_sightings: bool) -> None:
        self._counts = np.zeros(capacity if counts_sightings else 0, np.int32)
        self._keys = np.zeros(capacity, np.int64)
        self._cells, self._entries = cells_for(capacity)
        self._leaving = np.zeros(0, np.int64)
        self._spare: np.ndarray | None = None
        # addresses and numbers that kernels know the table by, int64 [Field]; `describe` may move them
        self.fields = np.zeros(len(Field), np.int64)
        self.fields[Field.CELLS] = address_of(self._cells)
        self.fields[Field.NUM_CELLS] = len(self._cells)
        self.fields[Field.KEYS] = address_of(self._keys)
        self.fields[Field.CAPACITY] = capacity
        self.fields[Field.COUNTS] = address_of(self._counts)
        self.fields[Field.NUM_COUNTS] = len(self._counts)
        self.fields[Field.USED] = 1
        self.fields[Field.MARKED] = address_of(self._leaving)
        self.fields[Field.MOST_MARKED] = max(1, capacity // MARKED_SHARE)
        self.fields[Field.KEEPS] = evict is Evict.never
        self.fields[Field.FEWEST_FIRST] = evict is Evict.count

    def place(self, cells: np.ndarray) -> np.ndarray:
        """Have the empty index in the first of other cells, int64 [n, 2]; return the rest."""
        self._cells, rest = np.split(cells, [self.fields[Field.NUM_CELLS]])
        self._entries = self._cells.view(np.int32)
        self.fields[Field.CELLS] = address_of(self._cells)
        return rest

    def describe(self, fields: np.ndarray) -> None:
        """Move the fields to other memory, int64 [Field]."""
        fields[:] = self.fields
        self.fields = fields

    @property
    def used(self) -> int:
        """Slots in use, with slot 0."""
        return int(self.fields[Field.USED])

    @property
    def num_keys(self) -> int:
        return int(np.count_nonzero(self._keys))

    @property
    def leaving(self) -> Leaving:
        memory = self._spare if self._spare is not None and self._has_marked else self._leaving
        count, at, batch = self.fields[[Field.NUM_MARKED, Field.NEXT, Field.MARKED_IN]].tolist()
        return Leaving(memory[:count], at, batch)

    @property
    def counts_sightings(self) -> bool:
        return len(self._counts) > 0

    def state(self) -> TableState:
        facts = np.zeros((len(self._keys), 2), np.int32)
        if self.counts_sightings:
            facts[:, COUNT] = self._counts
        last = np.zeros(len(self._keys), np.int32)
        last_batches(self._entries, last)
        facts[1:, LAST] = last[1:]
        return TableState(self._keys.copy(), facts, self.used, self.leaving)

    def load(self, state: TableState) -> None:
        self._keys[:] = state.keys
        if self.counts_sightings:
            self._counts[:] = state.facts[:, COUNT]
        self.fields[Field.USED] = state.used
        self._leaving, self._spare = state.leaving.slots, None
        self.fields[Field.MARKED] = address_of(self._leaving)
        self.fields[Field.NUM_MARKED] = len(self._leaving)
        self.fields[Field.NEXT] = state.leaving.next
        self.fields[Field.MARKED_IN] = state.leaving.batch
        self.fields[Field.SPARE] = 0
        self._cells[:] = 0
        fill(self._cells, self._entries, self._keys, state.facts[:, LAST].copy(), DRAWN)

    def remove_unseen(self, first: int, own: TableChange | None) -> TableChange:
        """Remove the keys that no batch from `first` on has had; return what they and `own`, of the last batch, change."""
        state = self.state()
        slots = np.flatnonzero((state.keys != 0) & (state.facts[:, LAST] < first))
        removed = slots, np.zeros_like(slots), state.keys[slots], state.facts[slots]
        change = TableChange(*removed, state.used, state.leaving)
        if len(slots):
            state.keys[slots] = state.facts[slots] = 0
            self.load(state)
        if own is None:
            return change
        before = own.slots, own.keys, own.old_keys, own.old_facts
        slots, keys, old, facts = map(np.concatenate, zip(before, removed, strict=True))
        return TableChange(slots, keys, old, facts, own.used, own.leaving)

    def look_up(self, keys: np.ndarray) -> np.ndarray:
        """Return the slots of int64 keys [K], int32 [K]; 0 of keys without one."""
        slots = np.empty(len(keys), np.int32)
        look_up(self._cells, self._entries, keys, slots, DRAWN)
        return slots

    def prepare(self, num_keys: int) -> None:
        """Have memory for marks if so many new keys may need it; changes that are pending have that of the marks before."""
        if self.used + num_keys <= len(self._keys):
            return
        if self._spare is None or self._has_marked:
            self._leaving = self.leaving.slots
            self._spare = np.empty(int(self.fields[Field.MOST_MARKED]), np.int64)
            self.fields[Field.SPARE] = address_of(self._spare)

    @property
    def _has_marked(self) -> bool:
        return bool(self.fields[Field.MARKED] == self.fields[Field.SPARE])
