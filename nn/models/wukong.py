"""WuKong: stacked factorization machines (arXiv:2403.02545)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.initialization import truncated_glorot_
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.features import rates
from nn.models.model import Activations, Model
from nn.models.options import WuKongOptions

# B: samples, D: columns of a vector, V: vectors of a layer's input, K: columns of the compressed products


class Recombination(nn.Module):
    """Linear combinations W X of vectors, without a bias: the linear compression block (LCB).

    V is `inputs`.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weight from a CPU generator, with the standard deviation sqrt(2 / (in + out)) before truncation."""
        truncated_glorot_(self.weight, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, V, D] to [B, outputs, D]."""
        return torch.matmul(self.weight.to(x.dtype), x)


class WuKongLayer(nn.Module):
    """Interaction layer (section "Interaction Stack"): LN(concat(FMB(X), LCB(X)) + X).

    FMB(X) = MLP(LN(X X^T Y)), as vectors, with Y of [V, K] (section "Optimized FM"), computed as X (X^T Y). Where the number
    of vectors changes, the residual X is recombined to it.

    V is `inputs`. D is `embedding_dim`.
    """

    def __init__(self, inputs: int, embedding_dim: int, options: WuKongOptions) -> None:
        super().__init__()
        num_fm, num_linear, rank = options.fm_vectors, options.linear_vectors, options.compression
        self.num_outputs = num_fm + num_linear
        self.compression = Recombination(inputs, rank)
        self.product_norm = nn.LayerNorm(inputs * rank)
        self.fm = MLP(inputs * rank, [*options.fm_hidden, num_fm * embedding_dim], **rates(options))
        self.linear = Recombination(inputs, num_linear)
        self.residual = (
            None if inputs == self.num_outputs else Recombination(inputs, self.num_outputs)
        )
        self.norm = nn.LayerNorm(embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, V, D] to [B, num_outputs, D]."""
        products = torch.bmm(x, self.compression(x).transpose(1, 2)).flatten(1)
        fm = self.fm(self.product_norm(products)).unflatten(1, (-1, x.shape[2]))
        both = torch.cat([fm, self.linear(x).to(fm.dtype)], dim=1)
        return self.norm(both + (x if self.residual is None else self.residual(x)))


class WuKong(Model):
    """Dense component of WuKong: vectors of the features, a stack of `WuKongLayer`, and an MLP.

    The numerical features become one vector through an MLP, as in the paper's embedding layer. The paper gives no initial
    weights; linear layers begin as those of `MLP`.
    """

    Options = WuKongOptions

    def __init__(self, options: WuKongOptions, spec: FeatureSpec) -> None:
        super().__init__()
        num_numerical = len(spec.numerical)
        dim = options.embedding_dim
        widths: Sequence[int] = [*options.numerical_hidden, dim]
        self.bottom = MLP(num_numerical, widths, final_activation=True) if num_numerical else None
        self.prefix_columns = dim if num_numerical else 0
        sizes = [len(spec.categorical) + bool(num_numerical)]
        sizes += [options.fm_vectors + options.linear_vectors] * options.layers
        self.layers = nn.ModuleList(WuKongLayer(size, dim, options) for size in sizes[:-1])
        self.top = MLP(sizes[-1] * dim, [*options.hidden, 1], **rates(options))
        self._dim, self._sizes, self._rank = dim, sizes, options.compression

    def activations(self) -> Activations:
        """Return what a layer keeps: vectors, compressed vectors, products, recombinations, and inputs of both norms."""
        columns = products = 0
        for inputs, outputs in zip(self._sizes, self._sizes[1:], strict=False):
            columns += self._dim * (inputs + self._rank + 2 * outputs) + 2 * inputs * self._rank
            products += 4 * inputs * self._rank * self._dim
            products += 2 * inputs * outputs * self._dim * (1 if inputs == outputs else 2)
        return Activations(backward_columns=columns, products={"factorization machines": products})

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        joined = join(None if self.bottom is None else self.bottom(numerical), embeddings)
        x = joined.unflatten(1, (-1, self._dim))
        for layer in self.layers:
            x = layer(x).to(joined.dtype)
        return self.top(x.flatten(1)).squeeze(1).float()
