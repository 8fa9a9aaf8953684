"""MLP with a learned activation, PReLU or Dice (DIN, arXiv:1706.06978, section 5.2)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from nn.layers.batch_norm import BatchNorm
from nn.layers.dropout import Dropout
from nn.layers.initialization import initialise_linear_


class Dice(nn.Module):
    """Data adaptive activation p(x) x + (1 - p(x)) alpha x (equation 9), alpha learned from 0 on.

    p(x) = sigmoid((x - mean) / sqrt(variance + 1e-8)), over the valid rows of the global batch, and with running values in
    evaluation (`BatchNorm`). PReLU is the case of p(x) = 1 for positive x and 0 for others (equation 8).

    `kept_columns`: columns that the backward pass keeps beside the normalization's.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm = BatchNorm(columns, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(columns))
        self.kept_columns = 3 * columns

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, columns] to the same shape and dtype."""
        chance = torch.sigmoid(self.norm(x))
        return (x * (chance + self.alpha * (1 - chance))).to(x.dtype)


class AdaptiveMLP(nn.Module):
    """Hidden layers with a learned activation, and a linear layer with one output.

    I is `num_inputs`. `dice`: whether the activation is Dice; else PReLU. `dropout`, `batch_norm`: as of `MLP`. `kept_columns`:
    columns that the backward pass keeps beside the layers' own: inputs of the activations.
    """

    def __init__(
        self,
        num_inputs: int,
        hidden: Sequence[int],
        *,
        dice: bool,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        sizes = [num_inputs, *hidden, 1]
        layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.layers = cast(Sequence[nn.Linear], layers)
        activation = Dice if dice else nn.PReLU
        self.activations = nn.ModuleList(activation(width) for width in hidden)
        self.dropout = nn.ModuleList(Dropout(dropout) for _ in hidden)
        self.norms = nn.ModuleList(
            BatchNorm(width) if batch_norm else nn.Identity() for width in hidden
        )
        self.kept_columns = sum(hidden)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        for layer in self.layers:
            initialise_linear_(layer, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, I] to logits [B]."""
        for layer, norm, activation, dropout in zip(
            self.layers[:-1], self.norms, self.activations, self.dropout, strict=True
        ):
            x = dropout(activation(norm(layer(x))))
        return self.layers[-1](x).squeeze(1)
