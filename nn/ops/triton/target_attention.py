"""Attention on a GPU of DIN's candidate over events, and between the vectors of a sample, AutoInt's interacting layer.

A kernel a direction holds the unit's input and hidden layers in registers and computes them again in the backward pass, so
that nothing of their width lies in memory: of 64, 80 and 40 columns they were nine tenths of the traffic. Blocks behind the
last event are skipped. Sums have one order.

A program of AutoInt's layer takes one sample and head at a time. Projections and scores stay on the chip, and the backward
pass computes them again: memory has the vectors, and the result, which the next layer keeps anyway. The plain versions are in
`nn.layers.interactions`.
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

# B: samples, C: positions, D: columns, H1, H2: widths of the two hidden layers; of AutoInt F: vectors of a sample, H: heads,
# K: columns of a head

BLOCK_P = 64
"""Positions that a program takes at once."""
FIELD_PROGRAMS = 528
"""Of AutoInt's backward pass, each with sums of its own: 4 for each multiprocessor of an H100."""
FIELD_FORWARD = FIELD_BACKWARD = {"num_warps": 4, "num_stages": 1}


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
        ctx: Any,
        query: Tensor,
        events: Tensor,
        at: Positions,
        is_mean: bool,
        *parameters: Tensor,
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
    """Load a matrix of which `rows` [., 1] and `columns` [1, .] are given, zeros outside."""
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
    D: int
    K: int
    H: int
    PRECISION: str
    BLOCK_F: int
    BLOCK_D: int
    BLOCK_K: int


@torch.compiler.disable
def interact(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    """Map [B, F, D] by the weights [4, H * K, D] of query, key, value and residual to [B, F, H * K], as `InteractingLayer`."""
    return _Interact.apply(x, weight, heads)


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, heads: int) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        _, fields, columns = x.shape
        sizes = fields, columns, weight.shape[1] // heads
        blocks = (max(triton.next_power_of_2(size), 16) for size in sizes)
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
        ctx.shape = FieldShape(*sizes, heads, precision, *blocks)
        out = x.new_empty(*x.shape[:2], weight.shape[1])
        if len(x):
            _interact[(heads * len(x),)](x, weight, out, S=ctx.shape, **FIELD_FORWARD)
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        of_x = torch.empty_like(x)
        partial = x.new_empty(FIELD_PROGRAMS, weight.numel(), dtype=torch.float32)
        tensors = grad.contiguous(), x, weight, out, of_x, partial
        _interact_gradient[(FIELD_PROGRAMS,)](*tensors, len(x), S=ctx.shape, **FIELD_BACKWARD)
        return of_x, column_sums(partial).view_as(weight).to(weight.dtype), None


@triton.jit
def _columns_of(
    sample, first, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr
):
    """Return where columns of a sample's vectors lie, [F, columns], and which are there."""
    field, column = tl.arange(0, S.BLOCK_F)[:, None], tl.arange(0, BLOCK)[None, :]
    offset = (sample * S.F + field.to(tl.int64)) * STRIDE + first + column
    return offset, (field < S.F) & (column < COLUMNS)


@triton.jit
def _weights(head, S: tl.constexpr):
    """Return where a head's weights of all four projections lie and which are there, [4 K, D]."""
    row, column = tl.arange(0, 4 * S.BLOCK_K)[:, None], tl.arange(0, S.BLOCK_D)[None, :]
    part, of_head = row // S.BLOCK_K, row % S.BLOCK_K
    offset = ((part * S.H + head) * S.K + of_head) * S.D + column
    return offset, (of_head < S.K) & (column < S.D)


@triton.jit
def _product(a, b, S: tl.constexpr):
    return tl.dot(a, b, input_precision=S.PRECISION)


@triton.jit
def _halves(x, S: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (S.BLOCK_F, 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _beside(a, b, S: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (S.BLOCK_F, 2 * a.shape[1]))


@triton.jit
def _attend(vectors, weights, S: tl.constexpr):
    """Return query, key, value [F, K] in the dtype of the vectors, residual [F, K], and how much each takes of each [F, F]."""
    first, last = _halves(_product(vectors, tl.trans(weights), S), S)
    query, key = _halves(first.to(vectors.dtype), S)
    value, residual = _halves(last, S)
    scores = _product(query, tl.trans(key), S)
    scores = tl.where(tl.arange(0, S.BLOCK_F)[None, :] < S.F, scores, -float("inf"))
    powers = tl.exp(scores - tl.max(scores, 1)[:, None])
    attention = powers * (1 / tl.sum(powers, 1))[:, None]
    return query, key, value.to(vectors.dtype), residual, attention


@triton.jit
def _interact(x, weight, out, S: tl.constexpr):
    sample, head = tl.program_id(0) // S.H, tl.program_id(0) % S.H
    offset, inside = _columns_of(sample, 0, S.D, S.D, S.BLOCK_D, S)
    vectors = tl.load(x + offset, mask=inside, other=0.0)
    offset, inside = _weights(head, S)
    weights = tl.load(weight + offset, mask=inside, other=0.0).to(vectors.dtype)
    _, _, value, total, attention = _attend(vectors, weights, S)
    total += _product(attention.to(vectors.dtype), value, S)
    offset, inside = _columns_of(sample, head * S.K, S.H * S.K, S.K, S.BLOCK_K, S)
    # As torch, NaN where the sum is NaN.
    tl.store(out + offset, tl.where(total <= 0, 0.0, total).to(vectors.dtype), mask=inside)


@triton.jit
def _interact_gradient(grad, x, weight, out, of_x, partial, samples, S: tl.constexpr):
    for head in range(S.H):
        place, exists = _weights(head, S)
        weights = tl.load(weight + place, mask=exists, other=0.0).to(x.dtype.element_ty)
        of_weights = tl.zeros((4 * tl.constexpr(S.BLOCK_K), tl.constexpr(S.BLOCK_D)), tl.float32)
        for sample in range(tl.program_id(0), samples, tl.num_programs(0)):
            offset, inside = _columns_of(sample, head * S.K, S.H * S.K, S.K, S.BLOCK_K, S)
            result = tl.load(out + offset, mask=inside, other=0.0)
            slope = tl.load(grad + offset, mask=inside, other=0.0)
            slope = tl.where(result <= 0, 0.0, slope).to(x.dtype.element_ty)
            offset, inside = _columns_of(sample, 0, S.D, S.D, S.BLOCK_D, S)
            vectors = tl.load(x + offset, mask=inside, other=0.0)
            query, key, value, _, attention = _attend(vectors, weights, S)
            of_value = _product(tl.trans(attention.to(vectors.dtype)), slope, S)
            of_attention = _product(slope, tl.trans(value), S)
            mean = tl.sum(attention * of_attention, 1)[:, None]
            of_scores = (attention * (of_attention - mean)).to(vectors.dtype)
            of_query, of_key = _product(of_scores, key, S), _product(tl.trans(of_scores), query, S)
            first, last = _beside(of_query, of_key, S), _beside(of_value, slope.to(tl.float32), S)
            slopes = _beside(first, last, S).to(vectors.dtype)
            total = _product(slopes, weights, S)
            if head:
                total += tl.load(of_x + offset, mask=inside, other=0.0)
            tl.store(of_x + offset, total.to(vectors.dtype), mask=inside)
            of_weights += _product(tl.trans(slopes), vectors, S)
        tl.store(partial + tl.program_id(0) * 4 * S.H * S.K * S.D + place, of_weights, mask=exists)
        # The next head reads what other threads of the program may have written.
        tl.debug_barrier()
