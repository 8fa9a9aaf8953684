"""Rows of a table file that host memory holds: a cache with a fixed number of buffer rows.

A row enters when a batch that is announced needs it, and leaves when its buffer row is needed for another one, in the order of
the buffer rows. Rows that the device has, or that an announced batch needs, stay.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from nn.tiers.row_items import row_items
from nn.tiers.table_file import TableFile

ABSENT = -1
ON_DEVICE = -2
"""Instead of the buffer row of a row that the device keeps for good."""
FIRST_REACH = 2**16
"""Buffer rows that a search for free ones looks at, beside twice those that are needed."""


class HostRows:
    """Buffer rows in host memory for some of the rows of a file.

    One thread at a time calls `read` and `flush`. Others may write values of rows that stay.

    `kept` are the rows that the device keeps for good, ascending; `parts` have the memory [buffer rows, columns] of each part.
    `buffer_row`, int32 [num_rows], is that of each row of the file; `ABSENT` or `ON_DEVICE` without one.
    """

    def __init__(
        self, file: TableFile, num_rows: int, kept: np.ndarray, parts: Mapping[str, Tensor]
    ) -> None:
        self._file = file
        self.items = [row_items(memory) for memory in parts.values()]
        num_buffer_rows = len(self.items[0])
        self.buffer_row = np.full(num_rows, ABSENT, np.int32)
        self.buffer_row[kept] = ON_DEVICE
        self._table_row = np.full(num_buffer_rows, ABSENT, np.int64)
        self._is_changed = np.zeros(num_buffer_rows, bool)
        self._hand = 0
        self._num_read = self._num_written = 0

    def without_kept(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.buffer_row[rows] != ON_DEVICE]

    def lacks(self, rows: np.ndarray) -> bool:
        return bool((self.buffer_row[rows] == ABSENT).any())

    def change(self, rows: np.ndarray) -> None:
        """Note that the values of rows, which have buffer rows, are changed there or will be when they leave the device."""
        self._is_changed[self.buffer_row[rows]] = True

    def read(self, rows: np.ndarray, staying: Sequence[np.ndarray]) -> bool:
        """Read distinct, ascending rows, int64 [n], that have no buffer row, while others stay; return whether all have one."""
        missing = rows[self.buffer_row[rows] == ABSENT]
        if not len(missing):
            return True
        stays = np.zeros(len(self._table_row), bool)
        for others in (rows, *staying):
            buffer_rows = self.buffer_row[others]
            stays[buffer_rows[buffer_rows >= 0]] = True
        taken = self._free(stays, len(missing))
        if len(taken) < len(missing):
            return False
        self._hand = int(taken[-1]) + 1
        self._release(taken)
        self._file.read(missing, self.items, taken)
        self._table_row[taken] = missing
        self.buffer_row[missing] = taken
        self._num_read += len(missing)
        return True

    def _free(self, stays: np.ndarray, count: int) -> np.ndarray:
        """Return the next `count` buffer rows whose rows need not stay; fewer if there are fewer."""
        reach = 2 * count + FIRST_REACH
        while True:
            reach = min(reach, len(stays))
            buffer_rows = (self._hand + np.arange(reach)) % len(stays)
            free = buffer_rows[~stays[buffer_rows]]
            if len(free) >= count or reach == len(stays):
                return free[:count]
            reach *= 4

    def flush(self) -> None:
        """Write all changed rows to the file, which nobody reads meanwhile."""
        self._file.merge()
        buffer_rows = np.flatnonzero(self._is_changed)
        rows = self._table_row[buffer_rows]
        order = np.argsort(rows)
        self._file.store(rows[order], self.items, buffer_rows[order])
        self._is_changed.fill(False)

    def forget(self) -> None:
        """Drop all rows, since the file has changed."""
        self._file.forget()
        self.buffer_row[self.buffer_row >= 0] = ABSENT
        self._table_row.fill(ABSENT)
        self._is_changed.fill(False)

    def take_counts(self) -> tuple[int, int]:
        """Return the rows read from the file and those written to its journal since the last call."""
        counts = self._num_read, self._num_written
        self._num_read = self._num_written = 0
        return counts

    def _release(self, buffer_rows: np.ndarray) -> None:
        """Write the changed rows of some buffer rows to the journal, and empty them."""
        changed = buffer_rows[self._is_changed[buffer_rows]]
        rows = self._table_row[changed]
        order = np.argsort(rows)
        self._file.keep(rows[order], self.items, changed[order])
        self._num_written += len(changed)
        leaving = self._table_row[buffer_rows]
        self.buffer_row[leaving[leaving >= 0]] = ABSENT
        self._is_changed[buffer_rows] = False
