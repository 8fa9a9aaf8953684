"""Arithmetic of batch normalization over some rows of a matrix, in plain torch; `nn.ops.triton.batch_norm` is that of GPUs.

The rows beyond `num_valid` are padding: they count in no sum, and their result is a constant. Statistics are float32 or
wider. Moments of blocks of rows, on one rank or several, are added in float64, which is Chan, Golub and LeVeque's
combination ("Updating formulae and a pairwise algorithm for computing sample variances", 1979) without its divisions.
"""

import torch
from torch import Tensor

# R: rows, C: columns


def moments(x: Tensor, num_valid: Tensor) -> Tensor:
    """Return sums whose total over blocks of rows, or ranks, gives mean and variance.

    `x`: [R, C]. `num_valid`: valid rows, integer [1]. Returns float64 [3, C]: per column n m, the sum of (x - m)^2, and n
    m^2, for n rows with the mean m.
    """
    is_valid, values = _valid(x, num_valid), x.to(statistics_dtype(x))
    mean = values.where(is_valid, 0).sum(0) / num_valid.clamp(min=1)
    squares = (values - mean).where(is_valid, 0).square().sum(0)
    mean = mean.double()
    return torch.stack([num_valid * mean, squares.double(), num_valid * mean.square()])


def normalise(
    x: Tensor, num_valid: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Return (x - mean) rstd weight + bias in the dtype of `x`, [R, C]; of padding rows the bias."""
    return (_normalised(x, num_valid, mean, rstd) * weight + bias).to(x.dtype)


def gradient_sums(grad: Tensor, x: Tensor, num_valid: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradients of bias and weight, [2, C]."""
    grad = grad.to(mean.dtype).where(_valid(x, num_valid), 0)
    normalised = _normalised(x, num_valid, mean, rstd)
    return torch.stack([grad.sum(0), (grad * normalised).sum(0)])


def input_gradient(
    grad: Tensor,
    x: Tensor,
    num_valid: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    mean_sums: Tensor,
) -> Tensor:
    """Return the gradient of `x`, [R, C]; 0 for padding rows.

    `grad`: gradient of `normalise`'s result, [R, C]. `num_valid`: valid rows, integer [1]. `mean`: [C]. `rstd`: [C].
    `weight`: [C]. `mean_sums`: `gradient_sums` over the global batch, divided by its rows, [2, C].
    """
    normalised = _normalised(x, num_valid, mean, rstd)
    centred = grad.to(mean.dtype) - mean_sums[0] - normalised * mean_sums[1]
    return (centred * (weight * rstd)).where(_valid(x, num_valid), 0).to(x.dtype)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or float64 if `x` is."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _valid(x: Tensor, num_valid: Tensor) -> Tensor:
    return (torch.arange(len(x), device=x.device) < num_valid)[:, None]


def _normalised(x: Tensor, num_valid: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    # Chosen, not multiplied: padding may hold anything.
    return ((x.to(mean.dtype) - mean) * rstd).where(_valid(x, num_valid), 0)
