"""DIN: attention of a candidate item over a user's history (arXiv:1706.06978)."""

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import Tables, one_table_per_feature
from nn.layers.interactions.adaptive_mlp import AdaptiveMLP
from nn.layers.interactions.target_attention import TargetAttention
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.features import rates
from nn.models.model import Activations, Model
from nn.models.options import AdaptiveActivation, DINOptions
from nn.models.sequences import FixedHistories, SequenceInput, find_history
from nn.ops.fused_linear import as_autocast
from nn.ops.target_attention import PROGRAMS

# B: samples, N: numerical features, D: columns of a table, H: pairs of an item and its history, L: positions of a history


class DIN(Model):
    """Dense component of DIN (section 4.3).

    logit = MLP([item, sum_j a(e_j, item) e_j, others, x])

    The item and the events e_j of its history are rows of one table. Several pairs of them (an item's id and category,
    say) lie side by side. The history is a sequence group; features of an event that the item lacks are zeros in it. Or it has
    fixed hotness, and its length is a numerical feature that the MLP does not read. The paper gives no initial weights;
    linear layers begin as those of `MLP`, but the attention's last bias as 0 (`TargetAttention`).
    """

    Options = DINOptions

    def __init__(self, options: DINOptions, spec: FeatureSpec) -> None:
        super().__init__()
        self.history = history = find_history(options, spec)
        self._attended, self._dim = 0, options.embedding_dim
        if isinstance(history, SequenceInput):
            item_columns, self._columns = history.item_columns, history.columns
            num_others = history.num_others
        else:
            self._attended = options.history_positions or history.positions
            item_columns = self._columns = len(history.items) * self._dim
            self._numbers = [
                column for column in range(len(spec.numerical)) if column != history.length
            ]
            num_others = len(history.others) * self._dim + len(self._numbers)
        self.attention = TargetAttention(
            self._columns, self._attended, options.attention_hidden, options.attention_pooling.value
        )
        self.top = AdaptiveMLP(
            item_columns + self._columns + num_others,
            options.hidden,
            dice=options.activation is AdaptiveActivation.dice,
            **rates(options),
        )

    @classmethod
    def tables(cls, options: DINOptions, spec: FeatureSpec) -> Tables:
        """Return an unpooled table per pair of item and history, and one table per other feature.

        Raises ValueError: the options name no history, or one that the dataset lacks or that does not fit its item.
        """
        from torchrec.modules.embedding_configs import PoolingType

        history = find_history(options, spec)
        if isinstance(history, SequenceInput):
            return history.declare(options, spec)
        tables = []
        for item, past in zip(history.items, history.histories, strict=True):
            (table,) = one_table_per_feature(options, spec, features=[item])
            table.feature_names.append(past)
            table.pooling = PoolingType.NONE
            tables.append(table)
        return tables + one_table_per_feature(options, spec, features=history.others)

    def activations(self) -> Activations:
        """Return what the attention keeps per position: history, its unit's input and hidden layers, and the weight.

        Kernels keep the history, and have gradients of it and of the item, and partial sums of the parameters'.
        """
        widths = [layer.in_features for layer in self.attention.layers]
        per_position = 2 * self._columns + widths[0] + 2 * sum(widths[1:]) + 1
        if isinstance(self.history, SequenceInput):
            group, gradients = self.history.group.name, sum(widths[1:]) + self._columns
            num_weights = sum(each.numel() for each in self.attention.parameters())
            of_kernels = Activations(
                event_columns={group: 3 * self._columns},
                event_gradient_columns={group: 2 * self._columns},
                event_gradient_bytes=4 * PROGRAMS * num_weights,
            )
            return Activations(
                event_columns={group: per_position + self._columns},
                event_gradient_columns={group: gradients},
                in_16_bits=of_kernels if self.attention.has_kernels else None,
                products={"attention": round(2 * self.history.mean_events * self._columns)},
            )
        return Activations(
            backward_columns=self._attended * per_position,
            products={"attention": 2 * self._attended * self._columns},
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings, [B, H*(1+L)*D + others] without a sequence group, to float32 logits [B]."""
        if isinstance(self.history, SequenceInput):
            parts = self.history.read(numerical, embeddings)
            item, others = parts.candidate, parts.others
            query = nn.functional.pad(item, (0, self._columns - item.shape[1]))
            pooled = self.attention.of_events(query, parts.vectors, parts.events)
        else:
            item, pooled, others = self._fixed(self.history, numerical, join(None, embeddings))
        return self.top(torch.cat([item, pooled.to(item.dtype), others], dim=1)).float()

    def _fixed(
        self, history: FixedHistories, numerical: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return items, pooled histories, and the other inputs of the MLP."""
        pairs = len(history.items)
        both = pairs * (1 + history.positions) * self._dim
        # Per pair the item comes first, then the positions of its history.
        by_pair = x[:, :both].unflatten(1, (pairs, 1 + history.positions, self._dim))
        vectors = by_pair.transpose(1, 2).flatten(2)  # [B, 1 + L, H * D]
        item, past = vectors[:, 0], vectors[:, 1 : 1 + self._attended]
        if history.length is None:
            lengths = numerical.new_full((x.shape[0],), self._attended)
        else:
            lengths = numerical[:, history.length]
        others = [x[:, both:]]
        if self._numbers:
            numbers = [numerical[:, column : column + 1] for column in self._numbers]
            others.append(as_autocast(torch.cat(numbers, dim=1)))
        return item, self.attention(item, past, lengths), torch.cat(others, dim=1)
