"""Layer norm, alone or with what HSTU multiplies by it: a kernel a direction, which reads its inputs once.

A program holds whole rows, narrow ones several at once. Statistics are float32. The backward pass computes them again, and
all that follows from the inputs, so it keeps nothing else. Each of its programs adds the gradients of weight and bias over
its rows, and `column_sums` those of all programs: every sum has one order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.column_blocks import GradientBlocks
from nn.ops.dropout_mask import DropoutMask
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.dropout import is_kept, mask_arguments, row_bits

# R: rows, C: columns, P: programs

PROGRAMS = 528
"""Most programs of the backward pass: 4 for each multiprocessor of an H100."""
# Numbers of a matrix that a program reads at once, if a row has no more.
FORWARD, BACKWARD, GATE_FORWARD, GATE_BACKWARD = 4096, 2048, 2048, 1024
WIDE = 512
"""Columns from which the backward pass takes a row at once, by few warps that load the next ones meanwhile."""
WIDE_PROGRAMS, WIDE_STAGES = 2112, 3


class Shape(NamedTuple):
    C: int
    BLOCK_C: int
    BLOCK_R: int  # rows at once
    WIDTH: int = 0  # columns of a gate's result
    SWISH: bool = False
    DROPS: bool = False
    STAGES: int = 1  # rows that are on their way at once, in the backward pass
    T: int = 1  # tokens, and whether they are mixed, of `nn.ops.triton.rankmixer`
    MIXES: bool = False
    PIECE: int = 0  # columns of a piece of a row: tiles are [pieces, R, PIECE], or [R, C] for 0


class GateGradients(NamedTuple):
    """Results of the backward pass of a gate."""

    of_u: Tensor
    of_a: Tensor
    sums: Tensor
    of_u_stride: int


@torch.compiler.disable
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, swish: bool = False
) -> Tensor:
    """Map [..., C] to LN(x) or, if `swish`, to x * sigmoid(LN(x)), in the same dtype."""
    return _Norm.apply(x, weight, bias, eps, swish, False)


@torch.compiler.disable
def norm_beside(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return LN(x), and x for what is beside the norm, whose gradient the norm's kernel adds."""
    return _Norm.apply(x, weight, bias, eps, False, True)


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
    gradients: GradientBlocks | None = None,
) -> Tensor:
    """Map u [R, C], whose rows may be further apart, and a [R, C] to dropout([s, a, s * LN(a)]) with s = silu(u), [R, 3 C].

    Without `concat` it is the last of the three, [R, C]. `mask`, `at`: of `DropoutMask.apply`; no mask drops nothing.
    `gradients`: blocks, of which the first is for that of u.
    """
    return _Gate.apply(u, a, weight, bias, (eps, mask, at, concat), gradients)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, swish: bool, beside: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.options = eps, swish
        out = torch.empty_like(x)
        rows, programs, shape, num_warps = _layout(x, FORWARD, SWISH=swish)
        _norm[(programs,)](x, weight, bias, out, rows, eps, shape, num_warps=num_warps)
        return (out, x) if beside else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *beside: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        eps, swish = ctx.options
        of_x = torch.empty_like(x)
        rows, programs, shape, num_warps = _backward_layout(x, BACKWARD, SWISH=swish)
        sums = x.new_empty(programs, 2 * shape.C, dtype=torch.float32)
        inputs = grad.contiguous(), x, weight, bias, beside[0].contiguous() if beside else None
        _norm_gradient[(len(sums),)](*inputs, of_x, sums, rows, eps, shape, num_warps=num_warps)
        return of_x, *column_sums(sums).to(weight.dtype).chunk(2), None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        a: Tensor,
        weight: Tensor,
        bias: Tensor,
        options: tuple[Any, ...],
        gradients: GradientBlocks | None,
    ) -> Tensor:
        ctx.gradients = gradients
        a = a.contiguous()
        u = u if u.stride(1) == 1 else u.contiguous()
        ctx.save_for_backward(u, a, weight, bias)
        ctx.options = options
        programs, rest = _gate_arguments(u, a, *options)
        out = a.new_empty(len(a), rest["S"].WIDTH)
        _gate[(programs,)](u, a, weight, bias, out, **rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, a, weight, bias = ctx.saved_tensors
        of_u = torch.empty_like(a) if ctx.gradients is None else ctx.gradients.block(0)
        of_a = torch.empty_like(a)
        programs, rest = _gate_arguments(u, a, *ctx.options, is_backward=True)
        sums = a.new_empty(programs, 2 * a.shape[1], dtype=torch.float32)
        results = GateGradients(of_u, of_a, sums, of_u.stride(0))
        _gate_gradient[(len(sums),)](grad.contiguous(), u, a, weight, bias, results, **rest)
        return of_u, of_a, *column_sums(sums).to(weight.dtype).chunk(2), None, None


def _layout(x: Tensor, elements: int, **options: Any) -> tuple[int, int, Shape, int]:
    """Return the rows of a matrix, the programs that each read one block of them, and how many warps a program has."""
    shape = shape_of(x, elements, **options)
    rows = x.numel() // shape.C
    # A program without rows writes sums of zero.
    programs = max(triton.cdiv(rows, shape.BLOCK_R), 1)
    return rows, programs, shape, min(max(shape.BLOCK_C // 512, 4), 16)


def _backward_layout(x: Tensor, elements: int, **options: Any) -> tuple[int, int, Shape, int]:
    """Return what `_layout` does, with at most as many programs as have sums of their own."""
    block = triton.next_power_of_2(x.shape[-1])
    if block < WIDE:
        rows, programs, shape, num_warps = _layout(x, elements, **options)
        return rows, min(programs, PROGRAMS), shape, num_warps
    rows, programs, shape, _ = _layout(x, block, STAGES=WIDE_STAGES, **options)
    return rows, min(programs, WIDE_PROGRAMS), shape, min(block // 256, 16)


def shape_of(x: Tensor, elements: int, **options: Any) -> Shape:
    block = triton.next_power_of_2(x.shape[-1])
    return Shape(x.shape[-1], block, max(elements // block, 1), **options)


def _gate_arguments(
    u: Tensor,
    a: Tensor,
    eps: float,
    mask: DropoutMask | None,
    at: tuple[Tensor, Tensor],
    concat: bool,
    *,
    is_backward: bool = False,
) -> tuple[int, dict[str, Any]]:
    """Return the programs of a gate's kernel as `_layout`, and its arguments but the matrices and parameters."""
    options = {"WIDTH": (3 if concat else 1) * a.shape[1], "DROPS": mask is not None}
    layout, elements = _layout, GATE_FORWARD
    if is_backward:
        layout, elements = _backward_layout, GATE_BACKWARD
    rows, programs, shape, num_warps = layout(a, elements, **options)
    arguments = {"rows": rows, "u_stride": u.stride(0), "eps": eps, "S": shape}
    return programs, mask_arguments(mask, rows, at, u) | arguments | {"num_warps": num_warps}


@triton.jit
def row_mean(x, S: tl.constexpr):
    """Return the mean of each row, [R, 1] or [1, R, 1]."""
    x = tl.sum(x, 0, keep_dims=True) if S.PIECE else x
    return tl.sum(x, -1, keep_dims=True) / S.C


@triton.jit
def normalise(x, inside, eps, S: tl.constexpr):
    """Return rows with the mean 0 and the variance 1, zeros outside, and what they were multiplied by, [R, 1]."""
    centred = tl.where(inside, x - row_mean(x, S), 0.0)
    rstd = tl.rsqrt(row_mean(centred * centred, S) + eps)
    return centred * rstd, rstd


@triton.jit
def input_gradient(grad, normalised, rstd, S: tl.constexpr):
    """Return the gradient of what was normalised from that of the result, which is 0 outside."""
    return (grad - row_mean(grad, S) - normalised * row_mean(grad * normalised, S)) * rstd


@triton.jit
def load(values, offset, inside):
    return tl.load(values + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store(values, offset, result, inside):
    tl.store(values + offset, result.to(values.dtype.element_ty), mask=inside)


@triton.jit
def columns_of(S: tl.constexpr):
    """Return the columns of a tile, [1, C] or [pieces, 1, PIECE]."""
    first = tl.arange(0, S.BLOCK_C // S.PIECE)[:, None, None] * S.PIECE if S.PIECE else 0
    return first + tl.arange(0, S.PIECE if S.PIECE else S.BLOCK_C)[None, :]


@triton.jit
def parameters(weight, bias, S: tl.constexpr):
    """Return the columns with weight and bias of each."""
    column = columns_of(S)
    return column, load(weight, column, column < S.C), load(bias, column, column < S.C)


@triton.jit
def zeros(S: tl.constexpr):
    return tl.zeros((tl.constexpr(S.BLOCK_R), 1), tl.float32) + tl.zeros_like(columns_of(S))


@triton.jit
def store_sums(sums, of_weight, of_bias, column, S: tl.constexpr):
    offset = tl.program_id(0) * 2 * S.C + column
    store(sums, offset, tl.sum(of_weight, -2, keep_dims=True), column < S.C)
    store(sums, offset + S.C, tl.sum(of_bias, -2, keep_dims=True), column < S.C)


@triton.jit(do_not_specialize=["rows"])
def _norm(x, weight, bias, out, rows, eps, S: tl.constexpr):
    column, factor, shift = parameters(weight, bias, S)
    row = tl.program_id(0) * S.BLOCK_R + tl.arange(0, S.BLOCK_R)[:, None]
    inside = (row < rows) & (column < S.C)
    offset = row.to(tl.int64) * S.C + column
    values = load(x, offset, inside)
    result = normalise(values, inside, eps, S)[0] * factor + shift
    if S.SWISH:
        result = values * tl.sigmoid(result)
    store(out, offset, result, inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_gradient(grad, x, weight, bias, beside, of_x, sums, rows, eps, S: tl.constexpr):
    column, factor, shift = parameters(weight, bias, S)
    of_weight, of_bias = zeros(S), zeros(S)
    begin, blocks, step = tl.program_id(0), tl.cdiv(rows, S.BLOCK_R), tl.num_programs(0)
    for block in tl.range(begin, blocks, step, num_stages=S.STAGES):
        row = block * S.BLOCK_R + tl.arange(0, S.BLOCK_R)[:, None]
        inside = (row < rows) & (column < S.C)
        offset = row.to(tl.int64) * S.C + column
        values, slope = load(x, offset, inside), load(grad, offset, inside)
        normalised, rstd = normalise(values, inside, eps, S)
        if S.SWISH:
            share = tl.sigmoid(normalised * factor + shift)
            direct = slope * share
            slope = direct * values * (1 - share)
        of_weight += slope * normalised
        of_bias += slope
        result = input_gradient(slope * factor, normalised, rstd, S)
        if S.SWISH:
            result += direct
        if beside is not None:
            result += load(beside, offset, inside)
        store(of_x, offset, result, inside)
    store_sums(sums, of_weight, of_bias, column, S)


@triton.jit
def bits_of_rows(at, key, row, rows, S: tl.constexpr):
    """Return the random bits of each row's sample and the row's first column among those of the sample's rows, both [R, 1].

    `row`: [R]; of [R, 1] a thread would load and hash a row as often as it has columns.
    """
    sample, number = row.to(tl.int64), row * 0
    if at.samples is not None:
        sample = tl.load(at.samples + row, mask=row < rows, other=0).to(tl.int64)
        number = tl.load(at.offsets + row, mask=row < rows, other=0).to(tl.int32)
    return row_bits(at, key, sample)[:, None], number[:, None] * S.WIDTH


@triton.jit
def dropped(values, bits, column, threshold, scale, S: tl.constexpr):
    if S.DROPS:
        values = tl.where(is_kept(bits, column, threshold), values * scale, 0.0)
    return values


@triton.jit(do_not_specialize=["key", "threshold", "rows"])
def _gate(u, a, weight, bias, out, at, key, threshold, scale, rows, u_stride, eps, S: tl.constexpr):
    column, factor, shift = parameters(weight, bias, S)
    row = tl.program_id(0) * S.BLOCK_R + tl.arange(0, S.BLOCK_R)
    bits, first = 0, 0
    if S.DROPS:
        bits, first = bits_of_rows(at, key, row, rows, S)
    row = row.to(tl.int64)[:, None]
    inside = (row < rows) & (column < S.C)
    raw = load(u, row * u_stride + column, inside)
    attended = load(a, row * S.C + column, inside)
    activated = raw * tl.sigmoid(raw)
    result = activated * (normalise(attended, inside, eps, S)[0] * factor + shift)
    here = out + row * S.WIDTH
    if S.WIDTH != S.C:
        activated = dropped(activated, bits, first + column, threshold, scale, S)
        store(here, column, activated, inside)
        attended = dropped(attended, bits, first + S.C + column, threshold, scale, S)
        store(here, S.C + column, attended, inside)
    column += S.WIDTH - S.C
    store(here, column, dropped(result, bits, first + column, threshold, scale, S), inside)


@triton.jit(do_not_specialize=["key", "threshold", "rows"])
def _gate_gradient(
    grad, u, a, weight, bias, out, at, key, threshold, scale, rows, u_stride, eps, S: tl.constexpr
):
    column, factor, shift = parameters(weight, bias, S)
    of_weight, of_bias = zeros(S), zeros(S)
    begin, blocks, step = tl.program_id(0), tl.cdiv(rows, S.BLOCK_R), tl.num_programs(0)
    for block in tl.range(begin, blocks, step, num_stages=S.STAGES):
        row = block * S.BLOCK_R + tl.arange(0, S.BLOCK_R)
        bits, first = 0, 0
        if S.DROPS:
            bits, first = bits_of_rows(at, key, row, rows, S)
        row = row.to(tl.int64)[:, None]
        inside = (row < rows) & (column < S.C)
        raw = load(u, row * u_stride + column, inside)
        normalised, rstd = normalise(load(a, row * S.C + column, inside), inside, eps, S)
        here, last = grad + row * S.WIDTH, S.WIDTH - S.C + column
        slope = load(here, last, inside)
        slope = dropped(slope, bits, first + last, threshold, scale, S)
        share = tl.sigmoid(raw)
        of_activated = slope * (normalised * factor + shift)
        slope *= raw * share
        of_weight += slope * normalised
        of_bias += slope
        result = input_gradient(slope * factor, normalised, rstd, S)
        if S.WIDTH != S.C:
            direct = load(here, column, inside)
            of_activated += dropped(direct, bits, first + column, threshold, scale, S)
            direct = load(here, S.C + column, inside)
            result += dropped(direct, bits, first + S.C + column, threshold, scale, S)
        of_u = of_activated * share * (1 + raw * (1 - share))
        store(out.of_u, row * out.of_u_stride + column, of_u, inside)
        store(out.of_a, row * S.C + column, result, inside)
    store_sums(out.sums, of_weight, of_bias, column, S)
