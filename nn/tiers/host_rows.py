"""Rows of a table file that host memory holds: a cache with a fixed number of places.

A row enters when a batch that is announced needs it, and leaves when its place is needed for another one, in the order of the
places. Rows that the device has, or that an announced batch needs, stay.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from nn.tiers.row_items import row_items
from nn.tiers.table_file import TableFile

ABSENT = -1
ON_DEVICE = -2
"""Place of a row that the device keeps for good: it has none here."""
FIRST_REACH = 2**16
"""Places that a search for free ones looks at, beside twice those that are needed."""


class HostRows:
    """Places in host memory for some of the rows of a file.

    One thread at a time calls `read` and `flush`. Others may write values of rows that stay.

    `kept` are the rows that the device keeps for good, ascending; `parts` have the memory [places, columns] of each part.
    `place_of_row`, int32 [num_rows], is `ABSENT` or `ON_DEVICE` without one.
    """

    def __init__(
        self, file: TableFile, num_rows: int, kept: np.ndarray, parts: Mapping[str, Tensor]
    ) -> None:
        self._file = file
        self.items = [row_items(memory) for memory in parts.values()]
        num_places = len(self.items[0])
        self.place_of_row = np.full(num_rows, ABSENT, np.int32)
        self.place_of_row[kept] = ON_DEVICE
        self._row_of_place = np.full(num_places, ABSENT, np.int64)
        self._is_changed = np.zeros(num_places, bool)
        self._hand = 0
        self._num_read = self._num_written = 0

    def without_kept(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.place_of_row[rows] != ON_DEVICE]

    def lacks(self, rows: np.ndarray) -> bool:
        return bool((self.place_of_row[rows] == ABSENT).any())

    def change(self, rows: np.ndarray) -> None:
        """Note that the values of rows, which have places, are changed there or will be when they leave the device."""
        self._is_changed[self.place_of_row[rows]] = True

    def read(self, rows: np.ndarray, staying: Sequence[np.ndarray]) -> bool:
        """Read distinct, ascending rows, int64 [n], that have no place, while others stay; return whether all have places."""
        missing = rows[self.place_of_row[rows] == ABSENT]
        if not len(missing):
            return True
        stays = np.zeros(len(self._row_of_place), bool)
        for others in (rows, *staying):
            places = self.place_of_row[others]
            stays[places[places >= 0]] = True
        taken = self._free(stays, len(missing))
        if len(taken) < len(missing):
            return False
        self._hand = int(taken[-1]) + 1
        self._release(taken)
        self._file.read(missing, self.items, taken)
        self._row_of_place[taken] = missing
        self.place_of_row[missing] = taken
        self._num_read += len(missing)
        return True

    def _free(self, stays: np.ndarray, count: int) -> np.ndarray:
        """Return the next `count` places whose rows need not stay; fewer if there are fewer."""
        reach = 2 * count + FIRST_REACH
        while True:
            reach = min(reach, len(stays))
            places = (self._hand + np.arange(reach)) % len(stays)
            free = places[~stays[places]]
            if len(free) >= count or reach == len(stays):
                return free[:count]
            reach *= 4

    def flush(self) -> None:
        """Write all changed rows to the file, which nobody reads meanwhile."""
        self._file.merge()
        places = np.flatnonzero(self._is_changed)
        rows = self._row_of_place[places]
        order = np.argsort(rows)
        self._file.store(rows[order], self.items, places[order])
        self._is_changed.fill(False)

    def forget(self) -> None:
        """Drop all rows, since the file has changed."""
        self._file.forget()
        self.place_of_row[self.place_of_row >= 0] = ABSENT
        self._row_of_place.fill(ABSENT)
        self._is_changed.fill(False)

    def take_counts(self) -> tuple[int, int]:
        """Return the rows read from the file and those written to its journal since the last call."""
        counts = self._num_read, self._num_written
        self._num_read = self._num_written = 0
        return counts

    def _release(self, places: np.ndarray) -> None:
        """Write the changed rows of some places to the journal, and let the places be empty."""
        changed = places[self._is_changed[places]]
        rows = self._row_of_place[changed]
        order = np.argsort(rows)
        self._file.keep(rows[order], self.items, changed[order])
        self._num_written += len(changed)
        leaving = self._row_of_place[places]
        self.place_of_row[leaving[leaving >= 0]] = ABSENT
        self._is_changed[places] = False
