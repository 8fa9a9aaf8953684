"""Hash tables from 32-bit codes to counts or ids, compiled by Numba.

A slot is one 64-bit number: the code in the high half, its count or id in the low half. A look-up thus touches one cache line.
Zero is an empty slot, since neither a count nor an id is zero. Probing is linear. Its start depends on a random number of the
process, so no file can be built whose codes all collide. The results do not depend on that number.
"""

import secrets
from collections.abc import Iterator

import numpy as np

from dataloading.keys.kernels.compiled import kernel
from preproc.criteo.tokenizer import MISSING, NON_HEX

# Bytes per entry: a slot, and an empty one that keeps probes short; a growing table also holds the old one.
ENTRY_BYTES = 16
GROWING_ENTRY_BYTES = 24
# Slots per chunk of entries that a full table yields.
PART_SLOTS = 1 << 20
# A table of this size fits in the cache. Smaller ones would have longer probes.
FIRST_SLOTS = 1 << 16
# A count has half of a slot.
MOST_COUNTED = (1 << 32) - 1

DRAWN = np.uint64(secrets.randbits(32))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


@kernel
def _home_cell(code, num_slots, drawn):
    """Return the number of the first slot to probe: MurmurHash3's finaliser, scaled to the number of slots."""
    mixed = np.uint64(code) ^ drawn
    mixed = ((mixed ^ (mixed >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & LOW
    mixed = ((mixed ^ (mixed >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & LOW
    mixed ^= mixed >> np.uint64(16)
    # Unsigned: Numba checks whether other indices are negative.
    return (mixed * np.uint64(num_slots)) >> HALF


@kernel
def _find(code, slots, drawn):
    """Return the cell of a code, or the empty cell where it would be."""
    key = np.uint64(code) << HALF
    cell = _home_cell(code, len(slots), drawn)
    while slots[cell] != 0 and slots[cell] & ~LOW != key:
        cell += np.uint64(1)
        if cell == np.uint64(len(slots)):
            cell = np.uint64(0)
    return cell


@kernel
def _count(codes, begin, slots, used, drawn):
    """Count codes[begin:] until half of the slots are used; return where, and slots in use."""
    most = len(slots) // 2
    for at in range(begin, len(codes)):
        cell = _find(codes[at], slots, drawn)
        if slots[cell] == 0:
            if used == most:
                return at, used
            slots[cell] = np.uint64(codes[at]) << HALF
            used += 1
        slots[cell] += np.uint64(1)
    return len(codes), used


@kernel
def _insert(entries, slots, drawn):
    """Insert entries of distinct codes, zeros skipped; at most half of the slots are in use afterwards."""
    for entry in entries:
        if entry != 0:
            slots[_find(entry >> HALF, slots, drawn)] = entry


@kernel
def _look_up(codes, slots, drawn, ids):
    """Write the ids of the codes in `slots` to `ids`; leave the others unchanged."""
    for at in range(len(codes)):
        slot = slots[_find(codes[at], slots, drawn)]
        if slot != 0:
            ids[at] = slot & LOW


@kernel
def _number(codes, begin, slots, used, first, drawn, ids):
    """Write the ids of codes[begin:] in order of appearance until half of the slots are used; return where, and slots in use."""
    most = len(slots) // 2
    for at in range(begin, len(codes)):
        cell = _find(codes[at], slots, drawn)
        if slots[cell] == 0:
            if used == most:
                return at, used
            slots[cell] = np.uint64(codes[at]) << HALF | np.uint64(first + used)
            used += 1
        ids[at] = slots[cell] & LOW
    return len(codes), used


def _doubled(slots: np.ndarray) -> np.ndarray:
    larger = np.zeros(2 * len(slots), np.uint64)
    _insert(slots, larger, DRAWN)
    return larger


class FirstSeen:
    """Numbers codes in the order in which they first appear, in a table that grows."""

    def __init__(self, first: int) -> None:
        self.num_codes = 0  # distinct codes so far
        self._first = first
        self._slots = np.zeros(FIRST_SLOTS, np.uint64)

    def __call__(self, codes: np.ndarray) -> np.ndarray:
        """Return the numbers of uint32 `codes` [n], int32 [n]."""
        ids = np.empty(len(codes), np.int32)
        at = 0
        while True:
            at, self.num_codes = _number(
                codes, at, self._slots, self.num_codes, self._first, DRAWN, ids
            )
            if at == len(codes):
                return ids
            self._slots = _doubled(self._slots)


class Counter:
    """Counts codes in a table that grows to `most_entries` values."""

    def __init__(self, most_entries: int) -> None:
        # whether NON_HEX was among the codes taken; neither it nor MISSING is among the entries
        self.has_non_hex = False
        self._most_slots = 2 * most_entries
        self._slots = np.zeros(min(FIRST_SLOTS, self._most_slots), np.uint64)
        self._used = self._counted = 0

    def add(self, codes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Count uint32 `codes` [n]; yield the entries of a full table, in the form of `take`."""
        if self._counted + len(codes) > MOST_COUNTED:
            yield from self.take()
        self._counted += len(codes)
        at = 0
        while True:
            at, self._used = _count(codes, at, self._slots, self._used, DRAWN)
            if at == len(codes):
                return
            if 2 * len(self._slots) <= self._most_slots:
                self._slots = _doubled(self._slots)
            else:
                yield from self.take()
                self._counted = len(codes) - at

    def take(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the distinct codes and their counts in chunks, unordered; then restart with an empty table."""
        for start in range(0, len(self._slots), PART_SLOTS):
            part = self._slots[start : start + PART_SLOTS]
            entries = part[part != 0]
            self.has_non_hex |= bool((entries >> HALF == NON_HEX).any())
            entries = entries[entries >> HALF < NON_HEX]
            yield (entries >> HALF).astype(np.uint32), entries & LOW
        self._slots = np.zeros(min(FIRST_SLOTS, self._most_slots), np.uint64)
        self._used = self._counted = 0


class Lookup:
    def __init__(self, most_entries: int) -> None:
        """Allocate a table for `most_entries` codes, `ENTRY_BYTES` each."""
        num_slots = max(2 * most_entries + 3, min(8 * most_entries, FIRST_SLOTS))
        self._slots = np.zeros(num_slots, np.uint64)
        # Missing values are found too, with the id that they have: a branch that is always taken costs nothing.
        self.add(np.array([MISSING]), np.array([0]))

    def add(self, codes: np.ndarray, ids: np.ndarray) -> None:
        """Add distinct uint32 `codes` and their int32 or int64 `ids`, which start at 1; may be called repeatedly."""
        _insert(codes.astype(np.uint64) << HALF | ids.astype(np.uint64), self._slots, DRAWN)

    def __call__(self, codes: np.ndarray, ids: np.ndarray) -> None:
        """Write the ids of uint32 `codes` [n] to `ids` [n], 0 for MISSING; entries of unknown codes stay as they are."""
        _look_up(codes, self._slots, DRAWN, ids)
