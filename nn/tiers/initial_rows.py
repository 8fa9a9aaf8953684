"""Rows as what training has changed of them: the exclusive or with the initial weights, which the seed gives.

A row that was never changed is zeros, so that a file of a table has holes there: only changed rows take room on a disk, and a
hole is read as the row's initial weights. Optimizer state begins as zeros, and needs no such step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The index of a checkpoint is read before torch is imported.
    from torch import Tensor

    from nn.layers.initialization import KeyedWeights

ROWS_AT_ONCE = 2**12


@dataclass(frozen=True, slots=True)
class InitialRows:
    """Initial weights of a table, as `fill_uniform_` has them."""

    seed: int
    table: str
    bound: float

    def toggle(self, values: Tensor, rows: Tensor, first_column: int = 0) -> None:
        """Turn weights into changes or back, in place: [n, columns] in host memory, of the table's `rows`, int64 [n]."""
        import torch

        weights = _weights(self, first_column, values.shape[1])
        bits = torch.int32 if values.itemsize == 4 else torch.int16
        for some, numbers in zip(values.split(ROWS_AT_ONCE), rows.split(ROWS_AT_ONCE), strict=True):
            initial = weights(numbers, torch.zeros_like(numbers)).to(values.dtype)
            some.view(bits).bitwise_xor_(initial.view(bits))


@lru_cache(maxsize=256)
def _weights(initial: InitialRows, first_column: int, num_columns: int) -> KeyedWeights:
    import torch

    from nn.layers.initialization import KeyedWeights

    table = (initial.table, first_column, initial.bound)
    return KeyedWeights([table], initial.seed, num_columns, torch.device("cpu"))
