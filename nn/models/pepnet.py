"""PEPNet: embeddings gated by the domain, towers gated by user and item (arXiv:2302.01115)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import one_table_per_feature
from nn.layers.interactions.experts import Towers
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.features import chosen_features, num_tasks
from nn.models.model import Activations, Model
from nn.models.options import PEPNetOptions
from nn.ops.fused_linear import as_autocast

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

# B: samples, C: columns of numerical features and embeddings, D: columns of a table, T: tasks


class GateUnit(nn.Module):
    """Gate NU (section 2.3.1, equations 1 and 2): 2 sigmoid(W' ReLU(W [prior, x]) + b'), without a gradient to x."""

    def __init__(self, prior: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mlp = MLP(prior + inputs, [outputs, outputs], final_activation=False)

    def forward(self, prior: Tensor, x: Tensor) -> Tensor:
        """Map the prior [B, P] and x [B, C] to gates [B, outputs]."""
        return 2 * torch.sigmoid(self.mlp(torch.cat([prior, x.detach()], dim=1)))


class PEPNet(Model):
    """Dense component of PEPNet: EPNet, then a tower per task with PPNet.

    EPNet (section 2.3.2, equations 3 and 4): O = Gate(E(domain), E) * E, where E are the numerical features and the
    embeddings. PPNet (section 2.3.3, equations 5 to 7): every hidden layer of all towers has one gate,
    Gate(E(user, item), O), of which each tower multiplies its part onto the layer's output. The paper gives no initial
    weights; all begin as `MLP`.

    Args:
        num_numerical: N.
        num_categorical: F.
        domain: positions of the domain's features among the embeddings.
        prior: positions of the features of user, item and author.
        num_tasks: T.
        options: widths.
    """

    Options = PEPNetOptions

    def __init__(
        self,
        *,
        num_numerical: int,
        num_categorical: int,
        domain: Sequence[int],
        prior: Sequence[int],
        num_tasks: int,
        options: PEPNetOptions,
    ) -> None:
        super().__init__()
        self.prefix_columns = num_numerical
        self._dim, self._domain, self._prior = options.embedding_dim, list(domain), list(prior)
        self._columns = num_numerical + num_categorical * self._dim
        self.embedding_gate = GateUnit(len(domain) * self._dim, self._columns, self._columns)
        gates = nn.ModuleList(
            GateUnit(len(prior) * self._dim, self._columns, num_tasks * width)
            for width in options.tower_hidden
        )
        self.layer_gates = cast(Sequence[GateUnit], gates)
        self.towers = Towers(self._columns, num_tasks, options.tower_hidden)

    @classmethod
    def tables(cls, options: PEPNetOptions, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        """Return one table per feature."""
        return one_table_per_feature(options, spec)

    @classmethod
    def build(cls, options: PEPNetOptions, spec: FeatureSpec) -> PEPNet:
        """Build the dense component; ValueError if an option names no feature, or one that the dataset lacks."""
        tables = spec.table_features.values()
        every = [feature.name for features in tables for feature in features]

        def places(key: str, chosen: list[str]) -> list[int]:
            names = chosen_features(f"model.{key}", chosen, every)
            if not names:
                raise ValueError(
                    f"model.name=pepnet needs model.{key}; name features of {', '.join(every)}"
                )
            return [every.index(name) for name in names]

        return cls(
            num_numerical=len(spec.numerical),
            num_categorical=len(spec.categorical),
            domain=places("domain_features", options.domain_features),
            prior=places("prior_features", options.prior_features),
            num_tasks=num_tasks(spec),
            options=options,
        )

    def activations(self) -> Activations:
        """Return what gates keep beside the inputs of their layers: sigmoids, and the products' factors."""
        widths = [self._columns, *(gate.mlp.layers[1].out_features for gate in self.layer_gates)]
        return Activations(
            backward_columns=3 * sum(widths),
            reread_columns=(len(self.towers.towers) - 1) * self._columns,
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D] or `PooledEmbeddings` to float32 logits [B, T], or [B] of one task."""
        x = join(as_autocast(numerical) if self.prefix_columns else None, embeddings)
        vectors = x[:, self.prefix_columns :].unflatten(1, (-1, self._dim))
        domain = torch.cat([vectors[:, position] for position in self._domain], dim=1)
        prior = torch.cat([vectors[:, position] for position in self._prior], dim=1)
        gated = self.embedding_gate(domain, x) * x
        count = len(self.towers.towers)
        gates = [gate(prior, gated).chunk(count, dim=1) for gate in self.layer_gates]
        logits = []
        for task, tower in enumerate(cast(Sequence[MLP], self.towers.towers)):
            hidden = tower.pad(gated)
            for layer, gate in zip(tower.layers[:-1], gates, strict=True):
                hidden = torch.relu(layer(hidden)) * gate[task]
            logits.append(tower.layers[-1](hidden))
        return (logits[0].squeeze(1) if count == 1 else torch.cat(logits, dim=1)).float()
