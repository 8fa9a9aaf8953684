"""What the hand-written backward passes of the dense half share: copies of the weights and gradients for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the Triton kernels take; they add up in float32."""


def autocast_to_device(x: Tensor) -> Tensor:
    """Return `x` in the dtype in which autocast would run a linear layer on it now."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


def copies_in(dtype: torch.dtype, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters in another dtype, in one launch instead of one a parameter."""
    if all(each.dtype is dtype for each in parameters):
        return list(parameters)
    copies = [torch.empty_like(each, dtype=dtype) for each in parameters]
    torch._foreach_copy_(copies, list(parameters))
    return copies


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad^T x, [columns of grad, columns of x], as it was added up: unrounded if `dtype` is float32."""
    if dtype is grad.dtype:
        return grad.t() @ x
    return torch.mm(grad.t(), x, out_dtype=dtype)
