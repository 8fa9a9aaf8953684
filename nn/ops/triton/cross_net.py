"""Cross network on a GPU with fused elementwise operations; the PyTorch version is in `nn.layers.cross_net`.

The elementwise operations are memory-bound: their cost is the number of reads and writes of tensors as large as x0. All
layers are one autograd function to reduce that number. Every layer contributes to the gradient of x0; the first layer
sums the contributions once. Gradients between layers are kept as separate terms, and every layer sums the terms that it
needs instead of writing the sum. Three layers take 16 reads and writes. Writing every sum would take 18, and two more
matrix products would read their accumulator.

A cross layer of FCN is one kernel a direction beside its products. It keeps c = W x, and computes again all that follows from it.

A layer of xDeepFM's compressed interactions multiplies the vectors v by the weights W of the pairs of one output, and adds
up x * (W v) in float32. No product of a pair lies in memory; the backward pass computes all again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.dropout_mask import DropoutMask
from nn.ops.fused_linear import weight_gradient
from nn.ops.triton import layer_norm as norms
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.dropout import mask_arguments
from nn.ops.triton.parameters import cast_parameters

# B: samples, C: columns of x0, R: rank of the weight (C for a full weight), L: layers, P: programs along the samples,
# D: columns of a vector, F, H, K: vectors of compressed interactions: features, of a layer's input and output,
# h: [B, R], input of a layer's last matrix product, u: [B, C], factor of x0, g: [B, C], gradient of a layer's output

BLOCK_B, BLOCK_C, BLOCKS_OF_ROWS = tl.constexpr(16), tl.constexpr(128), tl.constexpr(16)
"""A program processes `BLOCKS_OF_ROWS` blocks in sequence and accumulates in registers."""
MASKED_BLOCK, MASKED_PROGRAMS = 2048, 264
"""Columns of c that a program reads at once, of whole rows, and most programs of FCN's backward pass."""
PRODUCTS = {"M": 64, "num_warps": 4, "num_stages": 3}
OF_PAIRS = {"M": 32, "N": 128, "num_warps": 4, "num_stages": 1}
EXACT = {"M": 64, "num_warps": 8, "num_stages": 1}
"""M: rows of compressed interactions of a program, N: its pairs of output and input; products without TF32 need registers."""
PAIR_PROGRAMS = 320
"""Programs of the gradient of compressed interactions' weights, where all pairs have as many."""


class Layers(NamedTuple):
    """Inputs of the layers' gradients: g of any layer but the last is the sum of `grad` and `products[index:]`."""

    grad: Tensor  # g of the last layer, [B, C]
    products: Tensor  # per layer the gradient through its weights to the layer before, [L - 1 (at least 1), B, C]
    x0: Tensor
    factors: Tensor  # u of every layer, [L, B, C]


class Depth(NamedTuple):
    """A layer's position, from 0, among layers."""

    INDEX: int
    LAYERS: int


def fused_cross(
    x0: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Map x0 [B, C] through cross layers to [B, C], as `nn.layers.cross_net.CrossNet`.

    `downs`: per layer [R, C]; empty for full rank. All parameters have one dtype, which their gradients have too. `ups`:
    per layer [C, R]. `biases`: per layer [C].
    """
    return _FusedCross.apply(x0, len(ups), *downs, *ups, *biases)


class _FusedCross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x0: Tensor, num_layers: int, *parameters: Tensor) -> Tensor:
        x0 = x0.contiguous()
        copies = cast_parameters(x0.dtype, parameters)
        downs: Sequence[Tensor | None] = copies[: -2 * num_layers] or [None] * num_layers
        ups, biases = copies[-2 * num_layers : -num_layers], copies[-num_layers:]
        x, inputs, hiddens = x0, [], []
        factors = x0.new_empty(num_layers, *x0.shape)
        for down, up, bias, factor in zip(downs, ups, biases, factors, strict=True):
            inputs.append(x)
            hiddens.append(x if down is None else x @ down.t())
            torch.addmm(bias, hiddens[-1], up.t(), out=factor)
            x = torch.addcmul(x, x0, factor)
        ctx.save_for_backward(factors, *inputs, *hiddens, *downs, *ups)
        ctx.num_layers = num_layers
        ctx.parameters = parameters
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers, parameters = ctx.num_layers, ctx.parameters
        factors, *saved = ctx.saved_tensors
        inputs, hiddens, downs, ups = (
            saved[start : start + num_layers] for start in range(0, len(saved), num_layers)
        )
        x0 = inputs[0]
        # Partial sums of all layers are adjacent, so that one reduction over programs at the end suffices.
        num_programs = triton.cdiv(len(x0), BLOCK_B * BLOCKS_OF_ROWS)
        partial_sums = x0.new_empty(num_programs, num_layers, x0.shape[1], dtype=torch.float32)
        # The first is finally overwritten by x0's gradient.
        products = x0.new_empty(max(1, num_layers - 1), *x0.shape)
        layers = Layers(grad.contiguous(), products, x0, factors)
        grad_downs: list[Tensor] = []
        grad_ups: list[Tensor] = []
        for index in reversed(range(num_layers)):
            down, up = downs[index], ups[index]
            grad_factor = cross_backward(index, layers, partial_sums[:, index])
            parameter = parameters[index - 2 * num_layers]
            grad_ups.insert(0, weight_gradient(grad_factor, hiddens[index], parameter))
            pair = (grad_factor, up)
            if down is not None:
                grad_hidden = grad_factor @ up
                grad_down = weight_gradient(grad_hidden, inputs[index], parameters[index])
                grad_downs.insert(0, grad_down)
                pair = (grad_hidden, down)
            if index:
                torch.mm(*pair, out=products[index - 1])
            else:
                products[0].addmm_(*pair)
        sums = column_sums(partial_sums.flatten(1)).view(num_layers, -1)
        grad_biases = sums.to(parameters[0].dtype).unbind()
        return products[0], None, *grad_downs, *grad_ups, *grad_biases


def cross_backward(index: int, x: Layers, partial_sums: Tensor) -> Tensor:
    """Compute the gradient of u in layer `index`, x + x0 * u, and in the first layer also the gradient of x0.

    `index`: index of the layer, from 0. In the first layer `products[0]` is overwritten by the gradient of x0, without the term
    through this layer's weights. `partial_sums`: [P, C], float32; receives every program's sum of u's gradient over its
    samples. Returns the gradient of u, [B, C].
    """
    grad_factor = torch.empty_like(x.x0)
    grid = triton.cdiv(x.x0.shape[1], BLOCK_C), len(partial_sums)
    sizes = *x.x0.shape, partial_sums.stride(0)
    _cross_backward[grid](x, grad_factor, partial_sums, *sizes, S=Depth(index, len(x.factors)))
    return grad_factor


@triton.jit
def _cross_backward(x, grad_factor, partial_sums, num_rows, columns, sums_stride, S: tl.constexpr):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    first = tl.program_id(1).to(tl.int64) * BLOCKS_OF_ROWS * BLOCK_B
    # The elements of all layers may exceed 32 bits.
    layer = tl.full((), 1, tl.int64) * num_rows * columns
    total = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    for block in range(BLOCKS_OF_ROWS):
        row = first + block * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
        inside = (row < num_rows) & (column < columns)
        offset = row * columns + column
        grad_u, grad_x0 = layer_gradients(x, offset, inside, layer, S)
        norms.store(grad_factor, offset, grad_u, inside)
        total += grad_u
        if S.INDEX == 0:
            norms.store(x.products, offset, grad_x0, inside)
    partial_sum = partial_sums + tl.program_id(1) * sums_stride + column
    tl.store(partial_sum, tl.sum(total, 0)[None, :], mask=column < columns)


@triton.jit
def layer_gradients(x, offset, inside, layer, S: tl.constexpr):
    """Return the gradient of u in a layer and, in the first layer, that of x0 without the term through the weights.

    `offset` and `inside` are those of the elements in a [B, C] matrix, `layer` the elements of one.
    """
    grad_out = norms.load(x.grad, offset, inside)
    grad_x0 = tl.zeros_like(grad_out)
    for above in tl.static_range(tl.constexpr(S.LAYERS - 1), tl.constexpr(S.INDEX), -1):
        if S.INDEX == 0:
            grad_x0 += grad_out * norms.load(x.factors + above * layer, offset, inside)
        grad_out += norms.load(x.products + (above - 1) * layer, offset, inside)
    grad_u = grad_out * norms.load(x.x0, offset, inside)
    if S.INDEX == 0:
        # x of the first layer is x0, so the gradient of the residual term is part of x0's.
        grad_x0 += grad_out * (norms.load(x.factors, offset, inside) + 1)
    return grad_u, grad_x0


@torch.compiler.disable
def masked_cross(
    factor: Tensor, x: Tensor, mask: DropoutMask | None, eps: float, parameters: Sequence[Tensor]
) -> Tensor:
    """Map [B, C] as `nn.layers.cross_net.MaskedCrossLayer`; the factor may be x itself.

    `parameters`: W [C / 2, C], weight and bias of the norm [C / 2], b [C].
    """
    return _MaskedCross.apply(factor.contiguous(), x.contiguous(), mask, eps, *parameters)


class _MaskedCross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, factor: Tensor, x: Tensor, mask: DropoutMask | None, eps: float, *small: Tensor
    ) -> Tensor:
        (narrow,) = cast_parameters(x.dtype, small[:1])
        crossed, out = x @ narrow.t(), torch.empty_like(x)
        ctx.save_for_backward(factor, x, crossed, narrow)
        ctx.rest = factor is x, mask, eps, small
        shape = norms.shape_of(crossed, MASKED_BLOCK, DROPS=mask is not None)
        programs = max(triton.cdiv(len(x), shape.BLOCK_R), 1)
        tensors, rest = (factor, x, crossed, small, out), mask_arguments(mask, len(x), None, x)
        _masked_cross[(programs,)](*tensors, **rest, rows=len(x), eps=eps, S=shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (factor, x, crossed, narrow), (is_own, mask, eps, small) = ctx.saved_tensors, ctx.rest
        rows, columns = x.shape
        of_factor = None if is_own else torch.empty_like(x)
        of_x, of_crossed = torch.empty_like(x), torch.empty_like(crossed)
        shape = norms.shape_of(crossed, MASKED_BLOCK, DROPS=mask is not None)
        programs = min(max(triton.cdiv(rows, shape.BLOCK_R), 1), MASKED_PROGRAMS)
        sums = x.new_empty(programs, 2 * columns, dtype=torch.float32)
        tensors = grad.contiguous(), factor, crossed, small, (of_factor, of_x, of_crossed, sums)
        rest = mask_arguments(mask, rows, None, x) | {"rows": rows, "eps": eps, "S": shape}
        _masked_gradient[(programs,)](*tensors, **rest, num_warps=8)
        of_weight = weight_gradient(of_crossed, x, small[0])
        of_x.addmm_(of_crossed, narrow)
        of_small = column_sums(sums).to(small[0].dtype).split([len(each) for each in small[1:]])
        return of_factor, of_x, None, None, of_weight, *of_small


@triton.jit
def _factors(c, mask, small, half, column, S: tl.constexpr):
    """Return a half of [c, c * ReLU(mask)] + b; as torch's ReLU, NaN where the mask is NaN."""
    values = c if half == 0 else c * tl.where(mask <= 0, 0.0, mask)
    return values + norms.load(small[3], half * S.C + column, column < S.C)


@triton.jit(do_not_specialize=["key", "threshold", "rows"])
def _masked_cross(
    factor, x, crossed, small, out, at, key, threshold, scale, rows, eps, S: tl.constexpr
):
    column, gain, lift = norms.parameters(small[1], small[2], S)
    row, bits = tl.program_id(0) * S.BLOCK_R + tl.arange(0, S.BLOCK_R), 0
    if S.DROPS:
        bits, _ = norms.bits_of_rows(at, key, row, rows, S)
    row = row.to(tl.int64)[:, None]
    inside = (row < rows) & (column < S.C)
    c = norms.load(crossed, row * S.C + column, inside)
    mask = norms.normalise(c, inside, eps, S)[0] * gain + lift
    for half in tl.static_range(2):
        place = row * 2 * S.C + half * S.C + column
        result = norms.load(factor, place, inside) * _factors(c, mask, small, half, column, S)
        result += norms.load(x, place, inside)
        result = norms.dropped(result, bits, half * S.C + column, threshold, scale, S)
        norms.store(out, place, result, inside)


@triton.jit(do_not_specialize=["key", "threshold", "rows"])
def _masked_gradient(
    grad, factor, crossed, small, results, at, key, threshold, scale, rows, eps, S: tl.constexpr
):
    """Compute the gradients of the factor, of x without that through c, of c, and sums of those of the small parameters."""
    column, gain, lift = norms.parameters(small[1], small[2], S)
    nothing = norms.zeros(S)
    of_gain, of_lift, of_low, of_high = nothing, nothing, nothing, nothing
    for block in range(tl.program_id(0), tl.cdiv(rows, S.BLOCK_R), tl.num_programs(0)):
        row, bits = block * S.BLOCK_R + tl.arange(0, S.BLOCK_R), 0
        if S.DROPS:
            bits, _ = norms.bits_of_rows(at, key, row, rows, S)
        row = row.to(tl.int64)[:, None]
        inside = (row < rows) & (column < S.C)
        c = norms.load(crossed, row * S.C + column, inside)
        normalised, rstd = norms.normalise(c, inside, eps, S)
        mask = normalised * gain + lift
        for half in tl.static_range(2):
            place = row * 2 * S.C + half * S.C + column
            slope = norms.load(grad, place, inside)
            slope = norms.dropped(slope, bits, half * S.C + column, threshold, scale, S)
            of_factor = slope * _factors(c, mask, small, half, column, S)
            if results[0] is None:
                of_factor += slope
            else:
                norms.store(results[1], place, slope, inside)
            norms.store(results[1] if results[0] is None else results[0], place, of_factor, inside)
            slope *= norms.load(factor, place, inside)
            if half == 0:
                of_low += slope
                of_c = slope
        of_high += slope
        of_mask = tl.where(mask <= 0, 0.0, slope * c)
        of_gain += of_mask * normalised
        of_lift += of_mask
        of_c += tl.where(mask <= 0, 0.0, slope * mask)
        of_c += norms.input_gradient(of_mask * gain, normalised, rstd, S)
        norms.store(results[2], row * S.C + column, of_c, inside)
    sums = results[3] + tl.program_id(0) * 2 * S.C
    norms.store_sums(sums, of_gain, of_lift, column, S)
    norms.store_sums(sums + 2 * S.C, of_low, of_high, column, S)


class Pairs(NamedTuple):
    PRECISION: str
    F: int
    H: int
    K: int
    BLOCK_F: int
    BLOCK_H: int
    BLOCK_K: int


@torch.compiler.disable
def interact(x: Tensor, vectors: Tensor, weight: Tensor) -> Tensor:
    """Map x [B, D, H], which may be the vectors [B, D, F], to [B, D, K], as `nn.layers.cross_net.CompressedInteraction`."""
    return _Interaction.apply(x.contiguous(), vectors.contiguous(), weight)


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor, weight: Tensor) -> Tensor:
        sizes = vectors.shape[2], x.shape[2], len(weight)
        blocks = (max(triton.next_power_of_2(size), 16) for size in sizes)
        is_exact = x.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32
        shape = Pairs("ieee" if is_exact else "tf32", *sizes, *blocks)
        padded = x.new_empty(2, shape.K, shape.BLOCK_H * shape.BLOCK_F)
        _pad[(shape.K,)](weight.contiguous(), padded, IS_FIRST=x is vectors, S=shape)
        ctx.save_for_backward(x, vectors, weight, padded)
        ctx.rest = shape, x is vectors
        return _pair_sums(vectors, padded[0], x, shape, forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, vectors, weight, padded), (shape, is_first) = ctx.saved_tensors, ctx.rest
        (by, f, h, k, block_f, block_h, block_k), grad = shape, grad.contiguous()
        turned = Pairs(by, h, f, k, block_h, block_f, block_k)
        of_vectors = _pair_sums(x, padded[1], grad, turned)
        of_x = None if is_first else _pair_sums(vectors, padded[0], grad, shape)
        rows, kind = x.numel() // h, OF_PAIRS | (EXACT if shape.PRECISION == "ieee" else {})
        tiles = triton.cdiv(h * k, kind["N"])
        programs = max(min(PAIR_PROGRAMS // tiles, triton.cdiv(rows, kind["M"])), 1)
        partial = x.new_empty(programs, weight.numel(), dtype=torch.float32)
        _pair_gradient[(tiles, programs)](x, vectors, grad, partial, rows, S=shape, **kind)
        return of_x, of_vectors, column_sums(partial).view_as(weight).to(weight.dtype)


def _pair_sums(a: Tensor, padded: Tensor, by: Tensor, S: Pairs, *, forward: bool = False) -> Tensor:
    out = a.new_empty(*a.shape[:2], S.K if forward else S.H)
    rows, kind = a.numel() // S.F, PRODUCTS | (EXACT if S.PRECISION == "ieee" else {})
    programs = (max(triton.cdiv(rows, kind["M"]), 1),)
    _pair_products[programs](a, padded, by, out, rows, TO_K=forward, S=S, **kind)
    return out


@triton.jit
def _rounded(x, S: tl.constexpr):
    """Round float32 to TF32, to nearest, where tensor cores would cut off; a NaN stays one."""
    if S.PRECISION == "tf32" and x.dtype == tl.float32:
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def _pad(weight, padded, IS_FIRST: tl.constexpr, S: tl.constexpr):
    """Write W of an output, rounded, to [K, BLOCK_H, BLOCK_F], then the transposes, in the first layer of W + W^T."""
    h, f = tl.arange(0, S.BLOCK_H)[:, None], tl.arange(0, S.BLOCK_F)[None, :]
    first, inside = tl.program_id(0) * S.H * S.F, (h < S.H) & (f < S.F)
    value = norms.load(weight, first + h * S.F + f, inside)
    place = tl.program_id(0) * S.BLOCK_H * S.BLOCK_F
    narrow = _rounded(value.to(padded.dtype.element_ty), S)
    tl.store(padded + place + h * S.BLOCK_F + f, narrow)
    if IS_FIRST:
        value += norms.load(weight, first + f * S.F + h, inside)
        narrow = _rounded(value.to(padded.dtype.element_ty), S)
    place += S.K * S.BLOCK_H * S.BLOCK_F + f * S.BLOCK_H + h
    tl.store(padded + place, narrow)


@triton.jit
def _pair_products(a, padded, by, out, rows, S: tl.constexpr, M: tl.constexpr, TO_K: tl.constexpr):
    """Multiply rows of a [R, F] by each W_k^T; sum over H those times by [R, H] to [R, K], or over K those times by [R, K]."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)[:, None]
    f, h = tl.arange(0, S.BLOCK_F)[None, :], tl.arange(0, S.BLOCK_H)[None, :]
    column = tl.arange(0, S.BLOCK_K)[None, :] if TO_K else h
    factor = tl.load(a + row * S.F + f, mask=(row < rows) & (f < S.F), other=0.0)
    factor, place = _rounded(factor, S), h * S.BLOCK_F + tl.arange(0, S.BLOCK_F)[:, None]
    if TO_K:
        x = norms.load(by, row * S.H + h, (row < rows) & (h < S.H))
    total = tl.zeros((M, column.shape[1]), tl.float32)
    for k in range(S.K):
        block = tl.load(padded + k * S.BLOCK_H * S.BLOCK_F + place)
        product = tl.dot(factor, block, input_precision=S.PRECISION)
        if TO_K:
            total = tl.where(column == k, tl.sum(product * x, 1)[:, None], total)
        else:
            total += product * norms.load(by, row * S.K + k, row < rows)
    columns: tl.constexpr = S.K if TO_K else S.H
    norms.store(out, row * columns + column, total, (row < rows) & (column < columns))


@triton.jit
def _pair_gradient(x, v, grad, partial, rows, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Sum grad[k] * x[h] * v[f] over this program's rows, for N pairs of k and h."""
    pair, f = tl.program_id(0) * N + tl.arange(0, N)[None, :], tl.arange(0, S.BLOCK_F)[:, None]
    total = tl.zeros((f.shape[0], N), tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(rows, M), tl.num_programs(1)):
        first = tl.full((), M, tl.int64) * block
        row, along = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
        inside = (first + along < rows) & (f < S.F)
        left = tl.load(v + first * S.F + along * S.F + f, mask=inside, other=0.0)
        inside = (first + row < rows) & (pair < S.K * S.H)
        right = norms.load(x + first * S.H, row * S.H + pair % S.H, inside)
        right *= norms.load(grad + first * S.K, row * S.K + pair // S.H, inside)
        right = _rounded(right.to(left.dtype), S)
        total = tl.dot(_rounded(left, S), right, total, input_precision=S.PRECISION)
    inside = (pair < S.K * S.H) & (f < S.F)
    tl.store(partial + (tl.program_id(1) * S.K * S.H + pair) * S.F + f, total, mask=inside)
