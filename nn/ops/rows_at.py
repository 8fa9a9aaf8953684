"""Rows of tables at positions, added up and dropped out: what a position of HSTU begins with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import embedding

from nn.ops.dropout_mask import DropoutMask
from nn.ops.fused_linear import as_autocast, can_fuse

# P: positions, R: rows of a table, D: columns


@dataclass(frozen=True, slots=True)
class RowsAt:
    """A row of a table for each position, times `scale`."""

    table: Tensor  # [R, D]
    index: Tensor  # of the row, integer [P]
    scale: float = 1.0

    @classmethod
    def each(cls, vectors: Tensor) -> "RowsAt":
        """Return a row of its own for each position, of [P, D]."""
        return cls(vectors, torch.arange(len(vectors), device=vectors.device))


def sum_of_rows(
    rows: Sequence[RowsAt], mask: DropoutMask | None, at: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the dropped out sum of the rows at each position, [P, D], on a GPU in autocast's dtype.

    `mask`, `at`: of `DropoutMask.apply`; no mask drops nothing. On a GPU the backward pass adds up the gradients of a row in one
    order, and from numbers in the dtype of the result.
    """
    if can_fuse(rows[0].table, rows[0].table):
        # Only CUDA builds of torch include Triton.
        from nn.ops.triton.rows_at import sum_of_rows

        return sum_of_rows(rows, mask, at)
    vectors = (embedding(of.index, of.table) * of.scale for of in rows)
    total = reduce(torch.add, vectors)
    return as_autocast(total if mask is None else mask.apply(total, at))
