"""Attention of a candidate over a history (DIN, arXiv:1706.06978, 4.3) and between features (AutoInt, arXiv:1810.11921, 4.4)."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, cast

import torch
from torch import Tensor, nn

from nn.layers.initialization import initialise_linear_, uniform_
from nn.layers.sequence import SamplePositions, expand, pool, softmax
from nn.ops.fused_linear import can_fuse
from nn.ops.target_attention import fields_fit, fits

# B: samples, L: positions of a history, C: positions of the events of all samples, D: columns of a vector; F: features,
# A: columns of all heads


class TargetAttention(nn.Module):
    """Weighted sum of a history, sum_j a(e_j, q) e_j (equation 3).

    The activation unit a is an MLP of [q, e_j, q - e_j, q * e_j] with one output, as in the authors' program; the paper's
    figure 2 says "out product". Sigmoid follows every hidden layer, as in that program.

    The paper's weights are not normalised, so that a history with many similar items has a longer sum. The authors' program
    takes a softmax instead. A sum of L positions is up to L times as large as one vector, and on a small dataset it was worse
    than no history (benchmarks/README.md).

    D is `columns`. `pooling`: sum of the weighted items; mean, their sum divided by their number; or softmax of the weights.
    """

    positions: Tensor  # L

    def __init__(
        self,
        columns: int,
        positions: int,
        hidden: Sequence[int],
        pooling: Literal["sum", "mean", "softmax"] = "sum",
    ) -> None:
        super().__init__()
        self.pooling = pooling
        # Whether a GPU has kernels for it, of 16 bits.
        self.has_kernels = pooling != "softmax" and fits(columns, hidden)
        sizes = [4 * columns, *hidden, 1]
        layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.layers = cast(Sequence[nn.Linear], layers)
        self.register_buffer("positions", torch.arange(positions), persistent=False)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights from a CPU generator, but for the last bias, which is 0.

        A bias of deviation 1, as `initialise_linear_` draws it, would be the common weight of all positions: the history
        would begin as a large sum of a random sign.
        """
        for layer in self.layers:
            initialise_linear_(layer, generator)
        nn.init.zeros_(self.layers[-1].bias)

    def forward(self, query: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        """Return the pooled histories, [B, D].

        `query`: candidates, [B, D]. `history`: [B, L, D]. Positions from the length on are padding: their values change nothing,
        not even if they are NaN, and their gradients are zero. `lengths`: true lengths, [B]; 0 gives a vector of zeros.
        """
        is_item = (self.positions < lengths.unsqueeze(1)).unsqueeze(2)
        history = torch.where(is_item, history, 0)
        weights = self._weights(query.unsqueeze(1).expand_as(history), history)
        if self.pooling == "softmax":
            # The least finite number, since a history without items has no other: -inf would make its gradients NaN.
            least = torch.finfo(weights.dtype).min
            weights = torch.softmax(torch.where(is_item, weights, least), dim=1)
        pooled = (torch.where(is_item, weights, 0) * history).sum(1)
        if self.pooling == "mean":
            pooled = pooled / is_item.sum(1).clamp(min=1).to(pooled.dtype)
        return pooled

    def of_events(self, query: Tensor, events: Tensor, at: SamplePositions) -> Tensor:
        """Return the same of ragged histories, [B, D], from candidates [B, D] and events [C, D]."""
        is_narrow = events.element_size() == 2
        if self.has_kernels and is_narrow and can_fuse(events, self.layers[0].weight):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.target_attention import attend_weighted

            parameters = [each for layer in self.layers for each in (layer.weight, layer.bias)]
            return attend_weighted(query.to(events.dtype), events, at, self.pooling, parameters)
        weights = self._weights(expand(query, at), events)
        if self.pooling == "softmax":
            weights = softmax(weights, at)
        return pool(weights * events, at, "mean" if self.pooling == "mean" else "sum")

    def _weights(self, query: Tensor, item: Tensor) -> Tensor:
        """Return the weights of items [..., D] for their candidates [..., D], [..., 1]."""
        x = torch.cat([query, item, query - item, query * item], dim=-1)
        for layer in self.layers[:-1]:
            x = torch.sigmoid(layer(x))
        return self.layers[-1](x)


class InteractingLayer(nn.Module):
    """Self-attention with a residual (AutoInt, equations 5 to 8): ReLU(concat_h(softmax(Q_h K_h^T) V_h) + R).

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
        parts = nn.functional.linear(x, self.projections.flatten(0, 1).to(x.dtype))
        if can_fuse(x, self.projections) and fields_fit(x.shape[1], self.head_dim):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.target_attention import interact

            return interact(parts, self.heads)
        query, key, value, residual = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts.chunk(4, dim=2)
        )
        attention = torch.softmax(query @ key.mT, dim=3).to(value.dtype)
        return torch.relu(attention @ value + residual).transpose(1, 2).flatten(2)
