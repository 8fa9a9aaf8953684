"""Kernels of `nn.ops.hstu_attention`, forward and backward, with one order of every sum.

The backward pass takes two: one program per block of keys for the gradients of keys and values, one per block of queries for
that of queries. So nothing is added atomically, at the price of computing the scores twice: 7 products for 5.

With h = score / 2 and u = 1 + tanh(h), silu(score) = h u and its derivative is u (1 + h (2 - u)) / 2. On a GPU 16-bit inputs take
the hardware's approximate tanh, whose error is below that of 16 bits; one such operation costs as much as 256 multiply-adds of
tensor cores, so nothing else may be as slow. Factors that are the same for all scores come at the end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from nn.ops.column_blocks import GradientBlocks
from nn.ops.hstu_attention import JaggedPositions
from nn.ops.triton.jagged_attention import with_packed_heads

# Columns of a head are powers of two, of at least 16 for tensor cores.
FORWARD = {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
OF_KEYS = {"BLOCK_Q": 64, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3}
OF_QUERIES = {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
# With a few queries per sample the kernels read keys and values once, and memory is the bound.
FEW_QUERIES = {"BLOCK_Q": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
# Products of float32 are three of tensor cores each, and compile for minutes in large blocks.
FLOAT32 = {"BLOCK_Q": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1}


class Operands(NamedTuple):
    """Inputs of all kernels."""

    q: Tensor
    k: Tensor
    v: Tensor
    norm: Tensor
    starts: Tensor
    lengths: Tensor
    q_starts: Tensor
    q_lengths: Tensor
    scale: float


class Counts(NamedTuple):
    """Numbers of blocks of the longest sample, of samples, and of positions, of what a kernel has a program for."""

    blocks: int
    samples: int
    positions: int


class Shape(NamedTuple):
    """Constants of all kernels; strides are those of a position, in elements."""

    HEADS: int
    COLUMNS: int
    Q_STRIDE: int
    K_STRIDE: int
    V_STRIDE: int
    OUT_STRIDE: int
    CANDIDATES: int
    APPROXIMATE: bool
    PRECISION: str


@torch.compiler.disable
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: Tensor,
    keys: JaggedPositions,
    queries: JaggedPositions,
    num_candidates: int,
    gradients: tuple[GradientBlocks, Sequence[int]] | None = None,
) -> Tensor:
    """Compute `nn.ops.hstu_attention.hstu_attention` without a bias.

    `gradients`: blocks for those of q, k and v, which are as large, and the numbers of the three.
    """
    columns = q.shape[-1]
    padding = max(16, triton.next_power_of_2(columns)) - columns
    if padding:
        q, k, v = (pad(of, (0, padding)) for of in (q, k, v))
        gradients = None
    # One number for all samples has a stride of 0.
    norm = norm.contiguous()
    out = _Attention.apply(q, k, v, norm, keys, queries, num_candidates, columns**-0.5, gradients)
    return out[..., :columns] if padding else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: Tensor,
        keys: JaggedPositions,
        queries: JaggedPositions,
        num_candidates: int,
        scale: float,
        gradients: tuple[GradientBlocks, Sequence[int]] | None,
    ) -> Tensor:
        q, k, v = (with_packed_heads(of) for of in (q, k, v))
        ctx.positions, ctx.options = (keys, queries), (num_candidates, scale)
        ctx.gradients = gradients
        ctx.save_for_backward(q, k, v, norm)
        x = Operands(q, k, v, norm, *_places(keys, queries), scale)
        out, blocks = _empty(q), _blocks(FORWARD, q, queries)
        _launch(_forward, (x, out), queries, "BLOCK_Q", blocks, num_candidates)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, norm = ctx.saved_tensors
        (keys, queries), (num_candidates, scale) = ctx.positions, ctx.options
        if ctx.gradients is None:
            of_q, of_k, of_v = _empty(q), _empty(k), _empty(v)
        else:
            blocks, numbers = ctx.gradients
            of_q, of_k, of_v = (blocks.block(n).unflatten(1, q.shape[1:]) for n in numbers)
        x = Operands(q, k, v, norm, *_places(keys, queries), scale)
        inputs = x, grad.contiguous()
        sizes = _blocks(OF_KEYS, q, queries)
        _launch(_of_keys, (*inputs, of_k, of_v), keys, "BLOCK_K", sizes, num_candidates)
        sizes = _blocks(OF_QUERIES, q, queries)
        _launch(_of_queries, (*inputs, of_q), queries, "BLOCK_Q", sizes, num_candidates)
        return of_q, of_k, of_v, *[None] * 6


def _places(
    keys: JaggedPositions, queries: JaggedPositions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return keys.starts, keys.lengths, queries.starts, queries.lengths


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _blocks(blocks: dict[str, int], q: Tensor, queries: JaggedPositions) -> dict[str, int]:
    if q.is_cuda and q.dtype is torch.float32:
        return FLOAT32
    return FEW_QUERIES if queries.max_length <= FEW_QUERIES["BLOCK_Q"] else blocks


def _launch(
    kernel: Any,
    arguments: tuple[Any, ...],
    over: JaggedPositions,
    block: str,
    blocks: dict[str, int],
    num_candidates: int,
) -> None:
    """Launch a kernel over blocks of keys or queries; its arguments begin with the operands and end with a result."""
    x, out, heads = arguments[0], arguments[-1], arguments[0].q.shape[1]
    # Those behind the last sample's clear the positions of none.
    num_blocks = triton.cdiv(over.max_length, blocks[block])
    counts = Counts(num_blocks, len(over.starts), len(over.samples))
    is_float32 = x.q.dtype is torch.float32
    strides = x.q.stride(0), x.k.stride(0), x.v.stride(0), out.stride(0)
    # Triton's interpreter knows no assembly.
    how = num_candidates, x.q.is_cuda and not is_float32, "tf32x3" if is_float32 else "tf32"
    shape = Shape(heads, x.q.shape[2], *strides, *how)
    kernel[(num_blocks * (counts.samples + 1) * heads,)](*arguments, counts, S=shape, **blocks)


@triton.jit
def _one_plus_tanh(h, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return 1.0 + tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1
        )
    return 2.0 / (1.0 + tl.exp(-2.0 * h))


@triton.jit
def _sees(query, key, length, S: tl.constexpr):
    if S.CANDIDATES == 1:
        return key <= query
    return (key == query) | ((key < query) & (key < length - S.CANDIDATES))


@triton.jit
def _sample(x, counts, S: tl.constexpr):
    """Return number of the block, sample, head, and where the sample's keys and queries are."""
    program = tl.program_id(0)
    sample = program // counts.blocks // S.HEADS
    head = program // counts.blocks % S.HEADS
    start = tl.load(x.starts + sample).to(tl.int64)
    q_start = tl.load(x.q_starts + sample).to(tl.int64)
    length = tl.load(x.lengths + sample).to(tl.int32)
    q_length = tl.load(x.q_lengths + sample).to(tl.int32)
    return program % counts.blocks, sample, head, start, length, q_start, q_length


@triton.jit
def _is_behind(counts, S: tl.constexpr):
    """Return whether a program is one of those behind the last sample's."""
    return tl.program_id(0) >= counts.samples * counts.blocks * S.HEADS


@triton.jit
def _clear(out, starts, lengths, counts, BLOCK: tl.constexpr, S: tl.constexpr):
    """Store zeros at the positions behind the last sample's."""
    program = tl.program_id(0) - counts.samples * counts.blocks * S.HEADS
    end = tl.load(starts + counts.samples - 1) + tl.load(lengths + counts.samples - 1)
    start = end.to(tl.int64)
    count = (counts.positions - start).to(tl.int32)
    out += start * S.OUT_STRIDE + program % S.HEADS * S.COLUMNS
    zeros = tl.zeros([BLOCK, tl.constexpr(S.COLUMNS)], tl.float32)
    for first in range(program // S.HEADS * BLOCK, count, counts.blocks * BLOCK):
        # As many positions as samples may leave unused, times their columns, exceed 32 bits.
        row = first + tl.arange(0, BLOCK).to(tl.int64)
        _store(out, row, count, zeros, S)


@triton.jit
def _rows(first, row, stride, count, S: tl.constexpr):
    """Load rows [BLOCK, COLUMNS], zeros from `count` on."""
    pointer = first + row[:, None] * stride + tl.arange(0, S.COLUMNS)[None, :]
    return tl.load(pointer, mask=row[:, None] < count, other=0.0)


@triton.jit
def _store(first, row, count, values, S: tl.constexpr):
    target = first + row[:, None] * S.OUT_STRIDE + tl.arange(0, S.COLUMNS)[None, :]
    tl.store(target, values.to(first.dtype.element_ty), mask=row[:, None] < count)


@triton.jit
def _forward(x, out, counts, S: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    if _is_behind(counts, S):
        _clear(out, x.q_starts, x.q_lengths, counts, BLOCK_Q, S)
        return
    block, sample, head, start, length, q_start, q_length = _sample(x, counts, S)
    # The last queries have most keys: they begin first.
    row = (counts.blocks - 1 - block) * BLOCK_Q
    if row >= q_length:
        return
    rows = row + tl.arange(0, BLOCK_Q)
    first = length - q_length + row
    query = length - q_length + rows
    k = x.k + (start * S.K_STRIDE + head * S.COLUMNS)
    v = x.v + (start * S.V_STRIDE + head * S.COLUMNS)
    of_rows = _rows(x.q + q_start * S.Q_STRIDE + head * S.COLUMNS, rows, S.Q_STRIDE, q_length, S)
    sums = tl.zeros([BLOCK_Q, tl.constexpr(S.COLUMNS)], tl.float32)
    unmasked = tl.minimum(first, length - S.CANDIDATES) // BLOCK_K * BLOCK_K
    for n in range(0, unmasked, BLOCK_K):
        key = n + tl.arange(0, BLOCK_K)
        of_keys = _rows(k, key, S.K_STRIDE, length, S)
        values = _rows(v, key, S.V_STRIDE, length, S)
        h = tl.dot(of_rows, tl.trans(of_keys), input_precision=S.PRECISION) * (0.5 * x.scale)
        weights = h * _one_plus_tanh(h, S.APPROXIMATE)
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision=S.PRECISION)
    for n in range(unmasked, tl.minimum(first + BLOCK_Q, length), BLOCK_K):
        key = n + tl.arange(0, BLOCK_K)
        of_keys = _rows(k, key, S.K_STRIDE, length, S)
        values = _rows(v, key, S.V_STRIDE, length, S)
        h = tl.dot(of_rows, tl.trans(of_keys), input_precision=S.PRECISION) * (0.5 * x.scale)
        seen = _sees(query[:, None], key[None, :], length, S)
        weights = tl.where(seen, h * _one_plus_tanh(h, S.APPROXIMATE), 0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision=S.PRECISION)
    sums = sums / tl.load(x.norm + sample).to(tl.float32)
    out += q_start * S.OUT_STRIDE + head * S.COLUMNS
    _store(out, rows, q_length, sums, S)


@triton.jit
def _of_keys(
    x, grad, of_k, of_v, counts, S: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    if _is_behind(counts, S):
        _clear(of_k, x.starts, x.lengths, counts, BLOCK_K, S)
        _clear(of_v, x.starts, x.lengths, counts, BLOCK_K, S)
        return
    # The first keys have most queries, and begin first.
    block, sample, head, start, length, q_start, q_length = _sample(x, counts, S)
    if block * BLOCK_K >= length:
        return
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    stride = S.HEADS * S.COLUMNS
    q = x.q + (q_start * S.Q_STRIDE + head * S.COLUMNS)
    grad += q_start * stride + head * S.COLUMNS
    of_keys = _rows(x.k + start * S.K_STRIDE + head * S.COLUMNS, key, S.K_STRIDE, length, S)
    values = _rows(x.v + start * S.V_STRIDE + head * S.COLUMNS, key, S.V_STRIDE, length, S)
    k_sums = tl.zeros([BLOCK_K, tl.constexpr(S.COLUMNS)], tl.float32)
    v_sums = tl.zeros([BLOCK_K, tl.constexpr(S.COLUMNS)], tl.float32)
    before = length - q_length
    first = tl.maximum(block * BLOCK_K - before, 0) // BLOCK_Q * BLOCK_Q
    # Queries from here on see all keys of the block, if those are no candidates.
    unmasked = tl.cdiv(block * BLOCK_K + BLOCK_K - 1 - before, BLOCK_Q) * BLOCK_Q
    if S.CANDIDATES > 1:
        unmasked = tl.where((block + 1) * BLOCK_K > length - S.CANDIDATES, q_length, unmasked)
    unmasked = tl.minimum(tl.maximum(unmasked, first), q_length)
    for is_masked in tl.static_range(1, -1, -1):
        for m in range(
            first if is_masked else unmasked, unmasked if is_masked else q_length, BLOCK_Q
        ):
            rows = m + tl.arange(0, BLOCK_Q)
            of_rows = _rows(q, rows, S.Q_STRIDE, q_length, S)
            grads = _rows(grad, rows, stride, q_length, S)
            h = tl.dot(of_keys, tl.trans(of_rows), input_precision=S.PRECISION) * (0.5 * x.scale)
            # Here, so that the next product runs while its result is used.
            of_weights = tl.dot(values, tl.trans(grads), input_precision=S.PRECISION)
            u = _one_plus_tanh(h, S.APPROXIMATE)
            if is_masked:
                seen = _sees(before + rows[None, :], key[:, None], length, S)
                u = tl.where(seen, u, 0.0)  # which makes both the weight and its derivative 0
            weights = h * u
            v_sums = tl.dot(weights.to(grads.dtype), grads, v_sums, input_precision=S.PRECISION)
            of_scores = of_weights * (u + weights * (2.0 - u))
            k_sums = tl.dot(
                of_scores.to(of_rows.dtype), of_rows, k_sums, input_precision=S.PRECISION
            )
    inverse = 1.0 / tl.load(x.norm + sample).to(tl.float32)
    k_sums = k_sums * (0.5 * x.scale * inverse)
    target = start * S.OUT_STRIDE + head * S.COLUMNS
    _store(of_k + target, key, length, k_sums, S)
    _store(of_v + target, key, length, v_sums * inverse, S)


@triton.jit
def _of_queries(
    x, grad, of_q, counts, S: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    if _is_behind(counts, S):
        _clear(of_q, x.q_starts, x.q_lengths, counts, BLOCK_Q, S)
        return
    block, sample, head, start, length, q_start, q_length = _sample(x, counts, S)
    row = (counts.blocks - 1 - block) * BLOCK_Q
    if row >= q_length:
        return
    rows = row + tl.arange(0, BLOCK_Q)
    query = length - q_length + rows
    stride = S.HEADS * S.COLUMNS
    k = x.k + (start * S.K_STRIDE + head * S.COLUMNS)
    v = x.v + (start * S.V_STRIDE + head * S.COLUMNS)
    of_rows = _rows(x.q + q_start * S.Q_STRIDE + head * S.COLUMNS, rows, S.Q_STRIDE, q_length, S)
    grad += q_start * stride + head * S.COLUMNS
    grads = _rows(grad, rows, stride, q_length, S)
    sums = tl.zeros([BLOCK_Q, tl.constexpr(S.COLUMNS)], tl.float32)
    # All blocks are masked: at 512 positions a second loop costs more than the masks do.
    for n in range(0, tl.minimum(length - q_length + row + BLOCK_Q, length), BLOCK_K):
        key = n + tl.arange(0, BLOCK_K)
        of_keys = _rows(k, key, S.K_STRIDE, length, S)
        values = _rows(v, key, S.V_STRIDE, length, S)
        h = tl.dot(of_rows, tl.trans(of_keys), input_precision=S.PRECISION) * (0.5 * x.scale)
        u = _one_plus_tanh(h, S.APPROXIMATE)
        u = tl.where(_sees(query[:, None], key[None, :], length, S), u, 0.0)
        of_weights = tl.dot(grads, tl.trans(values), input_precision=S.PRECISION)
        of_scores = of_weights * (u + h * u * (2.0 - u))
        sums = tl.dot(of_scores.to(of_keys.dtype), of_keys, sums, input_precision=S.PRECISION)
    factor = 0.5 * x.scale / tl.load(x.norm + sample).to(tl.float32)
    of_q += q_start * S.OUT_STRIDE + head * S.COLUMNS
    _store(of_q, rows, q_length, sums * factor, S)
