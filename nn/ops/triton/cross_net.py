"""The cross network on a GPU with its elementwise work fused; `nn.layers.cross_net` has it in plain torch.

All layers are one function, because its elementwise work is bound by memory: what counts is how often it reads or
writes a tensor as large as x0. The gradient of x0, to which every layer adds, is summed once, in the first layer, and
gradients between layers are kept in parts: each layer adds up the parts that it needs instead of writing their sum. For
three layers these are 16 reads and writes; with all sums kept up on the way it were 18, and two matrix products more would
read what they are added to.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.fused_linear import copies_in, weight_gradient

# B: samples, C: columns of x0, R: rank (C for a full weight), L: layers, h: [B, R], what a layer multiplies by its last
# weight, u: [B, C], what x0 is multiplied by, g: [B, C], the gradient of a layer's result, P: programs that share the
# samples

BLOCKS = {"BLOCK_B": 16, "BLOCK_C": 128, "BLOCKS_OF_ROWS": 16}
"""A program takes `BLOCKS_OF_ROWS` blocks one after the other, and adds up in registers."""


def fused_cross(
    x0: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Map x0 [B, C] through cross layers to [B, C], as `nn.layers.cross_net.CrossNet`.

    Args:
        x0: in the dtype to compute in.
        downs: [R, C] of each layer, or none for full rank; all parameters of one dtype; so are their gradients.
        ups: [C, R] of each layer.
        biases: [C] of each layer.
    """
    return _FusedCross.apply(x0, len(ups), *downs, *ups, *biases)


class _FusedCross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x0: Tensor, num_layers: int, *parameters: Tensor) -> Tensor:
        x0 = x0.contiguous()
        copies = copies_in(x0.dtype, parameters)
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
        ctx.dtype = parameters[0].dtype
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers, dtype = ctx.num_layers, ctx.dtype
        factors, *saved = ctx.saved_tensors
        inputs, hiddens, downs, ups = (
            saved[start : start + num_layers] for start in range(0, len(saved), num_layers)
        )
        x0 = inputs[0]
        # Every layer's sums over samples side by side, so that the programs' shares are added up once, at the end.
        num_programs = triton.cdiv(len(x0), BLOCKS["BLOCK_B"] * BLOCKS["BLOCKS_OF_ROWS"])
        shares = x0.new_empty(num_programs, num_layers, x0.shape[1], dtype=torch.float32)
        # What each layer's weights hand down to the layer before it, and at the end the sum for x0 in place of the first.
        products = x0.new_empty(max(1, num_layers - 1), *x0.shape)
        grad = grad.contiguous()
        grad_downs: list[Tensor] = []
        grad_ups: list[Tensor] = []
        for index in reversed(range(num_layers)):
            down, up = downs[index], ups[index]
            grad_factor = cross_backward(index, grad, products, x0, factors, shares[:, index])
            grad_ups.insert(0, weight_gradient(grad_factor, hiddens[index], dtype))
            pair = (grad_factor, up)
            if down is not None:
                grad_hidden = grad_factor @ up
                grad_downs.insert(0, weight_gradient(grad_hidden, inputs[index], dtype))
                pair = (grad_hidden, down)
            if index:
                torch.mm(*pair, out=products[index - 1])
            else:
                products[0].addmm_(*pair)
        grad_biases = shares.sum(0).to(dtype).unbind()
        return products[0], None, *grad_downs, *grad_ups, *grad_biases


def cross_backward(
    index: int, grad: Tensor, products: Tensor, x0: Tensor, factors: Tensor, shares: Tensor
) -> Tensor:
    """Go back through layer `index`, x + x0 * u, to u, and in the first layer to x0.

    Args:
        index: of the layer, from 0.
        grad: g of the last layer, [B, C].
        products: [L - 1 (at least 1), B, C]; g of any other layer is `grad` and those from its own index on. In the first
            layer the first of them is overwritten by the gradient of x0, but for what this layer's weights hand down.
        x0: [B, C].
        factors: u of each layer, [L, B, C].
        shares: [P, C], float32; gets each program's sum of u's gradient over its samples.

    Returns:
        the gradient of u, [B, C].
    """
    grad_factor = torch.empty_like(x0)
    num_rows, columns = x0.shape
    _cross_backward[(triton.cdiv(columns, BLOCKS["BLOCK_C"]), len(shares))](
        grad,
        products,
        x0,
        factors,
        grad_factor,
        shares,
        num_rows,
        columns,
        shares.stride(0),
        INDEX=index,
        NUM_LAYERS=len(factors),
        **BLOCKS,
    )
    return grad_factor


@triton.jit
def _cross_backward(
    grad,
    products,
    x0,
    factors,
    grad_factor,
    shares,
    num_rows,
    columns,
    shares_stride,
    INDEX: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCKS_OF_ROWS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    first = tl.program_id(1).to(tl.int64) * BLOCKS_OF_ROWS * BLOCK_B
    # All layers together may have more elements than 32 bits count.
    layer = tl.full((), 1, tl.int64) * num_rows * columns
    total = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    for block in range(BLOCKS_OF_ROWS):
        row = first + block * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
        inside = (row < num_rows) & (column < columns)
        place = row * columns + column
        through = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        grad_x0 = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
        for above in tl.static_range(NUM_LAYERS - 1, INDEX, -1):
            if INDEX == 0:
                u = tl.load(factors + above * layer + place, mask=inside, other=0.0)
                grad_x0 += through * u.to(tl.float32)
            handed = tl.load(products + (above - 1) * layer + place, mask=inside, other=0.0)
            through += handed.to(tl.float32)
        grad_u = through * tl.load(x0 + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_factor + place, grad_u.to(grad_factor.dtype.element_ty), mask=inside)
        total += grad_u
        if INDEX == 0:
            # x of the first layer is x0 too, so what passes it by joins the sum.
            u = tl.load(factors + place, mask=inside, other=0.0).to(tl.float32)
            grad_x0 += through * (u + 1)
            tl.store(products + place, grad_x0.to(products.dtype.element_ty), mask=inside)
    share = shares + tl.program_id(1) * shares_stride + column
    tl.store(share, tl.sum(total, 0)[None, :], mask=column < columns)
