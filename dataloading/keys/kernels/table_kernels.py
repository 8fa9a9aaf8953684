"""Kernels that see, insert and look up the keys of one table, which they know by its fields, int64 [Field]; compiled by Numba."""

import numpy as np
from numba import carray

from dataloading.keys.kernels.compiled import kernel
from dataloading.keys.kernels.hash_index import cell_of, find, home_cell, mask_of, remove
from dataloading.keys.kernels.layouts import NO_BATCH, Field, pointer
from dataloading.keys.kernels.mark_kernels import mark

BLOCK = 256
SMALL_CELLS = 8192
"""Cells of an index whose keys a batch has nearly all seen before long, so that a branch on that is guessed right."""
MOST_SIGHTINGS = 2**31 - 1


@kernel
def index_of(fields):
    """Return the cells of a table, int64 [n, 2], and the same memory as entries, int32 [n, 4]."""
    cells = carray(pointer(fields[Field.CELLS]), (fields[Field.NUM_CELLS], 2), np.int64)
    return cells, carray(pointer(fields[Field.CELLS]), (fields[Field.NUM_CELLS], 4), np.int32)


@kernel
def counts_of(fields):
    """Return the sightings of the keys by slot, int32 [C]; of length 0 if they are not counted."""
    return carray(pointer(fields[Field.COUNTS]), (fields[Field.NUM_COUNTS],), np.int32)


@kernel
def see(source, own, table, batch, found, drawn):
    """Note that a batch has keys, in blocks: first their cells, then the keys that stand there, then what differs.

    The cells are independent addresses, so the processor loads many at once. It does not do that beyond a branch on what it
    loads that it guesses wrong, so the loads have a loop without branches.

    Threads may see parts of a batch at the same time unless sightings are counted. A slot may then stand in `seen` of several
    parts, each time with the same facts. `source`: the column of keys, its runs, and the half-open span of the keys to see,
    counted over the runs. Key 0 is none. `own`: int32 or int64 rows, one of them empty, that receive slots, 0 of keys without
    one; and the position of the first of their keys. `batch`: its number; with `NO_BATCH` keys are looked up, and nothing is
    noted. `found`: memory for slots seen, with their facts before, int32 [n, 3], and for the keys without slots, with their
    positions in the rows, which may lie outside, int64 [n, 2]. Returns the slots seen, and the keys without slots.
    """
    column, runs, begin, end = source
    narrow, wide, first = own
    cells, entries, counts = table
    num_seen = num_missing = 0
    mask = mask_of(cells)
    block, found_keys = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    cell_numbers = np.empty(BLOCK, np.uint64)
    run, at = _position(runs, begin)
    position, left = begin - first, end - begin
    while left > 0:
        size, run, at = _next_keys(column, runs, run, at, min(BLOCK, left), block)
        for i in range(size):
            cell_numbers[i] = home_cell(block[i], mask, drawn)
        for i in range(size):
            found_keys[i] = cells[cell_numbers[i], 0]
        for i in range(size):
            # An emptied cell keeps its key. As the first cell to probe it still tells that the key has no slot.
            if found_keys[i] != block[i]:
                cell_numbers[i] = cell_of(cells, entries, block[i], cell_numbers[i])
        for i in range(max(0, -position), min(size, len(narrow) - position)):
            narrow[position + i] = entries[cell_numbers[i], 2]
        for i in range(max(0, -position), min(size, len(wide) - position)):
            wide[position + i] = entries[cell_numbers[i], 2]
        if batch != NO_BATCH:
            num_seen, num_missing = _note(
                (block, cell_numbers, size, position),
                (entries, counts),
                batch,
                found,
                (num_seen, num_missing),
            )
        position += size
        left -= size
    return num_seen, num_missing


@kernel
def _position(runs, number):
    run = 0
    while run < len(runs) and number >= runs[run, 1] - runs[run, 0]:
        number -= runs[run, 1] - runs[run, 0]
        run += 1
    return run, (runs[run, 0] if run < len(runs) else 0) + number


@kernel
def _next_keys(column, runs, run, at, most, block):
    """Copy the next keys to `block`; return how many, and where the next one is."""
    size = 0
    while size < most and run < len(runs):
        num = min(most - size, runs[run, 1] - at)
        for i in range(num):
            block[size + i] = column[at + i]
        size += num
        at += num
        if at == runs[run, 1]:
            run += 1
            if run < len(runs):
                at = runs[run, 0]
    return size, run, at


@kernel
def _note(block, table, batch, found, numbers):
    """Stamp and count the keys of a block, and note what was there before; return the numbers of `found`."""
    keys, cell_numbers, size, position = block
    entries, counts = table
    seen, missing = found
    num_seen, num_missing = numbers
    is_counted = len(counts) > 0
    is_small = len(entries) <= SMALL_CELLS and not is_counted
    for i in range(size):
        cell_number = cell_numbers[i]
        slot, last = entries[cell_number, 2], entries[cell_number, 3]
        if slot == 0:
            missing[num_missing, 0] = keys[i]
            missing[num_missing, 1] = position + i
            num_missing += keys[i] != 0
            continue
        if is_small and last == batch:
            continue
        # In a larger index it cannot be guessed whether the batch had the key before, so there is no branch.
        seen[num_seen, 0] = slot
        seen[num_seen, 1] = counts[slot] if is_counted else 0
        seen[num_seen, 2] = last
        num_seen += last != batch
        entries[cell_number, 3] = batch
        if is_counted:
            counts[slot] += counts[slot] < MOST_SIGHTINGS
    return num_seen, num_missing


@kernel
def insert_keys(new, fields, change, drawn):
    """Give slots to keys that have none, and stop where the table is full of keys that stay.

    `new`: keys [n], their sightings [n], which a key that occurs again adds to, memory for the slots of all keys [n],
    and the batch. `change`: memory for slots, new keys, old keys, all int64 [n], and old facts, int32 [n, 2]. Returns
    the keys that were handled, and the entries of `change`.
    """
    keys, times, key_slots, batch = new
    slots, new_keys, old_keys, old_facts = change
    num_new = 0
    cells, entries = index_of(fields)
    counts = counts_of(fields)
    keys_of = carray(pointer(fields[Field.KEYS]), (fields[Field.CAPACITY],), np.int64)
    is_counted = len(counts) > 0
    touched = np.empty(BLOCK, np.int32)
    for i in range(len(keys)):
        if i % BLOCK == 0:
            # Loads at independent addresses overlap, which those of one insertion after the other do not.
            for j in range(min(BLOCK, len(keys) - i)):
                touched[j] = entries[home_cell(keys[i + j], mask_of(cells), drawn), 2]
        at = find(cells, entries, keys[i], drawn)
        slot = np.int64(entries[at, 2])
        if slot != 0:
            key_slots[i] = slot
            if is_counted:
                counts[slot] = min(counts[slot] + times[i], MOST_SIGHTINGS)
            continue
        slot, last = _free_slot(fields, (cells, entries, keys_of, counts), batch, drawn)
        if slot == 0:
            return i, num_new
        old_key = keys_of[slot]
        if old_key != 0:
            # Other keys may have moved.
            at = find(cells, entries, keys[i], drawn)
        cells[at, 0] = keys_of[slot] = new_keys[num_new] = keys[i]
        entries[at, 2] = key_slots[i] = slots[num_new] = slot
        entries[at, 3] = batch
        old_keys[num_new] = old_key
        old_facts[num_new, 0] = counts[slot] if is_counted else 0
        old_facts[num_new, 1] = last
        num_new += 1
        if is_counted:
            counts[slot] = times[i]
    return len(keys), num_new


@kernel
def _free_slot(fields, table, batch, drawn):
    """Return a slot that no key has any more, 0 if there is none, and the batch that saw its last key last."""
    cells, entries, keys_of, counts = table
    if fields[Field.USED] < len(keys_of):
        slot = fields[Field.USED]
        fields[Field.USED] += 1
        return slot, 0
    while True:
        marked = carray(pointer(fields[Field.MARKED]), (fields[Field.NUM_MARKED],), np.int64)
        while fields[Field.NEXT] < len(marked):
            slot = marked[fields[Field.NEXT]]
            fields[Field.NEXT] += 1
            if keys_of[slot] == 0:
                return slot, np.int64(0)
            at = find(cells, entries, keys_of[slot], drawn)
            last = entries[at, 3]
            if last < fields[Field.MARKED_IN]:
                remove(cells, entries, at, drawn)
                return slot, np.int64(last)
        worth_counts = counts if fields[Field.FEWEST_FIRST] else counts[:0]
        if not mark(fields, entries, worth_counts, batch):
            return np.int64(0), 0


@kernel
def take_due(keys, fields, admit_after, due, times, drawn):
    """Write the keys that were sighted often enough, each once, with their sightings, which begin again; return their number."""
    cells, entries = index_of(fields)
    counts = counts_of(fields)
    num_due = 0
    for i in range(len(keys)):
        slot = entries[find(cells, entries, keys[i], drawn), 2]
        if slot != 0 and counts[slot] >= admit_after:
            due[num_due] = keys[i]
            times[num_due] = counts[slot]
            counts[slot] = 0
            num_due += 1
    return num_due
