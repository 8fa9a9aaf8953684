"""A multi-layer perceptron on a GPU with ReLU and bias inside the matrix products; `nn.mlp` has it in plain torch.

Forward, cuBLASLt adds the bias and applies ReLU before it writes a product. Backward, one Triton kernel a layer masks
the gradient and adds up its columns for the bias, where torch and inductor read the gradient twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.fused_linear import copies_in, weight_gradient

# B: samples, C: columns of a layer's output

BLOCK_B, BLOCK_C = 32, 128
BLOCKS_OF_ROWS = 16
"""That one program takes one after the other, and adds up in registers."""


def fused_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, final_activation: bool
) -> Tensor:
    """Map x [B, columns] through linear layers with ReLU between them, as `nn.mlp.MLP` without padding.

    Args:
        x: in the dtype to compute in.
        weights: [columns after, columns before] of each layer, of any dtype; so are their gradients.
        biases: [columns after] of each layer.
        final_activation: apply ReLU after the last layer too.
    """
    return _FusedMLP.apply(x, final_activation, *weights, *biases)


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, final_activation: bool, *parameters: Tensor) -> Tensor:
        copies = copies_in(x.dtype, parameters)
        num_layers = len(copies) // 2
        num_activations = num_layers if final_activation else num_layers - 1
        outputs = []
        for index, (weight, bias) in enumerate(
            zip(copies[:num_layers], copies[num_layers:], strict=True)
        ):
            linear = torch._addmm_activation if index < num_activations else torch.addmm
            outputs.append(linear(bias, outputs[-1] if outputs else x, weight.t()))
        ctx.save_for_backward(x, *outputs[:num_activations], *copies[:num_layers])
        ctx.num_layers = num_layers
        ctx.dtypes = [each.dtype for each in parameters]
        return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_layers = ctx.num_layers
        tensors, weights = ctx.saved_tensors[:-num_layers], ctx.saved_tensors[-num_layers:]
        x, *activations = tensors
        inputs = (x, *activations)[:num_layers]
        grad_weights, grad_biases = [None] * num_layers, [None] * num_layers
        for index in reversed(range(num_layers)):
            if index < len(activations):
                grad, grad_bias = relu_backward(grad, activations[index])
            else:
                grad_bias = grad.sum(0, dtype=torch.float32)
            grad_weights[index] = weight_gradient(grad, inputs[index], ctx.dtypes[index])
            grad_biases[index] = grad_bias.to(ctx.dtypes[num_layers + index])
            if index or ctx.needs_input_grad[0]:
                grad = grad @ weights[index]
        return grad if ctx.needs_input_grad[0] else None, None, *grad_weights, *grad_biases


def relu_backward(grad: Tensor, activation: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient before ReLU [B, C] and its sum over samples [C] in float32, always in the same order.

    Args:
        grad: [B, C] after ReLU, rows at any distance.
        activation: [B, C], ReLU's result.
    """
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    num_rows, columns = activation.shape
    num_chunks = triton.cdiv(num_rows, BLOCK_B * BLOCKS_OF_ROWS)
    masked = torch.empty_like(activation)
    partial = grad.new_empty(num_chunks, columns, dtype=torch.float32)
    _relu_backward[(triton.cdiv(columns, BLOCK_C), num_chunks)](
        grad,
        activation,
        masked,
        partial,
        num_rows,
        columns,
        grad.stride(0),
        BLOCK_B=BLOCK_B,
        BLOCK_C=BLOCK_C,
        BLOCKS_OF_ROWS=BLOCKS_OF_ROWS,
    )
    return masked, partial.sum(0)


@triton.jit
def _relu_backward(
    grad,
    activation,
    masked,
    partial,
    num_rows,
    columns,
    grad_stride,
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
        result = tl.load(activation + row * columns + column, mask=inside, other=0.0)
        through = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0)
        # As in torch, what is not a number lets the gradient pass.
        through = tl.where(result <= 0, 0.0, through)
        tl.store(masked + row * columns + column, through, mask=inside)
        total += through.to(tl.float32)
    place = partial + tl.program_id(1) * columns + column
    tl.store(place, tl.sum(total, 0)[None, :], mask=column < columns)
