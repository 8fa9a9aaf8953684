"""The cross network on a GPU with its elementwise work fused; `nn.cross` has it in plain torch.

All layers are one function, so that the gradient of x0, to which every layer adds, is kept up by the kernels that are
needed anyway: one Triton kernel a layer, which reads each of the layer's tensors once.
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
# u: [B, C], what x0 is multiplied by, P: programs that share the samples

BLOCKS = {"BLOCK_B": 8, "BLOCK_C": 128, "BLOCKS_OF_ROWS": 64}
"""A program takes `BLOCKS_OF_ROWS` blocks one after the other, and adds up in registers."""


def fused_cross(
    x0: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Map x0 [B, C] through cross layers to [B, C], as `nn.cross.CrossNet`.

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
        downs = copies[: -2 * num_layers] or [None] * num_layers
        ups, biases = copies[-2 * num_layers : -num_layers], copies[-num_layers:]
        x, inputs, hiddens, factors = x0, [], [], []
        for down, up, bias in zip(downs, ups, biases, strict=True):
            inputs.append(x)
            hiddens.append(x if down is None else x @ down.t())
            factors.append(torch.addmm(bias, hiddens[-1], up.t()))
            x = torch.addcmul(x, x0, factors[-1])
        ctx.save_for_backward(*inputs, *hiddens, *factors, *downs, *ups)
        ctx.num_layers = num_layers
        ctx.dtype = parameters[0].dtype
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers, dtype = ctx.num_layers, ctx.dtype
        saved = ctx.saved_tensors
        inputs, hiddens, factors, downs, ups = (
            saved[start : start + num_layers] for start in range(0, len(saved), num_layers)
        )
        x0 = inputs[0]
        # Every layer's sums over samples side by side, so that the programs' shares are added up once, at the end.
        num_programs = triton.cdiv(len(x0), BLOCKS["BLOCK_B"] * BLOCKS["BLOCKS_OF_ROWS"])
        shares = x0.new_empty(num_programs, num_layers, x0.shape[1], dtype=torch.float32)
        grad = grad.contiguous()
        grad_x0 = None
        grad_downs, grad_ups = [], []
        for index in reversed(range(num_layers)):
            down, up = downs[index], ups[index]
            # In the first layer x is x0 too, so what passes it by joins the sum for x0.
            grad_factor, grad_x0, past = cross_backward(
                grad, x0, factors[index], grad_x0, shares[:, index], joins=index == 0
            )
            grad_ups.insert(0, weight_gradient(grad_factor, hiddens[index], dtype))
            if down is None:
                grad = past.addmm_(grad_factor, up)
            else:
                grad_hidden = grad_factor @ up
                grad_downs.insert(0, weight_gradient(grad_hidden, inputs[index], dtype))
                grad = past.addmm_(grad_hidden, down)
        grad_biases = shares.sum(0).to(dtype).unbind()
        return grad, None, *grad_downs, *grad_ups, *grad_biases


def cross_backward(
    grad: Tensor,
    x0: Tensor,
    factor: Tensor,
    grad_x0: Tensor | None,
    shares: Tensor,
    *,
    joins: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Go back through x + x0 * u, to u and x0.

    Args:
        grad: [B, C], of the result.
        x0: [B, C].
        factor: u, [B, C].
        grad_x0: [B, C], what later layers gave; overwritten. None in the last layer.
        shares: [P, C], float32; gets each program's sum of u's gradient over its samples.
        joins: add `grad` to the gradient of x0 too.

    Returns:
        the gradient of u; the sum of x0's so far; and what passes the layer by, to be overwritten: `grad`, a copy of it
        in the last layer, because what comes from outside may have other readers, or, if it joins, the sum of x0's.
    """
    is_last = grad_x0 is None
    grad_factor = torch.empty_like(x0)
    if is_last:
        grad_x0 = torch.empty_like(x0)
    past = grad_x0 if joins else torch.empty_like(grad) if is_last else grad
    num_rows, columns = x0.shape
    _cross_backward[(triton.cdiv(columns, BLOCKS["BLOCK_C"]), len(shares))](
        grad,
        x0,
        factor,
        grad_x0,
        grad_factor,
        past,
        shares,
        num_rows,
        columns,
        shares.stride(0),
        IS_LAST=is_last,
        JOINS=joins,
        **BLOCKS,
    )
    return grad_factor, grad_x0, past


@triton.jit
def _cross_backward(
    grad,
    x0,
    factor,
    grad_x0,
    grad_factor,
    past,
    shares,
    num_rows,
    columns,
    shares_stride,
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
        through = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(factor + place, mask=inside, other=0.0).to(tl.float32)
        grad_u = through * tl.load(x0 + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_factor + place, grad_u.to(grad_factor.dtype.element_ty), mask=inside)
        total += grad_u
        grad_first = through * (u + 1) if JOINS else through * u
        if not IS_LAST:
            grad_first += tl.load(grad_x0 + place, mask=inside, other=0.0).to(tl.float32)
        elif not JOINS:
            tl.store(past + place, through.to(past.dtype.element_ty), mask=inside)
        tl.store(grad_x0 + place, grad_first.to(grad_x0.dtype.element_ty), mask=inside)
    share = shares + tl.program_id(1) * shares_stride + column
    tl.store(share, tl.sum(total, 0)[None, :], mask=column < columns)
