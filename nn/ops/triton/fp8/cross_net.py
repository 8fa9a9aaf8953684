"""Elementwise operations of cross layers in FP8 on a GPU: the matrices of the products are rounded where they are computed.

`nn.ops.fp8` has the same functions in plain torch, and those of `quantise`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.ops.fp8 import GRADIENT, INPUT, Fp8Matrix, Scale
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.cross_net import Depth, Layers, layer_gradients
from nn.ops.triton.fp8.quantise import (
    BLOCK_C,
    BLOCK_R,
    OPTIONS,
    activate,
    allocate,
    grid,
    place,
    quantise,
    quantise_gradient,
    store_rounded,
    store_words,
)
from nn.ops.triton.layer_norm import load, store

__all__ = ["activate", "add_product", "cross_backward", "quantise", "quantise_gradient"]

# B: samples, C: columns of x0, L: layers, P: programs along the samples

OF_LAYERS = OPTIONS | {"maxnreg": 80}
"""Of a layer's gradient, which reads most matrices."""


def add_product(
    x: Tensor, x0: Tensor, factor: Tensor, scale: Scale, *, transposed: bool, keep: bool = True
) -> tuple[Tensor | None, Fp8Matrix]:
    """Return x + x0 * factor, [B, C], and the same in 8 bits, as `nn.ops.fp8.add_product`."""
    out = torch.empty_like(x) if keep else None
    matrix, words = allocate(x, INPUT, scale, transposed=transposed)
    tensors = x, x0, factor, out, matrix.rows, words, (scale.factor, scale.latest)
    _add_product[grid(x)](*tensors, *x.shape, **OPTIONS)
    return out, matrix


def cross_backward(
    index: int,
    grad: Tensor,
    products: Tensor,
    x0: Tensor,
    factors: Tensor,
    scale: Scale,
    *,
    transposed: bool,
) -> tuple[Fp8Matrix, Tensor | None, Tensor]:
    """Compute the gradients of u in layer `index` and of x0, as `nn.ops.fp8.cross_backward`."""
    matrix, words = allocate(x0, GRADIENT, scale, transposed=transposed)
    wide = None if transposed else torch.empty_like(x0)
    programs = grid(x0)
    partial_sums = x0.new_empty(programs[1], x0.shape[1], dtype=torch.float32)
    tensors = Layers(grad, products, x0, factors), matrix.rows, words, wide, partial_sums
    rest = (scale.factor, scale.latest), *x0.shape, Depth(index, len(factors))
    _cross_backward[programs](*tensors, *rest, **OF_LAYERS)
    return matrix, wide, column_sums(partial_sums)


@triton.jit
def _add_product(x, x0, factor_of_x0, out, rows, words, scales, num_rows, num_columns):
    column, word, inside = place(num_rows, num_columns)
    scale = tl.load(scales[0])
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    values = ()
    at = word * 4 * num_columns + column
    for byte in tl.static_range(4):
        offset = at + byte * num_columns
        u = load(factor_of_x0, offset, inside)
        value = load(x, offset, inside) + load(x0, offset, inside) * u
        rounded = value.to(x.dtype.element_ty)
        if out is not None:
            tl.store(out + offset, rounded, mask=inside)
        # The 8 bits are those of the 16-bit result, as without this fusion.
        value = rounded.to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        values += (value,)
    packed = store_rounded(values, rows + at, num_columns, inside, scale)
    if words is not None:
        store_words(packed, words, num_rows, num_columns)
    tl.atomic_max(scales[1], tl.max(largest), sem="relaxed")


@triton.jit
def _cross_backward(
    x, rows, words, wide, partial_sums, scales, num_rows, num_columns, S: tl.constexpr
):
    column, word, inside = place(num_rows, num_columns)
    scale = tl.load(scales[0])
    # The elements of all layers may exceed 32 bits.
    layer = tl.full((), 1, tl.int64) * num_rows * num_columns
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    values = ()
    at = word * 4 * num_columns + column
    for byte in tl.static_range(4):
        offset = at + byte * num_columns
        grad_u, grad_x0 = layer_gradients(x, offset, inside, layer, S)
        total += grad_u
        if S.INDEX == 0:
            store(x.products, offset, grad_x0, inside)
        rounded = grad_u.to(x.x0.dtype.element_ty)
        if wide is not None:
            tl.store(wide + offset, rounded, mask=inside)
        value = rounded.to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        values += (value,)
    packed = store_rounded(values, rows + at, num_columns, inside, scale)
    if words is not None:
        store_words(packed, words, num_rows, num_columns)
    tl.atomic_max(scales[1], tl.max(largest), sem="relaxed")
    partial_sum = partial_sums + tl.program_id(1) * num_columns + column
    tl.store(partial_sum, tl.sum(total, 0)[None, :], mask=column < num_columns)
