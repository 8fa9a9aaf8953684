"""FinalMLP: two MLPs with gated inputs and a bilinear fusion (arXiv:2304.00902)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.initialization import truncated_glorot_
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import chosen_features, in_table_order, rates
from nn.models.model import Activations, VectorModel
from nn.models.options import FinalMLPOptions

# B: samples, N: numerical features, F: features, D: columns of a vector, H: heads, I and J: columns of the two streams


class FeatureGate(nn.Module):
    """Weights of all elements of the vectors e (section "Stream-Specific Feature Selection"): h = 2 sigmoid(Gate(x)) * e.

    Gate is an MLP. Its input x is the embeddings of some features, or, without any, a learned vector.

    F is `num_features`. D is `embedding_dim`.
    """

    def __init__(
        self, positions: Sequence[int], num_features: int, embedding_dim: int, hidden: Sequence[int]
    ) -> None:
        super().__init__()
        self._positions = list(positions)
        self.constant = None if positions else nn.Parameter(torch.zeros(1, embedding_dim))
        inputs = max(len(positions), 1) * embedding_dim
        self.gate = MLP(inputs, [*hidden, num_features * embedding_dim])

    def forward(self, vectors: Tensor) -> Tensor:
        """Map vectors [B, F, D] to [B, F * D]."""
        if self.constant is None:
            x = torch.cat([vectors[:, position] for position in self._positions], dim=1)
        else:
            x = self.constant.to(vectors.dtype)
        return 2 * torch.sigmoid(self.gate(x)) * vectors.flatten(1)


class BilinearFusion(nn.Module):
    """Multi-head bilinear fusion in heads of I/H and J/H columns (section "Stream-Level Interaction Aggregation").

    logit = b + w_1^T o_1 + w_2^T o_2 + sum over heads of o_1h^T W_h o_2h

    I is `first`. J is `second`. `heads`: H; it divides I and J.
    """

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        self.linear = nn.Linear(first + second, 1)
        self.product = nn.Parameter(torch.empty(heads, first // heads, second // heads))
        self.initialise(torch.default_generator)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights from a CPU generator as Glorot's normal, and set the bias to zero."""
        truncated_glorot_(self.linear.weight, generator)
        self.linear.bias.zero_()
        truncated_glorot_(self.product, generator)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Map o_1 [B, I] and o_2 [B, J] to logits [B]."""
        heads = len(self.product)
        left, right = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in (first, second))
        products = (torch.bmm(left, self.product.to(left.dtype)) * right).float().sum((0, 2))
        return self.linear(torch.cat([first, second], dim=1)).squeeze(1) + products


class FinalMLP(VectorModel):
    """Dense component of FinalMLP: o_i = MLP_i(h_i), with a `FeatureGate` per stream and a `BilinearFusion`.

    The vectors e are the embeddings, and `NumericalEmbedding` of the numerical features. The weights begin as those of `MLP`; the
    fusion's as in the authors' program, normal with variance 2 / (in + out). Without features that control the gate of a stream
    it is a learned constant. Raises ValueError: an option names a feature that the dataset lacks.
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
