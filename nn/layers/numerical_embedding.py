"""Embeddings of numerical features: a vector per feature, scaled by its value (AutoInt, arXiv:1810.11921, section 4.3)."""

import math

import torch
from torch import Tensor, nn

from nn.layers.initialization import truncated_normal_


class NumericalEmbedding(nn.Module):
    """Map numerical features x_i to vectors x_i * v_i.

    N is `num_features`. `columns`: D, columns of every vector.
    """

    def __init__(self, num_features: int, columns: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(num_features, columns))
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the vectors from a CPU generator, with the standard deviation sqrt(2 / (N + D)) before truncation."""
        truncated_normal_(self.vectors, math.sqrt(2 / sum(self.vectors.shape)), generator)

    def forward(self, numerical: Tensor) -> Tensor:
        """Map [B, N] to [B, N * D]."""
        return (numerical.unsqueeze(2) * self.vectors).flatten(1)
