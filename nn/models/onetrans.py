"""OneTrans: events and all other features as tokens of one transformer (arXiv:2510.26104)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.dropout import Dropout
from nn.layers.interactions.transformer import EventTokens, check_heads
from nn.layers.per_token import PerTokenExperts, PerTokenLinear
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import Positions, SamplePositions, attend
from nn.models.features import rates
from nn.models.options import OneTransOptions
from nn.models.sequence_model import SequenceModel, TopMLP
from nn.ops.jagged import offsets

# B: samples, N: numerical features, C: positions of events, T: tokens of other features, D: columns of a token


class JoinedTokens(NamedTuple):
    """Positions of events [C] and of T tokens of every sample [T, B], when those follow its events."""

    at: Positions
    # which of the events and the tokens behind them lies at each position, [C + T * B]
    source: Tensor
    event_positions: Tensor  # [C]
    token_positions: Tensor  # [T * B]

    @classmethod
    def of(cls, events: SamplePositions, count: int) -> "JoinedTokens":
        """Return the positions of `count` tokens behind the events."""
        samples = torch.arange(events.starts.shape[0], device=events.starts.device)
        starts, size = events.starts + count * samples, events.samples.shape[0]
        position = torch.arange(size + count * starts.shape[0], device=starts.device)
        owner = (torch.searchsorted(starts, position, right=True) - 1).clamp(min=0)
        at = Positions(starts, events.lengths + count, owner, events.max_length + count)
        offset = offsets(at)[0]
        token = (offset - events.lengths[owner]).clamp(max=count - 1)
        source = torch.where(
            token < 0, events.starts[owner] + offset, size + token * starts.shape[0] + owner
        )
        own = torch.arange(size, device=starts.device) + count * events.samples
        behind = starts + events.lengths + torch.arange(count, device=starts.device)[:, None]
        last = position.shape[0] - 1
        return cls(at, source.clamp(0, last), own.clamp(0, last), behind.flatten())


class OneTransBlock(nn.Module):
    """Z = MixedMHA(RMSNorm(X)) + X, X' = MixedFFN(RMSNorm(Z)) + Z (section 3.3, equations 4 and 5).

    Attention is causal, over the events and then the tokens. Events share the weights of all products; every token has its
    own. Behind the last block events are not read, so its output products are those of tokens alone.
    """

    def __init__(
        self, columns: int, tokens: int, heads: int, expansion: int, dropout: float, is_last: bool
    ) -> None:
        super().__init__()
        self._heads, hidden = heads, expansion * columns
        self.attention_norm, self.network_norm = (nn.RMSNorm(columns, eps=1e-6) for _ in range(2))
        self.projections = nn.Linear(columns, 3 * columns)
        self.token_projections = PerTokenLinear(tokens, columns, 3 * columns)
        self.token_attended = PerTokenLinear(tokens, columns, columns)
        self.token_network = PerTokenExperts(tokens, columns, hidden, 1)
        self.attended = None if is_last else nn.Linear(columns, columns)
        self.hidden = None if is_last else nn.Linear(columns, hidden)
        self.output = None if is_last else nn.Linear(hidden, columns)
        self.dropout, self.token_dropout = Dropout(dropout), Dropout(dropout)
        self.kept_per_position = (10 + 2 * expansion) * columns
        self.gradients_per_position = 3 * columns
        self._products = 2 * columns * (4 * columns + 2 * hidden)

    def flops(self, positions: float) -> float:
        """Return the operations of a sample with so many events and tokens."""
        return positions * self._products + 2 * positions**2 * self.attention_norm.weight.numel()

    def forward(
        self, events: Tensor, tokens: Tensor, joined: JoinedTokens, at: SamplePositions
    ) -> tuple[Tensor, Tensor]:
        """Map events [C, D] and tokens [T, B, D] to the same; the last block leaves events as they are."""
        normed = _normed(self.attention_norm, events)
        of_tokens = self.token_projections(_normed(self.attention_norm, tokens))
        both = torch.cat([self.projections(normed), of_tokens.flatten(0, 1)])
        query, key, value = (
            both.index_select(0, joined.source).unflatten(1, (3, self._heads, -1)).unbind(1)
        )
        found = attend(query, key, value, joined.at, causal=True).flatten(1)
        behind = found.index_select(0, joined.token_positions).view_as(tokens)
        tokens = tokens + self._dropped(self.token_attended(behind))
        network = self.token_network(_normed(self.network_norm, tokens), None)
        tokens = tokens + self._dropped(network)
        if self.attended is None or self.hidden is None or self.output is None:
            return events, tokens
        own = self.attended(found.index_select(0, joined.event_positions))
        events = events + self.dropout(own, at)
        hidden = gelu(self.hidden(_normed(self.network_norm, events)))
        return events + self.dropout(self.output(hidden), at), tokens

    def _dropped(self, tokens: Tensor) -> Tensor:
        return self.token_dropout(tokens.transpose(0, 1)).transpose(0, 1)


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


class OneTrans(SequenceModel):
    """Dense component: logit = MLP(tokens behind the last block).

    Tokens are one product of [item, others, x], cut into T (section 3.2, auto-split); an event's is a product of its vector
    (`EventTokens` adds position, age and numbers). The paper's pyramid, which drops the oldest events from block to block,
    is not here: all events stay up to the last block, which computes tokens only.
    """

    Options = OneTransOptions

    def __init__(self, options: OneTransOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        columns, tokens = options.token_dim, options.tokens
        check_heads(options.heads, columns)
        self._shape = tokens, columns
        self.events = nn.Linear(self.inputs.columns, columns)
        # Named as checkpoints have it.
        self.places = EventTokens(columns, self.inputs.group, options.block_dropout)
        features = self.inputs.item_columns + self.inputs.num_others
        self.features = nn.Linear(features, tokens * columns)
        sizes = columns, tokens, options.heads, options.expansion, options.block_dropout
        for number in range(options.blocks):
            self.blocks.append(OneTransBlock(*sizes, number == options.blocks - 1))
        self.top = TopMLP(tokens * columns, [*options.hidden, 1], **rates(options))

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        parts = self.inputs.read(numerical, embeddings)
        joined = JoinedTokens.of(parts.events, self._shape[0])
        events = self.places(self.events(parts.vectors), parts.events)
        features = self.features(torch.cat([parts.candidate, parts.others], dim=1))
        tokens = features.unflatten(1, self._shape).transpose(0, 1)
        for block in self.blocks:
            events, tokens = block(events, tokens, joined, parts.events)
        return self.top(tokens.transpose(0, 1).flatten(1)).squeeze(1).float()
