"""Column sums of what many programs have added up, in a fixed order; torch's sum gives few columns few programs."""

import triton
import triton.language as tl
from torch import Tensor

# P: programs whose sums are added up, C: columns

BLOCK_P, BLOCK_C = tl.constexpr(64), tl.constexpr(32)


def column_sums(partial_sums: Tensor) -> Tensor:
    """Return the sums [C] of the columns of contiguous float32 values [P, C]."""
    assert partial_sums.is_contiguous()
    num_rows, num_columns = partial_sums.shape
    sums = partial_sums.new_empty(num_columns)
    programs = (triton.cdiv(num_columns, BLOCK_C),)
    _column_sums[programs](partial_sums, sums, num_rows, num_columns)
    return sums


@triton.jit
def _column_sums(values, sums, num_rows, num_columns):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for first in range(0, num_rows, BLOCK_P):
        row = first + tl.arange(0, BLOCK_P)[:, None]
        inside = (row < num_rows) & (column < num_columns)
        total += tl.load(values + row * num_columns + column, mask=inside, other=0.0)
    tl.store(sums + column, tl.sum(total, 0)[None, :], mask=column < num_columns)
