"""Multi-layer perceptron, used as bottom and top MLP of the dense component."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from configs.options import require_rate
from nn.layers.batch_norm import BatchNorm
from nn.layers.dropout import Dropout
from nn.layers.fp8 import Fp8Linear
from nn.layers.initialization import initialise_linear_
from nn.ops.fused_linear import as_autocast, can_fuse

ALIGNMENT = 8
"""Inputs are padded with zeros to a multiple of this, so that every layer can use 16-bit tensor cores."""


def round_up(count: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class MLP(nn.Module):
    """Linear layers with ReLU between them and, optionally, after the last one.

    Batch normalization may precede every ReLU, and dropout may follow it. The input is padded with zeros to a multiple of 8
    columns, as in NVIDIA's TensorFlow 2 recipe: 13 numerical features become 16.

    `widths`: output columns of every layer; at least one layer. `dropout`: rate of the dropout after every ReLU; 0 for
    none. `kept_columns`: columns that the backward pass keeps beside the inputs of linear layers and normalizations. `fp8`:
    product of the first layer in 8 bits, or None; see `use_fp8`. Raises ValueError: `dropout` is below 0, or 1 or more.
    """

    def __init__(
        self,
        num_inputs: int,
        widths: Sequence[int],
        *,
        final_activation: bool = False,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        require_rate("dropout", dropout)
        self.padding = round_up(num_inputs) - num_inputs
        self.final_activation = final_activation
        sizes = [num_inputs + self.padding, *widths]
        layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.layers = cast(Sequence[nn.Linear], layers)
        num_activations = len(widths) if final_activation else len(widths) - 1
        dropouts = nn.ModuleList(Dropout(dropout) for _ in range(num_activations if dropout else 0))
        self.dropouts = cast(Sequence[Dropout], dropouts)
        normalised = widths[:num_activations] if batch_norm else []
        norms = nn.ModuleList(BatchNorm(columns) for columns in normalised)
        self.norms = cast(Sequence[BatchNorm], norms)
        # ReLU keeps its output. Dropout, which is a layer of its own after a normalization, has another.
        self.kept_columns = sum(normalised) if dropout else 0
        self.fp8: Fp8Linear | None = None
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        for layer in self.layers:
            initialise_linear_(layer, generator)

    def use_fp8(self, *, weight_gradients: bool) -> None:
        """Compute the first layer's products in 8 bits in training, its weight's gradient too or in 16 bits.

        Only the first: the others are too narrow to gain more time than the rounding takes.
        """
        self.fp8 = Fp8Linear(weight_gradients=weight_gradients)

    def fp8_products(self) -> list[tuple[str, int, int]]:
        return [("layers.0", self.layers[0].in_features, self.layers[0].out_features)]

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, ..., num_inputs] to [B, ..., widths[-1]]; the first dimension is the rows of this rank."""
        if self.fp8 is not None and self.training:
            return self.behind_first(self._forward_fp8(self.pad(x), self.fp8))
        return self._rest(x, 0)

    @property
    def first_relu(self) -> bool:
        """A ReLU follows the first layer's product, with no normalization between them."""
        return not self.norms and (len(self.layers) > 1 or self.final_activation)

    def behind_first(self, first: Tensor) -> Tensor:
        """Compute what is behind the first layer's product and, if there is one, its `first_relu`."""
        if not self.first_relu:
            first = self._activate(first, 0)
        elif self.dropouts:
            first = self.dropouts[0](first)
        return self._rest(first, 1)

    def forward_plain(self, x: Tensor) -> Tensor:
        """Compute `forward` with unfused PyTorch operations, on any device."""
        return self._rest_plain(x, 0)

    def _rest(self, x: Tensor, start: int) -> Tensor:
        layers = self.layers[start:]
        if layers and not self.norms and can_fuse(x, layers[0].weight):
            return self._forward_fused(as_autocast(x), start)
        return self._rest_plain(x, start)

    def _rest_plain(self, x: Tensor, start: int) -> Tensor:
        x = x if start else self.pad(x)
        for index in range(start, len(self.layers)):
            x = self.hidden(x, index)
        return x

    def hidden(self, x: Tensor, index: int) -> Tensor:
        """Map the padded input of a layer to its output, behind norm, ReLU and dropout."""
        return self._activate(self.layers[index](x), index)

    def _activate(self, x: Tensor, index: int) -> Tensor:
        if index == len(self.layers) - 1 and not self.final_activation:
            return x
        x = torch.relu(self.norms[index](x) if self.norms else x)
        return self.dropouts[index](x) if self.dropouts else x

    @torch.compiler.disable
    def _forward_fp8(self, x: Tensor, fp8: Fp8Linear) -> Tensor:
        first = self.layers[0]
        out = fp8(x.flatten(0, -2), first.weight, first.bias, relu=self.first_relu)
        return out.view(*x.shape[:-1], out.shape[1])

    def _forward_fused(self, x: Tensor, start: int = 0) -> Tensor:
        layers, dropouts = self.layers[start:], self.dropouts[start:]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        x = x if start else self.pad(x)
        return fused(x, weights, biases, dropouts, final_activation=self.final_activation)

    def pad(self, x: Tensor) -> Tensor:
        """Return the input of the first layer: x [B, ..., num_inputs] and zeros."""
        return nn.functional.pad(x, (0, self.padding)) if self.padding else x


def linear_layers(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Map [B, inputs] through linear layers with ReLU between them; on a GPU kernels add up the gradients of biases."""
    if can_fuse(x, layers[0].weight):
        weights, biases = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
        return fused(as_autocast(x), weights, biases, [], final_activation=False)
    for layer in layers[:-1]:
        x = torch.relu(layer(x))
    return layers[-1](x)


@torch.compiler.disable
def fused(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    dropouts: Sequence[Dropout],
    *,
    final_activation: bool = False,
) -> Tensor:
    """Map [B, ..., inputs] through linear layers with ReLU and dropout between them by kernels, where `can_fuse` says so."""
    # Only CUDA builds of torch include Triton.
    from nn.ops.triton.mlp import fused_mlp

    masks = [dropout.mask for dropout in dropouts if dropout.mask is not None]
    return fused_mlp(x, weights, biases, final_activation=final_activation, masks=masks)
