"""Numbers that compiled calls know arrays by: addresses, and int64 arrays with a column for each name.

So one call takes any number of arrays.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numba import types
from numba.core.cgutils import voidptr_t
from numba.extending import intrinsic

NO_BATCH = 0
"""Number of a batch whose keys are looked up only."""


class Field(IntEnum):
    """Table of keys: addresses, sizes and progress."""

    CELLS = 0
    NUM_CELLS = 1
    KEYS = 2
    CAPACITY = 3
    COUNTS = 4
    NUM_COUNTS = 5
    USED = 6
    """Slots in use, with slot 0; they are the first ones."""
    MARKED = 7
    """Slots that are evicted next, in their order."""
    NUM_MARKED = 8
    NEXT = 9
    """Index of the next of them."""
    MARKED_IN = 10
    """Batch in which they were marked."""
    MOST_MARKED = 11
    """Slots that are marked at once."""
    FEWEST_FIRST = 12
    """Whether keys with the fewest sightings are marked, and not those that were seen longest ago."""
    SPARE = 13
    """Memory for the next marks."""
    KEEPS = 14
    """Whether no key is ever evicted: only slots whose key was removed are used again."""


class Column(IntEnum):
    """Keys of a feature in a batch."""

    TABLE = 0
    KEYS = 1
    NUM_KEYS = 2
    RUNS = 3
    NUM_RUNS = 4
    NARROW = 5
    """int32 rows to write, or none."""
    NUM_NARROW = 6
    WIDE = 7
    """int64 rows to write, or none."""
    NUM_WIDE = 8
    FIRST = 9
    """Position of the first of their keys."""
    OFFSET = 10
    """Keys of the columns before."""


class Part(IntEnum):
    """Part of a column, which one thread sees."""

    COLUMN = 0
    BEGIN = 1
    END = 2
    SEEN = 3
    """Slots that it has seen first."""
    MISSING = 4
    """Keys without a slot."""


class Job(IntEnum):
    """Keys of a table that have no row."""

    TABLE = 0
    FIRST_PART = 1
    LAST_PART = 2
    OFFSET = 3
    """Such keys of the jobs before."""
    KEYS = 4
    """Their number."""
    CANDIDATES_SEEN = 5
    """Candidates among the keys."""
    CANDIDATES_CHANGED = 6
    """Slots of candidates that got a key."""
    DUE = 7
    """Keys to insert as rows."""
    DONE = 8
    """Keys of them that are handled; the others find no row."""
    ROWS_CHANGED = 9
    """Rows that got a key."""


class Kind(IntEnum):
    ROWS = 0
    CANDIDATES = 1


def address_of(array: np.ndarray) -> int:
    """Return the address of an array, which must be contiguous and outlive every call that has it."""
    assert array.flags.c_contiguous, "kernels step through memory"
    return int(array.__array_interface__["data"][0])


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """Return the pointer of an address, for `numba.carray`."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], voidptr_t)

    return types.voidptr(types.int64), generate
