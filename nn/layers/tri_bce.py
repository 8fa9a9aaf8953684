"""Tri-BCE: losses of a model's branches, weighted by their excess over its own (FCN, arXiv:2407.13349, section 4.4)."""

from collections.abc import Callable

import torch
from torch import Tensor

from nn.layers.pass_state import PassLayer


class TriBCE(PassLayer):
    """L + sum_i max(0, L_i - L) L_i, with the loss L of the model and L_i of its branches, over the global batch.

    As in the authors' program the gradient passes through the weights max(0, L_i - L) too.
    """

    reduces_over_ranks = True

    def __init__(self) -> None:
        super().__init__()
        self.branches: list[Tensor] = []

    def keep(self, *branches: Tensor) -> None:
        """Keep the logits [B] of the branches of a training pass, for `share`."""
        self.branches = list(branches)

    def share(self, share: Tensor, share_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's share of the sum; `nn.models.model.Model.add_losses` describes the arguments."""
        shares = torch.stack([share_of(logits) for logits in self.branches])
        whole = self.pass_state.all_reduce_sum(torch.cat([share.view(1), shares]).detach())
        weights = torch.relu(whole[1:] - whole[0])
        # Its gradient is that of the weights; a weight of the global batch has a gradient on every rank's rows.
        through = (whole[1:] * (weights > 0) * (shares - share)).sum()
        return share + (weights * shares).sum() + through - through.detach()
