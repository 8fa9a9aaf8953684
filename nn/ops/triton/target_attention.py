"""Attention on a GPU, of DIN's candidate over events and between a sample's vectors (AutoInt); plain in `nn.layers.interactions`.

A kernel a direction holds the unit's input and hidden layers in registers and computes them again in the backward pass, so
that nothing of their width lies in memory: of 64, 80 and 40 columns they were nine tenths of the traffic. Blocks behind the
last event are skipped. Sums have one order.

A program of AutoInt's layer takes a sample and head, and the backward pass computes scores again. What is multiplied comes from
memory in either orientation; no product is split, joined or transposed. One warp is fastest; its products are `mma`.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.jagged import Positions, SamplePositions
from nn.ops.target_attention import PROGRAMS
from nn.ops.triton import jagged
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.jagged_attention import LOG2_E

# B: samples, C: positions, D: columns, H1, H2: widths of the two hidden layers; F: vectors, H: heads, K: columns of a head

BLOCK_P = 64
"""Positions that a program takes at once."""
FIELDS_FORWARD = {"BLOCK_Q": 16, "num_warps": 1, "num_stages": 2}
FIELDS_BACKWARD = {"BLOCK_Q": 16, "num_warps": 1, "num_stages": 2, "maxnreg": 168}


class Shape(NamedTuple):
    """Constants of the kernels: positions at once, widths, and those of the blocks that hold them."""

    IS_MEAN: bool
    P: int
    D: int
    H1: int
    H2: int
    BLOCK_D: int
    BLOCK_1: int
    BLOCK_2: int


@torch.compiler.disable
def attend_weighted(
    query: Tensor,
    events: Tensor,
    at: SamplePositions,
    how: Literal["sum", "mean"],
    parameters: Sequence[Tensor],
) -> Tensor:
    """Return the weighted sum or mean of each sample's events [C, D], [B, D], by its query [B, D].

    `parameters`: weight and bias of each of the unit's three layers, which the kernels cast to the dtype of the events.
    """
    positions = Positions(at.starts, at.lengths, at.samples, at.max_length)
    return _Attend.apply(query, events, positions, how == "mean", *parameters)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, events: Tensor, at: Positions, is_mean: bool, *parameters: Tensor
    ) -> Tensor:
        query, events = query.contiguous(), events.contiguous()
        ctx.save_for_backward(query, events, *parameters)
        ctx.at, ctx.is_mean = at, is_mean
        weighted = torch.empty_like(events)
        _launch(_forward, (query, events), at, parameters, is_mean, weighted)
        return jagged.pool(weighted, at, "mean" if is_mean else "sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, events, *parameters = ctx.saved_tensors
        # Blocks that are skipped have zeros; sums over samples read no such position.
        of_events, of_query = torch.zeros_like(events), torch.empty_like(events)
        sizes = [each.numel() for each in parameters]
        partial = grad.new_empty(PROGRAMS, sum(sizes), dtype=torch.float32)
        results = grad.contiguous(), of_events, of_query, partial, sum(sizes)
        _launch(_backward, (query, events), ctx.at, parameters, ctx.is_mean, *results)
        sums = zip(column_sums(partial).split(sizes), parameters, strict=True)
        of_parameters = (sum_.view_as(each).to(each.dtype) for sum_, each in sums)
        return jagged.pool(of_query, ctx.at, "sum"), of_events, None, None, *of_parameters


def _launch(
    kernel: Any,
    vectors: tuple[Tensor, Tensor],
    at: Positions,
    parameters: Sequence[Tensor],
    is_mean: bool,
    *rest: Any,
) -> None:
    widths = vectors[1].shape[1], parameters[0].shape[0], parameters[2].shape[0]
    blocks = (max(triton.next_power_of_2(width), 16) for width in widths)
    kernel[(PROGRAMS,)](
        *vectors,
        (at.starts, at.lengths, at.samples),
        tuple(parameters),
        len(vectors[0]),
        *rest,
        S=Shape(is_mean, BLOCK_P, *widths, *blocks),
        # Unmeasured; from the registers that the compiler needs.
        num_warps=8 if kernel is _backward else 4,
        num_stages=1,
    )


@triton.jit
def _matrix(weight, rows, columns, stride, NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """Load a matrix of which `rows` [., 1] and `columns` [1, .] are given, or transposed, zeros outside."""
    inside = (rows < NUM_ROWS) & (columns < NUM_COLUMNS)
    return tl.load(weight + rows * stride + columns, mask=inside, other=0.0)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def _vectors(values, row, takes, S: tl.constexpr):
    column = tl.arange(0, S.BLOCK_D)[None, :]
    inside = takes[:, None] & (column < S.D)
    return tl.load(values + row[:, None] * S.D + column, mask=inside, other=0.0)


@triton.jit
def _block(query, events, at, block, end, S: tl.constexpr):
    """Return positions, their samples, which belong to one, its length, and the vectors of candidates and events."""
    position = tl.arange(0, S.P).to(tl.int64) + block * S.P
    sample = tl.load(at[2] + position, mask=position < end, other=0).to(tl.int64)
    length = tl.load(at[1] + sample)
    offset = position - tl.load(at[0] + sample)
    takes = (position < end) & (offset >= 0) & (offset < length)
    q = _vectors(query, sample, takes, S)
    e = _vectors(events, position, takes, S)
    return position, sample, takes, length, q, e


@triton.jit
def _hidden(q, e, parameters, S: tl.constexpr):
    """Return both hidden layers, float32, and the weights of events."""
    column = tl.arange(0, S.BLOCK_D)
    of_1, of_2 = tl.arange(0, S.BLOCK_1), tl.arange(0, S.BLOCK_2)
    h1 = _zeros(S.P, S.BLOCK_1)
    for part in tl.static_range(4):
        x = q if part == 0 else e if part == 1 else q - e if part == 2 else q * e
        w = _matrix(parameters[0] + part * S.D, of_1[:, None], column[None, :], 4 * S.D, S.H1, S.D)
        h1 += tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee")
    h1 = tl.sigmoid(h1 + tl.load(parameters[1] + of_1, mask=of_1 < S.H1, other=0.0)[None, :])
    w = _matrix(parameters[2], of_2[:, None], of_1[None, :], S.H1, S.H2, S.H1).to(q.dtype)
    h2 = tl.dot(h1.to(q.dtype), tl.trans(w), input_precision="ieee")
    h2 = tl.sigmoid(h2 + tl.load(parameters[3] + of_2, mask=of_2 < S.H2, other=0.0)[None, :])
    # Columns behind the last one have weights of zero.
    w = tl.load(parameters[4] + of_2, mask=of_2 < S.H2, other=0.0)
    return h1, h2, tl.sum(h2 * w[None, :], 1) + tl.load(parameters[5])


@triton.jit
def _end_of(at, count):
    return tl.load(at[0] + count - 1).to(tl.int32) + tl.load(at[1] + count - 1).to(tl.int32)


@triton.jit
def _forward(query, events, at, parameters, count, weighted, S: tl.constexpr):
    end = _end_of(at, count)
    column = tl.arange(0, S.BLOCK_D)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(end, S.P), tl.num_programs(0)):
        position, _, takes, _, q, e = _block(query, events, at, block, end, S)
        _, _, weight = _hidden(q, e, parameters, S)
        result = weight[:, None] * e.to(tl.float32)
        inside = takes[:, None] & (column < S.D)
        out = weighted + position[:, None] * S.D + column
        tl.store(out, result.to(weighted.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    query, events, at, parameters, count, grad, of_events, of_query, partial, size, S: tl.constexpr
):
    end = _end_of(at, count)
    column = tl.arange(0, S.BLOCK_D)
    of_1, of_2 = tl.arange(0, S.BLOCK_1), tl.arange(0, S.BLOCK_2)
    dw1_0 = _zeros(S.BLOCK_1, S.BLOCK_D)
    dw1_1 = _zeros(S.BLOCK_1, S.BLOCK_D)
    dw1_2 = _zeros(S.BLOCK_1, S.BLOCK_D)
    dw1_3 = _zeros(S.BLOCK_1, S.BLOCK_D)
    dw2 = _zeros(S.BLOCK_2, S.BLOCK_1)
    db1 = tl.zeros((tl.constexpr(S.BLOCK_1),), tl.float32)
    db2 = tl.zeros((tl.constexpr(S.BLOCK_2),), tl.float32)
    dw3 = tl.zeros((tl.constexpr(S.BLOCK_2),), tl.float32)
    db3 = tl.zeros((tl.constexpr(S.P),), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(end, S.P), tl.num_programs(0)):
        position, sample, takes, length, q, e = _block(query, events, at, block, end, S)
        h1, h2, weight = _hidden(q, e, parameters, S)
        g = _vectors(grad, sample, takes, S).to(tl.float32)
        if S.IS_MEAN:
            g = g / tl.maximum(length, 1).to(tl.float32)[:, None]
        d3 = tl.sum(g * e.to(tl.float32), 1)
        w3 = tl.load(parameters[4] + of_2, mask=of_2 < S.H2, other=0.0)
        d2 = d3[:, None] * w3[None, :] * h2 * (1 - h2)
        w2 = _matrix(parameters[2], of_2[:, None], of_1[None, :], S.H1, S.H2, S.H1).to(q.dtype)
        d1 = tl.dot(d2.to(q.dtype), w2, input_precision="ieee") * h1 * (1 - h1)
        db3 += d3
        dw3 += tl.sum(d3[:, None] * h2, 0)
        db2 += tl.sum(d2, 0)
        db1 += tl.sum(d1, 0)
        dw2 += tl.dot(tl.trans(d2.to(q.dtype)), h1.to(q.dtype), input_precision="ieee")
        narrow = d1.to(q.dtype)
        across = tl.trans(narrow)
        dw1_0 += tl.dot(across, q, input_precision="ieee")
        dw1_1 += tl.dot(across, e, input_precision="ieee")
        dw1_2 += tl.dot(across, q - e, input_precision="ieee")
        dw1_3 += tl.dot(across, q * e, input_precision="ieee")
        dq = _zeros(S.P, S.BLOCK_D)
        de = weight[:, None] * g
        for part in tl.static_range(4):
            w1 = _matrix(
                parameters[0] + part * S.D, of_1[:, None], column[None, :], 4 * S.D, S.H1, S.D
            )
            dx = tl.dot(narrow, w1.to(q.dtype), input_precision="ieee")
            if part == 0:
                dq += dx
            elif part == 1:
                de += dx
            elif part == 2:
                dq += dx
                de -= dx
            else:
                dq += dx * e.to(tl.float32)
                de += dx * q.to(tl.float32)
        inside = takes[:, None] & (column < S.D)[None, :]
        offset = position[:, None] * S.D + column[None, :]
        tl.store(of_events + offset, de.to(of_events.dtype.element_ty), mask=inside)
        tl.store(of_query + offset, dq.to(of_query.dtype.element_ty), mask=inside)
    # In the order of the parameters.
    out = partial + tl.program_id(0).to(tl.int64) * size
    inside = (of_1 < S.H1)[:, None] & (column < S.D)[None, :]
    of_part = out + of_1[:, None] * (4 * S.D) + column[None, :]
    tl.store(of_part, dw1_0, mask=inside)
    tl.store(of_part + S.D, dw1_1, mask=inside)
    tl.store(of_part + 2 * S.D, dw1_2, mask=inside)
    tl.store(of_part + 3 * S.D, dw1_3, mask=inside)
    out += 4 * S.D * S.H1
    tl.store(out + of_1, db1, mask=of_1 < S.H1)
    out += S.H1
    inside = (of_2 < S.H2)[:, None] & (of_1 < S.H1)[None, :]
    tl.store(out + of_2[:, None] * S.H1 + of_1[None, :], dw2, mask=inside)
    out += S.H1 * S.H2
    tl.store(out + of_2, db2, mask=of_2 < S.H2)
    tl.store(out + S.H2 + of_2, dw3, mask=of_2 < S.H2)
    tl.store(out + 2 * S.H2, tl.sum(db3, 0))


class FieldShape(NamedTuple):
    F: int
    H: int
    K: int
    PRECISION: str
    BLOCK_F: int
    BLOCK_K: int


@torch.compiler.disable
def interact(parts: Tensor, heads: int) -> Tensor:
    """Map query, key, value and residual beside each other, [B, F, 4 * H * K], to [B, F, H * K], as `InteractingLayer`."""
    return _Interact.apply(parts.contiguous(), heads)


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, heads: int) -> Tensor:
        samples, fields, columns = parts.shape
        out = parts.new_empty(samples, fields, columns // 4)
        sizes = fields, heads, columns // (4 * heads)
        blocks = (max(triton.next_power_of_2(size), 16) for size in sizes[::2])
        rounds = parts.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
        rounds &= parts.is_cuda  # Triton's interpreter knows no assembly.
        ctx.shape = FieldShape(*sizes, "tf32" if rounds else "ieee", *blocks)
        _interact[(samples * heads,)](parts, out, None, None, S=ctx.shape, **FIELDS_FORWARD)
        ctx.save_for_backward(parts, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts, out = ctx.saved_tensors
        tensors = parts, out, grad.contiguous(), torch.empty_like(parts)
        _interact[(len(parts) * ctx.shape.H,)](*tensors, S=ctx.shape, **FIELDS_BACKWARD)
        return tensors[-1], None


@triton.jit
def _rounded(x, S: tl.constexpr):
    """Round to the nearest TF32; a product would cut its other bits off, which is twice as far."""
    if S.PRECISION == "tf32":
        x = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    return x


@triton.jit
def _part(parts, field, column, S: tl.constexpr):
    return _rounded(_matrix(parts, field, column, 4 * S.H * S.K, S.F, S.K), S)


@triton.jit
def _slope(grad, out, field, column, S: tl.constexpr):
    """Load the gradient of what ReLU takes."""
    result = _matrix(out, field, column, S.H * S.K, S.F, S.K)
    return tl.where(result <= 0, 0.0, _matrix(grad, field, column, S.H * S.K, S.F, S.K))


@triton.jit
def _store(values, field, column, x, STRIDE: tl.constexpr, S: tl.constexpr):
    inside = (field < S.F) & (column < S.K)
    tl.store(values + field * STRIDE + column, x.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _interact(parts, out, grad, of_parts, S: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Compute the result, or with its gradient that of the parts. Keys are rows of scores, queries columns."""
    WIDTH: tl.constexpr = S.H * S.K
    sample, head = tl.program_id(0) // S.H, tl.program_id(0) % S.H
    start = sample.to(tl.int64) * (S.F * WIDTH)
    parts += 4 * start + head * S.K
    out += start + head * S.K
    key, down = tl.arange(0, S.BLOCK_F), tl.arange(0, S.BLOCK_K)[:, None]
    across = tl.arange(0, S.BLOCK_K)[None, :]
    k = _part(parts + WIDTH, key[:, None], across, S)
    if grad is None:
        values = _part(parts + 2 * WIDTH, key[None, :], down, S)
    else:
        keys = _part(parts + WIDTH, key[None, :], down, S)
        v = _part(parts + 2 * WIDTH, key[:, None], across, S)
        grad += start + head * S.K
        of_parts += 4 * start + head * S.K
        of_k, of_v = _zeros(S.BLOCK_F, S.BLOCK_K), _zeros(S.BLOCK_F, S.BLOCK_K)
    for block in range(0, S.F, BLOCK_Q):
        row = block + tl.arange(0, BLOCK_Q)[:, None]
        query = block + tl.arange(0, BLOCK_Q)[None, :]
        queries = _part(parts, query, down, S)
        scores = tl.dot(k, queries, input_precision=S.PRECISION)
        scores = tl.where(key[:, None] < S.F, scores, -float("inf"))
        powers = tl.exp2(scores * LOG2_E - tl.max(scores, 0, keep_dims=True) * LOG2_E)
        attention = powers * (1 / tl.sum(powers, 0, keep_dims=True))
        weights = _rounded(attention, S).to(k.dtype)
        if grad is None:
            total = tl.dot(values, weights, input_precision=S.PRECISION)
            total += _matrix(parts + 3 * WIDTH, query, down, 4 * WIDTH, S.F, S.K)
            # As torch, NaN where the sum is NaN.
            _store(out, query, down, tl.where(total <= 0, 0.0, total), WIDTH, S)
        else:
            slope = _slope(grad, out, row, across, S)
            _store(of_parts + 3 * WIDTH, row, across, slope, 4 * WIDTH, S)
            of_v += tl.dot(weights, _rounded(slope, S), input_precision=S.PRECISION)
            slopes = _rounded(_slope(grad, out, query, down, S), S)
            of_attention = tl.dot(v, slopes, input_precision=S.PRECISION)
            mean = tl.sum(attention * of_attention, 0, keep_dims=True)
            of_scores = _rounded(attention * (of_attention - mean), S).to(k.dtype)
            of_k += tl.dot(of_scores, _part(parts, row, across, S), input_precision=S.PRECISION)
            of_q = tl.dot(keys, of_scores, input_precision=S.PRECISION)
            _store(of_parts, query, down, of_q, 4 * WIDTH, S)
    if grad is not None:
        _store(of_parts + WIDTH, key[:, None], across, of_k, 4 * WIDTH, S)
        _store(of_parts + 2 * WIDTH, key[:, None], across, of_v, 4 * WIDTH, S)
