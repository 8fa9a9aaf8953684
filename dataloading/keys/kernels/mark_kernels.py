"""Choice of the keys that leave a full table next, compiled by Numba."""

import numpy as np
from numba import carray

from dataloading.keys.kernels.compiled import kernel
from dataloading.keys.kernels.hash_index import last_batches
from dataloading.keys.kernels.layouts import Field, pointer

DIGIT_BITS = 11
DIGITS = 1 << DIGIT_BITS


@kernel
def mark(fields, entries, counts, batch):
    """Mark the slots of the keys worth least, none of those of `batch`; by the last batch alone without `counts`; if any.

    Slots whose key was removed are worth least: they have no sighting and no batch.
    """
    last = np.zeros(fields[Field.CAPACITY], np.int32)
    last_batches(entries, last)
    last[0] = batch
    facts = last, counts, np.int64(1) if fields[Field.KEEPS] else batch
    num, low, high = _range(facts)
    num = min(num, fields[Field.MOST_MARKED])
    if num == 0:
        return False
    worth, slots = _least(facts, num, _border(facts, num, low, high))
    # Changes that are pending have the marks before in the other memory.
    fields[Field.MARKED] = fields[Field.SPARE]
    _sort(worth, slots, carray(pointer(fields[Field.MARKED]), (num,), np.int64))
    fields[Field.NUM_MARKED] = num
    fields[Field.NEXT] = 0
    fields[Field.MARKED_IN] = batch
    return True


@kernel
def _worth(facts, slot):
    """Return the worth of a slot's key: its sightings, if they matter, and the batch that saw it last."""
    last, counts, _ = facts
    if len(counts) == 0:
        return np.int64(last[slot])
    return np.int64(counts[slot]) << 32 | np.int64(last[slot])


@kernel
def _range(facts):
    """Return how many keys may leave, and their smallest and largest worth."""
    last, _, batch = facts
    num, low, high = 0, np.int64(2**63 - 1), np.int64(0)
    for slot in range(len(last)):
        if last[slot] < batch:
            worth = _worth(facts, slot)
            low, high = min(low, worth), max(high, worth)
            num += 1
    return num, low, high


@kernel
def _border(facts, num, low, high):
    """Return the largest worth of the `num` keys that are worth least, and how many are worth less; digit by digit."""
    last, _, batch = facts
    below = 0
    found = np.empty(DIGITS + 1, np.int64)
    while low < high:
        shift = 0
        while (high - low) >> shift >= DIGITS:
            shift += 1
        found[:] = 0
        for slot in range(len(last)):
            worth = _worth(facts, slot)
            # The last one counts the others: a branch would be mispredicted.
            is_inside = (last[slot] < batch) & (low <= worth) & (worth <= high)
            found[(worth - low) >> shift if is_inside else DIGITS] += 1
        digit = 0
        while below + found[digit] < num:
            below += found[digit]
            digit += 1
        low += digit << shift
        high = min(high, low + (1 << shift) - 1)
    return low, below


@kernel
def _least(facts, num, border):
    """Return the `num` keys that are worth least in the order of their slots: worth and slots, int64 [num]."""
    last, _, batch = facts
    most, below = border
    worths, slots = np.empty(num, np.int64), np.empty(num, np.int64)
    at, equal = 0, num - below
    for slot in range(len(last)):
        worth = _worth(facts, slot)
        if worth > most or last[slot] >= batch or (worth == most and equal == 0):
            continue
        equal -= worth == most
        worths[at], slots[at] = worth, slot
        at += 1
    return worths, slots


@kernel
def _sort(worths, slots, out):
    """Write slots in the order of their worth to `out`; equal ones keep their order."""
    low, high = worths.min(), worths.max()
    shift = 0
    starts = np.empty(DIGITS, np.int64)
    while shift < 63 and (high - low) >> shift > 0:
        starts[:] = 0
        for i in range(len(worths)):
            starts[(worths[i] - low) >> shift & (DIGITS - 1)] += 1
        before = 0
        for digit in range(DIGITS):
            starts[digit], before = before, before + starts[digit]
        sorted_worths, sorted_slots = np.empty_like(worths), np.empty_like(slots)
        for i in range(len(worths)):
            digit = (worths[i] - low) >> shift & (DIGITS - 1)
            to = starts[digit]
            sorted_worths[to], sorted_slots[to] = worths[i], slots[i]
            starts[digit] = to + 1
        worths, slots = sorted_worths, sorted_slots
        shift += DIGIT_BITS
    out[:] = slots
