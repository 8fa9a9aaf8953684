"""PEPNet: embeddings gated by the domain, towers gated by user and item (arXiv:2302.01115)."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.experts import Towers
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import chosen_features, in_table_order, rates
from nn.models.model import Activations, Model
from nn.models.options import PEPNetOptions

# B: samples, C: columns of numerical features and embeddings, D: columns of a table, T: tasks


class GateUnit(nn.Module):
    """Gate NU (section 2.3.1, equations 1 and 2): 2 sigmoid(W' ReLU(W [prior, x]) + b'), without a gradient to x."""

    def __init__(self, prior: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mlp = MLP(prior + inputs, [outputs, outputs])

    def forward(self, prior: Tensor, x: Tensor) -> Tensor:
        """Map the prior [B, P] and x [B, C] to gates [B, outputs]."""
        return 2 * torch.sigmoid(self.mlp(torch.cat([prior, x.detach()], dim=1)))


class PEPNet(Model):
    """Dense component of PEPNet: EPNet, then a tower per task with PPNet.

    EPNet (section 2.3.2, equations 3 and 4): O = Gate(E(domain), E) * E, where E are the numerical features and the
    embeddings. PPNet (section 2.3.3, equations 5 to 7): every hidden layer of all towers has one gate,
    Gate(E(user, item), O), of which each tower multiplies its part onto the layer's output. The paper gives no initial
    weights; all begin as `MLP`. Raises ValueError: an option names no feature, or one that the dataset lacks.
    """

    Options = PEPNetOptions

    def __init__(self, options: PEPNetOptions, spec: FeatureSpec) -> None:
        super().__init__()
        every = in_table_order(spec)

        def indices(key: str, chosen: list[str]) -> list[int]:
            names = chosen_features(f"model.{key}", chosen, every)
            if not names:
                raise ValueError(
                    f"model.name=pepnet needs model.{key}; name features of {', '.join(every)}"
                )
            return [every.index(name) for name in names]

        self.prefix_columns, self._dim = len(spec.numerical), options.embedding_dim
        self._domain = indices("domain_features", options.domain_features)
        self._prior = indices("prior_features", options.prior_features)
        self._columns = self.prefix_columns + len(every) * self._dim
        self.embedding_gate = GateUnit(len(self._domain) * self._dim, self._columns, self._columns)
        gates = nn.ModuleList(
            GateUnit(len(self._prior) * self._dim, self._columns, len(spec.labels) * width)
            for width in options.tower_hidden
        )
        self.layer_gates = cast(Sequence[GateUnit], gates)
        self.towers = Towers(
            self._columns, len(spec.labels), options.tower_hidden, **rates(options)
        )

    def activations(self) -> Activations:
        """Return what gates keep beside the inputs of their layers: sigmoids, and the products' factors."""
        widths = [self._columns, *(gate.mlp.layers[1].out_features for gate in self.layer_gates)]
        return Activations(
            backward_columns=3 * sum(widths),
            reread_columns=(len(self.towers.towers) - 1) * self._columns,
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        x = self.join_inputs(numerical, embeddings)
        vectors = x[:, self.prefix_columns :].unflatten(1, (-1, self._dim))
        domain = torch.cat([vectors[:, position] for position in self._domain], dim=1)
        prior = torch.cat([vectors[:, position] for position in self._prior], dim=1)
        gated = self.embedding_gate(domain, x) * x
        count = len(self.towers.towers)
        gates = [gate(prior, gated).chunk(count, dim=1) for gate in self.layer_gates]
        logits = []
        for task, tower in enumerate(cast(Sequence[MLP], self.towers.towers)):
            hidden = tower.pad(gated)
            for number, gate in enumerate(gates):
                hidden = tower.hidden(hidden, number) * gate[task]
            logits.append(tower.layers[-1](hidden))
        return (logits[0].squeeze(1) if count == 1 else torch.cat(logits, dim=1)).float()
