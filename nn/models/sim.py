"""SIM and ETA: a search for the events most like the candidate, and attention over those (arXiv:2006.05639, 2108.04468)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.event_choice import latest, most_similar
from nn.layers.interactions.target_attention import TargetAttention
from nn.layers.interactions.transformer import EventTokens, check_heads
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import SamplePositions, attend_once, expand
from nn.models.model import Activations
from nn.models.options import Search, SIMOptions
from nn.models.sequence_model import SequenceModel

# B: samples, N: numerical features, C: positions of events, D: columns of an event, H: heads


class SIM(SequenceModel):
    """Dense component: logit = MLP([item, multi-head attention over found events, DIN's over recent ones, others, x]).

    Found are the events with the largest <item, e_j> (SIM, section 3.2, soft search), or of which random projections of e_j
    have the most signs in common with those of the item (ETA, section 3.3: locality-sensitive hashing). The search has no
    gradient; SIM's own loss for it is left out, as in ETA, since the vectors are those that the attention trains.
    Attention (SIM, equations 5 to 7) is of the candidate over tokens of found events (`EventTokens`), which tell their age.
    The recent events have DIN's unit, as in both papers.
    """

    Options = SIMOptions
    projections: Tensor  # [P * D, bits]

    def __init__(self, options: SIMOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        columns, group, items = self.inputs.columns, self.inputs.group, self.inputs.item_columns
        check_heads(options.heads, columns)
        self._found = min(options.found, group.max_length)
        self._recent = min(options.recent, group.max_length)
        self._heads, self._hashes = options.heads, options.search is Search.hash
        if self._hashes:
            fixed = torch.Generator("cpu").manual_seed(0)
            drawn = torch.randn(items, options.hash_bits, generator=fixed, device="cpu")
            self.register_buffer("projections", drawn, persistent=False)
        self.tokens = EventTokens(columns, group)
        self.query = nn.Linear(items, columns, bias=False)
        self.key_value = nn.Linear(columns, 2 * columns, bias=False)
        self.attention = TargetAttention(columns, 0, [80, 40]) if self._recent else None
        self.add_top(options, columns * (2 if self._recent else 1))

    def activations(self) -> Activations:
        """Return what events keep, and found and recent ones of a sample."""
        columns, unit = self.inputs.columns, 0
        if self.attention is not None:
            unit = sum(2 * layer.in_features for layer in self.attention.layers) + columns
        products = 2 * self._found * self.key_value.weight.numel() + 4 * self._found * columns
        return Activations(
            backward_columns=self._found * 5 * columns + self._recent * unit,
            event_columns={self.inputs.group.name: 3 * columns},
            products={"attention": products},
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        parts = self.inputs.read(numerical, embeddings)
        item, events, vectors = parts.candidate, parts.events, parts.vectors
        found = most_similar(self._similarities(item, vectors, events), events, self._found)
        tokens = found.of(self.tokens(vectors, events))
        query = self.query(item).unflatten(1, (self._heads, -1))
        key, value = self.key_value(tokens).unflatten(1, (2, self._heads, -1)).unbind(1)
        results = [attend_once(query, key, value, found.at).flatten(1)]
        if self.attention is not None:
            recent = latest(events, self._recent)
            wide = pad(item, (0, self.inputs.columns - item.shape[1]))
            results.append(self.attention.of_events(wide, recent.of(vectors), recent.at))
        return self.logits(parts, *results)

    @torch.no_grad()
    def _similarities(self, item: Tensor, vectors: Tensor, at: SamplePositions) -> Tensor:
        """Return how similar events [C, D] are to their candidates [B, P * D], float32 [C]."""
        vectors = vectors[:, : item.shape[1]]
        if self._hashes:
            item, vectors = (torch.sign(each @ self.projections) for each in (item, vectors))
        return (expand(item, at) * vectors).sum(1, dtype=torch.float32)
