"""AutoInt's interacting layer on a GPU; the plain version is in `nn.models.autoint`.

A program takes one sample and head at a time. Projections and scores stay on the chip, and the backward pass computes them
again: memory has only the vectors and the result, which the next layer keeps anyway. Each program adds the gradients of the
weights over its samples, and `column_sums` those of all programs: every sum has one order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.triton.column_sums import column_sums

# B: samples, F: vectors of a sample, D: columns of a vector, H: heads, K: columns of a head

PROGRAMS = 528
"""Of the backward pass, each with sums of its own: 4 for each multiprocessor of an H100."""
FORWARD = BACKWARD = {"num_warps": 4, "num_stages": 1}


class Shape(NamedTuple):
    F: int
    D: int
    K: int
    H: int
    BLOCK_F: int
    BLOCK_D: int
    BLOCK_K: int
    PRECISION: str


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
        ctx.shape = Shape(*sizes, heads, *blocks, precision)
        out = x.new_empty(*x.shape[:2], weight.shape[1])
        if len(x):
            _forward[(heads * len(x),)](x, weight, out, S=ctx.shape, **FORWARD)
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        of_x = torch.empty_like(x)
        partial = x.new_empty(PROGRAMS, weight.numel(), dtype=torch.float32)
        tensors = grad.contiguous(), x, weight, out, of_x, partial
        _backward[(PROGRAMS,)](*tensors, len(x), S=ctx.shape, **BACKWARD)
        return of_x, column_sums(partial).view_as(weight).to(weight.dtype), None


@triton.jit
def _vectors(
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
def _dot(a, b, S: tl.constexpr):
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
    first, last = _halves(_dot(vectors, tl.trans(weights), S), S)
    query, key = _halves(first.to(vectors.dtype), S)
    value, residual = _halves(last, S)
    scores = _dot(query, tl.trans(key), S)
    scores = tl.where(tl.arange(0, S.BLOCK_F)[None, :] < S.F, scores, -float("inf"))
    powers = tl.exp(scores - tl.max(scores, 1)[:, None])
    attention = powers * (1 / tl.sum(powers, 1))[:, None]
    return query, key, value.to(vectors.dtype), residual, attention


@triton.jit
def _forward(x, weight, out, S: tl.constexpr):
    sample, head = tl.program_id(0) // S.H, tl.program_id(0) % S.H
    offset, inside = _vectors(sample, 0, S.D, S.D, S.BLOCK_D, S)
    vectors = tl.load(x + offset, mask=inside, other=0.0)
    offset, inside = _weights(head, S)
    weights = tl.load(weight + offset, mask=inside, other=0.0).to(vectors.dtype)
    _, _, value, total, attention = _attend(vectors, weights, S)
    total += _dot(attention.to(vectors.dtype), value, S)
    offset, inside = _vectors(sample, head * S.K, S.H * S.K, S.K, S.BLOCK_K, S)
    # As torch, NaN where the sum is NaN.
    tl.store(out + offset, tl.where(total <= 0, 0.0, total).to(vectors.dtype), mask=inside)


@triton.jit
def _backward(grad, x, weight, out, of_x, partial, samples, S: tl.constexpr):
    for head in range(S.H):
        place, exists = _weights(head, S)
        weights = tl.load(weight + place, mask=exists, other=0.0).to(x.dtype.element_ty)
        of_weights = tl.zeros((4 * tl.constexpr(S.BLOCK_K), tl.constexpr(S.BLOCK_D)), tl.float32)
        for sample in range(tl.program_id(0), samples, tl.num_programs(0)):
            offset, inside = _vectors(sample, head * S.K, S.H * S.K, S.K, S.BLOCK_K, S)
            result = tl.load(out + offset, mask=inside, other=0.0)
            slope = tl.load(grad + offset, mask=inside, other=0.0)
            slope = tl.where(result <= 0, 0.0, slope).to(x.dtype.element_ty)
            offset, inside = _vectors(sample, 0, S.D, S.D, S.BLOCK_D, S)
            vectors = tl.load(x + offset, mask=inside, other=0.0)
            query, key, value, _, attention = _attend(vectors, weights, S)
            of_value = _dot(tl.trans(attention.to(vectors.dtype)), slope, S)
            of_attention = _dot(slope, tl.trans(value), S)
            mean = tl.sum(attention * of_attention, 1)[:, None]
            of_scores = (attention * (of_attention - mean)).to(vectors.dtype)
            of_query, of_key = _dot(of_scores, key, S), _dot(tl.trans(of_scores), query, S)
            first, last = _beside(of_query, of_key, S), _beside(of_value, slope.to(tl.float32), S)
            slopes = _beside(first, last, S).to(vectors.dtype)
            total = _dot(slopes, weights, S)
            if head:
                total += tl.load(of_x + offset, mask=inside, other=0.0)
            tl.store(of_x + offset, total.to(vectors.dtype), mask=inside)
            of_weights += _dot(tl.trans(slopes), vectors, S)
        tl.store(partial + tl.program_id(0) * 4 * S.H * S.K * S.D + place, of_weights, mask=exists)
        # The next head reads what other threads of the program may have written.
        tl.debug_barrier()
