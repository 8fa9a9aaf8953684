"""Attention of a candidate over a history of variable length (DIN, arXiv:1706.06978, section 4.3)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from nn.layers.initialization import initialise_linear_

# B: samples, L: positions of a history, D: columns of a vector


class TargetAttention(nn.Module):
    """Weighted sum of a history, sum_j a(e_j, q) e_j (equation 3).

    The activation unit a is an MLP of [q, e_j, q - e_j, q * e_j] with one output, as in the authors' program; the paper's
    figure 2 says "out product". Its weights are not normalised by a softmax: a history with many similar items has a longer
    sum. Sigmoid follows every hidden layer, as in that program.

    Args:
        columns: D.
        positions: L.
        hidden: widths of the hidden layers.
    """

    positions: Tensor

    def __init__(self, columns: int, positions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        sizes = [4 * columns, *hidden, 1]
        layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.layers = cast(Sequence[nn.Linear], layers)
        self.register_buffer("positions", torch.arange(positions), persistent=False)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights from a CPU generator."""
        for layer in self.layers:
            initialise_linear_(layer, generator)

    def forward(self, query: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        """Return the pooled histories, [B, D].

        Args:
            query: candidates, [B, D].
            history: [B, L, D]. Positions from the length on are padding: their values change nothing, not even if they are
                NaN, and their gradients are zero.
            lengths: true lengths, [B]; 0 gives a vector of zeros.
        """
        is_item = (self.positions < lengths.unsqueeze(1)).unsqueeze(2)
        history = torch.where(is_item, history, 0)
        query = query.unsqueeze(1).expand_as(history)
        x = torch.cat([query, history, query - history, query * history], dim=2)
        for layer in self.layers[:-1]:
            x = torch.sigmoid(layer(x))
        weights = torch.where(is_item, self.layers[-1](x), 0)
        return (weights * history).sum(1)
