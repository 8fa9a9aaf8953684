"""What the fused parts of the dense half share: when they run, copies of the weights, gradients of the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

# What the Triton kernels take; they add up in float32.
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_fuse(x: Tensor, weight: Tensor) -> bool:
    """Whether the fused functions apply: on a GPU, where a linear layer with this weight would run on `x`.

    An exported program is for other machines too, so it keeps to plain torch.
    """
    dtypes_fit = x.dtype is weight.dtype or torch.is_autocast_enabled("cuda")
    fits = x.is_cuda and x.dtype in FUSED_DTYPES and dtypes_fit
    return fits and not torch.compiler.is_exporting()


def as_autocast(x: Tensor) -> Tensor:
    """Return `x` on a GPU in the dtype in which a linear layer would now read it."""
    if torch.is_autocast_enabled("cuda"):
        return x.to(torch.get_autocast_dtype("cuda"))
    return x


def copies_in(dtype: torch.dtype, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters in another dtype, in one launch instead of one a parameter."""
    if all(each.dtype is dtype for each in parameters):
        return list(parameters)
    copies = [torch.empty_like(each, dtype=dtype) for each in parameters]
    torch._foreach_copy_(copies, list(parameters))
    return copies


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad^T x, [columns of grad, columns of x]; in float32 not rounded on the way."""
    if dtype is grad.dtype:
        return grad.t() @ x
    return torch.mm(grad.t(), x, out_dtype=dtype)
