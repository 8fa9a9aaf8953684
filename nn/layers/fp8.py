"""Matrix products of linear and cross layers in FP8, and the scales of their matrices (`train.fp8`).

As in `nn.ops.triton.cross_net`, all cross layers are one autograd function, and gradients between layers stay separate
terms. The elementwise operations write the 8 bits that the next product reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nn.layers.pass_state import PassLayer
from nn.ops import fp8 as plain
from nn.ops.fp8 import (
    GRADIENT,
    INPUT,
    LARGEST,
    MULTIPLE,
    Fp8Matrix,
    Scale,
    apart,
    product,
    scale_factors,
)
from nn.ops.fused_linear import weight_gradient
from nn.ops.gradient_buffer import take_buffer

# B: samples, C: columns of x0, R: rank of the weight (C for a full weight), L: layers, u: [B, C], factor of x0, n: matrices

HISTORY = 16
"""Passes whose largest values a scale takes into account."""
ROOM = {INPUT: 2.0, GRADIENT: 16.0}
"""Times that a value may exceed the largest one of these passes, at least, before it is rounded down."""
FIRST_LARGEST = 16.0
"""Taken for the largest value of an input before any pass; that of a gradient is 1 / rows of the global batch."""


class Fp8Scales(PassLayer):
    """Scales of the inputs and gradients of a layer's products, from the largest values of the latest passes.

    A scale must be known before the matrix that it scales is computed, so that the kernel that computes it can round it
    (delayed scaling). The scales are the same on all ranks. They are a part of checkpoints, as state of the training:
    evaluation, which multiplies in 16 bits, needs none.

    `weight_gradients`: compute gradients of weights in 8 bits too, instead of 16.
    """

    # largest absolute values of the latest passes, the latest one first; 0 before the first, float32 [HISTORY, n]
    largest: Tensor
    _latest: Tensor
    _limits: Tensor
    _is_gradient: Tensor
    reduces_over_ranks = True

    def __init__(self, dtypes: Sequence[torch.dtype], *, weight_gradients: bool) -> None:
        super().__init__()
        self.weight_gradients = weight_gradients
        limits = [LARGEST[dtype] / ROOM[dtype] for dtype in dtypes]
        for name, values in (
            ("largest", torch.zeros(HISTORY, len(dtypes))),
            ("_latest", torch.zeros(len(dtypes))),
            ("_limits", torch.tensor(limits)),
            ("_is_gradient", torch.tensor([dtype is GRADIENT for dtype in dtypes])),
        ):
            self.register_buffer(name, values, persistent=False)

    def begin(self) -> list[Scale]:
        """Return the scales of a pass, in the order of the matrices."""
        first = 1.0 / self.pass_state.global_valid.clamp(min=1).float()
        largest = self.largest.amax(0)
        largest = largest.where(
            largest > 0, first.expand_as(largest).where(self._is_gradient, FIRST_LARGEST)
        )
        factors = scale_factors(largest, self._limits)
        vectors = (factors.split(1), apart(factors.reciprocal()), self._latest.zero_().split(1))
        return [Scale(*scale) for scale in zip(*vectors, strict=True)]

    @torch.no_grad()
    def update(self) -> None:
        """Queue the replacement of the oldest pass by the latest one."""
        latest = self.pass_state.all_reduce_max(self._latest)
        self.largest.copy_(torch.cat([latest[None], self.largest[:-1]]))

    def training_state(self) -> dict[str, Tensor]:
        return {"largest": self.largest}


class Fp8Linear(Fp8Scales):
    """Product of a linear layer in FP8; the layer has the parameters.

    `weight_gradients`: compute the gradient of the weight in 8 bits too, instead of 16.
    """

    def __init__(self, *, weight_gradients: bool) -> None:
        super().__init__([INPUT, GRADIENT], weight_gradients=weight_gradients)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool = False) -> Tensor:
        """Map x [B, inputs] to x weight^T + bias, and through ReLU if there is one; bfloat16 [B, outputs]."""
        return unpadded(_Fp8Linear.apply(padded(x), self, relu, weight, bias), len(x))


@dataclass(frozen=True, slots=True)
class LinearPass:
    """A pass of a linear layer, with ReLU or without."""

    grad_scale: Scale  # of the gradient of the layer's output
    relu: bool  # whether ReLU follows
    weight: Tensor  # [outputs, inputs]
    bias: Tensor  # [outputs]

    def forward(self, wide: Tensor | None, stored: Fp8Matrix) -> tuple[Tensor, list[Tensor | None]]:
        """Return the output [B, outputs], and what `backward` needs.

        `wide`: input in 16 bits, which `stored` without its transposed copy needs. `stored`: the input in 8 bits.
        """
        (weights,) = quantise_weights([self.weight])
        out = product(stored, weights, torch.bfloat16, bias=self.bias.to(torch.bfloat16))
        if self.relu:
            out = out.relu_()
        kept = [*kept_for_weight(wide, stored), *kept_for_input(weights)]
        return out, [out if self.relu else None, *kept]

    def backward(
        self, grad: Tensor, kept: Sequence[Tensor | None]
    ) -> tuple[Fp8Matrix, Tensor, Tensor]:
        """Return the gradient of the product in 8 bits, and those of weight and bias."""
        activation, x, inverse, *_ = kept
        assert x is not None
        assert inverse is not None
        stored, wide, bias_sum = rounding_ops(grad).quantise_gradient(
            grad.contiguous(), activation, self.grad_scale, transposed=x.dtype is INPUT
        )
        grad_weight = gradient_of_weight(stored, wide, (x, inverse), self.weight)
        return stored, grad_weight, bias_sum.to(self.bias.dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: Fp8Linear, relu: bool, weight: Tensor, bias: Tensor
    ) -> Tensor:
        x = x.contiguous()
        input_scale, grad_scale = layer.begin()
        ctx.linear = LinearPass(grad_scale, relu, weight, bias)
        stored = quantise(x, INPUT, input_scale, transposed=layer.weight_gradients)
        out, kept = ctx.linear.forward(x, stored)
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        stored, *gradients = ctx.linear.backward(grad, kept)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(stored, Fp8Matrix(*kept[-2:]), grad.dtype)
        return grad_x, None, None, *gradients


class Fp8CrossNet(Fp8Scales):
    """The cross network in FP8; the cross layers have the parameters.

    `low_rank`: whether each layer has two products, through a hidden vector. `weight_gradients`: compute gradients of
    weights in 8 bits too, instead of 16.
    """

    def __init__(self, num_layers: int, *, low_rank: bool, weight_gradients: bool) -> None:
        # Of each product its input and its gradient.
        dtypes = [INPUT, GRADIENT] * (2 if low_rank else 1)
        super().__init__(dtypes * num_layers, weight_gradients=weight_gradients)
        self.num_layers = num_layers

    def forward(
        self,
        x0: Tensor,
        downs: Sequence[Tensor],
        ups: Sequence[Tensor],
        biases: Sequence[Tensor],
        reader: "Reader | None" = None,
    ) -> Tensor:
        """Map x0 [B, C] through the cross layers to bfloat16 [B, C], or through the linear layer behind them too.

        `downs`: per layer [R, C]; empty for full rank. All parameters have one dtype, which their gradients have too.
        `ups`: per layer [C, R]. `biases`: per layer [C]. `reader`: the only reader of the cross layers' output, which is
        then written in 8 bits alone if it can be.
        """
        read = () if reader is None else (reader.weight, reader.bias)
        out = _Fp8Cross.apply(padded(x0), self, reader, *downs, *ups, *biases, *read)
        return unpadded(out, len(x0))

    def scales_by_layer(self) -> list[list[Scale]]:
        """Return the scales of a pass: per layer of the last product's input and gradient, then of the one's before."""
        scales = self.begin()
        count = len(scales) // self.num_layers
        return [scales[start : start + count] for start in range(0, len(scales), count)]


@dataclass(frozen=True, slots=True)
class Reader:
    """Linear layer behind the cross layers."""

    layer: Fp8Linear
    weight: Tensor  # [outputs, C]
    bias: Tensor  # [outputs]
    relu: bool  # whether ReLU follows


class _Fp8Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x0: Tensor, net: Fp8CrossNet, reader: Reader | None, *parameters: Tensor
    ) -> Tensor:
        num_layers, transposed = net.num_layers, net.weight_gradients
        x0, ops = x0.contiguous(), cross_ops(x0)
        scales = net.scales_by_layer()
        ctx.linear = None
        if reader is not None:
            parameters, read = parameters[:-2], parameters[-2:]
            last_scale, grad_scale = reader.layer.begin()
            ctx.linear = LinearPass(grad_scale, reader.relu, *read)
        weights = quantise_weights(parameters[:-num_layers])
        downs: Sequence[Fp8Matrix | None] = weights[:-num_layers] or [None] * num_layers
        layers = list(
            zip(downs, weights[-num_layers:], parameters[-num_layers:], scales, strict=True)
        )
        factors = x0.new_empty(num_layers, *x0.shape)
        kept: list[Tensor | None] = []
        x, stored = x0, quantise(x0, INPUT, scales[0][-2], transposed=transposed)
        for index, (down, up, bias, of_layer) in enumerate(layers):
            hidden, small = x, stored
            if down is not None:
                kept += kept_for_weight(x, stored) + kept_for_input(down)
                hidden = product(stored, down, x0.dtype)
                small = quantise(hidden, INPUT, of_layer[0], transposed=transposed)
            kept += kept_for_weight(hidden, small) + kept_for_input(up)
            product(small, up, x0.dtype, bias=bias.to(x0.dtype), out=factors[index])
            is_last = index + 1 == num_layers
            if is_last and reader is None:
                x = torch.addcmul(x, x0, factors[index])
                break
            scale = last_scale if is_last else scales[index + 1][-2]
            x, stored = ops.add_product(
                x,
                x0,
                factors[index],
                scale,
                transposed=transposed,
                keep=not (is_last and transposed),
            )
        ctx.num_kept = len(kept)
        if ctx.linear is not None:
            x, kept_by_linear = ctx.linear.forward(x, stored)
            kept += kept_by_linear
        first_down = None if downs[0] is None else parameters[0].to(x0.dtype)
        ctx.save_for_backward(x0, factors, first_down, *kept)
        ctx.scales, ctx.transposed, ctx.parameters = scales, transposed, parameters
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x0, factors, first_down, *kept = ctx.saved_tensors
        ops, num_layers = cross_ops(x0), len(factors)
        kept, of_reader = kept[: ctx.num_kept], kept[ctx.num_kept :]
        size = len(kept) // num_layers
        products = x0.new_empty(max(1, num_layers - 1), *x0.shape)
        of_linear: list[Tensor] = []
        if ctx.linear is not None:
            stored, *of_linear = ctx.linear.backward(grad, of_reader)
            grad = product(stored, Fp8Matrix(*of_reader[-2:]), x0.dtype)
        grad = grad.contiguous()
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        biases: list[Tensor] = []
        for index in reversed(range(num_layers)):
            *of_down, x, inverse, weight, weight_inverse = kept[index * size : (index + 1) * size]
            scales = ctx.scales[index]
            small, wide, bias_sum = ops.cross_backward(
                index, grad, products, x0, factors, scales[1], transposed=ctx.transposed
            )
            biases.insert(0, bias_sum.to(ctx.parameters[0].dtype))
            parameter = ctx.parameters[index - 2 * num_layers]
            ups.insert(0, gradient_of_weight(small, wide, (x, inverse), parameter))
            target = products[index - 1] if index else None
            if of_down:
                wide = product(small, Fp8Matrix(weight, weight_inverse), x0.dtype)
                x, inverse, weight, weight_inverse = of_down
                small = quantise(wide, GRADIENT, scales[3], transposed=ctx.transposed)
                parameter = ctx.parameters[index]
                downs.insert(0, gradient_of_weight(small, wide, (x, inverse), parameter))
                if target is None:
                    # A product in 8 bits cannot add to its result, and a pass that adds costs more than this saves.
                    products[0].addmm_(wide, first_down)
                    break
            result = product(small, Fp8Matrix(weight, weight_inverse), x0.dtype, out=target)
            if target is None:
                products[0] += result
        return products[0], None, None, *downs, *ups, *biases, *of_linear


def padded(x: Tensor) -> Tensor:
    """Return x [B, C] in bfloat16, with rows of zeros behind it up to a multiple of `MULTIPLE`; they change no other row."""
    missing = -len(x) % MULTIPLE
    return nn.functional.pad(x.bfloat16(), (0, 0, 0, missing)) if missing else x.bfloat16()


def unpadded(x: Tensor, rows: int) -> Tensor:
    """Return the first rows of x; x itself if it has no others, since the gradient of a part is written twice."""
    return x if len(x) == rows else x[:rows]


def kept_for_weight(x: Tensor | None, stored: Fp8Matrix) -> tuple[Tensor, Tensor]:
    """Return what the gradient of a weight needs of its product's input x [B, C]: x itself, or 8 bits [C, B] and 1 / scale."""
    kept = x if stored.columns is None else stored.columns
    assert kept is not None
    return kept, stored.inverse


def kept_for_input(weight: Fp8Matrix) -> tuple[Tensor, Tensor]:
    """Return what the gradient of a product's input needs of its weight."""
    transposed = weight.transposed
    return transposed.rows, transposed.inverse


def gradient_of_weight(
    grad: Fp8Matrix, wide: Tensor | None, kept: tuple[Tensor, Tensor], weight: Tensor
) -> Tensor:
    """Compute grad^T x, [columns of grad, columns of x].

    `grad`: of the product's result, [B, R]. `wide`: the same in 16 bits; needed if x was kept in 16 bits.
    """
    x, inverse = kept
    if x.dtype is INPUT:
        of_x = Fp8Matrix(x, inverse)
        return product(grad.transposed, of_x, weight.dtype, out=take_buffer(weight), exact=True)
    assert wide is not None
    return weight_gradient(wide, x, weight)


def quantise(x: Tensor, dtype: torch.dtype, scale: Scale, *, transposed: bool) -> Fp8Matrix:
    """Round x [R, C] to 8 bits."""
    return rounding_ops(x).quantise(x, dtype, scale, transposed=transposed)


def quantise_weights(weights: Sequence[Tensor]) -> list[Fp8Matrix]:
    """Round weights to 8 bits in both layouts, by scales of their own largest values."""
    weights = [weight.detach().contiguous() for weight in weights]
    largest = torch.stack(torch._foreach_norm(weights, float("inf")))
    factors = scale_factors(largest, torch.full_like(largest, LARGEST[INPUT]))
    scales = map(Scale, factors.split(1), apart(factors.reciprocal()))
    return [
        quantise(weight, INPUT, scale, transposed=True)
        for weight, scale in zip(weights, scales, strict=True)
    ]


def rounding_ops(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return plain
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton.fp8 import quantise

    return quantise


def cross_ops(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return plain
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton.fp8 import cross_net

    return cross_net
