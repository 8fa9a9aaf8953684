"""FinalMLP: two MLPs with gated inputs and a bilinear fusion (arXiv:2304.00902)."""

from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.bilinear_fusion import BilinearFusion
from nn.layers.interactions.feature_gate import FeatureGate
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import chosen_features, in_table_order, rates
from nn.models.model import Activations, VectorModel
from nn.models.options import FinalMLPOptions

# B: samples, N: numerical features


class FinalMLP(VectorModel):
    """Dense component of FinalMLP: o_i = MLP_i(h_i), with a `FeatureGate` per stream and a `BilinearFusion`.

    The vectors e are the embeddings, and `NumericalEmbedding` of the numerical features. The weights begin as those of
    `MLP`; the fusion's as in the authors' program, normal with variance 2 / (in + out).
    Without features that control the gate of a stream it is a learned constant. Raises ValueError: an option names a feature
    that the dataset lacks.
    """

    Options = FinalMLPOptions

    def __init__(self, options: FinalMLPOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        every = [*spec.numerical, *in_table_order(spec)]
        named = {
            "gate_features_1": options.gate_features_1,
            "gate_features_2": options.gate_features_2,
        }
        gates = [chosen_features(f"model.{key}", names, every) for key, names in named.items()]
        self.gates = nn.ModuleList(
            FeatureGate(
                [every.index(name) for name in names],
                self.vectors.num_features,
                options.embedding_dim,
                options.gate_hidden,
            )
            for names in gates
        )
        self.streams = nn.ModuleList(
            MLP(self.vectors.columns, widths, final_activation=True, **rates(options))
            for widths in (options.hidden_1, options.hidden_2)
        )
        self.fusion = BilinearFusion(options.hidden_1[-1], options.hidden_2[-1], options.heads)

    def activations(self) -> Activations:
        """Return what the gates and the fusion keep: gates, their sigmoids and the gated vectors of both streams."""
        return Activations(backward_columns=4 * self.vectors.columns)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        vectors = self.vectors(numerical, embeddings)
        vectors = vectors.unflatten(1, (self.vectors.num_features, -1))
        first, second = (
            stream(gate(vectors)) for stream, gate in zip(self.streams, self.gates, strict=True)
        )
        return self.fusion(first, second).float()
