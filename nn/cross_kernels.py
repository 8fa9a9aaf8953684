"""The cross network on a GPU with its elementwise work fused; `nn.cross` has it in plain torch.

All layers are one function, so that the gradient of x0, to which every layer adds, is kept up by the kernels that are
needed anyway. Forward, the product with x0 is the end of a matrix product in Triton; backward, one Triton kernel a layer
reads the layer's tensors once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.fused_linear import copies_in, weight_gradient

# B: samples, C: columns of x0, R: rank (C for a full weight), h: [B, R], what a layer multiplies by its last weight,
# u: [B, C], what x0 is multiplied by

BLOCK_B, BLOCK_C = 32, 128
BLOCKS_OF_ROWS = 16
"""That one program of the backward pass takes one after the other, and adds up in registers."""


def fused_cross(
    x0: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Map x0 [B, C] through cross layers to [B, C], as `nn.cross.CrossNet`.

    Args:
        x0: in the dtype to compute in.
        downs: [R, C] of each layer, or none for full rank; of any dtype; so are their gradients.
        ups: [C, R] of each layer.
        biases: [C] of each layer.
    """
    return _FusedCross.apply(x0, len(ups), *downs, *ups, *biases)


class _FusedCross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x0: Tensor, num_layers: int, *parameters: Tensor) -> Tensor:
        x0 = x0.contiguous()
        copies = copies_in(x0.dtype, parameters)
        downs = copies[: -2 * num_layers] or [None] * num_layers
        ups, biases = copies[-2 * num_layers : -num_layers], copies[-num_layers:]
        x, inputs, hiddens, factors = x0, [], [], []
        for down, up, bias in zip(downs, ups, biases, strict=True):
            inputs.append(x)
            hiddens.append(x if down is None else x @ down.t())
            factor, x = cross_forward(hiddens[-1], up, bias, x0, x)
            factors.append(factor)
        ctx.save_for_backward(*inputs, *hiddens, *factors, *downs, *ups)
        ctx.num_layers = num_layers
        ctx.dtypes = [each.dtype for each in parameters]
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers, dtypes = ctx.num_layers, ctx.dtypes
        saved = ctx.saved_tensors
        inputs, hiddens, factors, downs, ups = (
            saved[start : start + num_layers] for start in range(0, len(saved), num_layers)
        )
        grad, grad_x0 = grad.contiguous(), None
        grad_downs, grad_ups, grad_biases = [], [], []
        for index in reversed(range(num_layers)):
            down, up = downs[index], ups[index]
            grad_factor, grad_x0, grad_bias = cross_backward(
                grad, inputs[0], factors[index], grad_x0, joins=index == 0
            )
            grad_biases.append(grad_bias.to(dtypes[-1]))
            grad_ups.append(weight_gradient(grad_factor, hiddens[index], dtypes[-1]))
            if down is None:
                grad_product, weight = grad_factor, up
            else:
                grad_product, weight = grad_factor @ up, down
                grad_downs.append(weight_gradient(grad_product, inputs[index], dtypes[-1]))
            if index == 0:
                grad = grad_x0.addmm_(grad_product, weight)
            elif index < num_layers - 1:
                grad = grad.addmm_(grad_product, weight)
            else:
                # What came from outside may have other readers.
                grad = torch.addmm(grad, grad_product, weight)
        return grad, None, *grad_downs[::-1], *grad_ups[::-1], *grad_biases[::-1]


def cross_backward(
    grad: Tensor, x0: Tensor, factor: Tensor, grad_x0: Tensor | None, *, joins: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Go back through x + x0 * u, to u and x0.

    Args:
        grad: [B, C], of the result.
        x0: [B, C].
        factor: u, [B, C].
        grad_x0: [B, C], what later layers gave; overwritten. None in the last layer.
        joins: add `grad` to the gradient of x0 too, because x is x0.

    Returns:
        the gradient of u [B, C], the sum of x0's so far [B, C], and the sum of u's over samples [C] in float32.
    """
    num_rows, columns = x0.shape
    num_chunks = triton.cdiv(num_rows, BLOCK_B * BLOCKS_OF_ROWS)
    grad_factor = torch.empty_like(x0)
    partial = x0.new_empty(num_chunks, columns, dtype=torch.float32)
    is_last = grad_x0 is None
    if is_last:
        grad_x0 = torch.empty_like(x0)
    _cross_backward[(triton.cdiv(columns, BLOCK_C), num_chunks)](
        grad,
        x0,
        factor,
        grad_x0,
        grad_factor,
        partial,
        num_rows,
        columns,
        IS_LAST=is_last,
        JOINS=joins,
        BLOCK_B=BLOCK_B,
        BLOCK_C=BLOCK_C,
        BLOCKS_OF_ROWS=BLOCKS_OF_ROWS,
    )
    return grad_factor, grad_x0, partial.sum(0)


@triton.jit
def _cross_backward(
    grad,
    x0,
    factor,
    grad_x0,
    grad_factor,
    partial,
    num_rows,
    columns,
    IS_LAST: tl.constexpr,
    JOINS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCKS_OF_ROWS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    first = tl.program_id(1).to(tl.int64) * BLOCKS_OF_ROWS * BLOCK_B
    total = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    for block in range(BLOCKS_OF_ROWS):
        row = first + block * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
        inside = (row < num_rows) & (column < columns)
        place = row * columns + column
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(factor + place, mask=inside, other=0.0).to(tl.float32)
        through = g * tl.load(x0 + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_factor + place, through.to(grad_factor.dtype.element_ty), mask=inside)
        total += through
        past = g * (u + 1) if JOINS else g * u
        if not IS_LAST:
            past += tl.load(grad_x0 + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x0 + place, past.to(grad_x0.dtype.element_ty), mask=inside)
    place = partial + tl.program_id(1) * columns + column
    tl.store(place, tl.sum(total, 0)[None, :], mask=column < columns)


TILE = {"BLOCK_B": 128, "BLOCK_C": 128, "BLOCK_R": 64, "num_warps": 4, "num_stages": 3}
"""Of `_cross_forward`."""


def cross_forward(
    hidden: Tensor, up: Tensor, bias: Tensor, x0: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return u = hidden up^T + bias and x + x0 * u, both [B, C].

    Args:
        hidden: h, [B, R].
        up: [C, R].
        bias: [C].
        x0: [B, C].
        x: [B, C].
    """
    num_rows, columns = x0.shape
    factor, out = torch.empty_like(x0), torch.empty_like(x0)
    tile = TILE | {"BLOCK_R": min(TILE["BLOCK_R"], 64 * 2 // x0.element_size())}
    grid = (triton.cdiv(columns, TILE["BLOCK_C"]) * triton.cdiv(num_rows, TILE["BLOCK_B"]),)
    _cross_forward[grid](
        hidden,
        up,
        bias,
        x0,
        x,
        factor,
        out,
        num_rows,
        columns,
        hidden.shape[1],
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        **tile,
    )
    return factor, out


@triton.jit
def _cross_forward(
    hidden,
    up,
    bias,
    x0,
    x,
    factor,
    out,
    num_rows,
    columns,
    rank,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs that run at the same time share rows of h, which they then find in the cache, as they do all of `up`.
    num_blocks = tl.cdiv(columns, BLOCK_C)
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
    column = (tl.program_id(0) % num_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    u = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    for start in range(0, rank, BLOCK_R):
        across = start + tl.arange(0, BLOCK_R)
        left = tl.load(
            hidden + row * rank + across[None, :],
            mask=(row < num_rows) & (across[None, :] < rank),
            other=0.0,
        )
        right = tl.load(
            up + column * rank + across[:, None],
            mask=(column < columns) & (across[:, None] < rank),
            other=0.0,
        )
        u = tl.dot(left, right, u, input_precision=PRECISION)
    u += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    inside = (row < num_rows) & (column < columns)
    place = row * columns + column
    tl.store(factor + place, u.to(factor.dtype.element_ty), mask=inside)
    first = tl.load(x0 + place, mask=inside, other=0.0).to(tl.float32)
    result = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + first * u
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
