"""Softmax attention within samples on a GPU; `nn.ops.jagged_attention` has the same in plain torch, and the biases.

As in FlashAttention-2 (arXiv:2307.08691) scores are never stored: the forward pass keeps the logarithm of each row's sum.
Each sum of the backward pass has one order: a program per block of queries makes dQ, one per block of keys dK and dV, and
one per band of distances the gradients of biases. Exponents and logarithms are of base 2.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from nn.ops.column_blocks import GradientBlocks
from nn.ops.jagged import SamplePositions
from nn.ops.jagged_attention import ScoreBias, time_shift

# C: positions of keys, Q: of queries, H: heads, K: columns of a head, R: columns of a position bias, T: of a time bias

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
BAND: tl.constexpr = tl.constexpr(32)
"""Queries and keys of a block of `_bias_sums`."""
SAMPLE_GROUPS = 128
"""Programs that share the samples of a band; a number of the GPU would change the order of its sums."""
PROGRAMS = 32768
"""Programs that keep a GPU busy to the end: those of more samples take several blocks of one each."""
CLEARED = tl.constexpr(128)
"""Positions of a program of `_clear`."""


class Operands(NamedTuple):
    """Inputs of all kernels: tensors first, then numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    position: Tensor | None
    time: Tensor | None
    times: Tensor | None
    query_starts: Tensor
    query_lengths: Tensor
    starts: Tensor
    lengths: Tensor
    q_stride: int
    k_stride: int
    v_stride: int
    num_queries: int
    max_queries: int
    max_length: int
    scale: float


class Shape(NamedTuple):
    H: int
    K: int
    BLOCK_K: int
    R: int
    SHIFT: int
    CAUSAL: bool
    PRECISION: str


class Saved(NamedTuple):
    """Further inputs of the backward pass."""

    out: Tensor
    grad: Tensor
    log_sums: Tensor  # of each query's exponents, [H, Q]
    products: Tensor  # of each query's result and gradient, [H, Q]; `_query_gradient` writes it


@torch.compiler.disable
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: SamplePositions,
    queries: SamplePositions,
    causal: bool,
    scale: float,
    bias: ScoreBias,
    gradients: GradientBlocks | None = None,
) -> Tensor:
    """Map queries [Q, H, K], keys and values [C, H, K], all of one dtype, to [Q, H, K].

    `gradients`: blocks for those of q, k and v, whose positions are the same.
    """
    q, k, v = (with_packed_heads(each.to(q.dtype)) for each in (q, k, v))
    biases = (bias.position, bias.time, bias.times)
    biases = tuple(None if each is None else each.contiguous() for each in biases)
    samples = (queries.starts, queries.lengths, at.starts, at.lengths)
    sizes = (q.stride(0), k.stride(0), v.stride(0), len(q), queries.max_length, at.max_length)
    shape = Shape(
        q.shape[1],
        q.shape[2],
        max(triton.next_power_of_2(q.shape[2]), 16),
        0 if bias.position is None else bias.position.shape[1],
        0 if bias.time is None else time_shift(bias.time.shape[1]),
        causal,
        "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
    )
    options = shape, (*sizes, scale), gradients, queries.samples
    return _Attend.apply(options, q, k, v, *biases, *samples)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Any) -> Tensor:
        ctx.options = shape, numbers, _, samples = options
        x = Operands(*tensors, *numbers)
        out = torch.empty_like(x.q, memory_format=torch.contiguous_format)
        _clear_unused(out, x, samples)
        log_sums = out.new_empty(shape.H, len(out), dtype=torch.float32)
        _launch(_forward, (x, out, log_sums), shape, blocks(x)[0], "M")
        ctx.save_for_backward(out, log_sums, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, log_sums, *tensors = ctx.saved_tensors
        shape, numbers, gradients, samples = ctx.options
        x = Operands(*tensors, *numbers)
        saved = Saved(out, grad.contiguous(), log_sums, torch.empty_like(log_sums))
        if gradients is None:
            of_q, of_k, of_v = (each.new_zeros(each.shape) for each in x[:3])
        else:
            parts = map(gradients.block, range(3))
            of_q, of_k, of_v = (part.unflatten(1, x.q.shape[1:]) for part in parts)
            _clear_unused(gradients.memory, x, samples)
        stride, (_, of_queries, of_keys) = of_q.stride(0), blocks(x)
        _launch(_query_gradient, (x, saved, of_q, stride), shape, of_queries, "M")
        _launch(_key_gradient, (x, saved, of_k, of_v, stride), shape, of_keys, "N")
        of_bias: tuple[Tensor | None, ...] = (None, None)
        if any(ctx.needs_input_grad[4:6]):
            of_bias = _bias_gradients(x, saved, shape)
        return None, of_q, of_k, of_v, *of_bias, *[None] * 5


def _launch(
    kernel: Any, arguments: tuple, shape: Shape, options: dict[str, int], over: str
) -> None:
    """Launch a kernel over blocks of queries (M) or keys (N); of many samples a program takes several of one head and sample."""
    x = arguments[0]
    samples = len(x.starts) * shape.H
    num_blocks = triton.cdiv(x.max_queries if over == "M" else x.max_length, options[over])
    parts = min(num_blocks, max(PROGRAMS // samples, 1))
    kernel[(parts * samples,)](*arguments, parts, shape, **options)


def _clear_unused(values: Tensor, x: Operands, samples: Tensor) -> None:
    """Set the positions of queries that belong to no sample to zero, of contiguous values [C, ...]."""
    width = values[0].numel()
    grid = (triton.cdiv(len(values), CLEARED.value),)
    block = triton.next_power_of_2(width)
    _clear[grid](values, samples, x.query_starts, x.query_lengths, len(values), width, block)


def _bias_gradients(x: Operands, saved: Saved, shape: Shape) -> tuple[Tensor | None, ...]:
    band = BAND.value
    last = triton.cdiv(x.max_length - 1, band)
    first = 0 if shape.CAUSAL else -last
    grid = (last - first + 1, min(SAMPLE_GROUPS, len(x.starts)), shape.H)
    by_distance = saved.log_sums.new_empty(*grid[::-1], 2 * band)
    by_time = saved.log_sums.new_empty(*grid[::-1], 0 if x.time is None else x.time.shape[1])
    _bias_sums[grid](x, saved, by_distance, by_time, len(x.starts), first, shape)
    of_position = None
    if x.position is not None:
        # The distances of a band are the second half of the one before and the first half of the next.
        low, high = by_distance.sum(1).unflatten(2, (2, band)).unbind(2)
        low, high = low.flatten(1), high.flatten(1)
        R = shape.R
        sums = pad(low, (R, band + R)) + pad(high, (band + R, R))
        # The ends of the table stand for all distances beyond.
        begin = R + (1 - first) * band - (0 if shape.CAUSAL else R // 2)
        of_position = sums[:, begin : begin + R].clone()
        of_position[:, 0] += sums[:, :begin].sum(1)
        of_position[:, -1] += sums[:, begin + R :].sum(1)
        of_position = of_position.to(x.position.dtype)
    return of_position, None if x.time is None else by_time.sum((1, 2)).to(x.time.dtype)


def blocks(x: Operands) -> list[dict[str, int]]:
    """Return queries (M) and keys (N) of a block of scores, and how it is compiled: forward pass, dQ, dK and dV.

    The fastest on an H200, of heads of 32 columns at 200 and 20 keys on average, of 64 at 1,000.
    """
    columns, length = x.q.shape[2], min(x.max_queries, x.max_length)
    if x.q.element_size() == 2 and length > (256 if columns <= 32 else 512):
        if columns <= 32:
            block = {"M": 64, "N": 32, "num_warps": 4, "num_stages": 3}
            return [block, block, block | {"M": 32, "N": 64}]
        block = {"M": 128, "N": 64, "num_warps": 4, "num_stages": 3}
        if columns <= 64:
            return [block, block, block | {"M": 64, "num_stages": 2}]
        backward = {"N": 64, "num_warps": 8, "num_stages": 2}
        return [block | {"num_warps": 8}, {"M": 128} | backward, {"M": 64} | backward | {"N": 128}]
    if x.q.element_size() == 2 and columns <= 32 and x.max_queries > 16:
        return [{"M": 32, "N": 32, "num_warps": 2, "num_stages": 2}] * 3
    size = 64 if x.q.element_size() == 2 and x.max_length > 64 else 32
    few = 16 if x.max_queries <= 16 else size
    return [{"M": few, "N": size, "num_warps": 4, "num_stages": 2}] * 3


def with_packed_heads(x: Tensor) -> Tensor:
    """Return [C, H, K] with all heads of a position side by side; positions may be further apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def _load(values, offset, length, start, stride, head, S: tl.constexpr):
    """Load a head at some offsets of a sample, [offsets, BLOCK_K]; zeros for those outside of the sample."""
    column = tl.arange(0, S.BLOCK_K)[None, :]
    inside = ((offset >= 0) & (offset < length))[:, None]
    if S.K != S.BLOCK_K:
        inside = inside & (column < S.K)
    first = values + start * stride + head * S.K
    return tl.load(first + offset[:, None] * stride + column, mask=inside, other=0.0)


@triton.jit
def _store(out, values, offset, length, start, stride, head, S: tl.constexpr):
    column = tl.arange(0, S.BLOCK_K)[None, :]
    inside = (offset < length)[:, None] & (column < S.K)
    first = out + start * stride + head * S.K
    tl.store(first + offset[:, None] * stride + column, values.to(out.dtype.element_ty), inside)


@triton.jit
def _clear(values, samples, starts, lengths, count, width, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * CLEARED + tl.arange(0, CLEARED)
    sample = tl.load(samples + position, mask=position < count, other=0)
    offset = position - tl.load(starts + sample)
    is_used = (offset >= 0) & (offset < tl.load(lengths + sample))
    column = tl.arange(0, BLOCK)[None, :]
    clears = ((position < count) & ~is_used)[:, None] & (column < width)
    tl.store(values + position[:, None] * width + column, 0.0, mask=clears)


@triton.jit
def _of_sample(x, sample, head):
    """Return what `_load` needs of a sample, and the offset of its first query among its keys.

    Queries have the offsets of keys, the last one that of the last key; their `start` is where the one of offset 0 would be.
    """
    length = tl.load(x.lengths + sample).to(tl.int32)
    first = length - tl.load(x.query_lengths + sample).to(tl.int32)
    query_start = tl.load(x.query_starts + sample).to(tl.int64) - first
    return (tl.load(x.starts + sample).to(tl.int64), query_start, length, head), first


@triton.jit
def _part(x, parts, S: tl.constexpr):
    """Return `_of_sample` of the program's sample and head, and its part of their blocks: those of a sample lie side by side."""
    program = tl.program_id(0) // parts
    at, first = _of_sample(x, program // S.H, program % S.H)
    return at, first, tl.program_id(0) % parts


@triton.jit
def _queries(x, saved, i, at, S: tl.constexpr):
    """Load queries, gradients of their results, and what `saved` has of each, its index and the logarithm of its sum."""
    _, start, length, head = at
    q = _load(x.q, i, length, start, x.q_stride, head, S)
    grad = _load(saved.grad, i, length, start, S.H * S.K, head, S)
    row = head * x.num_queries + start + i
    # Infinite behind the last query, so that its weights are zero.
    return q, grad, row, tl.load(saved.log_sums + row, mask=i < length, other=float("inf"))


@triton.jit
def _keys(x, j, at, S: tl.constexpr):
    start, _, length, head = at
    k = _load(x.k, j, length, start, x.k_stride, head, S)
    return k, _load(x.v, j, length, start, x.v_stride, head, S)


@triton.jit
def _scores(x, a, b, i, j, at, S: tl.constexpr):
    """Return scores a . b times log2(e) of queries i and keys j, of which one is [offsets, 1] and the other [1, offsets]."""
    head = at[3]
    scores = tl.dot(a, tl.trans(b), input_precision=S.PRECISION) * (x.scale * LOG2_E)
    if x.position is not None:
        index = tl.minimum(tl.maximum(i - j + (0 if S.CAUSAL else S.R // 2), 0), S.R - 1)
        scores += tl.load(x.position + head * S.R + index).to(tl.float32) * LOG2_E
    if x.time is not None:
        bias = x.time + head * (1 << (28 - S.SHIFT)) + _time_buckets(x, i, j, at, S)
        scores += tl.load(bias).to(tl.float32) * LOG2_E
    return scores


@triton.jit
def _time_buckets(x, i, j, at, S: tl.constexpr):
    """Return `nn.ops.jagged_attention.time_bucket` of pairs."""
    start, _, length, _ = at
    of_query = tl.load(x.times + start + i, mask=i < length, other=0.0)
    of_key = tl.load(x.times + start + j, mask=(j >= 0) & (j < length), other=0.0)
    bits = tl.maximum(tl.abs(of_query - of_key), 1.0).to(tl.int32, bitcast=True) - (127 << 23)
    return tl.minimum(bits >> S.SHIFT, (1 << (28 - S.SHIFT)) - 1)


@triton.jit
def _is_pair(i, j, at, S: tl.constexpr):
    is_pair = (i < at[2]) & (j >= 0) & (j < at[2])
    if S.CAUSAL:
        is_pair = is_pair & (i >= j)
    return is_pair


@triton.jit
def _slopes(x, pair, slopes, rows, j, at, masked: tl.constexpr, S: tl.constexpr):
    """Return weights and gradients of scores.

    `pair`: queries and keys; `slopes`: gradients and values, or in either the second comes first. `rows`: of each query its
    offset, the logarithm of its sum, and the product of its result and gradient.
    """
    i, log_sum, product = rows
    weights = tl.exp2(_scores(x, pair[0], pair[1], i, j, at, S) - log_sum)
    if masked:
        weights = tl.where(_is_pair(i, j, at, S), weights, 0.0)
    of_weights = tl.dot(slopes[0], tl.trans(slopes[1]), input_precision=S.PRECISION)
    return weights, weights * (of_weights - product)


@triton.jit(do_not_specialize=["parts"])
def _forward(x, out, log_sums, parts, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at, begin, part = _part(x, parts, S)
    _, start, length, head = at
    num_blocks = tl.cdiv(length - begin, M)
    for number in range(part, num_blocks, parts):
        # Late queries have most keys: they begin first.
        first = begin + (num_blocks - 1 - number) * M
        i = first + tl.arange(0, M)
        q = _load(x.q, i, length, start, x.q_stride, head, S)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        mixed = tl.zeros((M, tl.constexpr(S.BLOCK_K)), tl.float32)
        # Blocks whose keys all queries attend to, then those that need a mask.
        whole = (first if S.CAUSAL else length) // N * N
        end = tl.minimum(first + M, length) if S.CAUSAL else length
        for masked in tl.static_range(2):
            for block in range(whole if masked else 0, end if masked else whole, N):
                j = block + tl.arange(0, N)
                k, v = _keys(x, j, at, S)
                scores = _scores(x, q, k, i[:, None], j[None, :], at, S)
                if masked:
                    is_key = (i[:, None] >= j[None, :]) if S.CAUSAL else (j < length)[None, :]
                    scores = tl.where(is_key, scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                weights = tl.exp2(scores - higher[:, None])
                shrink = tl.exp2(top - higher)
                total = total * shrink + tl.sum(weights, 1)
                mixed = mixed * shrink[:, None]
                mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=S.PRECISION)
                top = higher
        _store(out, mixed / total[:, None], i, length, start, S.H * S.K, head, S)
        log_sum = top + tl.log2(total)
        tl.store(log_sums + head * x.num_queries + start + i, log_sum, mask=i < length)


@triton.jit(do_not_specialize=["parts"])
def _query_gradient(
    x, saved, of_q, stride, parts, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    at, begin, part = _part(x, parts, S)
    _, start, length, head = at
    num_blocks = tl.cdiv(length - begin, M)
    for number in range(part, num_blocks, parts):
        first = begin + (num_blocks - 1 - number) * M
        i = first + tl.arange(0, M)
        q, grad, row, log_sum = _queries(x, saved, i, at, S)
        out = _load(saved.out, i, length, start, S.H * S.K, head, S)
        product = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(saved.products + row, product, mask=i < length)
        rows = (i[:, None], log_sum[:, None], product[:, None])
        total = tl.zeros((M, tl.constexpr(S.BLOCK_K)), tl.float32)
        whole = (first if S.CAUSAL else length) // N * N
        end = tl.minimum(first + M, length) if S.CAUSAL else length
        for masked in tl.static_range(2):
            for block in range(whole if masked else 0, end if masked else whole, N):
                j = block + tl.arange(0, N)
                k, v = _keys(x, j, at, S)
                slopes = _slopes(x, (q, k), (grad, v), rows, j[None, :], at, masked, S)[1]
                total = tl.dot(slopes.to(k.dtype), k, total, input_precision=S.PRECISION)
        _store(of_q, total * x.scale, i, length, start, stride, head, S)


@triton.jit(do_not_specialize=["parts"])
def _key_gradient(
    x, saved, of_k, of_v, stride, parts, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    at, earliest, part = _part(x, parts, S)
    start, length, head = at[0], at[2], at[3]
    for number in range(part, tl.cdiv(length, N), parts):
        first = number * N
        j = first + tl.arange(0, N)
        k, v = _keys(x, j, at, S)
        of_keys = tl.zeros((N, tl.constexpr(S.BLOCK_K)), tl.float32)
        of_values = tl.zeros((N, tl.constexpr(S.BLOCK_K)), tl.float32)
        # Blocks of queries that need a mask, then those that all attend to all keys.
        begin = tl.maximum(first, earliest) if S.CAUSAL else earliest
        whole = begin
        if S.CAUSAL:
            whole = begin + tl.maximum(first + N - begin + M - 1, 0) // M * M
        middle = tl.minimum(whole, length)
        for later in tl.static_range(2):
            for block in range(whole if later else begin, length if later else middle, M):
                i = block + tl.arange(0, M)
                q, grad, row, log_sum = _queries(x, saved, i, at, S)
                product = tl.load(saved.products + row, mask=i < length, other=0.0)
                rows = (i[None, :], log_sum[None, :], product[None, :])
                weights, slopes = _slopes(x, (k, q), (v, grad), rows, j[:, None], at, not later, S)
                weights = weights.to(grad.dtype)
                of_values = tl.dot(weights, grad, of_values, input_precision=S.PRECISION)
                of_keys = tl.dot(slopes.to(q.dtype), q, of_keys, input_precision=S.PRECISION)
        _store(of_k, of_keys * x.scale, j, length, start, stride, head, S)
        _store(of_v, of_values, j, length, start, stride, head, S)


@triton.jit
def _bias_sums(x, saved, by_distance, by_time, num_samples, first_band, S: tl.constexpr):
    """Add up gradients of scores by distance and by time, of blocks whose queries are `band` blocks behind their keys."""
    W: tl.constexpr = BAND
    T: tl.constexpr = 1 << (28 - S.SHIFT)
    band = first_band + tl.program_id(0)
    of_distances = tl.zeros((2 * W,), tl.float32)
    of_times = tl.zeros((T if x.time is not None else 1,), tl.float32)
    offset = tl.arange(0, W)
    for sample in range(tl.program_id(1), num_samples, tl.num_programs(1)):
        at, first = _of_sample(x, sample, tl.program_id(2))
        length = at[2]
        num_blocks = (length - first + W - 1) // W
        # All blocks of queries whose keys are neither before the first one nor behind the last.
        begin = tl.maximum(band - (first + W - 1) // W, 0)
        for block in range(begin, tl.minimum(num_blocks, num_blocks + band)):
            i = first + block * W + offset
            j = i[None, :] - band * W
            k, v = _keys(x, i - band * W, at, S)
            q, grad, row, log_sum = _queries(x, saved, i, at, S)
            product = tl.load(saved.products + row, mask=i < length, other=0.0)
            rows = (i[:, None], log_sum[:, None], product[:, None])
            slopes = _slopes(x, (q, k), (grad, v), rows, j, at, True, S)[1]
            if x.position is not None:
                # Rows are moved until each column has one distance.
                column = offset[:, None] + W - tl.arange(0, 2 * W)[None, :]
                moved = tl.gather(slopes, tl.minimum(tl.maximum(column, 0), W - 1), 1)
                of_distances += tl.sum(tl.where((column >= 0) & (column < W), moved, 0.0), 0)
            if x.time is not None:
                bucket = _time_buckets(x, i[:, None], j, at, S)
                is_pair = _is_pair(i[:, None], j, at, S)
                end = tl.max(tl.where(is_pair, bucket, -1)) + 1
                for each in range(tl.min(tl.where(is_pair, bucket, T)), end):
                    value = tl.sum(tl.where(bucket == each, slopes, 0.0))
                    of_times += tl.where(tl.arange(0, T) == each, value, 0.0)
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    program = program * tl.num_programs(0) + tl.program_id(0)
    if x.position is not None:
        tl.store(by_distance + program * (2 * W) + tl.arange(0, 2 * W), of_distances)
    if x.time is not None:
        tl.store(by_time + program * T + tl.arange(0, T), of_times)
