"""Matrix products of linear, cross and per-token layers in FP8, and the scales of their matrices (`train.fp8`).

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
from nn.ops.stream_waits import stream_for

# B: samples, C: columns of x0, R: rank of the weight (C for a full weight), L: layers, u: [B, C], factor of x0, n: matrices,
# T: tokens, D: columns of a token, K: columns of its hidden layer

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

    `products`: their number, each with an input and a gradient. `weights`: that of weights with such scales, behind them.
    `weight_gradients`: compute gradients of weights in 8 bits too, instead of 16.
    """

    # largest absolute values of the latest passes, the latest one first; 0 before the first, float32 [HISTORY, n]
    largest: Tensor
    _latest: Tensor
    _limits: Tensor
    _is_gradient: Tensor
    reduces_over_ranks = True

    def __init__(self, products: int = 1, weights: int = 0, *, weight_gradients: bool) -> None:
        super().__init__()
        self.weight_gradients = weight_gradients
        dtypes = [INPUT, GRADIENT] * products + [INPUT] * weights
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
        unknown = first.expand_as(largest).where(self._is_gradient, FIRST_LARGEST)
        largest = largest.where(largest > 0, unknown)
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
    """Product of a linear layer in FP8; the layer has the parameters."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool = False) -> Tensor:
        """Map x [B, inputs] to x weight^T + bias, and through ReLU if there is one; bfloat16 [B, outputs]."""
        of = self.begin_pass(relu, weight, bias)
        return unpadded(_Fp8Pass.apply(padded(x), of, weight, bias), len(x))

    def begin_pass(self, relu: bool, weight: Tensor, bias: Tensor) -> "LinearPass":
        return LinearPass(self.begin(), self.weight_gradients, relu, weight, bias)


@dataclass(frozen=True, slots=True)
class LinearPass:
    """A pass of a linear layer, with ReLU or without."""

    scales: list[Scale]  # of the input and of the gradient of the layer's output
    transposed: bool  # the gradient of the weight is in 8 bits
    relu: bool  # whether ReLU follows
    weight: Tensor  # [outputs, inputs]
    bias: Tensor  # [outputs]

    def forward(self, x: Any, stored: Fp8Matrix | None = None) -> tuple[Tensor, list[Any]]:
        """Return the output [B, outputs], and what `backward` needs.

        `x`: input in 16 bits, which `stored`, the same in 8 bits, needs unless it has a transposed copy.
        """
        if stored is None:
            stored = ops_for(x).quantise(x, INPUT, self.scales[0], transposed=self.transposed)
        (weights,) = quantise_weights([self.weight])
        out = product(stored, weights, torch.bfloat16, bias=self.bias.to(torch.bfloat16))
        if self.relu:
            out = out.relu_()
        kept = [*kept_for_weight(x, stored), *kept_for_input(weights)]
        return out, [out if self.relu else None, *kept]

    def backward(
        self, grad: Tensor, kept: Sequence[Any], *, needs_input: bool = True
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input unless nobody needs it, of weight and bias."""
        activation, x, inverse, *weight = kept
        stored, wide, bias_sum = ops_for(grad).quantise_gradient(
            grad, activation, None, self.scales[1], transposed=x.dtype is INPUT
        )
        of_weight = gradient_of_weight(stored, wide, (x, inverse), self.weight)
        of_x = product(stored, Fp8Matrix(*weight), grad.dtype) if needs_input else None
        return of_x, of_weight, bias_sum.to(self.bias.dtype)


class _Fp8Pass(torch.autograd.Function):
    """A pass of a linear layer or of per-token networks, whose parameters follow it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: "LinearPass | NetworkPass", *parameters: Tensor) -> Tensor:
        out, kept = of.forward(x.contiguous())
        ctx.of = of
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, *gradients = ctx.of.backward(
            grad.contiguous(), ctx.saved_tensors, needs_input=ctx.needs_input_grad[0]
        )
        return of_x, None, *gradients


class Fp8CrossNet(Fp8Scales):
    """The cross network in FP8; the cross layers have the parameters.

    `low_rank`: whether each layer has two products, through a hidden vector. `weight_gradients`: compute gradients of
    weights in 8 bits too, instead of 16.
    """

    def __init__(self, num_layers: int, *, low_rank: bool, weight_gradients: bool) -> None:
        super().__init__((2 if low_rank else 1) * num_layers, weight_gradients=weight_gradients)
        self.num_layers = num_layers

    def forward(
        self,
        x0: Tensor,
        downs: Sequence[Tensor],
        ups: Sequence[Tensor],
        biases: Sequence[Tensor],
        reader: LinearPass | None = None,
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


class _Fp8Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x0: Tensor, net: Fp8CrossNet, reader: LinearPass | None, *parameters: Tensor
    ) -> Tensor:
        num_layers, transposed = net.num_layers, net.weight_gradients
        x0, ops = x0.contiguous(), ops_for(x0)
        scales = net.scales_by_layer()
        ctx.linear = reader
        if reader is not None:
            parameters = parameters[:-2]
        weights = quantise_weights(parameters[:-num_layers])
        downs: Sequence[Fp8Matrix | None] = weights[:-num_layers] or [None] * num_layers
        layers = list(
            zip(downs, weights[-num_layers:], parameters[-num_layers:], scales, strict=True)
        )
        factors = x0.new_empty(num_layers, *x0.shape)
        kept: list[Tensor | None] = []
        x, stored = x0, ops.quantise(x0, INPUT, scales[0][-2], transposed=transposed)
        for index, (down, up, bias, of_layer) in enumerate(layers):
            hidden, small = x, stored
            if down is not None:
                kept += kept_for_weight(x, stored) + kept_for_input(down)
                hidden = product(stored, down, x0.dtype)
                small = ops.quantise(hidden, INPUT, of_layer[0], transposed=transposed)
            kept += kept_for_weight(hidden, small) + kept_for_input(up)
            product(small, up, x0.dtype, bias=bias.to(x0.dtype), out=factors[index])
            is_last = index + 1 == num_layers
            if is_last and reader is None:
                x = torch.addcmul(x, x0, factors[index])
                break
            scale = reader.scales[0] if reader and is_last else scales[index + 1][-2]
            keep = not (is_last and transposed)
            x, stored = ops.add_product(
                x, x0, factors[index], scale, transposed=transposed, keep=keep
            )
        ctx.num_kept = len(kept)
        if reader is not None:
            x, kept_by_linear = reader.forward(x, stored)
            kept += kept_by_linear
        first_down = None if downs[0] is None else parameters[0].to(x0.dtype)
        ctx.save_for_backward(x0, factors, first_down, *kept)
        ctx.scales, ctx.transposed, ctx.parameters = scales, transposed, parameters
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x0, factors, first_down, *kept = ctx.saved_tensors
        ops, num_layers = ops_for(x0), len(factors)
        kept, of_reader = kept[: ctx.num_kept], kept[ctx.num_kept :]
        size = len(kept) // num_layers
        products = x0.new_empty(max(1, num_layers - 1), *x0.shape)
        of_linear: list[Tensor] = []
        if ctx.linear is not None:
            grad, *of_linear = ctx.linear.backward(grad.contiguous(), of_reader)
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
                small = ops.quantise(wide, GRADIENT, scales[3], transposed=ctx.transposed)
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


class Fp8Network(Fp8Scales):
    """Both products of per-token networks in FP8; `PerTokenExperts` has the parameters."""

    @torch.compiler.disable
    def forward(self, x: Tensor, up: Tensor, down: Tensor, up_bias: Tensor) -> Tensor:
        """Map bfloat16 [T, B, D] to GELU(x up + up_bias) down, the same shape and dtype; B is a multiple of `MULTIPLE`."""
        return _Fp8Pass.apply(x, self.begin_pass(up, down, up_bias), up, down, up_bias)

    def begin_pass(self, up: Tensor, down: Tensor, up_bias: Tensor) -> "NetworkPass":
        """Begin a pass; a GPU computes its scales beside what comes before the products, which wait for them."""
        stream = stream_of_scales(up)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            scales = self.begin()
        return NetworkPass(scales, self.weight_gradients, up, down, up_bias)


@dataclass(frozen=True, slots=True)
class NetworkPass:
    """A pass of per-token networks, whose weights [T, inputs, outputs] are the transposed ones of linear layers."""

    scales: list[Scale]  # of both inputs and gradients, alternating, then of `up` and `down`
    transposed: bool  # the gradients of weights are in 8 bits
    up: Tensor
    down: Tensor
    up_bias: Tensor  # [T, 1, K]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output [T, B, D], and what `backward` needs."""
        ops = ops_for(x)
        stream = stream_of_scales(x)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        # Weights change slowly; reading these for their own largest values would take 2 % of passes of 4,096 samples.
        up = ops.quantise(self.up.detach(), INPUT, self.scales[4], transposed=True)
        down = ops.quantise(self.down.detach(), INPUT, self.scales[5], transposed=True)
        stored = ops.quantise(x, INPUT, self.scales[0], transposed=self.transposed)
        hidden = product(stored, up.transposed, x.dtype)
        activated, wide = ops.activate(
            hidden, self.up_bias, self.scales[2], transposed=self.transposed
        )
        kept = [hidden, *kept_for_weight(x, stored), *kept_for_weight(wide, activated)]
        kept += [up.rows, up.inverse, down.rows, down.inverse]
        return product(activated, down.transposed, x.dtype), kept

    def backward(
        self, grad: Tensor, kept: Sequence[Tensor], *, needs_input: bool = True
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the input, `up`, `down` and `up_bias`."""
        hidden, x, x_inverse, activated, activated_inverse, up, up_inverse, *down = kept
        ops = ops_for(grad)
        small = ops.quantise(grad, GRADIENT, self.scales[3], transposed=self.transposed)
        of_down = gradient_of_weight(small, grad, (activated, activated_inverse), self.down)
        of_hidden = product(small, Fp8Matrix(*down), grad.dtype)
        small, wide, bias_sum = ops.quantise_gradient(
            of_hidden, hidden, self.up_bias, self.scales[1], transposed=self.transposed
        )
        of_up = gradient_of_weight(small, wide, (x, x_inverse), self.up)
        of_x = product(small, Fp8Matrix(up, up_inverse), grad.dtype)
        return of_x, of_up, of_down, bias_sum.view_as(self.up_bias).to(self.up_bias.dtype)


def stream_of_scales(x: Tensor) -> torch.cuda.Stream | None:
    """Return the stream on which a GPU computes scales beside other work, None on a CPU."""
    return stream_for("scales of per-token networks", x.device) if x.is_cuda else None


def padded(x: Tensor) -> Tensor:
    """Return x [..., B, C] in bfloat16, with rows of zeros behind it up to a multiple of `MULTIPLE`; they change no other row."""
    missing = -x.shape[-2] % MULTIPLE
    return nn.functional.pad(x.bfloat16(), (0, 0, 0, missing)) if missing else x.bfloat16()


def unpadded(x: Tensor, rows: int) -> Tensor:
    """Return the first rows of x; x itself if it has no others, since the gradient of a part is written twice."""
    return x if x.shape[-2] == rows else x[..., :rows, :]


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
    """Compute grad^T x, [columns of grad, columns of x]; of per-token weights, which are [T, inputs, outputs], x^T grad.

    `grad`: of the product's result, [B, R] or [T, B, R]. `wide`: the same in 16 bits; needed if x was kept in 16 bits.
    """
    x, inverse = kept
    per_token = weight.dim() == 3
    if x.dtype is INPUT:
        left, right = grad.transposed, Fp8Matrix(x, inverse)
        left, right = (right, left) if per_token else (left, right)
        return product(left, right, weight.dtype, out=take_buffer(weight), exact=True)
    assert wide is not None
    return weight_gradient(x, wide, weight) if per_token else weight_gradient(wide, x, weight)


def quantise_weights(weights: Sequence[Tensor]) -> list[Fp8Matrix]:
    """Round weights to 8 bits in both layouts, by scales of their own largest values."""
    weights = [weight.detach().contiguous() for weight in weights]
    largest = torch.stack(torch._foreach_norm(weights, float("inf")))
    factors = scale_factors(largest, torch.full_like(largest, LARGEST[INPUT]))
    scales = map(Scale, factors.split(1), apart(factors.reciprocal()))
    quantise, pairs = ops_for(largest).quantise, zip(weights, scales, strict=True)
    return [quantise(weight, INPUT, scale, transposed=True) for weight, scale in pairs]


def ops_for(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return plain
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton.fp8 import cross_net

    return cross_net
