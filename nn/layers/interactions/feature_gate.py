"""Feature gating of a stream (FinalMLP, arXiv:2304.00902, section "Stream-Specific Feature Selection")."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nn.layers.mlp import MLP

# B: samples, F: features, D: columns of a vector


class FeatureGate(nn.Module):
    """Weights of all elements of the vectors e: h = 2 sigmoid(Gate(x)) * e.

    Gate is an MLP. Its input x is the embeddings of some features, or, without any, a learned vector.

    F is `num_features`. D is `embedding_dim`.
    """

    def __init__(
        self, positions: Sequence[int], num_features: int, embedding_dim: int, hidden: Sequence[int]
    ) -> None:
        super().__init__()
        self._positions = list(positions)
        self.constant = None if positions else nn.Parameter(torch.zeros(1, embedding_dim))
        self.gate = MLP(
            max(len(positions), 1) * embedding_dim,
            [*hidden, num_features * embedding_dim],
            final_activation=False,
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """Map vectors [B, F, D] to [B, F * D]."""
        if self.constant is None:
            x = torch.cat([vectors[:, position] for position in self._positions], dim=1)
        else:
            x = self.constant.to(vectors.dtype)
        return 2 * torch.sigmoid(self.gate(x)) * vectors.flatten(1)
