"""Vectors of numerical features: scaled by their values, or by learned frequencies or buckets (`model.numerical_encoding`)."""

import math

import torch
from torch import Tensor, nn

from configs.schema import ModelConfig
from nn.layers.initialization import truncated_glorot_

# B: samples, N: numerical features, K: frequencies or buckets, D: columns of a vector

LEAK = 0.01


class NumericalEmbedding(nn.Module):
    """Map numerical features x_i to vectors x_i * v_i (AutoInt, arXiv:1810.11921, section 4.3).

    N is `num_features`. `columns`: D, columns of every vector.
    """

    def __init__(self, num_features: int, columns: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(num_features, columns))
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the vectors from a CPU generator, with the standard deviation sqrt(2 / (N + D)) before truncation."""
        truncated_glorot_(self.vectors, generator)

    def forward(self, numerical: Tensor) -> Tensor:
        """Map [B, N] to [B, N * D]."""
        return (numerical.unsqueeze(2) * self.vectors).flatten(1)


class NumericalVectors(nn.Module):
    """Map numerical features x_i to vectors.

    periodic (arXiv:2203.05556, section 3.3, "PLR"): ReLU(W_i [sin(2 pi c_i x_i), cos(2 pi c_i x_i)] + b_i); the K frequencies
    c_i begin normal with deviation sigma. buckets (AutoDis, arXiv:2012.08986, section 3.2): the mean of K vectors, weighted by
    softmax(U_i h + h) with h = LeakyReLU(w_i x_i). The papers give no other initial weights: w_i begins from -1 to 1, other
    weights as those of `MLP`. `kept_columns`: columns that the backward pass keeps.
    """

    def __init__(self, count: int, options: ModelConfig) -> None:
        super().__init__()
        self.is_periodic = {"periodic": True, "buckets": False}[options.numerical_encoding]
        self._sigma = options.numerical_sigma
        size, columns = options.numerical_size, options.embedding_dim
        inputs = 2 * size if self.is_periodic else size
        self.first = nn.Parameter(torch.empty(count, size))
        self.vectors = nn.Parameter(torch.empty(count, inputs, columns))
        if self.is_periodic:
            self.bias = nn.Parameter(torch.zeros(count, 1, columns))
        else:
            self.mixing = nn.Parameter(torch.empty(count, size, size))
        self.kept_columns = count * (4 * size + columns)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights from a CPU generator; biases begin at zero."""
        if not self.first.is_meta:
            drawn = torch.empty(self.first.shape, device="cpu")
            if self.is_periodic:
                drawn.normal_(0, self._sigma, generator=generator)
            else:
                drawn.uniform_(-1, 1, generator=generator)
            self.first.data.copy_(drawn)
        for weight in (self.vectors,) if self.is_periodic else (self.vectors, self.mixing):
            truncated_glorot_(weight, generator)

    def forward(self, numerical: Tensor) -> Tensor:
        """Map [B, N] to [B, N * D]."""
        x = (numerical.unsqueeze(2) * self.first).transpose(0, 1)  # [N, B, K]
        if self.is_periodic:
            angles = 2 * math.pi * x
            waves = torch.cat([angles.sin(), angles.cos()], dim=2)
            found = torch.relu(torch.baddbmm(self.bias, waves, self.vectors))
        else:
            hidden = nn.functional.leaky_relu(x, LEAK)
            weights = torch.softmax(torch.baddbmm(hidden, hidden, self.mixing), dim=2)
            found = torch.bmm(weights, self.vectors)
        return found.transpose(0, 1).flatten(1)
