"""The functions of `nn.ops.jagged` on a GPU: a kernel a direction, and sums in one order."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.ops.jagged import Pooling, SamplePositions

# B: samples, C: positions, D: columns, H: heads

BLOCK_P = 32
"""Positions that a program reads at once."""


@torch.compiler.disable
def expand(values: Tensor, at: SamplePositions) -> Tensor:
    """Map [B, D] to [C, D]."""
    return _Copy.apply(values, (at.starts, at.lengths, at.samples), "sum", True)


@torch.compiler.disable
def pool(values: Tensor, at: SamplePositions, how: Pooling) -> Tensor:
    """Map [C, D] to [B, D]."""
    return _Copy.apply(values, (at.starts, at.lengths, at.samples), how, False)


@torch.compiler.disable
def softmax(scores: Tensor, at: SamplePositions) -> Tensor:
    """Map scores [C] or [C, H] to the same shape."""
    return _Softmax.apply(scores, at.starts, at.lengths)


class _Copy(torch.autograd.Function):
    """A vector to the positions of its sample, or a sum over them: each is the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, at: tuple[Tensor, ...], how: Pooling, to_positions: bool
    ) -> Tensor:
        ctx.rest = at, how, to_positions
        values = values.contiguous()
        count = len(at[2 if to_positions else 0])
        out = values.new_empty(count, *values.shape[1:])
        width = values[0].numel()
        block = min(triton.next_power_of_2(width), 128)
        grid = (triton.cdiv(count, BLOCK_P) if to_positions else count, triton.cdiv(width, block))
        kernel = _expand if to_positions else _pool
        kernel[grid](values, out, at, count, width, how, BLOCK_P, block, num_warps=2)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        *rest, to_positions = ctx.rest
        return _Copy.apply(grad, *rest, not to_positions), None, None, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, *at: Tensor) -> Tensor:
        out = _softmax_of(scores.contiguous(), None, at)
        ctx.save_for_backward(out, *at)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out, *at = ctx.saved_tensors
        return _softmax_of(out, grad.contiguous(), tuple(at)), None, None


def _softmax_of(scores: Tensor, grad: Tensor | None, at: tuple[Tensor, ...]) -> Tensor:
    """Return the softmax of scores, or of a softmax and its gradient that of its scores."""
    result = torch.zeros_like(scores)
    heads = scores[0].numel()
    block = triton.next_power_of_2(heads)
    _softmax[(len(at[0]),)](scores, grad, result, at, heads, BLOCK_P, block, num_warps=1)
    return result


@triton.jit
def _expand(values, out, at, count, width, HOW: tl.constexpr, P: tl.constexpr, D: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    column = tl.program_id(1) * D + tl.arange(0, D)[None, :]
    sample = tl.load(at[2] + position, mask=position < count, other=0).to(tl.int64)
    length = tl.load(at[1] + sample)
    offset = position - tl.load(at[0] + sample)
    takes = (position < count) & (offset >= 0) & (offset < length)
    if HOW == "last":
        takes = takes & (offset == length - 1)
    row = values + sample[:, None] * width + column
    result = tl.load(row, mask=takes[:, None] & (column < width), other=0.0).to(tl.float32)
    if HOW == "mean":
        result = result / tl.maximum(length, 1).to(tl.float32)[:, None]
    inside = (position < count)[:, None] & (column < width)
    tl.store(out + position[:, None] * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pool(values, out, at, count, width, HOW: tl.constexpr, P: tl.constexpr, D: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * D + tl.arange(0, D)
    start = tl.load(at[0] + sample).to(tl.int64)
    length = tl.load(at[1] + sample).to(tl.int32)
    total = tl.zeros((D,), tl.float32)
    for first in range(tl.maximum(length - 1, 0) if HOW == "last" else 0, length, P):
        event = first + tl.arange(0, P)[:, None]
        inside = (event < length) & (column < width)[None, :]
        rows = tl.load(values + (start + event) * width + column[None, :], mask=inside, other=0.0)
        total += tl.sum(rows.to(tl.float32), 0)
    if HOW == "mean":
        total = total / tl.maximum(length, 1).to(tl.float32)
    tl.store(out + sample * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _softmax(scores, grad, result, at, heads, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr):
    start = tl.load(at[0] + tl.program_id(0)).to(tl.int64)
    length = tl.load(at[1] + tl.program_id(0)).to(tl.int32)
    head = tl.arange(0, BLOCK_H)[None, :]
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for writes in tl.static_range(2):
        for first in range(0, length, BLOCK_P):
            event = first + tl.arange(0, BLOCK_P)[:, None]
            offset = (start + event) * heads + head
            inside = (event < length) & (head < heads)
            block = tl.load(scores + offset, mask=inside, other=0.0).to(tl.float32)
            if grad is not None:
                slope = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
                if writes:
                    block = block * (slope - total[None, :])
                else:
                    total += tl.sum(block * slope, 0)
            elif writes:
                block = tl.exp(block - top[None, :]) / total[None, :]
            else:
                block = tl.where(event < length, block, float("-inf"))
                higher = tl.maximum(top, tl.max(block, 0))
                total = total * tl.exp(top - higher) + tl.sum(tl.exp(block - higher[None, :]), 0)
                top = higher
            if writes:
                tl.store(result + offset, block.to(result.dtype.element_ty), mask=inside)
