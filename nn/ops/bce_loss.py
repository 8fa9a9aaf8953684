"""The loss of a batch that is spread over ranks."""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def share_of_loss(logits: Tensor, labels: Tensor, num_valid: int, global_valid: int) -> Tensor:
    """Return this rank's share of the mean binary cross entropy over the rows of the global batch.

    The sum of the shares over ranks is that mean, whatever the number of ranks, and so it is with gradients.

    Args:
        logits: [B], float32.
        labels: [B], float32.
        num_valid: rows of this rank that count, the first ones.
        global_valid: rows over all ranks that count.
    """
    if logits.is_cuda:
        # Triton comes with torch's CUDA builds only.
        from nn.ops.triton.bce_loss import fused_share_of_loss

        return fused_share_of_loss(logits, labels, num_valid, global_valid)
    losses = binary_cross_entropy_with_logits(
        logits[:num_valid], labels[:num_valid], reduction="sum"
    )
    return losses / global_valid
