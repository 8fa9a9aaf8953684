"""DLRM as a plain single-device module (arXiv:1906.00091).

The dense half takes the numerical features and the looked-up embeddings, features in the spec's order, and gives a logit;
it knows neither ids nor ranks.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from configs.schema import ModelConfig
from dataloading.feature_spec import FeatureSpec
from nn.layers.dot_interaction import DotInteraction
from nn.layers.mlp import MLP
from nn.ops.pooled_embeddings import PooledEmbeddings

# B: samples, N: numerical features, F: categorical features, D: columns of a table


class DLRM(nn.Module):
    """Dense half of DLRM: bottom MLP, dot interaction, top MLP (arXiv:1906.00091).

    Args:
        num_numerical: N; with 0 there is no bottom MLP and only the embeddings interact.
        num_categorical: F.
        embedding_dim: D; the bottom MLP must end in it.
        bottom_mlp: widths of the bottom MLP, ReLU after each.
        top_mlp: widths of the top MLP, ending in 1, ReLU after all but the last.
    """

    def __init__(
        self,
        *,
        num_numerical: int,
        num_categorical: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
    ) -> None:
        super().__init__()
        self.bottom = (
            MLP(num_numerical, bottom_mlp, final_activation=True) if num_numerical else None
        )
        self.interaction = DotInteraction(
            num_categorical, embedding_dim, has_bottom=self.bottom is not None
        )
        self.top = MLP(self.interaction.num_outputs, top_mlp, final_activation=False)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings, [B, F*D] or where they lie, to logits [B] in float32."""
        bottom = None if self.bottom is None else self.bottom(numerical)
        return self.top(self.interaction(bottom, embeddings)).squeeze(1).float()


def build_dlrm(config: ModelConfig, spec: FeatureSpec) -> DLRM:
    """Build the dense half for the features of a dataset."""
    num_vectors = len(spec.categorical) + bool(spec.numerical)
    if num_vectors < 2:
        raise ValueError(
            f"model.name=dlrm needs two vectors to interact, got {num_vectors} (one a categorical "
            "feature, and one for the numerical features if there are any); use model.name=dcnv2"
        )
    return DLRM(
        num_numerical=len(spec.numerical),
        num_categorical=len(spec.categorical),
        embedding_dim=config.embedding_dim,
        bottom_mlp=config.bottom_mlp,
        top_mlp=config.top_mlp,
    )
