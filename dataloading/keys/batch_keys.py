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
