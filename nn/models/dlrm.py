"""DLRM: bottom MLP, dot interaction, top MLP (arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import one_table_per_feature
from nn.layers.dot_interaction import DotInteraction
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.model import Activations, Model
from nn.models.options import DLRMOptions

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

# B: samples, N: numerical features, F: categorical features, D: columns of a table


class DLRM(Model):
    """Dense component of DLRM.

    `num_numerical`: N; with 0 there is no bottom MLP and only the embeddings interact. F is `num_categorical`.
    `embedding_dim`: D; the bottom MLP must end in it. `top_mlp`: widths of the top MLP, ending in 1, ReLU after all but the
    last.
    """

    Options = DLRMOptions

    def __init__(
        self,
        *,
        num_numerical: int,
        num_categorical: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.bottom = (
            MLP(num_numerical, bottom_mlp, final_activation=True) if num_numerical else None
        )
        self.interaction = DotInteraction(
            num_categorical, embedding_dim, has_bottom=self.bottom is not None
        )
        self.takes_rows = self.bottom is not None and self.interaction.is_fusible
        self.top = MLP(
            self.interaction.num_outputs,
            top_mlp,
            final_activation=False,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        self._product_flops = 2 * embedding_dim * self.interaction.num_pairs

    @classmethod
    def tables(cls, options: DLRMOptions, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        """Return one table per feature, with as many columns as the bottom vector."""
        return one_table_per_feature(options, spec)

    @classmethod
    def build(cls, options: DLRMOptions, spec: FeatureSpec) -> DLRM:
        """Build the dense component for the features of a dataset.

        Raises ValueError: fewer than two vectors would interact.
        """
        num_vectors = len(spec.categorical) + bool(spec.numerical)
        if num_vectors < 2:
            raise ValueError(
                f"model.name=dlrm needs two vectors to interact, got {num_vectors} (one per categorical "
                "feature, and one for the numerical features if there are any); use model.name=dcnv2"
            )
        return cls(
            num_numerical=len(spec.numerical),
            num_categorical=len(spec.categorical),
            embedding_dim=options.embedding_dim,
            bottom_mlp=options.bottom_mlp,
            top_mlp=options.top_mlp,
            dropout=options.dropout,
            batch_norm=options.batch_norm,
        )

    def activations(self) -> Activations:
        """Return the operations of the dot interaction; every pair of vectors counts once."""
        return Activations(products={"dot interaction": self._product_flops})

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D] or `PooledEmbeddings` to logits [B] in float32."""
        bottom = None if self.bottom is None else self.bottom(numerical)
        return self.top(self.interaction(bottom, embeddings)).squeeze(1).float()
