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
    import torch
    from torch import Tensor

    from nn.layers.initialization import KeyedWeights

ROWS_AT_ONCE, ROWS_AT_ONCE_ON_GPU = 2**12, 2**16


@dataclass(frozen=True, slots=True)
class InitialRows:
    """Initial weights of a table, as `fill_uniform_` has them."""

    seed: int
    table: str
    bound: float

    def toggle(self, values: Tensor, rows: Tensor, first_column: int = 0) -> None:
        """Turn weights into changes or back, in place: [n, columns] of the table's `rows`, int64 [n], on the same device."""
        import torch

        weights = _weights(self, first_column, values.shape[1], values.device)
        bits = torch.int32 if values.itemsize == 4 else torch.int16
        at_once = ROWS_AT_ONCE if values.device.type == "cpu" else ROWS_AT_ONCE_ON_GPU
        for some, numbers in zip(values.split(at_once), rows.split(at_once), strict=True):
            initial = weights(numbers, torch.zeros_like(numbers)).to(values.dtype)
            some.view(bits).bitwise_xor_(initial.view(bits))


@lru_cache(maxsize=256)
def _weights(
    initial: InitialRows, first_column: int, num_columns: int, device: torch.device
) -> KeyedWeights:
    from nn.layers.initialization import KeyedWeights

    table = (initial.table, first_column, initial.bound)
    return KeyedWeights([table], initial.seed, num_columns, device)
