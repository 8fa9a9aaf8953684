"""Mask of a dropout layer: a function of counters, so that no mask is stored and no generator has a state to save.

An element is kept if a hash of (seed, layer, step, row of the global batch, column) is at least the rate. The mask is the same
for any number of ranks, after resuming, and inside a CUDA graph. `nn.ops.triton.dropout` computes the same bits on a GPU.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from nn.ops.stochastic_rounding import ROW_FACTOR, STEP_FACTOR, as_int32, mix

COLUMN_FACTOR = 0xC2B2AE35
"""Odd, so that the columns of a row have different numbers before they are hashed."""


def dropout_key(seed: int, layer: int) -> int:
    """Return the key of a layer's random bits, an int32 hash of seed and number of the layer."""
    digest = hashlib.blake2b(f"{seed}/{layer}/dropout".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True, slots=True)
class DropoutMask:
    key: int
    rate: float  # probability that an element is dropped, above 0 and below 1
    step: Tensor  # number of earlier updates, integer [1]
    first_row: Tensor  # number of the first row in the global batch, integer [1]
    # number of each row there, integer [B]; None if they are consecutive
    global_rows: Tensor | None = None

    @property
    def threshold(self) -> int:
        """Elements whose 31 random bits are below it are dropped."""
        return min(round(self.rate * 2**31), 2**31 - 1)

    @property
    def scale(self) -> float:
        """Factor of the elements that are kept, so that the expected value does not change."""
        return 1 / (1 - self.rate)

    def shifted(self, rows: int, at: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """Return `at` of `apply` with the numbers of samples so that `first_row` more are those in the global batch."""
        if self.global_rows is None:
            return at
        samples = (self.global_rows - self.first_row).int()
        if at is None:
            return samples[:rows], torch.zeros_like(samples[:rows])
        return samples.index_select(0, at[0]), at[1]

    def kept(self, rows: int, columns: int, at: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return which elements are kept, bool [rows, columns]; `at` as in `apply`."""
        device, at = self.step.device, self.shifted(rows, at)
        row, offset = (torch.arange(rows, device=device), None) if at is None else at
        row = row + self.first_row
        step_bits = mix(self.step.to(torch.int32) * as_int32(STEP_FACTOR) + self.key)
        # Hashed before the columns are added: rows would otherwise be shifted copies of each other.
        row_bits = mix(step_bits + row.to(torch.int32) * as_int32(ROW_FACTOR))
        column = torch.arange(columns, dtype=torch.int32, device=device)
        if offset is not None:
            column = column + offset.to(torch.int32)[:, None] * columns
        bits = mix(row_bits[:, None] + column * as_int32(COLUMN_FACTOR))
        return (bits >> 1 & 0x7FFFFFFF) >= self.threshold

    def apply(self, x: Tensor, at: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return `x` [B, ...] with dropped elements 0 and the others scaled; all dimensions after the first are columns.

        With `at`, the sample of each event and its offset there, [C] each, x is [C, ...], and a row has the columns of all its
        events.
        """
        matrix = x.view(len(x), -1) if x.is_contiguous() else x.reshape(len(x), -1)
        kept = self.kept(matrix.shape[0], matrix.shape[1], at)
        return torch.where(kept, matrix * self.scale, 0).view(x.shape)
