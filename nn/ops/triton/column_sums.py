"""Column sums in one order, of what programs have added up or of tall matrices; torch gives few columns few programs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# R: rows, C: columns

SIZES = {"ROWS": 512, "R": 64, "C": 32}
"""Rows that a program adds up, and rows and columns that it reads at once."""


def column_sums(values: Tensor) -> Tensor:
    """Return the sums [C] in float32 of the columns of contiguous values [R, C]."""
    assert values.is_contiguous()
    num_rows, num_columns = values.shape
    programs = max(triton.cdiv(num_rows, SIZES["ROWS"]), 1)
    sums = values.new_empty(programs, num_columns, dtype=torch.float32)
    grid = (triton.cdiv(num_columns, SIZES["C"]), programs)
    _column_sums[grid](values, sums, num_rows, num_columns, **SIZES)
    return sums[0] if programs == 1 else column_sums(sums)


@triton.jit
def _column_sums(
    values, sums, num_rows, num_columns, ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    column = tl.program_id(0) * C + tl.arange(0, C)[None, :]
    begin = tl.program_id(1).to(tl.int64) * ROWS
    total = tl.zeros((R, C), tl.float32)
    for first in range(begin, tl.minimum(begin + ROWS, num_rows), R):
        row = first + tl.arange(0, R)[:, None]
        inside = (row < num_rows) & (column < num_columns)
        found = tl.load(values + row * num_columns + column, mask=inside, other=0.0)
        total += found.to(tl.float32)
    sums += tl.program_id(1) * num_columns
    tl.store(sums + column, tl.sum(total, 0)[None, :], mask=column < num_columns)
