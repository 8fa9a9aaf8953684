"""The loss of a batch that is spread over ranks."""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def share_of_loss(logits: Tensor, labels: Tensor, num_valid: int, global_valid: int) -> Tensor:
    """Return this rank's share of the mean binary cross entropy over the rows of the global batch.

    The sum of the shares over ranks is that mean, whatever the number of ranks, and so it is with gradients.

    Args:
        logits: [B].
        labels: [B].
        num_valid: rows of this rank that count, the first ones.
        global_valid: rows over all ranks that count.
    """
    losses = binary_cross_entropy_with_logits(
        logits[:num_valid], labels[:num_valid], reduction="sum"
    )
    return losses / global_valid
