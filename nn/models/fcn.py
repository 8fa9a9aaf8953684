"""FCN, first named DCNv3: an exponential and a linear cross network (arXiv:2407.13349)."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.cross_net import MaskedCrossLayer
from nn.layers.initialization import initialise_without_bias_
from nn.layers.pass_state import PassLayer
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.model import Activations, VectorModel
from nn.models.options import FCNOptions

# B: samples, F: features, D: columns of a vector, C: F * D


class CrossBranch(nn.Module):
    """A stack of `MaskedCrossLayer` and its logit; exponential if each layer's factor is its own input."""

    def __init__(
        self, columns: int, layers: int, dropout: float, *, exponential: bool, batch_norm: bool
    ) -> None:
        super().__init__()
        self.exponential = exponential
        made = nn.ModuleList(
            MaskedCrossLayer(columns, dropout, batch_norm=batch_norm) for _ in range(layers)
        )
        self.layers = cast(Sequence[MaskedCrossLayer], made)
        self.logit = nn.Linear(columns, 1)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the logit's weight from a Glorot normal; its bias begins at zero."""
        initialise_without_bias_(self.logit, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C] to logits [B]."""
        first = x
        for layer in self.layers:
            x = layer(x if self.exponential else first, x)
        return self.logit(x).squeeze(1).float()


class TriBCE(PassLayer):
    """Section 4.4: L + sum_i max(0, L_i - L) L_i, with the loss L of the model and L_i of its branches, over the global batch.

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


class FCN(VectorModel):
    """Dense component of FCN (section 4): the mean of the logits of both cross networks, trained with `TriBCE`.

    x is the first halves of all vectors, then their second halves, on which the masks act (section 4.1). Numerical features
    have vectors that their values multiply.
    """

    Options = FCNOptions

    def __init__(self, options: FCNOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        columns, norm = self.vectors.columns, {"batch_norm": options.batch_norm}
        self.deep = CrossBranch(
            columns, options.deep_layers, options.deep_dropout, exponential=True, **norm
        )
        self.shallow = CrossBranch(
            columns, options.shallow_layers, options.shallow_dropout, exponential=False, **norm
        )
        self.tri_bce = TriBCE()
        self._layers = options.deep_layers + options.shallow_layers
        self._is_fused = not options.batch_norm

    def activations(self) -> Activations:
        """Return what a cross layer keeps beside x: kernels c, and as much for its gradient; others also mask and factor of x."""
        halves = 1 + self._layers if self._is_fused else 2 + 5 * self._layers
        return Activations(backward_columns=halves * self.vectors.columns // 2)

    def add_losses(self, share: Tensor, share_of: Callable[[Tensor], Tensor]) -> Tensor:
        return self.tri_bce.share(share, share_of)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        vectors = self.vectors(numerical, embeddings)
        x = vectors.unflatten(1, (self.vectors.num_features, 2, -1)).transpose(1, 2).flatten(1)
        deep, shallow = self.deep(x), self.shallow(x)
        if self.training:
            self.tri_bce.keep(deep, shallow)
        return (deep + shallow) / 2
