"""The check of the items of a file."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Wrong = Callable[[np.ndarray], np.ndarray]
"""Items of a chunk -> bool per item, True where it is invalid."""


@dataclass(frozen=True, slots=True)
class Column:
    """Check of the items of a file."""

    dtype: np.dtype  # of one item
    wrong: Wrong  # function that marks invalid items
    kind: str  # description of such items, such as `ids outside [0, 10)`
    place: Callable[[int], str]  # index of an item -> its place, for messages
