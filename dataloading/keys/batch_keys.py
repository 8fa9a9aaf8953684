"""Keys of a batch on their way to rows."""

from dataclasses import dataclass

import numpy as np

from dataloading.dataset.source import Keys


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """Keys of a feature in a batch, and the memory for rows."""

    keys: Keys  # of the rows of all ranks, in their order
    rows: np.ndarray  # receives the table's rows of this rank's keys, integers
    first: int = 0  # position of the first of these keys

    @classmethod
    def alone(cls, keys: np.ndarray) -> "BatchKeys":
        """Return int64 keys [K] of one rank, with memory for rows of their own."""
        return cls(Keys.of(keys), np.empty(len(keys), np.int32))
