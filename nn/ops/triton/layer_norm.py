"""Layer norm, alone or with what HSTU multiplies by it: a kernel a direction, which reads its inputs once.

A program holds whole rows, narrow ones several at once. Statistics are float32. The backward pass computes them again, and
all that follows from the inputs, so it keeps nothing else. Each of its programs adds the gradients of weight and bias over
its rows, and `column_sums` those of all programs: every sum has one order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.dropout_mask import DropoutMask
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.dropout import is_kept, row_bits

# R: rows, C: columns, P: programs

PROGRAMS = 528
"""Most programs of the backward pass: 4 for each multiprocessor of an H100."""
FORWARD, BACKWARD = 4096, 2048
"""Numbers of a matrix that a program reads at once; it has at least a row."""
GATE_FORWARD, GATE_BACKWARD = 2048, 1024
NUM_WARPS = 4
WIDE = 2048
"""Columns from which rows have more warps."""


@torch.compiler.disable
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, swish: bool = False
) -> Tensor:
    """Map [..., C] to LN(x) or, if `swish`, to x * sigmoid(LN(x)), in the same dtype."""
    return _Norm.apply(x, weight, bias, eps, swish)


@torch.compiler.disable
def gate(
    u: Tensor,
    a: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    mask: DropoutMask | None,
    at: tuple[Tensor, Tensor],
    *,
    concat: bool,
) -> Tensor:
    """Map u [R, C], whose rows may be further apart, and a [R, C] to dropout([s, a, s * LN(a)]) with s = silu(u), [R, 3 C].

    Without `concat` it is the last of the three, [R, C]. `mask`, `at`: of `DropoutMask.apply`; no mask drops nothing.
    """
    return _Gate.apply(u, a, weight, bias, eps, mask, at, concat)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, swish: bool
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.options = {"eps": eps, "SWISH": swish}
        out = torch.empty_like(x)
        rows, blocks = _blocks(x, FORWARD)
        grid = (triton.cdiv(rows, blocks["R"]),)
        if rows:
            _norm[grid](x, weight, bias, out, rows, **ctx.options, **blocks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_x = torch.empty_like(x)
        rows, blocks = _blocks(x, BACKWARD)
        sums = _partial_sums(x, rows, blocks)
        _norm_gradient[(len(sums),)](
            grad.contiguous(), x, weight, bias, of_x, sums, rows, **ctx.options, **blocks
        )
        return of_x, *_total(sums, weight), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        a: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        mask: DropoutMask | None,
        at: tuple[Tensor, Tensor],
        concat: bool,
    ) -> Tensor:
        a = a.contiguous()
        u = u if u.stride(1) == 1 else u.contiguous()
        ctx.save_for_backward(u, a, weight, bias)
        ctx.rest = mask, at, concat, eps
        rows, blocks = _blocks(a, GATE_FORWARD)
        out = a.new_empty(rows, (3 if concat else 1) * a.shape[1])
        if rows:
            grid = (triton.cdiv(rows, blocks["R"]),)
            _gate[grid](u, a, weight, bias, out, *_gate_options(u, *ctx.rest), **blocks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, a, weight, bias = ctx.saved_tensors
        of_u, of_a = torch.empty_like(a), torch.empty_like(a)
        rows, blocks = _blocks(a, GATE_BACKWARD)
        sums = _partial_sums(a, rows, blocks)
        inputs = (grad.contiguous(), u, a, weight, bias, of_u, of_a, sums)
        _gate_gradient[(len(sums),)](*inputs, *_gate_options(u, *ctx.rest), **blocks)
        return of_u, of_a, *_total(sums, weight), None, None, None, None


def _blocks(x: Tensor, elements: int) -> tuple[int, dict[str, int]]:
    """Return the rows of a matrix and the blocks of a kernel over it."""
    columns = x.shape[-1]
    block = triton.next_power_of_2(columns)
    rows_at_once = max(elements // block, 1)
    num_warps = min(max(NUM_WARPS, NUM_WARPS * block // WIDE), 16)
    blocks = {"COLUMNS": columns, "R": rows_at_once, "C": block, "num_warps": num_warps}
    return x.numel() // columns, blocks


def _partial_sums(x: Tensor, rows: int, blocks: dict[str, int]) -> Tensor:
    """Return the memory of the sums of each program for weight and bias, [P, 2 C]; one program clears it without rows."""
    programs = min(max(triton.cdiv(rows, blocks["R"]), 1), PROGRAMS)
    return x.new_empty(programs, 2 * blocks["COLUMNS"], dtype=torch.float32)


def _total(sums: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    of_weight, of_bias = column_sums(sums).to(weight.dtype).chunk(2)
    return of_weight, of_bias


def _gate_options(
    u: Tensor, mask: DropoutMask | None, at: tuple[Tensor, Tensor], concat: bool, eps: float
) -> tuple[Any, ...]:
    """Return the arguments of both kernels of the gate from `samples` to `DROPS`."""
    dropout = (u, u, 0, 0, 1.0)
    if mask is not None:
        dropout = (mask.step, mask.first_row, mask.key, mask.threshold, mask.scale)
    return *at, *dropout, len(u), u.stride(0), eps, concat, mask is not None


@triton.jit
def _normalised(x, inside, eps, COLUMNS: tl.constexpr):
    """Return rows with the mean 0 and the variance 1, zeros outside, and what they were multiplied by, [R, 1]."""
    mean = tl.sum(x, 1)[:, None] / COLUMNS
    centred = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / COLUMNS + eps)
    return centred * rstd, rstd


@triton.jit
def _input_gradient(grad, normalised, rstd, COLUMNS: tl.constexpr):
    """Return the gradient of what was normalised from that of the result, which is 0 outside."""
    mean = tl.sum(grad, 1)[:, None] / COLUMNS
    projection = tl.sum(grad * normalised, 1)[:, None] / COLUMNS
    return (grad - mean - normalised * projection) * rstd


@triton.jit
def _load(values, offset, inside):
    return tl.load(values + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(values, offset, result, inside):
    tl.store(values + offset, result.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _store_sums(sums, of_weight, of_bias, column, COLUMNS: tl.constexpr):
    offset = tl.program_id(0) * 2 * COLUMNS + column
    _store(sums, offset, tl.sum(of_weight, 0)[None, :], column < COLUMNS)
    _store(sums, offset + COLUMNS, tl.sum(of_bias, 0)[None, :], column < COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    weight,
    bias,
    out,
    rows,
    eps,
    SWISH: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    column = tl.arange(0, C)[None, :]
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    inside = (row < rows) & (column < COLUMNS)
    offset = row * COLUMNS + column
    values = _load(x, offset, inside)
    result = _normalised(values, inside, eps, COLUMNS)[0]
    result = result * _load(weight, column, column < COLUMNS)
    result += _load(bias, column, column < COLUMNS)
    if SWISH:
        result = values * tl.sigmoid(result)
    _store(out, offset, result, inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_gradient(
    grad,
    x,
    weight,
    bias,
    of_x,
    sums,
    rows,
    eps,
    SWISH: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    column = tl.arange(0, C)[None, :]
    factor = _load(weight, column, column < COLUMNS)
    of_weight = tl.zeros((R, C), tl.float32)
    of_bias = tl.zeros((R, C), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (tile * R + tl.arange(0, R)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < COLUMNS)
        offset = row * COLUMNS + column
        values = _load(x, offset, inside)
        slope = _load(grad, offset, inside)
        normalised, rstd = _normalised(values, inside, eps, COLUMNS)
        if SWISH:
            gate = tl.sigmoid(normalised * factor + _load(bias, column, column < COLUMNS))
            direct = slope * gate
            slope = direct * values * (1 - gate)
        of_weight += slope * normalised
        of_bias += slope
        result = _input_gradient(slope * factor, normalised, rstd, COLUMNS)
        if SWISH:
            result += direct
        _store(of_x, offset, result, inside)
    _store_sums(sums, of_weight, of_bias, column, COLUMNS)


@triton.jit
def _dropped(values, of_row, column, threshold, scale, DROPS: tl.constexpr):
    if DROPS:
        values = tl.where(is_kept(of_row, column, threshold), values * scale, 0.0)
    return values


@triton.jit
def _row_and_columns(
    samples, offsets, step, first_row, key, row, rows, column, WIDTH: tl.constexpr
):
    """Return the random bits of each row's sample, [R, 1], and the row's columns among those of all rows of the sample.

    `row`: [R]; loads of [R, 1] would be repeated by each thread for all its columns.
    """
    sample = tl.load(samples + row, mask=row < rows, other=0).to(tl.int64)
    event = tl.load(offsets + row, mask=row < rows, other=0).to(tl.int32)
    of_row = row_bits(step, first_row, key, sample)
    return of_row[:, None], event[:, None] * WIDTH + column


@triton.jit(do_not_specialize=["key", "threshold", "rows"])
def _gate(
    u,
    a,
    weight,
    bias,
    out,
    samples,
    offsets,
    step,
    first_row,
    key,
    threshold,
    scale,
    rows,
    u_stride,
    eps,
    CONCAT: tl.constexpr,
    DROPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    WIDTH: tl.constexpr = 3 * COLUMNS if CONCAT else COLUMNS
    column = tl.arange(0, C)[None, :]
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    bits = 0
    of_row = column
    if DROPS:
        bits, of_row = _row_and_columns(
            samples, offsets, step, first_row, key, row, rows, column, WIDTH
        )
    row = row[:, None]
    inside = (row < rows) & (column < COLUMNS)
    raw = _load(u, row * u_stride + column, inside)
    attended = _load(a, row * COLUMNS + column, inside)
    factor = raw * tl.sigmoid(raw)
    result = _normalised(attended, inside, eps, COLUMNS)[0]
    result = result * _load(weight, column, column < COLUMNS)
    result = factor * (result + _load(bias, column, column < COLUMNS))
    at = row * WIDTH + column
    if CONCAT:
        _store(out, at, _dropped(factor, bits, of_row, threshold, scale, DROPS), inside)
        of_row += COLUMNS
        at += COLUMNS
        _store(out, at, _dropped(attended, bits, of_row, threshold, scale, DROPS), inside)
        of_row += COLUMNS
        at += COLUMNS
    _store(out, at, _dropped(result, bits, of_row, threshold, scale, DROPS), inside)


@triton.jit(do_not_specialize=["key", "threshold", "rows"])
def _gate_gradient(
    grad,
    u,
    a,
    weight,
    bias,
    of_u,
    of_a,
    sums,
    samples,
    offsets,
    step,
    first_row,
    key,
    threshold,
    scale,
    rows,
    u_stride,
    eps,
    CONCAT: tl.constexpr,
    DROPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    WIDTH: tl.constexpr = 3 * COLUMNS if CONCAT else COLUMNS
    column = tl.arange(0, C)[None, :]
    scaling = _load(weight, column, column < COLUMNS)
    shift = _load(bias, column, column < COLUMNS)
    of_weight = tl.zeros((R, C), tl.float32)
    of_bias = tl.zeros((R, C), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (tile * R + tl.arange(0, R)).to(tl.int64)
        bits = 0
        of_row = column
        if DROPS:
            bits, of_row = _row_and_columns(
                samples, offsets, step, first_row, key, row, rows, column, WIDTH
            )
        row = row[:, None]
        inside = (row < rows) & (column < COLUMNS)
        raw = _load(u, row * u_stride + column, inside)
        at = row * COLUMNS + column
        normalised, rstd = _normalised(_load(a, at, inside), inside, eps, COLUMNS)
        last = WIDTH - COLUMNS
        slope = _load(grad, row * WIDTH + last + column, inside)
        slope = _dropped(slope, bits, of_row + last, threshold, scale, DROPS)
        share = tl.sigmoid(raw)
        of_factor = slope * (normalised * scaling + shift)
        slope *= raw * share
        of_weight += slope * normalised
        of_bias += slope
        result = _input_gradient(slope * scaling, normalised, rstd, COLUMNS)
        if CONCAT:
            direct = _load(grad, row * WIDTH + column, inside)
            of_factor += _dropped(direct, bits, of_row, threshold, scale, DROPS)
            direct = _load(grad, row * WIDTH + COLUMNS + column, inside)
            result += _dropped(direct, bits, of_row + COLUMNS, threshold, scale, DROPS)
        _store(of_u, at, of_factor * share * (1 + raw * (1 - share)), inside)
        _store(of_a, at, result, inside)
    _store_sums(sums, of_weight, of_bias, column, COLUMNS)
