"""DIN: attention of a candidate item over a user's history (arXiv:1706.06978)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import one_table_per_feature
from nn.layers.adaptive_mlp import AdaptiveMLP
from nn.layers.interactions.target_attention import TargetAttention
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.model import Activations, Model
from nn.models.options import AdaptiveActivation, DINOptions
from nn.models.sequences import find_sequences
from nn.ops.fused_linear import as_autocast

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

# B: samples, N: numerical features, D: columns of a table, H: pairs of an item and its history, L: positions of a history


class DIN(Model):
    """Dense component of DIN (section 4.3).

    logit = MLP([item, sum_j a(e_j, item) e_j, others, x])

    The item and the positions e_j of its history are rows of one table. Several pairs of them (an item's id and category,
    say) lie side by side. The length of the history is a numerical feature, which the MLP does not read. The paper gives no
    initial weights; linear layers begin as those of `MLP`, but the attention's last bias as 0 (`TargetAttention`).
    """

    Options = DINOptions

    def __init__(self, options: DINOptions, spec: FeatureSpec) -> None:
        super().__init__()
        sequences = find_sequences(options, spec)
        pairs, self._positions = len(sequences.items), sequences.positions
        self._dim, self._length = options.embedding_dim, sequences.length
        self._pairs, self._columns = pairs, pairs * self._dim
        self._numbers = [
            column for column in range(len(spec.numerical)) if column != sequences.length
        ]
        self._attended = options.history_positions or self._positions
        self.attention = TargetAttention(
            self._columns,
            self._attended,
            options.attention_hidden,
            options.attention_pooling.value,
        )
        self.top = AdaptiveMLP(
            2 * self._columns + len(sequences.others) * self._dim + len(self._numbers),
            options.hidden,
            dice=options.activation is AdaptiveActivation.dice,
            dropout=options.dropout,
        )

    @classmethod
    def tables(cls, options: DINOptions, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        """Return an unpooled table per pair of item and history, and one table per other feature.

        Raises ValueError: the options name no history, or one that the dataset lacks or that does not fit its item.
        """
        from torchrec.modules.embedding_configs import PoolingType

        sequences = find_sequences(options, spec)
        tables = []
        for item, history in zip(sequences.items, sequences.histories, strict=True):
            (table,) = one_table_per_feature(options, spec, features=[item])
            table.feature_names.append(history)
            table.pooling = PoolingType.NONE
            tables.append(table)
        return tables + one_table_per_feature(options, spec, features=sequences.others)

    def activations(self) -> Activations:
        """Return what the attention keeps per position: history, its unit's input and hidden layers, and the weight."""
        widths = [layer.in_features for layer in self.attention.layers]
        per_position = 2 * self._columns + widths[0] + 2 * sum(widths[1:]) + 1
        return Activations(
            backward_columns=self._attended * per_position,
            products={"attention": 2 * self._attended * self._columns},
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, H*(1+L)*D + others] to logits [B] in float32."""
        x = join(None, embeddings)
        both = self._pairs * (1 + self._positions) * self._dim
        # Per pair the item comes first, then the positions of its history.
        pairs = x[:, :both].unflatten(1, (self._pairs, 1 + self._positions, self._dim))
        vectors = pairs.transpose(1, 2).flatten(2)  # [B, 1 + L, H * D]
        item, history = vectors[:, 0], vectors[:, 1 : 1 + self._attended]
        if self._length is None:
            lengths = numerical.new_full((x.shape[0],), self._attended)
        else:
            lengths = numerical[:, self._length]
        parts = [item, self.attention(item, history, lengths).to(x.dtype), x[:, both:]]
        if self._numbers:
            numbers = [numerical[:, column : column + 1] for column in self._numbers]
            parts.append(as_autocast(torch.cat(numbers, dim=1)))
        return self.top(torch.cat(parts, dim=1)).float()
