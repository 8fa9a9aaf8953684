"""Helpers of the fused MLP and cross network: applicability, casts of inputs, gradients of weights."""

import torch
from torch import Tensor

from nn.ops.gradient_buffer import take_buffer

# Input dtypes of the Triton kernels, which accumulate in float32.
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_fuse(x: Tensor, weight: Tensor) -> bool:
    """Return whether the fused functions apply: on a GPU, if a linear layer with this weight accepts `x`.

    They do not apply during export, because an exported program must also run on machines without Triton.
    """
    dtypes_fit = x.dtype is weight.dtype or torch.is_autocast_enabled("cuda")
    fits = x.is_cuda and x.dtype in FUSED_DTYPES and dtypes_fit
    return fits and not torch.compiler.is_exporting()


def as_autocast(x: Tensor) -> Tensor:
    """Cast `x` on a GPU as autocast would for a linear layer."""
    return x.to(autocast_dtype(x))


def autocast_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Compute grad^T x, [columns of grad, columns of x], in the weight's dtype, and where its gradient is wanted.

    Three dimensions are as many products as the first has. Results in float32 are not rounded to a narrower dtype on the way.
    """
    dtype, buffer = weight.dtype, take_buffer(weight)
    product = torch.mm if grad.dim() == 2 else torch.bmm
    if dtype is grad.dtype:
        return product(grad.mT, x, out=buffer)
    if not grad.is_cuda:
        return product(grad.mT.to(dtype), x.to(dtype), out=buffer)
    return product(grad.mT, x, out_dtype=dtype, out=buffer)
