"""DeepFM: a factorization machine and an MLP on the same embeddings (arXiv:1703.04247)."""

from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, LinearVectorModel
from nn.models.options import DeepFMOptions

# B: samples, N: numerical features, F: categorical features, D: columns of a vector


class DeepFM(LinearVectorModel):
    """Dense component of DeepFM (section 2.1, equations 1 to 4).

    logit = sum_i w_i x_i + sum_{i<j} <v_i, v_j> x_i x_j + MLP([v_1 x_1, v_2 x_2, ...])

    All N + F features have a weight w_i and a vector v_i. Those of a categorical feature are rows of two tables, of one
    and of D columns, and x_i = 1. Those of a numerical feature are parameters, and x_i is its value. The bias is that of
    the MLP's last layer. The paper gives no initial weights; HugeCTR's are those of `MLP` and `NumericalEmbedding`.
    """

    Options = DeepFMOptions

    def __init__(self, options: DeepFMOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        self.deep = MLP(self.vectors.columns, [*options.hidden, 1], **rates(options))

    def activations(self) -> Activations:
        """Return the float32 copy of the vectors, which the squares need again, and the operations of the pairs."""
        columns = self.vectors.columns
        return Activations(
            backward_columns=2 * columns,
            reread_columns=columns - self.prefix_columns,
            products={"factorization machine": 4 * columns},
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D + F] or `PooledEmbeddings` to logits [B] in float32."""
        x = self.vectors(numerical, embeddings)
        vectors, weights = x.tensor_split([self.vectors.columns], dim=1)
        logits = self.deep(vectors).squeeze(1).float() + weights.float().sum(1)
        # Dot products of all pairs: sum_{i<j} <v_i, v_j> = 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2) (Rendle 2010,
        # 10.1109/ICDM.2010.127, lemma 3.1); in float32, since the difference cancels most digits of 16-bit numbers.
        factors = vectors.unflatten(1, (self.vectors.num_features, -1)).float()
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        logits = logits + pairs
        if self.weights is not None:
            logits = logits + self.weights(numerical).sum(1)
        return logits.float()
