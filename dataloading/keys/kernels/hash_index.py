"""Index from 64-bit keys to slots, compiled by Numba: open addressing with linear probing.

A cell of 16 bytes is a key, its slot, and the batch that saw it last, so that seeing a key touches one cache line. Slot 0 is an
empty cell, since no key has it. Probing starts at a cell that depends on a random number of the process, so no data can be made
whose keys all collide. Which key has which slot does not depend on that number. Cells are unsigned, since a signed index may be
negative, which costs a test per access.
"""

import secrets

import numpy as np

from dataloading.keys.kernels.compiled import kernel

DRAWN = np.uint64(secrets.randbits(63))
TINY = 300
"""Keys of an index that stays in a core's first cache with a line for each of them; then hardly two of them collide."""

# n: cells


def cells_for(num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cells for `num_keys` keys: int64 [n, 2] whose first column has keys, and the same memory as int32 [n, 4].

    A third to two thirds of them are used, a sixth at most of a tiny index; n is a power of two.
    """
    least = num_keys * 6 if num_keys <= TINY else num_keys * 3 // 2
    cells = np.zeros((1 << max(4, least.bit_length()), 2), np.int64)
    return cells, cells.view(np.int32)


@kernel
def home_cell(key, mask, drawn):
    """Return the first cell to probe, uint64: SplitMix64's finalizer."""
    mixed = np.uint64(key) ^ drawn
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) & mask


@kernel
def mask_of(cells):
    """Return the mask of cells, uint64."""
    return np.uint64(len(cells) - 1)


@kernel
def cell_of(cells, entries, key, at):
    """Return the cell of a key, or the empty cell where it would be; `at` is a cell on the way to it."""
    mask = mask_of(cells)
    while entries[at, 2] != 0 and cells[at, 0] != key:
        at = (at + np.uint64(1)) & mask
    return at


@kernel
def find(cells, entries, key, drawn):
    """Return the cell of a key, or the empty cell where it would be."""
    return cell_of(cells, entries, key, home_cell(key, mask_of(cells), drawn))


@kernel
def insert(cells, entries, key, slot, batch, drawn):
    at = find(cells, entries, key, drawn)
    cells[at, 0] = key
    entries[at, 2] = slot
    entries[at, 3] = batch


@kernel
def remove(cells, entries, hole, drawn):
    """Empty a key's cell; keys behind it move up, so that no probe meets a hole."""
    mask = mask_of(cells)
    at = (hole + np.uint64(1)) & mask
    while entries[at, 2] != 0:
        distance = (at - home_cell(cells[at, 0], mask, drawn)) & mask
        if distance >= ((at - hole) & mask):
            cells[hole, 0] = cells[at, 0]
            cells[hole, 1] = cells[at, 1]
            hole = at
        at = (at + np.uint64(1)) & mask
    entries[hole, 2] = 0


@kernel
def fill(cells, entries, keys, last, drawn):
    """Insert keys [C] in empty cells, each with its position as slot, and the batches that saw them last [C]; key 0 is none."""
    for slot in range(1, len(keys)):
        if keys[slot] != 0:
            insert(cells, entries, keys[slot], slot, last[slot], drawn)


@kernel
def look_up(cells, entries, keys, slots, drawn):
    """Write the slots of keys [K] to slots [K], 0 of keys without one."""
    for i in range(len(keys)):
        slots[i] = entries[find(cells, entries, keys[i], drawn), 2]


@kernel
def last_batches(entries, last):
    """Write the batches that saw the keys last to `last`, by slot; what slot 0 gets is not defined."""
    # A branch at every second cell would be mispredicted.
    for at in range(len(entries)):
        last[entries[at, 2]] = entries[at, 3]
