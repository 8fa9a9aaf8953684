"""Binary cross entropy of a batch that is distributed over ranks."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


@cache
def unit_gradient(device: torch.device) -> Tensor:
    """Return the gradient of a loss itself, 1, [], always the same tensor: nobody need multiply by it."""
    return torch.ones((), device=device)


def bce_loss_share(logits: Tensor, labels: Tensor, num_valid: int, global_valid: int) -> Tensor:
    """Compute this rank's share of the mean binary cross entropy over the rows of the global batch.

    The sum of the shares over ranks is the mean, for any number of ranks, and so are gradients. Logits and labels are [B]
    float32; `num_valid` rows of this rank come first, the others are padding, and all ranks have `global_valid` valid ones.
    """
    if logits.is_cuda:
        # Only CUDA builds of torch include Triton.
        from nn.ops.triton.bce_loss import fused_bce_loss_share

        unit = unit_gradient(logits.device)
        return fused_bce_loss_share(logits, labels, num_valid, global_valid, unit)
    losses = binary_cross_entropy_with_logits(
        logits[:num_valid], labels[:num_valid], reduction="sum"
    )
    return losses / global_valid
