"""Index from 64-bit keys to slots, compiled by Numba: open addressing with linear probing.

A cell is a key and its slot, which lie in one cache line. Slot 0 is an empty cell, since no key has it. Probing starts at a
place that depends on a random number of the process, so no data can be made whose keys all collide. Which key has which slot
does not depend on that number.
"""

import secrets

import numpy as np

from dataloading.keys.compiled import kernel

DRAWN = np.uint64(secrets.randbits(63))


def cells_for(num_keys: int) -> np.ndarray:
    """Return empty cells for `num_keys` keys, int64 [a power of two, 2]: a third to two thirds of them are used."""
    return np.zeros((1 << max(4, (num_keys * 3 // 2).bit_length()), 2), np.int64)


@kernel
def place_of(key, mask, drawn):
    """Return the first cell to probe: SplitMix64's finalizer."""
    mixed = np.uint64(key) ^ drawn
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((mixed ^ (mixed >> np.uint64(31))) & np.uint64(mask))


@kernel
def slot_of(cells, key, drawn):
    """Return the slot of a key; 0 if it has none."""
    mask = len(cells) - 1
    at = place_of(key, mask, drawn)
    while cells[at, 1] != 0:
        if cells[at, 0] == key:
            return cells[at, 1]
        at = (at + 1) & mask
    return 0


@kernel
def insert(cells, key, slot, drawn):
    """Insert a key that has no slot."""
    mask = len(cells) - 1
    at = place_of(key, mask, drawn)
    while cells[at, 1] != 0:
        at = (at + 1) & mask
    cells[at, 0] = key
    cells[at, 1] = slot


@kernel
def remove(cells, key, drawn):
    """Remove a key that has a slot; keys behind it move up, so that no probe meets a hole."""
    mask = len(cells) - 1
    hole = place_of(key, mask, drawn)
    while cells[hole, 0] != key or cells[hole, 1] == 0:
        hole = (hole + 1) & mask
    at = (hole + 1) & mask
    while cells[at, 1] != 0:
        distance = (at - place_of(cells[at, 0], mask, drawn)) & mask
        if distance >= ((at - hole) & mask):
            cells[hole, 0] = cells[at, 0]
            cells[hole, 1] = cells[at, 1]
            hole = at
        at = (at + 1) & mask
    cells[hole, 1] = 0


@kernel
def fill(cells, keys, drawn):
    """Insert keys [n] in empty cells, each with its position as slot; key 0 is no key."""
    for slot in range(1, len(keys)):
        if keys[slot] != 0:
            insert(cells, keys[slot], slot, drawn)


@kernel
def look_up(cells, keys, slots, drawn):
    """Write the slots of keys [n] to slots [n], 0 of keys without one."""
    for at in range(len(keys)):
        slots[at] = slot_of(cells, keys[at], drawn)
