"""Rows of a table that got other keys; nothing here needs Numba."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

KEYS = "keys"
"""Name of the keys of all rows in the state of a map."""
LEFT = -1
"""In place of the key of a row whose key left it, since no key is -1."""


class TableFullError(ValueError):
    """More keys need rows than a table has; all ranks raise it at the same batch."""


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """Rows of a table that got other keys, in ascending order."""

    rows: np.ndarray  # int64 [n], distinct
    keys: np.ndarray  # of them, int64 [n]; `LEFT` where there is none any more


class RekeyedRows:
    """The rows that got other keys since they were last taken, with their present keys: 8 bytes per row of a table."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        # 0, which is no key, of the other rows.
        self._keys = {name: np.zeros(count, np.int64) for name, count in rows.items()}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(keys) for name, keys in self._keys.items()}

    def add(self, rekeyed: Mapping[str, Rekeyed]) -> None:
        for name, new in rekeyed.items():
            self._keys[name][new.rows] = new.keys

    def take(self) -> dict[str, Rekeyed]:
        """Return the rows of every table, and forget them."""
        taken = {}
        for name, keys in self._keys.items():
            rows = np.flatnonzero(keys)
            taken[name] = Rekeyed(rows, keys[rows])
            keys[rows] = 0
        return taken

    def put_back(self, taken: Mapping[str, Rekeyed]) -> None:
        """Note rows again that were taken; those that have got yet another key meanwhile keep it."""
        for name, before in taken.items():
            keys = self._keys[name]
            is_older = keys[before.rows] == 0
            keys[before.rows[is_older]] = before.keys[is_older]
