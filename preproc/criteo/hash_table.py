"""Hash tables of 32-bit codes: how often each is seen, and which id it has. Compiled by Numba.

A slot is one 64-bit number, the code above its count or id, so that a look-up touches one cache
line; zero is an empty slot, for neither a count nor an id is zero. Slots are probed one after
another, from a place that depends on a number drawn by the process: no file can be made of codes
that all begin at the same place. What is counted and which ids are found does not depend on it.
"""

import secrets
from collections.abc import Iterator

import numpy as np
from numba import njit

from preproc.criteo.tokenizer import NON_HEX

# Numba's cache follows the file of a kernel alone, not the constants that it takes from others: what
# is imported from elsewhere is therefore an argument.

# Bytes per entry: a slot, and an empty one that keeps probes short; while a table grows, the one before.
ENTRY_BYTES = 16
GROWING_ENTRY_BYTES = 24
# Slots whose entries are handed over at a time.
PART_SLOTS = 1 << 20
# Slots that a count begins with: few columns have more values, and these stay in the cache.
FIRST_SLOTS = 1 << 12
# A count must fit its half of a slot.
MOST_COUNTED = (1 << 32) - 1

DRAWN = np.uint64(secrets.randbits(32))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


@njit(nogil=True, cache=True)
def _place(code, num_slots, drawn):
    """Return where to begin to look: MurmurHash3's finaliser, scaled to the number of slots."""
    mixed = np.uint64(code) ^ drawn
    mixed = ((mixed ^ (mixed >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & LOW
    mixed = ((mixed ^ (mixed >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & LOW
    mixed ^= mixed >> np.uint64(16)
    return np.int64((mixed * np.uint64(num_slots)) >> HALF)


@njit(nogil=True, cache=True)
def _count(codes, begin, slots, used, drawn, first_non_hex):
    """Count codes[begin:]; return where it stopped, the slots in use, and whether one was NON_HEX.

    It stops where a code is new and half of the slots are in use. Codes from `first_non_hex`, which is
    NON_HEX, on are not counted.
    """
    most = len(slots) // 2
    has_non_hex = False
    for at in range(begin, len(codes)):
        code = codes[at]
        if code >= first_non_hex:
            has_non_hex |= code == first_non_hex
            continue
        key = np.uint64(code) << HALF
        place = _place(code, len(slots), drawn)
        while True:
            slot = slots[place]
            if slot == 0:
                if used == most:
                    return at, used, has_non_hex
                slots[place] = key | np.uint64(1)
                used += 1
                break
            if slot & ~LOW == key:
                slots[place] = slot + np.uint64(1)
                break
            place = place + 1 if place + 1 < len(slots) else 0
    return len(codes), used, has_non_hex


@njit(nogil=True, cache=True)
def _insert(entries, slots, drawn):
    """Put entries whose codes differ into slots of which at most half are then in use; skip zeros."""
    for entry in entries:
        if entry == 0:
            continue
        place = _place(entry >> HALF, len(slots), drawn)
        while slots[place] != 0:
            place = place + 1 if place + 1 < len(slots) else 0
        slots[place] = entry


@njit(nogil=True, cache=True)
def _look_up(codes, slots, drawn, ids):
    """Write the ids of the codes that are in `slots`; leave the others alone."""
    for at in range(len(codes)):
        code = codes[at]
        key = np.uint64(code) << HALF
        place = _place(code, len(slots), drawn)
        slot = slots[place]
        while slot != 0:
            if slot & ~LOW == key:
                ids[at] = slot & LOW
                break
            place = place + 1 if place + 1 < len(slots) else 0
            slot = slots[place]


class Counter:
    """Counts codes in a table that grows to `most_entries` values.

    Attributes:
        has_non_hex: whether NON_HEX was among the codes; neither it nor MISSING is counted.
    """

    def __init__(self, most_entries: int) -> None:
        self.has_non_hex = False
        self._most_slots = 2 * most_entries
        self._slots = np.zeros(min(FIRST_SLOTS, self._most_slots), np.uint64)
        self._used = self._counted = 0

    def add(self, codes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Count uint32 `codes` [n]; yield what has to leave a full table, as `take` does."""
        if self._counted + len(codes) > MOST_COUNTED:
            yield from self.take()
        self._counted += len(codes)
        at = 0
        while True:
            at, self._used, non_hex = _count(codes, at, self._slots, self._used, DRAWN, NON_HEX)
            self.has_non_hex |= non_hex
            if at == len(codes):
                return
            if 2 * len(self._slots) <= self._most_slots:
                larger = np.zeros(2 * len(self._slots), np.uint64)
                _insert(self._slots, larger, DRAWN)
                self._slots = larger
            else:
                yield from self.take()
                self._counted = len(codes) - at

    def take(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the distinct codes and their counts, in parts and in no order, and restart with an empty table."""
        for start in range(0, len(self._slots), PART_SLOTS):
            part = self._slots[start : start + PART_SLOTS]
            entries = part[part != 0]
            yield (entries >> HALF).astype(np.uint32), entries & LOW
        self._slots = np.zeros(min(FIRST_SLOTS, self._most_slots), np.uint64)
        self._used = self._counted = 0


class Lookup:
    """Maps codes to ids."""

    def __init__(self, most_entries: int) -> None:
        """Make room for `most_entries` codes, `ENTRY_BYTES` each."""
        self._slots = np.zeros(2 * most_entries + 1, np.uint64)

    def add(self, codes: np.ndarray, ids: np.ndarray) -> None:
        """Add distinct uint32 `codes` and their int32 or int64 `ids`, from 1 on: a part of them all."""
        _insert(codes.astype(np.uint64) << HALF | ids.astype(np.uint64), self._slots, DRAWN)

    def __call__(self, codes: np.ndarray, ids: np.ndarray) -> None:
        """Put the ids of uint32 `codes` [n] into `ids` [n]; those of other codes stay as they are."""
        _look_up(codes, self._slots, DRAWN, ids)
