"""AutoInt+: self-attention over the features' vectors, beside an MLP (arXiv:1810.11921)."""

from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.target_attention import InteractingLayer
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, VectorModel
from nn.models.options import AutoIntOptions
from nn.ops.target_attention import fields_fit

# B: samples, F: features, D: columns of a vector, H: heads, A: columns of all heads


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
        self.logit = MLP(self.vectors.num_features * columns, [1])
        self.deep = MLP(self.vectors.columns, [*options.hidden, 1], **rates(options))
        self._inputs, self._columns, self._heads = inputs, columns, options.heads

    def activations(self) -> Activations:
        """Return what a layer keeps, inputs, projections and without kernels attention, and operations of its products.

        The gradients of one layer's projections lie beside them.
        """
        count, columns = self.vectors.num_features, self._columns
        kept = (sum(before + 4 * columns for before in self._inputs) + 4 * columns) * count
        if not fields_fit(count, columns // self._heads):
            kept += len(self._inputs) * (2 * self._heads * count + columns) * count
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
