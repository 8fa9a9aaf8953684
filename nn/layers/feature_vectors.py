"""Vectors of all features: embeddings of numerical features, then those of categorical ones."""

from torch import Tensor, nn

from configs.schema import ModelConfig, NumericalEncoding
from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.numerical_embedding import NumericalEmbedding, NumericalVectors
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.ops.fused_linear import as_autocast


class FeatureVectors(nn.Module):
    """Join the vectors of numerical and categorical features.

    D is `embedding_dim` of the options. `columns`: (N + F) * D. `prefix_columns`: N * D; see `nn.models.model.Model`.
    """

    def __init__(self, spec: FeatureSpec, options: ModelConfig) -> None:
        super().__init__()
        num_numerical, embedding_dim = len(spec.numerical), options.embedding_dim
        self.num_features = num_numerical + len(spec.categorical)
        self.columns = self.num_features * embedding_dim
        self.prefix_columns = num_numerical * embedding_dim
        self.numerical: NumericalEmbedding | NumericalVectors | None = None
        if num_numerical and options.numerical_encoding is NumericalEncoding.plain:
            self.numerical = NumericalEmbedding(num_numerical, embedding_dim)
        elif num_numerical:
            self.numerical = NumericalVectors(num_numerical, options)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D + R] or `PooledEmbeddings` to [B, (N + F)*D + R], N vectors first."""
        prefix = None if self.numerical is None else as_autocast(self.numerical(numerical))
        return join(prefix, embeddings)
