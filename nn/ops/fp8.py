"""FP8 matrices with power-of-two scales, and their products, in plain torch; `nn.ops.triton.fp8` has the kernels of GPUs.

A matrix is stored as values * scale in 8 bits, by rows and, for some products, transposed too: Hopper's tensor cores read
both operands of an 8-bit product along the dimension that is summed. A scale is a power of two. It shifts exponents and
rounds nothing, so a product has the rounding of its operands to 8 bits and no other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nn.ops.stream_waits import stream_for

# R: rows, C: columns, B: samples, L: layers, K: the dimension that a product sums over, n: matrices, T: tokens

INPUT = torch.float8_e4m3fn
"""Dtype of inputs and weights: 3 bits of mantissa, up to 448."""
GRADIENT = torch.float8_e5m2
"""Dtype of gradients: 2 bits of mantissa, up to 57,344."""
LARGEST = {INPUT: 448.0, GRADIENT: 57_344.0}
MULTIPLE = 16
"""The tensor cores' 8-bit products require rows and columns that are multiples of this."""
EXPONENT_BITS = 0x7F800000
SMALLEST = 2.0**-100
"""Largest values below this one are taken for it, so that no scale becomes infinite."""


@dataclass(frozen=True, slots=True)
class Scale:
    factor: Tensor  # float32 [1], a power of two; stored = value * factor
    inverse: Tensor  # 1 / factor, at a multiple of 16 bytes
    # float32 [1], raised to the largest absolute value of the matrix; None if nobody reads it
    latest: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix [R, C] in 8 bits, or one of each token [T, R, C]."""

    rows: Tensor  # [R, C], contiguous
    inverse: Tensor  # value = stored * inverse, float32 [1]
    columns: Tensor | None = None  # [C, R], contiguous; None if no product needs it

    @property
    def transposed(self) -> "Fp8Matrix":
        """The transposed matrix [C, R]; it has no columns of its own."""
        assert self.columns is not None, "the matrix was quantised without its transposed copy"
        return Fp8Matrix(self.columns, self.inverse)


def scale_factors(largest: Tensor, limits: Tensor) -> Tensor:
    """Return the largest powers of two with largest * factor <= limit, float32 [n] as both arguments."""
    ratio = limits / largest.clamp(min=SMALLEST)
    return ratio.view(torch.int32).bitwise_and(EXPONENT_BITS).view(torch.float32)


def apart(values: Tensor) -> list[Tensor]:
    """Return each of the values [n] as [1], at a multiple of 16 bytes: cuBLAS refuses scales at other addresses."""
    return [value[:1] for value in values[:, None].expand(-1, 4).contiguous()]


def quantise(x: Tensor, dtype: torch.dtype, scale: Scale, *, transposed: bool) -> Fp8Matrix:
    """Round x [R, C] or [T, R, C] to 8 bits, to the nearest value and at most the largest.

    `x`: contiguous.
    """
    if scale.latest is not None:
        scale.latest.copy_(torch.maximum(scale.latest, x.abs().max().float()))
    # Unlike torch's cast to e5m2, this keeps what is too large finite; NaN stays NaN.
    limit = LARGEST[dtype]
    rows = (x.float() * scale.factor).clamp(-limit, limit).to(dtype)
    return Fp8Matrix(rows, scale.inverse, rows.mT.contiguous() if transposed else None)


def activate(
    hidden: Tensor, bias: Tensor, scale: Scale, *, transposed: bool
) -> tuple[Fp8Matrix, Tensor | None]:
    """Compute GELU(hidden + bias) in 8 bits and, unless `transposed`, in the dtype of `hidden` too.

    `hidden`: [T, B, C], contiguous. `bias`: [T, 1, C].
    """
    activated = nn.functional.gelu(hidden.float() + bias.float())
    stored = quantise(activated, INPUT, scale, transposed=transposed)
    return stored, None if transposed else activated.to(hidden.dtype)


def quantise_gradient(
    grad: Tensor, activation: Tensor | None, bias: Tensor | None, scale: Scale, *, transposed: bool
) -> tuple[Fp8Matrix, Tensor | None, Tensor]:
    """Round the gradient of a linear layer's output [B, C], or of one of each token [T, B, C], to 8 bits.

    `grad`: contiguous; of the output of the activation behind the layer if there is one. `activation`: the output of ReLU,
    contiguous; None without; with `bias` both are arguments of `activate`. Returns the gradient in 8 bits; unless
    `transposed`, the same in the dtype of `grad`; its sum over the samples, float32 [C] or [T * C].
    """
    wide = grad if activation is None else grad.masked_fill(activation <= 0, 0)
    if activation is not None and bias is not None:
        wide = torch.ops.aten.gelu_backward(grad.float(), activation.float() + bias.float())
    stored = quantise(wide, GRADIENT, scale, transposed=transposed)
    sums = wide.sum(-2, dtype=torch.float32)
    return stored, None if transposed else wide.to(grad.dtype), sums.flatten()


def add_product(
    x: Tensor, x0: Tensor, factor: Tensor, scale: Scale, *, transposed: bool, keep: bool = True
) -> tuple[Tensor | None, Fp8Matrix]:
    """Return x + x0 * factor, [B, C], unless not to `keep`, and the same in 8 bits, the input of the next product."""
    out = torch.addcmul(x, x0, factor)
    return out if keep else None, quantise(out, INPUT, scale, transposed=transposed)


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
    """Compute the gradient of u in layer `index`, x + x0 * u, and in the first layer also the gradient of x0.

    `index`: index of the layer, from 0. `grad`: gradient of the last layer's output, [B, C]. `products`: [L - 1 (at least 1), B,
    C]. The gradient of any other layer's output is the sum of `grad` and `products[index:]`. In the first layer `products[0]` is
    overwritten by the gradient of x0, without the term through this layer's weights. `x0`: [B, C]. `factors`: u of every layer,
    [L, B, C]. `transposed`: make its transposed copy, and no copy in the dtype of x0. Returns the gradient of u, [B, C], in 8
    bits; unless `transposed`, the same in the dtype of x0; its sum over the samples, float32 [C].
    """
    grad_out = grad.float()
    grad_x0 = torch.zeros_like(grad_out)
    for above in range(len(factors) - 1, index, -1):
        grad_x0 += grad_out * factors[above].float()
        grad_out = grad_out + products[above - 1].float()
    grad_u = grad_out * x0.float()
    if index == 0:
        products[0] = grad_x0 + grad_out * (factors[0].float() + 1)
    rounded = grad_u.to(x0.dtype)
    stored = quantise(rounded, GRADIENT, scale, transposed=transposed)
    return stored, None if transposed else rounded, grad_u.sum(0)


def product(
    left: Fp8Matrix,
    right: Fp8Matrix,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """Compute left [R, K] times the transposed right [C, K], plus a bias [C]; [R, C]. Of matrices of T tokens, T products.

    `left`: at most one of the two is a gradient. `exact`: let a GPU add all products in 32 bits. Its faster sums have 14
    bits within 128 products; the sum of a weight's gradient runs over the batch.
    """
    if left.rows.is_cuda and left.rows.dim() == 3:
        return _of_tokens(left, right, dtype, out, exact=exact)
    if left.rows.is_cuda:
        return torch._scaled_mm(
            left.rows,
            right.rows.t(),
            scale_a=left.inverse,
            scale_b=right.inverse,
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=not exact,
            out=out,
        )
    wide = left.rows.float() @ right.rows.float().mT * (left.inverse * right.inverse)
    result = (wide if bias is None else wide + bias).to(dtype)
    return result if out is None else out.copy_(result)


def _of_tokens(
    left: Fp8Matrix, right: Fp8Matrix, dtype: torch.dtype, out: Tensor | None, *, exact: bool
) -> Tensor:
    """Compute the products of all tokens on two streams: one's first blocks fill the GPU beside the other's last ones.

    Each stream has a workspace of its own, so the results are those of one stream.
    """
    shape = *left.rows.shape[:2], right.rows.shape[1]
    out = left.rows.new_empty(shape, dtype=dtype) if out is None else out
    current = torch.cuda.current_stream()
    streams = current, stream_for("products of tokens", out.device)
    streams[1].wait_stream(current)
    for token, result in enumerate(out):
        with torch.cuda.stream(streams[token % 2]):
            one = Fp8Matrix(left.rows[token], left.inverse)
            other = Fp8Matrix(right.rows[token], right.inverse)
            product(one, other, dtype, out=result, exact=exact)
    current.wait_stream(streams[1])
    return out
