"""Vectors of all features: embeddings of numerical features, then those of categorical ones."""

from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.numerical_embedding import NumericalEmbedding
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.ops.fused_linear import as_autocast


class FeatureVectors(nn.Module):
    """Join the vectors of numerical and categorical features.

    `embedding_dim`: D, columns of every vector. `columns`: (N + F) * D. `prefix_columns`: N * D; see `nn.models.model.Model`.
    """

    def __init__(self, spec: FeatureSpec, embedding_dim: int) -> None:
        super().__init__()
        num_numerical = len(spec.numerical)
        self.num_features = num_numerical + len(spec.categorical)
        self.columns = self.num_features * embedding_dim
        self.prefix_columns = num_numerical * embedding_dim
        self.numerical = NumericalEmbedding(num_numerical, embedding_dim) if num_numerical else None

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D + R] or `PooledEmbeddings` to [B, (N + F)*D + R], N vectors first."""
        prefix = None if self.numerical is None else as_autocast(self.numerical(numerical))
        return join(prefix, embeddings)
