"""DIN's attention of a candidate over events on a GPU; the plain version is in `nn.layers.interactions.target_attention`.

A kernel a direction holds the unit's input and hidden layers in registers and computes them again in the backward pass, so
that nothing of their width lies in memory: of 64, 80 and 40 columns they were nine tenths of the traffic. Blocks behind the
last event are skipped. Sums have one order.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.jagged import SamplePositions
from nn.ops.target_attention import PROGRAMS
from nn.ops.triton import jagged
from nn.ops.triton.column_sums import column_sums

# B: samples, C: positions, D: columns, H1, H2: widths of the two hidden layers

BLOCK_P = 64
"""Positions that a program takes at once."""


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
    return _Attend.apply(query, events, (at.starts, at.lengths, at.samples), how, *parameters)


class _Positions:
    """Positions of samples, as `nn.ops.triton.jagged` takes them."""

    max_length = 0

    def __init__(self, starts: Tensor, lengths: Tensor, samples: Tensor) -> None:
        self.starts, self.lengths, self.samples = starts, lengths, samples


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        events: Tensor,
        at: tuple[Tensor, ...],
        how: str,
        *parameters: Tensor,
    ) -> Tensor:
        query, events = query.contiguous(), events.contiguous()
        ctx.save_for_backward(query, events, *at, *parameters)
        ctx.how = how
        weighted = torch.empty_like(events)
        _launch(_forward, query, events, at, parameters, weighted)
        return jagged.pool(weighted, _Positions(*at), how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, events, *at, w1, b1, w2, b2, w3, b3 = ctx.saved_tensors
        parameters = w1, b1, w2, b2, w3, b3
        # Blocks that are skipped have zeros; sums over samples read no such position.
        of_events, of_query = torch.zeros_like(events), torch.empty_like(events)
        sizes = [each.numel() for each in parameters]
        partial = grad.new_empty(PROGRAMS, sum(sizes), dtype=torch.float32)
        _launch(
            _backward,
            query,
            events,
            tuple(at),
            parameters,
            *(grad.contiguous(), of_events, of_query, partial, sum(sizes), ctx.how == "mean"),
        )
        sums = column_sums(partial).split(sizes)
        return (
            jagged.pool(of_query, _Positions(*at), "sum"),
            of_events,
            None,
            None,
            *(
                sum_.view_as(each).to(each.dtype)
                for sum_, each in zip(sums, parameters, strict=True)
            ),
        )


def _launch(
    kernel: Any,
    query: Tensor,
    events: Tensor,
    at: tuple[Tensor, ...],
    parameters: Sequence[Tensor],
    *rest: Any,
) -> None:
    (first, second), columns = (parameters[0].shape[0], parameters[2].shape[0]), events.shape[1]
    kernel[(PROGRAMS,)](
        query,
        events,
        at,
        tuple(parameters),
        len(query),
        *rest,
        D=columns,
        H1=first,
        H2=second,
        P=BLOCK_P,
        BLOCK_D=max(triton.next_power_of_2(columns), 16),
        BLOCK_1=max(triton.next_power_of_2(first), 16),
        BLOCK_2=max(triton.next_power_of_2(second), 16),
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
def _vectors(values, row, takes, D: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = takes[:, None] & (column < D)
    return tl.load(values + row[:, None] * D + column, mask=inside, other=0.0)


@triton.jit
def _block(query, events, at, block, end, P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return positions, their samples, which belong to one, its length, and the vectors of candidates and events."""
    position = tl.arange(0, P).to(tl.int64) + block * P
    sample = tl.load(at[2] + position, mask=position < end, other=0).to(tl.int64)
    length = tl.load(at[1] + sample)
    offset = position - tl.load(at[0] + sample)
    takes = (position < end) & (offset >= 0) & (offset < length)
    q = _vectors(query, sample, takes, D, BLOCK_D)
    e = _vectors(events, position, takes, D, BLOCK_D)
    return position, sample, takes, length, q, e


@triton.jit
def _hidden(
    q,
    e,
    parameters,
    D: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_1: tl.constexpr,
    BLOCK_2: tl.constexpr,
):
    """Return both hidden layers, float32, and the weights of events."""
    column, of_1, of_2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_1), tl.arange(0, BLOCK_2)
    h1 = tl.zeros((q.shape[0], BLOCK_1), tl.float32)
    for part in tl.static_range(4):
        x = q if part == 0 else e if part == 1 else q - e if part == 2 else q * e
        w = _matrix(parameters[0] + part * D, of_1[:, None], column[None, :], 4 * D, H1, D)
        h1 += tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee")
    h1 = tl.sigmoid(h1 + tl.load(parameters[1] + of_1, mask=of_1 < H1, other=0.0)[None, :])
    w = _matrix(parameters[2], of_2[:, None], of_1[None, :], H1, H2, H1).to(q.dtype)
    h2 = tl.dot(h1.to(q.dtype), tl.trans(w), input_precision="ieee")
    h2 = tl.sigmoid(h2 + tl.load(parameters[3] + of_2, mask=of_2 < H2, other=0.0)[None, :])
    # Columns behind the last one have weights of zero.
    w = tl.load(parameters[4] + of_2, mask=of_2 < H2, other=0.0)
    return h1, h2, tl.sum(h2 * w[None, :], 1) + tl.load(parameters[5])


@triton.jit
def _end_of(at, count):
    return tl.load(at[0] + count - 1).to(tl.int32) + tl.load(at[1] + count - 1).to(tl.int32)


@triton.jit
def _forward(
    query,
    events,
    at,
    parameters,
    count,
    weighted,
    D: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_1: tl.constexpr,
    BLOCK_2: tl.constexpr,
):
    end = _end_of(at, count)
    column = tl.arange(0, BLOCK_D)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(end, P), tl.num_programs(0)):
        position, _, takes, _, q, e = _block(query, events, at, block, end, P, D, BLOCK_D)
        _, _, weight = _hidden(q, e, parameters, D, H1, H2, BLOCK_D, BLOCK_1, BLOCK_2)
        result = weight[:, None] * e.to(tl.float32)
        inside = takes[:, None] & (column < D)
        out = weighted + position[:, None] * D + column
        tl.store(out, result.to(weighted.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    query,
    events,
    at,
    parameters,
    count,
    grad,
    of_events,
    of_query,
    partial,
    num_parameters,
    IS_MEAN: tl.constexpr,
    D: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_1: tl.constexpr,
    BLOCK_2: tl.constexpr,
):
    end = _end_of(at, count)
    column, of_1, of_2 = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_1), tl.arange(0, BLOCK_2)
    dw1_0 = tl.zeros((BLOCK_1, BLOCK_D), tl.float32)
    dw1_1 = tl.zeros((BLOCK_1, BLOCK_D), tl.float32)
    dw1_2 = tl.zeros((BLOCK_1, BLOCK_D), tl.float32)
    dw1_3 = tl.zeros((BLOCK_1, BLOCK_D), tl.float32)
    dw2 = tl.zeros((BLOCK_2, BLOCK_1), tl.float32)
    db1 = tl.zeros((BLOCK_1,), tl.float32)
    db2 = tl.zeros((BLOCK_2,), tl.float32)
    dw3 = tl.zeros((BLOCK_2,), tl.float32)
    db3 = tl.zeros((P,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(end, P), tl.num_programs(0)):
        position, sample, takes, length, q, e = _block(query, events, at, block, end, P, D, BLOCK_D)
        h1, h2, weight = _hidden(q, e, parameters, D, H1, H2, BLOCK_D, BLOCK_1, BLOCK_2)
        g = _vectors(grad, sample, takes, D, BLOCK_D).to(tl.float32)
        if IS_MEAN:
            g = g / tl.maximum(length, 1).to(tl.float32)[:, None]
        d3 = tl.sum(g * e.to(tl.float32), 1)
        w3 = tl.load(parameters[4] + of_2, mask=of_2 < H2, other=0.0)
        d2 = d3[:, None] * w3[None, :] * h2 * (1 - h2)
        w2 = _matrix(parameters[2], of_2[:, None], of_1[None, :], H1, H2, H1).to(q.dtype)
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
        dq = tl.zeros((P, BLOCK_D), tl.float32)
        de = weight[:, None] * g
        for part in tl.static_range(4):
            w1 = _matrix(parameters[0] + part * D, of_1[:, None], column[None, :], 4 * D, H1, D)
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
        inside = takes[:, None] & (column < D)[None, :]
        offset = position[:, None] * D + column[None, :]
        tl.store(of_events + offset, de.to(of_events.dtype.element_ty), mask=inside)
        tl.store(of_query + offset, dq.to(of_query.dtype.element_ty), mask=inside)
    # In the order of the parameters.
    out = partial + tl.program_id(0).to(tl.int64) * num_parameters
    inside = (of_1 < H1)[:, None] & (column < D)[None, :]
    of_part = out + of_1[:, None] * (4 * D) + column[None, :]
    tl.store(of_part, dw1_0, mask=inside)
    tl.store(of_part + D, dw1_1, mask=inside)
    tl.store(of_part + 2 * D, dw1_2, mask=inside)
    tl.store(of_part + 3 * D, dw1_3, mask=inside)
    out += 4 * D * H1
    tl.store(out + of_1, db1, mask=of_1 < H1)
    out += H1
    inside = (of_2 < H2)[:, None] & (of_1 < H1)[None, :]
    tl.store(out + of_2[:, None] * H1 + of_1[None, :], dw2, mask=inside)
    out += H1 * H2
    tl.store(out + of_2, db2, mask=of_2 < H2)
    tl.store(out + H2 + of_2, dw3, mask=of_2 < H2)
    tl.store(out + 2 * H2, tl.sum(db3, 0))
