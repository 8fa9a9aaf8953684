"""Cross network of DCN-V2 (arXiv:2008.13535, equations 1 and 2), the layers of FCN (2407.13349) and xDeepFM (1803.05170)."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from nn.layers.batch_norm import BatchNorm
from nn.layers.dropout import Dropout
from nn.layers.fp8 import Fp8CrossNet
from nn.layers.initialization import normal_, truncated_glorot_, truncated_normal_, uniform_
from nn.layers.mlp import MLP
from nn.layers.sequence import LayerNorm
from nn.ops.fused_linear import as_autocast, can_fuse

STD = 0.05
"""Standard deviation of the initial weights before truncation at two deviations (Keras' `truncated_normal`)."""
MOST_VECTORS = 64
"""Vectors whose pairs with others a GPU's kernels have room for."""


class CrossLayer(nn.Module):
    """Cross layer x0 * (W x + b) + x, where W is a full matrix or low-rank, W = V U.

    `width`: C, columns of x0 and x. `projection_dim`: rank of W, with U of [projection_dim, C] and V of [C,
    projection_dim]; None for a full W.
    """

    def __init__(self, width: int, projection_dim: int | None) -> None:
        super().__init__()
        self.down = None if projection_dim is None else nn.Linear(width, projection_dim, bias=False)
        self.up = nn.Linear(width if projection_dim is None else projection_dim, width)
        self.initialise(torch.default_generator)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights from a CPU generator and set the bias to zero."""
        if self.down is not None:
            truncated_normal_(self.down.weight, STD, generator)
        truncated_normal_(self.up.weight, STD, generator)
        self.up.bias.zero_()

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Map x0 [B, C] and x [B, C] to [B, C]."""
        hidden = x if self.down is None else self.down(x)
        return torch.addcmul(x, x0, self.up(hidden))


class CrossNet(nn.Module):
    """Stack of cross layers; x0 of every layer is the input of the stack.

    `width`: C, columns of the input and the output. `num_layers`: number of layers; the output contains products of up to
    `num_layers + 1` features. `projection_dim`: rank of every layer's weight; None for full rank. `fp8`: the cross layers
    in 8 bits, or None; see `use_fp8`.
    """

    def __init__(self, width: int, num_layers: int, projection_dim: int | None) -> None:
        super().__init__()
        layers = nn.ModuleList(CrossLayer(width, projection_dim) for _ in range(num_layers))
        self.layers = cast(Sequence[CrossLayer], layers)
        self.fp8: Fp8CrossNet | None = None

    def use_fp8(self, *, weight_gradients: bool) -> None:
        """Compute all products in 8 bits in training, gradients of weights too or in 16 bits."""
        self.fp8 = Fp8CrossNet(
            len(self.layers),
            low_rank=self.layers[0].down is not None,
            weight_gradients=weight_gradients,
        )

    def fp8_products(self) -> list[tuple[str, int, int]]:
        return [
            (name, layer.in_features, layer.out_features)
            for name, layer in self.named_modules()
            if isinstance(layer, nn.Linear)
        ]

    def forward(self, x0: Tensor, reader: MLP | None = None) -> Tensor:
        """Map [B, C] to [B, C], or with an MLP that alone reads this to the MLP's output.

        In 8 bits the last cross layer then writes what the MLP's first product reads.
        """
        if self.fp8 is not None and self.training:
            crossed = self._forward_fp8(x0, self.fp8, reader)
            return crossed if reader is None else reader.behind_first(crossed)
        if can_fuse(x0, self.layers[0].up.weight):
            crossed = self._forward_fused(as_autocast(x0))
        else:
            crossed = self.forward_plain(x0)
        return crossed if reader is None else reader(crossed)

    def forward_plain(self, x0: Tensor) -> Tensor:
        """Compute `forward` with unfused PyTorch operations, on any device."""
        x = x0
        for layer in self.layers:
            x = layer(x0, x)
        return x

    @torch.compiler.disable
    def _forward_fused(self, x0: Tensor) -> Tensor:
        # Only CUDA builds of torch include Triton.
        from nn.ops.triton.cross_net import fused_cross

        return fused_cross(x0, *self._parameters_by_kind())

    @torch.compiler.disable
    def _forward_fp8(self, x0: Tensor, fp8: Fp8CrossNet, mlp: MLP | None) -> Tensor:
        reader = None
        if mlp is not None:
            assert mlp.fp8 is not None, "the MLP behind the cross layers must be in 8 bits too"
            first = mlp.layers[0]
            reader = mlp.fp8.begin_pass(mlp.first_relu, first.weight, first.bias)
        return fp8(x0, *self._parameters_by_kind(), reader)

    def _parameters_by_kind(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the first weights of low-rank layers, the last weights, and the biases."""
        return (
            [layer.down.weight for layer in self.layers if layer.down is not None],
            [layer.up.weight for layer in self.layers],
            [layer.up.bias for layer in self.layers],
        )


class MaskedCrossLayer(nn.Module):
    """x' = a * ([c, c * ReLU(LN(c))] + b) + x with c = W x (FCN, sections 4.2 and 4.3); a is x, or the first x of all layers.

    With `batch_norm` c = BN(W x), as the authors' program has it, but with moments of every column.
    """

    def __init__(self, columns: int, dropout: float, *, batch_norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, columns // 2, bias=False)
        self.batch_norm = BatchNorm(columns // 2) if batch_norm else nn.Identity()
        self.norm = LayerNorm(columns // 2)
        self.bias = nn.Parameter(torch.empty(columns))
        self.dropout = Dropout(dropout)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weight from a Glorot normal, and b from 0 to 1, as the authors' program."""
        normal_(self.linear.weight, generator)
        uniform_(self.bias, 0, 1, generator)

    def forward(self, factor: Tensor, x: Tensor) -> Tensor:
        """Map the factor a [B, C] and x [B, C] to [B, C]."""
        if isinstance(self.batch_norm, nn.Identity) and can_fuse(x, self.linear.weight):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.cross_net import masked_cross

            parameters = self.linear.weight, self.norm.weight, self.norm.bias, self.bias
            narrow = as_autocast(x)
            first = narrow if factor is x else as_autocast(factor)
            return masked_cross(first, narrow, self.dropout.mask, self.norm.eps, parameters)
        crossed = self.batch_norm(self.linear(x))
        mask = torch.relu(self.norm(crossed))
        both = torch.cat([crossed, crossed * mask], dim=1) + self.bias.to(crossed.dtype)
        return self.dropout(torch.addcmul(x, factor, both))


class CompressedInteraction(nn.Module):
    """Layer of the compressed interaction network (section 3.1, equation 6): x'_k = sum_ij W_kij (x_i * v_j).

    The products of all pairs are one matrix product; vectors are the last dimension here: F features, H of the input, K of
    the output. `has_kernels`: whether a GPU has kernels for these sizes, which keep no products of pairs.
    """

    def __init__(self, features: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs * features))
        self.has_kernels = max(features, inputs, outputs) <= MOST_VECTORS
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weight as those of an MLP; the paper gives no initial weights."""
        truncated_glorot_(self.weight, generator)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Map x [B, D, H] and the vectors [B, D, F] to [B, D, K]."""
        if self.has_kernels and can_fuse(vectors, self.weight):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.cross_net import interact

            narrow = as_autocast(vectors)
            return interact(narrow if x is vectors else as_autocast(x), narrow, self.weight)
        pairs = (x.unsqueeze(3) * vectors.unsqueeze(2)).flatten(2)
        return nn.functional.linear(pairs, self.weight.to(pairs.dtype))
