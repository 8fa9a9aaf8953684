"""Fusion of two streams (FinalMLP, arXiv:2304.00902, section "Stream-Level Interaction Aggregation")."""

import math

import torch
from torch import Tensor, nn

from nn.layers.initialization import truncated_normal_

# B: samples, H: heads, I and J: columns of the two streams


class BilinearFusion(nn.Module):
    """Multi-head bilinear fusion in heads of I/H and J/H columns.

    logit = b + w_1^T o_1 + w_2^T o_2 + sum over heads of o_1h^T W_h o_2h

    I is `first`. J is `second`. `heads`: H; it divides I and J.
    """

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        self.linear = nn.Linear(first + second, 1)
        self.product = nn.Parameter(torch.empty(heads, first // heads, second // heads))
        self.initialise(torch.default_generator)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights from a CPU generator as Glorot's normal, and set the bias to zero."""
        truncated_normal_(
            self.linear.weight, math.sqrt(2 / sum(self.linear.weight.shape)), generator
        )
        self.linear.bias.zero_()
        truncated_normal_(self.product, math.sqrt(2 / sum(self.product.shape[1:])), generator)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Map o_1 [B, I] and o_2 [B, J] to logits [B]."""
        heads = len(self.product)
        left, right = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in (first, second))
        products = (torch.bmm(left, self.product.to(left.dtype)) * right).float().sum((0, 2))
        return self.linear(torch.cat([first, second], dim=1)).squeeze(1) + products
