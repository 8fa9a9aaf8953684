"""DLRM: bottom MLP, dot interaction, top MLP (arXiv:1906.00091)."""

from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.dot_interaction import DotInteraction
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, Model
from nn.models.options import DLRMOptions

# B: samples, N: numerical features, F: categorical features, D: columns of a table


class DLRM(Model):
    """Dense component of DLRM.

    Without numerical features there is no bottom MLP and only the embeddings interact. Raises ValueError: fewer than two
    vectors would interact.
    """

    Options = DLRMOptions

    def __init__(self, options: DLRMOptions, spec: FeatureSpec) -> None:
        super().__init__()
        num_numerical, num_categorical = len(spec.numerical), len(spec.categorical)
        num_vectors = num_categorical + bool(num_numerical)
        if num_vectors < 2:
            raise ValueError(
                f"model.name=dlrm needs two vectors to interact, got {num_vectors} (one per categorical "
                "feature, and one for the numerical features if there are any); use model.name=dcnv2"
            )
        self.bottom = (
            MLP(num_numerical, options.bottom_mlp, final_activation=True) if num_numerical else None
        )
        self.interaction = DotInteraction(
            num_categorical, options.embedding_dim, has_bottom=self.bottom is not None
        )
        self.fuses_lookup = self.bottom is not None and self.interaction.is_fusible
        self.top = MLP(self.interaction.num_outputs, options.top_mlp, **rates(options))
        self._product_flops = 2 * options.embedding_dim * self.interaction.num_pairs

    def activations(self) -> Activations:
        """Return the operations of the dot interaction; every pair of vectors counts once."""
        return Activations(products={"dot interaction": self._product_flops})

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        bottom = None if self.bottom is None else self.bottom(numerical)
        return self.top(self.interaction(bottom, embeddings)).squeeze(1).float()
