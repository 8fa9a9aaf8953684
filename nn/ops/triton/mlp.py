"""A multi-layer perceptron on a GPU with ReLU and bias inside the matrix products; `nn.layers.mlp` has it in plain torch.

Forward, cuBLASLt adds the bias and applies ReLU before it writes a product. Backward, one Triton kernel a layer masks
the gradient and adds up its columns for the bias, where torch and inductor read the gradient twice. A last layer of one
logit is no matrix product worth the name: its whole backward pass is part of the kernel of the layer before.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.fused_linear import copies_in, weight_gradient

# B: samples, C: columns of a layer's output, P: programs that share the samples

BLOCKS = {"BLOCK_B": 32, "BLOCK_C": 128, "BLOCKS_OF_ROWS": 8}
"""A program takes `BLOCKS_OF_ROWS` blocks one after the other, and adds up in registers."""


def fused_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, final_activation: bool
) -> Tensor:
    """Map x [B, columns] through linear layers with ReLU between them, as `nn.layers.mlp.MLP` without padding.

    Args:
        x: in the dtype to compute in.
        weights: [columns after, columns before] of each layer, all parameters of one dtype; so are their gradients.
        biases: [columns after] of each layer.
        final_activation: apply ReLU after the last layer too.
    """
    return _FusedMLP.apply(x, final_activation, *weights, *biases)


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, final_activation: bool, *parameters: Tensor) -> Tensor:
        copies = copies_in(x.dtype, parameters)
        num_layers = len(copies) // 2
        weights, biases = copies[:num_layers], copies[num_layers:]
        num_activations = num_layers if final_activation else num_layers - 1
        outputs: list[Tensor] = []
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            linear = torch._addmm_activation if index < num_activations else torch.addmm
            outputs.append(linear(bias, outputs[-1] if outputs else x, weight.t()))
        ctx.save_for_backward(x, *outputs[:num_activations], *weights)
        ctx.num_layers = num_layers
        ctx.dtype = parameters[0].dtype
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers = ctx.num_layers
        inputs, weights = ctx.saved_tensors[:-num_layers], ctx.saved_tensors[-num_layers:]
        activations = inputs[1:]
        widths = [activation.shape[1] for activation in activations]
        has_logit = 0 < len(activations) < num_layers and len(weights[-1]) == 1
        sizes = [*widths, widths[-1], 1] if has_logit else widths
        # Every layer's sums over samples side by side, so that the programs' shares are added up once, at the end.
        num_programs = triton.cdiv(len(grad), BLOCKS["BLOCK_B"] * BLOCKS["BLOCKS_OF_ROWS"])
        shares = grad.new_empty(num_programs, sum(sizes), dtype=torch.float32)
        parts = shares.split(sizes, dim=1) if sizes else ()

        last = num_layers - 1
        last_bias = []
        if has_logit:
            last -= 1
            grad = logit_backward(grad, weights[-1], activations[last], parts[last])
        elif last < len(activations):
            grad = relu_backward(grad, activations[last], parts[last])
        else:
            last_bias.append(grad.sum(0, dtype=torch.float32))
        grad_weights: list[Tensor] = []
        for index in reversed(range(last + 1)):
            # Here `grad` is that of the layer before its ReLU.
            grad_weights.insert(0, weight_gradient(grad, inputs[index], ctx.dtype))
            if index or ctx.needs_input_grad[0]:
                grad = grad @ weights[index]
            if index:
                grad = relu_backward(grad, activations[index - 1], parts[index - 1])
        sums = [*shares.sum(0).split(sizes), *last_bias] if sizes else last_bias
        if has_logit:
            grad_weights.append(sums.pop(-2).view(1, -1))
        gradients = [each.to(ctx.dtype) for each in (*grad_weights, *sums)]
        return grad if ctx.needs_input_grad[0] else None, None, *gradients


def relu_backward(grad: Tensor, activation: Tensor, shares: Tensor) -> Tensor:
    """Return the gradient before ReLU, [B, C].

    Args:
        grad: [B, C], after ReLU.
        activation: [B, C], ReLU's result.
        shares: [P, C or more], float32; gets each program's sum of the returned gradient over its samples.
    """
    grad = grad.contiguous()
    masked = torch.empty_like(activation)
    num_rows, columns = activation.shape
    _relu_backward[(triton.cdiv(columns, BLOCKS["BLOCK_C"]), len(shares))](
        grad, activation, masked, shares, num_rows, columns, shares.stride(0), **BLOCKS
    )
    return masked


@triton.jit
def _relu_backward(
    grad,
    activation,
    masked,
    shares,
    num_rows,
    columns,
    shares_stride,
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
        result = tl.load(activation + place, mask=inside, other=0.0)
        through = tl.load(grad + place, mask=inside, other=0.0)
        # As in torch, the gradient passes what is not a number.
        through = tl.where(result <= 0, 0.0, through)
        tl.store(masked + place, through, mask=inside)
        total += through.to(tl.float32)
    share = shares + tl.program_id(1) * shares_stride + column
    tl.store(share, tl.sum(total, 0)[None, :], mask=column < columns)


def logit_backward(grad: Tensor, weight: Tensor, activation: Tensor, shares: Tensor) -> Tensor:
    """Go back through a layer of one logit and the ReLU before it.

    Args:
        grad: [B, 1], of the logit.
        weight: [1, C].
        activation: [B, C], ReLU's result.
        shares: [P, 2 C + 1 or more], float32; gets each program's sums over its samples: of the returned gradient, of
            the weight's and of the logit's.

    Returns:
        the gradient before ReLU, [B, C].
    """
    grad = grad.contiguous()
    masked = torch.empty_like(activation)
    num_rows, columns = activation.shape
    _logit_backward[(triton.cdiv(columns, BLOCKS["BLOCK_C"]), len(shares))](
        grad, weight, activation, masked, shares, num_rows, columns, shares.stride(0), **BLOCKS
    )
    return masked


@triton.jit
def _logit_backward(
    grad,
    weight,
    activation,
    masked,
    shares,
    num_rows,
    columns,
    shares_stride,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCKS_OF_ROWS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    first = tl.program_id(1).to(tl.int64) * BLOCKS_OF_ROWS * BLOCK_B
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    total_weight = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    total_logit = tl.zeros((BLOCK_B, 1), tl.float32)
    for block in range(BLOCKS_OF_ROWS):
        row = first + block * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
        inside = (row < num_rows) & (column < columns)
        place = row * columns + column
        logit = tl.load(grad + row, mask=row < num_rows, other=0.0).to(tl.float32)
        result = tl.load(activation + place, mask=inside, other=0.0).to(tl.float32)
        through = tl.where(result <= 0, 0.0, logit * factor)
        tl.store(masked + place, through.to(masked.dtype.element_ty), mask=inside)
        total += through
        total_weight += logit * result
        total_logit += logit
    share = shares + tl.program_id(1) * shares_stride
    tl.store(share + column, tl.sum(total, 0)[None, :], mask=column < columns)
    tl.store(share + columns + column, tl.sum(total_weight, 0)[None, :], mask=column < columns)
    if tl.program_id(0) == 0:
        tl.store(share + 2 * columns, tl.sum(total_logit))
