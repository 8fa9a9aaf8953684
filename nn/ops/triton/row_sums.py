"""Rows of tables at positions, added up and dropped out: a kernel reads the rows of all tables, and writes each position once.

Gradients of a table's rows are sums over positions in one order, without a sort: each program multiplies a block of positions'
gradients by which of its rows they have, and skips blocks that have none. Positions side by side often have rows side by side.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from nn.ops.dropout_mask import DropoutMask
from nn.ops.fused_linear import autocast_dtype
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.dropout import apply_mask, is_kept, mask_arguments, row_bits

# R: rows of a table, P: positions, D: columns

BLOCK = 2048
"""Numbers that a program writes at once."""
FEW_ROWS, FEW_NUMBERS = 64, 2**16
"""Up to so many rows, or numbers of a table, gradients are added up by products: torch takes a thread a column, or a sort."""
SUMS = {"R": 64, "P": 128, "num_warps": 4}
"""Rows of a program of `few_row_sums`, and positions that it reads at once: of float32, without tensor cores, `FLOAT32_P`."""
FLOAT32_P = 32
SUM_PROGRAMS = 2048
"""Programs that share rows, columns and positions; a number of the GPU would change the order of sums."""


@torch.compiler.disable
def sum_of_rows(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    scales: Sequence[float],
    mask: DropoutMask | None,
    at: tuple[Tensor, Tensor],
    base: Tensor | None = None,
) -> Tensor:
    """Return the dropped out sum of rows of tables [R, D] at indices [P], times their scales, [P, D], in autocast's dtype.

    `mask`, `at`: of `DropoutMask.apply`; no mask drops nothing. `base`: [P, D], added to it; its dtype is the result's.
    """
    return _SumOfRows.apply(tuple(indices), tuple(scales), mask, at, base, *tables)


@torch.compiler.disable
def rows_at(table: Tensor, index: Tensor) -> Tensor:
    """Compute `nn.layers.sequence.rows_at`."""
    return _RowsAt.apply(table, index)


class _RowsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.rows = table.shape[0]
        ctx.save_for_backward(index)
        return embedding(index, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return row_sums(grad, index, ctx.rows).to(grad.dtype), None


def row_sums(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return the sums of the gradients [C, D] of each row at its positions, [R, D], in one order."""
    if rows <= max(FEW_ROWS, FEW_NUMBERS // grad.shape[1]):
        return few_row_sums(grad, index, rows)
    # Otherwise torch 2.13 adds up the gradients of some hundred rows by atomics.
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return torch.ops.aten.embedding_dense_backward(grad, index, rows, -1, False)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def few_row_sums(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """Compute `row_sums` in float32 by a kernel."""
    grad, (count, columns) = grad.contiguous(), grad.shape
    sizes = SUMS | {"C": min(max(triton.next_power_of_2(columns), 16), 128)}
    if grad.dtype is torch.float32:
        sizes["P"] = FLOAT32_P
    blocks = triton.cdiv(rows, sizes["R"]), triton.cdiv(columns, sizes["C"])
    groups = max(SUM_PROGRAMS // (blocks[0] * blocks[1]), 1)
    sums = grad.new_empty(groups, rows, columns, dtype=torch.float32)
    _row_sums[(*blocks, groups)](grad, index.contiguous(), sums, count, rows, columns, **sizes)
    return column_sums(sums.flatten(1)).view(rows, columns)


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        indices: tuple[Tensor, ...],
        scales: tuple[float, ...],
        mask: DropoutMask | None,
        at: tuple[Tensor, Tensor],
        base: Tensor | None,
        *tables: Tensor,
    ) -> Tensor:
        ctx.rest = indices, scales, mask, at
        ctx.rows = [(len(table), table.dtype) for table in tables]
        count, columns = len(indices[0]), tables[0].shape[1]
        dtype = autocast_dtype(tables[0]) if base is None else base.dtype
        out = tables[0].new_empty(count, columns, dtype=dtype)
        block = min(triton.next_power_of_2(columns), BLOCK)
        sizes = {"BLOCK_P": BLOCK // block, "BLOCK_C": block}
        grid = (triton.cdiv(count, sizes["BLOCK_P"]), triton.cdiv(columns, block))
        if count:
            _sum_of_rows[grid](
                tuple(table.contiguous() for table in tables),
                indices,
                scales,
                None if base is None else base.contiguous(),
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
        return None, None, None, None, grad if ctx.needs_input_grad[4] else None, *found


@triton.jit(do_not_specialize=["key", "threshold", "positions"])
def _sum_of_rows(
    tables,
    indices,
    scales,
    base,
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
    offset = position[:, None] * columns + column
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    if base is not None:
        total += tl.load(base + offset, mask=inside, other=0.0).to(tl.float32)
    for number in tl.static_range(TABLES):
        row = tl.load(indices[number] + position, mask=is_here, other=0).to(tl.int64)[:, None]
        values = tl.load(tables[number] + row * columns + column, mask=inside, other=0.0)
        total += scales[number] * values.to(tl.float32)
    if DROPS:
        sample = tl.load(at.samples + position, mask=is_here, other=0).to(tl.int64)
        first = tl.load(at.offsets + position, mask=is_here, other=0).to(tl.int32) * columns
        bits = row_bits(at, key, sample)[:, None]
        kept = is_kept(bits, first[:, None] + column, threshold)
        total = tl.where(kept, total * scale, 0.0)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_sums(
    grad, index, sums, positions, rows, columns, R: tl.constexpr, P: tl.constexpr, C: tl.constexpr
):
    first, group, groups = tl.program_id(0) * R, tl.program_id(2), tl.num_programs(2)
    column = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    total = tl.zeros((R, C), tl.float32)
    position = group.to(tl.int64) * P + tl.arange(0, P)
    following = tl.load(index + position, mask=position < positions, other=-1)
    for _ in range(group, tl.cdiv(positions, P), groups):
        row, here = following.to(tl.int32) - first, position[:, None]
        # The next block's indices are on their way while this one's gradients are.
        position += groups * P
        following = tl.load(index + position, mask=position < positions, other=-1)
        if tl.max(((row >= 0) & (row < R)).to(tl.int32), 0) > 0:
            is_row = tl.arange(0, R)[:, None] == row[None, :]
            inside = (here < positions) & (column < columns)
            values = tl.load(grad + here * columns + column, mask=inside, other=0.0)
            total = tl.dot(is_row.to(values.dtype), values, total, input_precision="ieee")
    row = first + tl.arange(0, R)[:, None]
    offset = (group * rows + row).to(tl.int64) * columns + column
    tl.store(sums + offset, total, mask=(row < rows) & (column < columns))
