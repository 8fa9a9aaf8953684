"""Multi-layer perceptron on a GPU with fused bias and ReLU; the PyTorch version is in `nn.layers.mlp`.

In the forward pass cuBLASLt adds the bias and applies ReLU in the epilogue of the matrix product. In the backward pass one
Triton kernel per layer masks the gradient and sums its columns for the bias; eager PyTorch and TorchInductor read the
gradient twice. The matrix product of a last layer with one output is too small to be worth a launch: its backward pass
is part of the kernel of the layer before.

Dropout is applied in place after ReLU. Its backward pass is part of the same kernels: the gradient is passed, scaled, where
the output is positive, so that neither mask nor further activations are kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.dropout_mask import DropoutMask
from nn.ops.fused_linear import weight_gradient
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.dropout import apply_mask
from nn.ops.triton.parameters import cast_parameters

# B: samples, C: columns of a layer's output, P: programs along the samples

BLOCK_B, BLOCK_C, BLOCKS_OF_ROWS = tl.constexpr(32), tl.constexpr(128), tl.constexpr(8)
"""A program processes `BLOCKS_OF_ROWS` blocks in sequence and accumulates in registers."""


def fused_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    final_activation: bool,
    masks: Sequence[DropoutMask] = (),
) -> Tensor:
    """Map x [B, ..., columns] through linear layers with ReLU between them, as `nn.layers.mlp.MLP` without padding.

    `weights`: per layer [outputs, inputs]. All parameters have one dtype, which their gradients have too. `biases`: per
    layer [outputs]. `masks`: of dropout after every ReLU, all of one rate; none without dropout.
    """
    rows = x.flatten(0, -2)
    out = _FusedMLP.apply(rows, len(x), final_activation, masks, *weights, *biases)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        num_samples: int,
        final_activation: bool,
        masks: Sequence[DropoutMask],
        *parameters: Tensor,
    ) -> Tensor:
        copies = cast_parameters(x.dtype, parameters)
        num_layers = len(copies) // 2
        weights, biases = copies[:num_layers], copies[num_layers:]
        num_activations = num_layers if final_activation else num_layers - 1
        outputs: list[Tensor] = []
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            linear = torch._addmm_activation if index < num_activations else torch.addmm
            if outputs and index == num_activations and len(weight) == 1:
                outputs.append(logit_forward(outputs[-1], weight, bias))
                break
            outputs.append(linear(bias, outputs[-1] if outputs else x, weight.t()))
            if masks and index < num_activations:
                samples = outputs[-1].view(num_samples, -1)
                apply_mask(samples, masks[index], out=samples)
        ctx.save_for_backward(x, *outputs[:num_activations], *weights)
        ctx.num_layers = num_layers
        ctx.parameters = parameters
        ctx.scale = masks[0].scale if masks else 1.0
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
        # Partial sums of all layers are adjacent, so that one reduction over programs at the end suffices.
        num_programs = triton.cdiv(len(grad), BLOCK_B * BLOCKS_OF_ROWS)
        partial_sums = grad.new_empty(num_programs, sum(sizes), dtype=torch.float32)
        layer_sums = partial_sums.split(sizes, dim=1) if sizes else ()

        last = num_layers - 1
        last_bias = []
        if has_logit:
            last -= 1
            grad = logit_backward(grad, weights[-1], activations[last], layer_sums[last], ctx.scale)
        elif last < len(activations):
            grad = relu_backward(grad, activations[last], layer_sums[last], ctx.scale)
        else:
            last_bias.append(column_sums(grad.contiguous()))
        grad_weights: list[Tensor] = []
        for index in reversed(range(last + 1)):
            # `grad` is the gradient of the linear layer's output, before ReLU.
            grad_weights.insert(0, weight_gradient(grad, inputs[index], ctx.parameters[index]))
            if index or ctx.needs_input_grad[0]:
                grad = grad @ weights[index]
            if index:
                grad = relu_backward(grad, activations[index - 1], layer_sums[index - 1], ctx.scale)
        sums = [*column_sums(partial_sums).split(sizes), *last_bias] if sizes else last_bias
        if has_logit:
            grad_weights.append(sums.pop(-2).view(1, -1))
        dtype = ctx.parameters[0].dtype
        gradients = [gradient.to(dtype) for gradient in (*grad_weights, *sums)]
        return grad if ctx.needs_input_grad[0] else None, None, None, None, *gradients


def relu_backward(grad: Tensor, activation: Tensor, partial_sums: Tensor, scale: float) -> Tensor:
    """Compute the gradient of ReLU's input, [B, C].

    `grad`: [B, C], gradient of ReLU's output, after dropout if there is one. `activation`: [B, C], that output.
    `partial_sums`: [P, C or more], float32; receives every program's sum of the returned gradient over its samples.
    `scale`: of dropout's kept elements; 1 without dropout.
    """
    grad = grad.contiguous()
    masked = torch.empty_like(activation)
    sizes = *activation.shape, partial_sums.stride(0)
    grid = triton.cdiv(activation.shape[1], BLOCK_C), len(partial_sums)
    _relu_backward[grid](grad, activation, masked, partial_sums, *sizes, SCALE=scale)
    return masked


@triton.jit
def _relu_backward(
    grad, activation, masked, partial_sums, num_rows, columns, sums_stride, SCALE: tl.constexpr
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    first = tl.program_id(1).to(tl.int64) * BLOCKS_OF_ROWS * BLOCK_B
    total = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    for block in range(BLOCKS_OF_ROWS):
        row = first + block * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
        inside = (row < num_rows) & (column < columns)
        offset = row * columns + column
        result = tl.load(activation + offset, mask=inside, other=0.0)
        grad_in = tl.load(grad + offset, mask=inside, other=0.0)
        # Like torch, the kernel passes the gradient where the activation is NaN.
        grad_in = tl.where(result <= 0, 0.0, grad_in)
        if SCALE != 1.0:
            grad_in = (grad_in.to(tl.float32) * SCALE).to(masked.dtype.element_ty)
        tl.store(masked + offset, grad_in, mask=inside)
        total += grad_in.to(tl.float32)
    partial_sum = partial_sums + tl.program_id(1) * sums_stride + column
    tl.store(partial_sum, tl.sum(total, 0)[None, :], mask=column < columns)


def logit_forward(activation: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute a linear layer with one output, float32 [B, 1]: what a loss reads, without a rounding on the way.

    `activation`: [B, C]. `weight`: [1, C]. `bias`: [1].
    """
    logits = torch.empty(len(activation), 1, dtype=torch.float32, device=activation.device)
    grid = (triton.cdiv(len(activation), BLOCK_B),)
    _logit_forward[grid](activation, weight, bias, logits, *activation.shape)
    return logits


@triton.jit
def _logit_forward(activation, weight, bias, logits, num_rows, columns):
    row = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
    total = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    for first in range(0, columns, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)[None, :]
        inside = (row < num_rows) & (column < columns)
        values = tl.load(activation + row * columns + column, mask=inside, other=0.0)
        factor = tl.load(weight + column, mask=column < columns, other=0.0)
        total += values.to(tl.float32) * factor.to(tl.float32)
    logit = tl.sum(total, 1)[:, None] + tl.load(bias).to(tl.float32)
    tl.store(logits + row, logit, mask=row < num_rows)


def logit_backward(
    grad: Tensor, weight: Tensor, activation: Tensor, partial_sums: Tensor, scale: float
) -> Tensor:
    """Compute the backward pass of a linear layer with one output and of the ReLU before it.

    `grad`: [B, 1], gradient of the logit. `weight`: [1, C]. `activation`: [B, C], output of ReLU, after dropout if there is
    one. `partial_sums`: [P, 2 C + 1 or more], float32; receives every program's sums over its samples: of the returned
    gradient, of the weight's gradient and of the logit's gradient. `scale`: of dropout's kept elements; 1 without dropout.
    Returns the gradient of ReLU's input, [B, C].
    """
    grad = grad.contiguous()
    masked = torch.empty_like(activation)
    sizes = *activation.shape, partial_sums.stride(0)
    grid = triton.cdiv(activation.shape[1], BLOCK_C), len(partial_sums)
    _logit_backward[grid](grad, weight, activation, masked, partial_sums, *sizes, SCALE=scale)
    return masked


@triton.jit
def _logit_backward(
    grad,
    weight,
    activation,
    masked,
    partial_sums,
    num_rows,
    columns,
    sums_stride,
    SCALE: tl.constexpr,
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
        offset = row * columns + column
        logit = tl.load(grad + row, mask=row < num_rows, other=0.0).to(tl.float32)
        result = tl.load(activation + offset, mask=inside, other=0.0).to(tl.float32)
        grad_in = tl.where(result <= 0, 0.0, logit * factor)
        if SCALE != 1.0:
            grad_in *= SCALE
        tl.store(masked + offset, grad_in.to(masked.dtype.element_ty), mask=inside)
        total += grad_in
        total_weight += logit * result
        total_logit += logit
    partial_sum = partial_sums + tl.program_id(1) * sums_stride
    inside = column < columns
    tl.store(partial_sum + column, tl.sum(total, 0)[None, :], mask=inside)
    tl.store(partial_sum + columns + column, tl.sum(total_weight, 0)[None, :], mask=inside)
    if tl.program_id(0) == 0:
        tl.store(partial_sum + 2 * columns, tl.sum(total_logit))
