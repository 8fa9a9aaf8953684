"""Kernels of `nn.ops.hstu_attention`, forward and backward, with one order of every sum.

The backward pass takes two: one program per block of keys for the gradients of keys and values, one per block of queries for
that of queries. So nothing is added atomically, at the price of computing the scores twice: 7 products for 5.

With h = score / 2 and u = 1 + tanh(h), silu(score) = h u and its derivative is u (1 + h (2 - u)) / 2. On a GPU 16-bit inputs take
the hardware's approximate tanh, whose error is below that of 16 bits; one such operation costs as much as 256 multiply-adds of
tensor cores, so nothing else may be as slow. Factors that are the same for all scores come at the end.
"""

from collections.abc import Sequence
from typing import Any

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
        out = _empty(q)
        blocks = _blocks(FORWARD, q, queries)
        arguments = (q, k, v, *_positions(keys, queries), norm, out)
        _launch(_forward, queries, "BLOCK_Q", blocks, arguments, q, k, v, num_candidates, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, norm = ctx.saved_tensors
        keys, queries = ctx.positions
        grad = grad.contiguous()
        if ctx.gradients is None:
            of_q, of_k, of_v = _empty(q), _empty(k), _empty(v)
        else:
            blocks, numbers = ctx.gradients
            of_q, of_k, of_v = (blocks.block(n).unflatten(1, q.shape[1:]) for n in numbers)
        inputs = (q, k, v, *_positions(keys, queries), norm, grad)
        sizes = _blocks(OF_KEYS, q, queries)
        _launch(_of_keys, keys, "BLOCK_K", sizes, (*inputs, of_k, of_v), q, k, v, *ctx.options)
        sizes = _blocks(OF_QUERIES, q, queries)
        _launch(_of_queries, queries, "BLOCK_Q", sizes, (*inputs, of_q), q, k, v, *ctx.options)
        return of_q, of_k, of_v, *[None] * 6


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _blocks(blocks: dict[str, int], q: Tensor, queries: JaggedPositions) -> dict[str, int]:
    if q.is_cuda and q.dtype is torch.float32:
        return FLOAT32
    return FEW_QUERIES if queries.max_length <= FEW_QUERIES["BLOCK_Q"] else blocks


def _positions(keys: JaggedPositions, queries: JaggedPositions) -> tuple[Tensor, ...]:
    return keys.starts, keys.lengths, queries.starts, queries.lengths


def _launch(
    kernel: Any,
    over: JaggedPositions,
    block: str,
    blocks: dict[str, int],
    arguments: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_candidates: int,
    scale: float,
) -> None:
    heads = q.shape[1]
    # Those behind the last sample's clear the positions of none.
    num_blocks = triton.cdiv(over.max_length, blocks[block])
    is_float32 = q.dtype is torch.float32
    kernel[(num_blocks * (len(over.starts) + 1) * heads,)](
        *arguments,
        scale,
        num_blocks,
        len(over.starts),
        len(over.samples),
        Q_STRIDE=q.stride(0),
        K_STRIDE=k.stride(0),
        V_STRIDE=v.stride(0),
        OUT_STRIDE=arguments[-1].stride(0),
        HEADS=heads,
        COLUMNS=q.shape[2],
        CANDIDATES=num_candidates,
        # Triton's interpreter knows no assembly.
        APPROXIMATE=q.is_cuda and not is_float32,
        PRECISION="tf32x3" if is_float32 else "tf32",
        **blocks,
    )


@triton.jit
def _one_plus_tanh(h, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return 1.0 + tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1
        )
    return 2.0 / (1.0 + tl.exp(-2.0 * h))


@triton.jit
def _sees(query, key, length, CANDIDATES: tl.constexpr):
    if CANDIDATES == 1:
        return key <= query
    return (key == query) | ((key < query) & (key < length - CANDIDATES))


@triton.jit
def _sample(num_blocks, starts, lengths, q_starts, q_lengths, HEADS: tl.constexpr):
    """Return number of the block, sample, head, and where the sample's keys and queries are."""
    program = tl.program_id(0)
    sample = program // num_blocks // HEADS
    head = program // num_blocks % HEADS
    start, q_start = tl.load(starts + sample).to(tl.int64), tl.load(q_starts + sample).to(tl.int64)
    length, q_length = (
        tl.load(lengths + sample).to(tl.int32),
        tl.load(q_lengths + sample).to(tl.int32),
    )
    return program % num_blocks, sample, head, start, length, q_start, q_length


@triton.jit
def _clear(
    out,
    starts,
    lengths,
    counts,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store zeros at the positions behind the last sample's; `counts` of blocks, samples and positions."""
    num_blocks, num_samples, num_positions = counts
    program = tl.program_id(0) - num_samples * num_blocks * HEADS
    start = (tl.load(starts + num_samples - 1) + tl.load(lengths + num_samples - 1)).to(tl.int64)
    count = (num_positions - start).to(tl.int32)
    out += start * STRIDE + program % HEADS * COLUMNS
    zeros = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for first in range(program // HEADS * BLOCK, count, num_blocks * BLOCK):
        # As many positions as samples may leave unused, times their columns, exceed 32 bits.
        row = first + tl.arange(0, BLOCK).to(tl.int64)
        _store(out, row, STRIDE, count, zeros, COLUMNS)


@triton.jit
def _rows(first, row, stride, count, COLUMNS: tl.constexpr):
    """Load rows [BLOCK, COLUMNS], zeros from `count` on."""
    column = tl.arange(0, COLUMNS)
    return tl.load(
        first + row[:, None] * stride + column[None, :], mask=row[:, None] < count, other=0.0
    )


@triton.jit
def _store(first, row, stride, count, values, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    target = first + row[:, None] * stride + column[None, :]
    tl.store(target, values.to(first.dtype.element_ty), mask=row[:, None] < count)


@triton.jit
def _forward(
    q,
    k,
    v,
    starts,
    lengths,
    q_starts,
    q_lengths,
    norm,
    out,
    scale,
    num_blocks,
    num_samples,
    num_positions,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if tl.program_id(0) >= num_samples * num_blocks * HEADS:
        counts = num_blocks, num_samples, num_positions
        _clear(out, q_starts, q_lengths, counts, OUT_STRIDE, HEADS, COLUMNS, BLOCK_Q)
        return
    block, sample, head, start, length, q_start, q_length = _sample(
        num_blocks, starts, lengths, q_starts, q_lengths, HEADS
    )
    # The last queries have most keys: they begin first.
    row = (num_blocks - 1 - block) * BLOCK_Q
    if row >= q_length:
        return
    rows = row + tl.arange(0, BLOCK_Q)
    first = length - q_length + row
    query = length - q_length + rows
    k += start * K_STRIDE + head * COLUMNS
    v += start * V_STRIDE + head * COLUMNS
    of_rows = _rows(q + q_start * Q_STRIDE + head * COLUMNS, rows, Q_STRIDE, q_length, COLUMNS)
    sums = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
    unmasked = tl.minimum(first, length - CANDIDATES) // BLOCK_K * BLOCK_K
    for n in range(0, unmasked, BLOCK_K):
        key = n + tl.arange(0, BLOCK_K)
        of_keys = _rows(k, key, K_STRIDE, length, COLUMNS)
        values = _rows(v, key, V_STRIDE, length, COLUMNS)
        h = tl.dot(of_rows, tl.trans(of_keys), input_precision=PRECISION) * (0.5 * scale)
        weights = h * _one_plus_tanh(h, APPROXIMATE)
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision=PRECISION)
    for n in range(unmasked, tl.minimum(first + BLOCK_Q, length), BLOCK_K):
        key = n + tl.arange(0, BLOCK_K)
        of_keys = _rows(k, key, K_STRIDE, length, COLUMNS)
        values = _rows(v, key, V_STRIDE, length, COLUMNS)
        h = tl.dot(of_rows, tl.trans(of_keys), input_precision=PRECISION) * (0.5 * scale)
        seen = _sees(query[:, None], key[None, :], length, CANDIDATES)
        weights = tl.where(seen, h * _one_plus_tanh(h, APPROXIMATE), 0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision=PRECISION)
    sums = sums / tl.load(norm + sample).to(tl.float32)
    out += q_start * OUT_STRIDE + head * COLUMNS
    _store(out, rows, OUT_STRIDE, q_length, sums, COLUMNS)


@triton.jit
def _of_keys(
    q,
    k,
    v,
    starts,
    lengths,
    q_starts,
    q_lengths,
    norm,
    grad,
    of_k,
    of_v,
    scale,
    num_blocks,
    num_samples,
    num_positions,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if tl.program_id(0) >= num_samples * num_blocks * HEADS:
        counts = num_blocks, num_samples, num_positions
        _clear(of_k, starts, lengths, counts, OUT_STRIDE, HEADS, COLUMNS, BLOCK_K)
        _clear(of_v, starts, lengths, counts, OUT_STRIDE, HEADS, COLUMNS, BLOCK_K)
        return
    # The first keys have most queries, and begin first.
    block, sample, head, start, length, q_start, q_length = _sample(
        num_blocks, starts, lengths, q_starts, q_lengths, HEADS
    )
    if block * BLOCK_K >= length:
        return
    key = block * BLOCK_K + tl.arange(0, BLOCK_K)
    stride = HEADS * COLUMNS
    q += q_start * Q_STRIDE + head * COLUMNS
    grad += q_start * stride + head * COLUMNS
    of_keys = _rows(k + start * K_STRIDE + head * COLUMNS, key, K_STRIDE, length, COLUMNS)
    values = _rows(v + start * V_STRIDE + head * COLUMNS, key, V_STRIDE, length, COLUMNS)
    k_sums = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
    v_sums = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
    before = length - q_length
    first = tl.maximum(block * BLOCK_K - before, 0) // BLOCK_Q * BLOCK_Q
    # Queries from here on see all keys of the block, if those are no candidates.
    unmasked = tl.cdiv(block * BLOCK_K + BLOCK_K - 1 - before, BLOCK_Q) * BLOCK_Q
    if CANDIDATES > 1:
        unmasked = tl.where((block + 1) * BLOCK_K > length - CANDIDATES, q_length, unmasked)
    unmasked = tl.minimum(tl.maximum(unmasked, first), q_length)
    for is_masked in tl.static_range(1, -1, -1):
        for m in range(
            first if is_masked else unmasked, unmasked if is_masked else q_length, BLOCK_Q
        ):
            rows = m + tl.arange(0, BLOCK_Q)
            of_rows = _rows(q, rows, Q_STRIDE, q_length, COLUMNS)
            grads = _rows(grad, rows, stride, q_length, COLUMNS)
            h = tl.dot(of_keys, tl.trans(of_rows), input_precision=PRECISION) * (0.5 * scale)
            # Here, so that the next product runs while its result is used.
            of_weights = tl.dot(values, tl.trans(grads), input_precision=PRECISION)
            u = _one_plus_tanh(h, APPROXIMATE)
            if is_masked:
                seen = _sees(before + rows[None, :], key[:, None], length, CANDIDATES)
                u = tl.where(seen, u, 0.0)  # which makes both the weight and its derivative 0
            weights = h * u
            v_sums = tl.dot(weights.to(grads.dtype), grads, v_sums, input_precision=PRECISION)
            of_scores = of_weights * (u + weights * (2.0 - u))
            k_sums = tl.dot(of_scores.to(of_rows.dtype), of_rows, k_sums, input_precision=PRECISION)
    inverse = 1.0 / tl.load(norm + sample).to(tl.float32)
    k_sums = k_sums * (0.5 * scale * inverse)
    target = start * OUT_STRIDE + head * COLUMNS
    _store(of_k + target, key, OUT_STRIDE, length, k_sums, COLUMNS)
    _store(of_v + target, key, OUT_STRIDE, length, v_sums * inverse, COLUMNS)


@triton.jit
def _of_queries(
    q,
    k,
    v,
    starts,
    lengths,
    q_starts,
    q_lengths,
    norm,
    grad,
    of_q,
    scale,
    num_blocks,
    num_samples,
    num_positions,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if tl.program_id(0) >= num_samples * num_blocks * HEADS:
        counts = num_blocks, num_samples, num_positions
        _clear(of_q, q_starts, q_lengths, counts, OUT_STRIDE, HEADS, COLUMNS, BLOCK_Q)
        return
    block, sample, head, start, length, q_start, q_length = _sample(
        num_blocks, starts, lengths, q_starts, q_lengths, HEADS
    )
    row = (num_blocks - 1 - block) * BLOCK_Q
    if row >= q_length:
        return
    rows = row + tl.arange(0, BLOCK_Q)
    query = length - q_length + rows
    stride = HEADS * COLUMNS
    k += start * K_STRIDE + head * COLUMNS
    v += start * V_STRIDE + head * COLUMNS
    of_rows = _rows(q + q_start * Q_STRIDE + head * COLUMNS, rows, Q_STRIDE, q_length, COLUMNS)
    grad += q_start * stride + head * COLUMNS
    grads = _rows(grad, rows, stride, q_length, COLUMNS)
    sums = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
    # All blocks are masked: at 512 positions a second loop costs more than the masks do.
    for n in range(0, tl.minimum(length - q_length + row + BLOCK_Q, length), BLOCK_K):
        key = n + tl.arange(0, BLOCK_K)
        of_keys = _rows(k, key, K_STRIDE, length, COLUMNS)
        values = _rows(v, key, V_STRIDE, length, COLUMNS)
        h = tl.dot(of_rows, tl.trans(of_keys), input_precision=PRECISION) * (0.5 * scale)
        u = _one_plus_tanh(h, APPROXIMATE)
        u = tl.where(_sees(query[:, None], key[None, :], length, CANDIDATES), u, 0.0)
        of_weights = tl.dot(grads, tl.trans(values), input_precision=PRECISION)
        of_scores = of_weights * (u + h * u * (2.0 - u))
        sums = tl.dot(of_scores.to(of_keys.dtype), of_keys, sums, input_precision=PRECISION)
    factor = 0.5 * scale / tl.load(norm + sample).to(tl.float32)
    of_q += q_start * OUT_STRIDE + head * COLUMNS
    _store(of_q, rows, OUT_STRIDE, q_length, sums * factor, COLUMNS)
