"""Transformer blocks over the events of each sample, and the tokens that they read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal, cast

import torch
from torch import Tensor, nn

from dataloading.dataset.sequences import SequenceGroup
from nn.layers.dropout import Dropout
from nn.layers.initialization import truncated_normal_
from nn.layers.mlp import linear_layers
from nn.layers.sequence import LayerNorm, SamplePositions, ScoreBias, attend, rows_at
from nn.layers.sequence_events import SequenceEvents
from nn.ops.column_blocks import column_blocks
from nn.ops.fused_linear import can_fuse
from nn.ops.jagged import offsets
from nn.ops.jagged_attention import time_bucket

# B: samples, C: positions of the events of all samples, D: columns of a token, H: heads

TIME_BUCKETS = 64
"""Half doublings of a second that ages, and times between events, are told apart by."""
TOKEN_INIT = 0.02


def check_heads(heads: int, columns: int) -> None:
    """Raise ValueError if heads do not divide the columns of a token."""
    if columns % heads:
        raise ValueError(
            f"model.heads must divide the {columns} columns of an event's token, got {heads}"
        )


class EventTokens(nn.Module):
    """Tokens of events, x_j = e_j + P[d_j] + A[b_j] + sum_k n_jk v_k, and dropout.

    e_j is an event's vector, d_j the events behind it in its sample, b_j the bucket of its age if the group has times
    (BST, section 2.1, takes the age for the position), n_jk its other numbers.
    """

    def __init__(self, columns: int, group: SequenceGroup, dropout: float = 0.0) -> None:
        super().__init__()
        self._time = group.time
        self._names = [column.name for column in group.numbers if column.name != group.time]
        # Position vectors; parameters are named as checkpoints have them.
        self.places = nn.Parameter(torch.empty(group.max_length, columns))
        self.ages = nn.Parameter(torch.empty(TIME_BUCKETS, columns)) if group.time else None
        self.numbers = nn.Parameter(torch.empty(len(self._names), columns)) if self._names else None
        self.dropout = Dropout(dropout)
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            truncated_normal_(parameter, TOKEN_INIT, generator)

    def forward(self, vectors: Tensor, events: SequenceEvents) -> Tensor:
        """Map [C, D] to [C, D] in the same dtype."""
        offset, is_event = offsets(events)
        behind = events.lengths[events.samples] - 1 - offset
        tables, indices = [self.places], [behind.clamp(0, len(self.places) - 1)]
        if self._time is not None and self.ages is not None:
            tables.append(self.ages)
            indices.append(time_bucket(events.numbers[self._time], TIME_BUCKETS))
        x = vectors
        if self.numbers is not None:
            numbers = torch.stack([events.numbers[name] for name in self._names], dim=1)
            x = x + torch.where(is_event[:, None], numbers, 0).to(x.dtype) @ self.numbers
        if can_fuse(x, self.places):
            # Only CUDA builds of torch include Triton.
            from nn.ops.triton.row_sums import sum_of_rows

            scales, where = [1.0] * len(tables), (events.samples, offset)
            return sum_of_rows(tables, indices, scales, self.dropout.mask, where, x).to(vectors)
        x = reduce(torch.add, map(rows_at, tables, indices), x)
        return self.dropout(x.to(vectors.dtype), events)


@dataclass(frozen=True, slots=True)
class BlockKind:
    heads: int
    expansion: int  # columns of the network's hidden layer, per column of a token
    residual: Literal["post_norm", "pre_norm", "gated"]
    dropout: float = 0.0
    activation: Literal["relu", "leaky_relu"] = "relu"
    causal: bool = False
    longest: int | None = None  # most positions of a sample, if there is a relative bias
    has_times: bool = False


class TransformerBlock(nn.Module):
    """Two layers F, self-attention (multi-head, with an output product) and W' f(W x + b) + b', each joined to its input.

    post_norm: LN(x + F(x)); pre_norm: x + F(LN(x)); gated: x + sigmoid(V x + c) F(LN(x)) (LiGR, arXiv:2502.03417). Dropout
    follows F. A relative bias is added to the scores of attention by the distance of two positions and, if they have
    times, by the time between them; it begins at 0.
    """

    def __init__(self, columns: int, kind: BlockKind) -> None:
        """Raise ValueError if the heads do not divide the columns."""
        super().__init__()
        check_heads(kind.heads, columns)
        self._kind, hidden = kind, kind.expansion * columns
        self.projections = nn.Linear(columns, 3 * columns)
        self.attended = nn.Linear(columns, columns)
        self.hidden = nn.Linear(columns, hidden)
        self.output = nn.Linear(hidden, columns)
        self.norms = nn.ModuleList(LayerNorm(columns) for _ in range(2))
        self.dropouts = nn.ModuleList(Dropout(kind.dropout) for _ in range(2))
        gates = 2 if kind.residual == "gated" else 0
        self.gates = nn.ModuleList(nn.Linear(columns, columns) for _ in range(gates))
        self.place_bias = self.time_bias = None
        if kind.longest is not None:
            distances = kind.longest if kind.causal else 2 * kind.longest - 1
            self.place_bias = nn.Parameter(torch.zeros(kind.heads, distances))
            if kind.has_times:
                self.time_bias = nn.Parameter(torch.zeros(kind.heads, TIME_BUCKETS))
        # LeakyReLU keeps its input beside its result, and ReLU makes one gradient of that size more at once.
        hidden_copies = 1 if kind.activation == "relu" else 2
        self.kept_per_position = (8 + hidden_copies * kind.expansion + 2 * gates) * columns
        # At most, while the last block's layers are passed backward.
        at_once = max(3, (3 - hidden_copies) * kind.expansion) + (kind.residual != "post_norm")
        self.gradients_per_position = at_once * columns

    def flops(self, positions: float) -> float:
        columns = self.attended.in_features
        products = sum(
            layer.weight.numel() for layer in self.modules() if isinstance(layer, nn.Linear)
        )
        pairs = positions**2 / (2 if self._kind.causal else 1)
        return 2 * positions * products + 4 * pairs * columns

    def forward(self, x: Tensor, at: SamplePositions, times: Tensor | None = None) -> Tensor:
        """Map [C, D] to [C, D]. `times`: of every position, in seconds, float32 [C]."""
        x = self._joined(x, 0, partial(self._attend, at=at, times=times), at)
        return self._joined(x, 1, self._network, at)

    def _attend(self, x: Tensor, at: SamplePositions, times: Tensor | None) -> Tensor:
        blocks, gradients = column_blocks(linear_layers(x, self.projections), 3)
        q, k, v = (block.unflatten(1, (self._kind.heads, -1)) for block in blocks)
        bias = ScoreBias(self.place_bias, self.time_bias, None if self.time_bias is None else times)
        causal = self._kind.causal
        attended = attend(q, k, v, at, causal=causal, bias=bias, gradients=gradients)
        return linear_layers(attended.flatten(1), self.attended)

    def _network(self, x: Tensor) -> Tensor:
        if self._kind.activation == "relu":
            return linear_layers(x, self.hidden, self.output)
        hidden = nn.functional.leaky_relu(linear_layers(x, self.hidden))
        return linear_layers(hidden, self.output)

    def _joined(
        self, x: Tensor, number: int, layer: Callable[[Tensor], Tensor], at: SamplePositions
    ) -> Tensor:
        norm, dropout = cast(LayerNorm, self.norms[number]), self.dropouts[number]
        if self._kind.residual == "post_norm":
            return norm(x + dropout(layer(x), at))
        normed, x = norm.beside(x)
        change = dropout(layer(normed), at)
        if self.gates:
            change = torch.sigmoid(self.gates[number](x)) * change
        return x + change
