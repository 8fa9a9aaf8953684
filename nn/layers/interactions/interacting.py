"""Self-attention between the vectors of a sample's features (AutoInt, arXiv:1810.11921, section 4.4)."""

import math

import torch
from torch import Tensor, nn

from nn.layers.initialization import uniform_
from nn.ops.fused_linear import as_autocast, can_fuse

# B: samples, F: features, D: columns of a vector, A: columns of all heads

MOST = 64
"""Vectors, columns of one, and twice those of a head, that fit into the registers of a GPU's kernels."""


def fits(features: int, columns: int, head_dim: int) -> bool:
    """Return whether a GPU's kernels have room for a layer."""
    return max(features, columns, 2 * head_dim) <= MOST


class InteractingLayer(nn.Module):
    """Self-attention with a residual (section 4.4, equations 5 to 8): ReLU(concat_h(softmax(Q_h K_h^T) V_h) + R).

    Q, K, V and R are the vectors times a matrix each, without a bias; the products are not scaled. The weights begin as in
    the authors' program, uniform in +-sqrt(6 / (in + out)).
    """

    def __init__(self, columns: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.projections = nn.Parameter(torch.empty(4, heads * head_dim, columns))
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        bound = math.sqrt(6 / sum(self.projections.shape[1:]))
        uniform_(self.projections, -bound, bound, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, F, D] to [B, F, A]."""
        _, features, columns = x.shape
        if can_fuse(x, self.projections) and fits(features, columns, self.head_dim):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.target_attention import interact

            return interact(as_autocast(x), self.projections, self.heads)
        weight = self.projections.flatten(0, 1).to(x.dtype)
        query, key, value, residual = nn.functional.linear(x, weight).chunk(4, dim=2)
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (query, key, value)
        )
        attention = torch.softmax(query @ key.transpose(2, 3), dim=3).to(value.dtype)
        return torch.relu((attention @ value).transpose(1, 2).flatten(2) + residual)
