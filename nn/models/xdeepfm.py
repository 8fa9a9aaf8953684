"""xDeepFM: a compressed interaction network, beside a linear model and an MLP (arXiv:1803.05170)."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.cross_net import CompressedInteraction
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, LinearVectorModel
from nn.models.options import XDeepFMOptions


class XDeepFM(LinearVectorModel):
    """Dense component of xDeepFM (section 3.2, equation 9).

    logit = sum_i w_i x_i + MLP(vectors) + w^T [sums over D of the vectors of every `CompressedInteraction`]

    The activation between these layers is the identity, as in the paper's experiments. All features have a weight and a
    vector, those of numerical ones parameters that their values multiply.
    """

    Options = XDeepFMOptions

    def __init__(self, options: XDeepFMOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        sizes = [self.vectors.num_features, *options.cross_layers]
        self.cross = nn.ModuleList(
            CompressedInteraction(self.vectors.num_features, before, after)
            for before, after in pairwise(sizes)
        )
        self.logit = nn.Linear(sum(options.cross_layers), 1, bias=False)
        self.deep = MLP(self.vectors.columns, [*options.hidden, 1], **rates(options))
        self._sizes, self._dim = sizes, options.embedding_dim

    def activations(self) -> Activations:
        """Return each layer's vectors and two gradients, without kernels the products of pairs, and their operations."""
        pairs = [self._sizes[0] * before for before in self._sizes[:-1]]
        products = sum(2 * n * after for n, after in zip(pairs, self._sizes[1:], strict=True))
        others = 2 * (self._sizes[0] + max(self._sizes[1:]))
        if not all(layer.has_kernels for layer in self.cross):
            others = sum(pairs) + max(pairs)
        columns = self._dim * (sum(self._sizes) + others)
        return Activations(
            backward_columns=columns, products={"compressed interactions": self._dim * products}
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D + F] or `PooledEmbeddings` to logits [B] in float32."""
        joined = self.vectors(numerical, embeddings)
        flat, weights = joined.tensor_split([self.vectors.columns], dim=1)
        logits = self.deep(flat).squeeze(1).float() + weights.float().sum(1)
        vectors = flat.unflatten(1, (self.vectors.num_features, -1)).transpose(1, 2).contiguous()
        x, sums = vectors, []
        for layer in self.cross:
            x = layer(x, vectors)
            sums.append(x.sum(1))
        logits = logits + self.logit(torch.cat(sums, dim=1)).squeeze(1)
        if self.weights is not None:
            logits = logits + self.weights(numerical).sum(1)
        return logits.float()
