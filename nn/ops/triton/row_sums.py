"""Rows of tables at positions, added up and dropped out: a kernel reads the rows of all tables, and writes each position once."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.dropout_mask import DropoutMask
from nn.ops.fused_linear import autocast_dtype
from nn.ops.jagged import row_sums
from nn.ops.triton.dropout import apply_mask, is_kept, mask_arguments, row_bits

# R: rows of a table, P: positions, D: columns

BLOCK = 2048
"""Numbers that a program writes at once."""


@torch.compiler.disable
def sum_of_rows(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    scales: Sequence[float],
    mask: DropoutMask | None,
    at: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the dropped out sum of rows of tables [R, D] at indices [P], times their scales, [P, D], in autocast's dtype.

    `mask`, `at`: of `DropoutMask.apply`; no mask drops nothing.
    """
    return _SumOfRows.apply(tuple(indices), tuple(scales), mask, at, *tables)


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        indices: tuple[Tensor, ...],
        scales: tuple[float, ...],
        mask: DropoutMask | None,
        at: tuple[Tensor, Tensor],
        *tables: Tensor,
    ) -> Tensor:
        ctx.rest = indices, scales, mask, at
        ctx.rows = [(len(table), table.dtype) for table in tables]
        count, columns = len(indices[0]), tables[0].shape[1]
        out = tables[0].new_empty(count, columns, dtype=autocast_dtype(tables[0]))
        block = min(triton.next_power_of_2(columns), BLOCK)
        sizes = {"BLOCK_P": BLOCK // block, "BLOCK_C": block}
        grid = (triton.cdiv(count, sizes["BLOCK_P"]), triton.cdiv(columns, block))
        if count:
            _sum_of_rows[grid](
                tuple(table.contiguous() for table in tables),
                indices,
                scales,
                out,
                **mask_arguments(mask, count, at, out),
                positions=count,
                columns=columns,
                TABLES=len(tables),
                DROPS=mask is not None,
                **sizes,
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indices, scales, mask, at = ctx.rest
        grad = grad.contiguous() if mask is None else apply_mask(grad, mask, at=at)
        found = []
        for index, scale, (rows, dtype) in zip(indices, scales, ctx.rows, strict=True):
            of_table = row_sums(grad, index, rows).to(dtype)
            found.append(of_table if scale == 1 else of_table * scale)
        return None, None, None, None, *found


@triton.jit(do_not_specialize=["key", "threshold", "positions"])
def _sum_of_rows(
    tables,
    indices,
    scales,
    out,
    at,
    key,
    threshold,
    scale,
    positions,
    columns,
    TABLES: tl.constexpr,
    DROPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    is_here = position < positions
    inside = is_here[:, None] & (column < columns)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for number in tl.static_range(TABLES):
        row = tl.load(indices[number] + position, mask=is_here, other=0).to(tl.int64)[:, None]
        values = tl.load(tables[number] + row * columns + column, mask=inside, other=0.0)
        total += scales[number] * values.to(tl.float32)
    if DROPS:
        sample = tl.load(at[0] + position, mask=is_here, other=0).to(tl.int64)
        first = tl.load(at[1] + position, mask=is_here, other=0).to(tl.int32) * columns
        bits = row_bits(at[2], at[3], key, sample)[:, None]
        kept = is_kept(bits, first[:, None] + column, threshold)
        total = tl.where(kept, total * scale, 0.0)
    offset = position[:, None] * columns + column
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)
