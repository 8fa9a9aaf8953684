"""AutoInt+: self-attention over the features' vectors, beside an MLP (arXiv:1810.11921)."""

import math

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.initialization import uniform_
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, VectorModel
from nn.models.options import AutoIntOptions

# B: samples, F: features, D: columns of a vector, H: heads, A: columns of all heads


class InteractingLayer(nn.Module):
    """Self-attention with a residual (section 4.4, equations 5 to 8): ReLU(concat_h(softmax(Q_h K_h^T) V_h) + R).

    Q, K, V and R are the vectors times a matrix each, without a bias; the products are not scaled. The weights begin as in
    the authors' program, uniform in +-sqrt(6 / (in + out)).
    """

    def __init__(self, columns: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.Parameter(torch.empty(4, heads * head_dim, columns))
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        bound = math.sqrt(6 / sum(self.projections.shape[1:]))
        uniform_(self.projections, -bound, bound, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, F, D] to [B, F, A]."""
        weight = self.projections.flatten(0, 1).to(x.dtype)
        query, key, value, residual = nn.functional.linear(x, weight).chunk(4, dim=2)
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (query, key, value)
        )
        attention = torch.softmax(query @ key.transpose(2, 3), dim=3).to(value.dtype)
        return torch.relu((attention @ value).transpose(1, 2).flatten(2) + residual)


class AutoInt(VectorModel):
    """Dense component of AutoInt+ (sections 4.2 to 4.5): logit = w^T concat(interacting layers) + MLP(vectors).

    Numerical features have vectors that their values multiply (section 4.3).
    """

    Options = AutoIntOptions

    def __init__(self, options: AutoIntOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        columns = options.heads * options.head_dim
        inputs = [options.embedding_dim] + [columns] * (options.layers - 1)
        self.layers = nn.ModuleList(
            InteractingLayer(before, options.heads, options.head_dim) for before in inputs
        )
        self.logit = MLP(self.vectors.num_features * columns, [1], final_activation=False)
        self.deep = MLP(
            self.vectors.columns, [*options.hidden, 1], final_activation=False, **rates(options)
        )
        self._inputs, self._columns, self._heads = inputs, columns, options.heads

    def activations(self) -> Activations:
        """Return what a layer keeps, inputs, projections and attention, and the operations of its products."""
        count, columns = self.vectors.num_features, self._columns
        kept = sum(before + 5 * columns for before in self._inputs) * count
        kept += len(self._inputs) * 2 * self._heads * count**2
        pairs = len(self._inputs) * 4 * count**2 * columns
        return Activations(
            backward_columns=kept,
            reread_columns=self.vectors.columns - self.prefix_columns,
            products={"attention": pairs + 8 * count * columns * sum(self._inputs)},
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        vectors = self.vectors(numerical, embeddings)
        x = vectors.unflatten(1, (self.vectors.num_features, -1))
        for layer in self.layers:
            x = layer(x)
        return (self.logit(x.flatten(1)) + self.deep(vectors)).squeeze(1).float()
