"""Rows of a table that got other keys; nothing here needs Numba."""

from dataclasses import dataclass

import numpy as np

KEYS = "keys"
"""Name of the keys of all rows in the state of a map."""


class TableFullError(ValueError):
    """More keys need rows than a table has; all ranks raise it at the same batch."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows of a table that got other keys, in ascending order.

    Attributes:
        rows: int64 [n], distinct.
        keys: of them, int64 [n].
    """

    rows: np.ndarray
    keys: np.ndarray
