"""TransAct: a transformer over the latest events, each beside the candidate (arXiv:2306.00248)."""

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.event_choice import largest, latest, latest_vectors
from nn.layers.interactions.transformer import EventTokens
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import expand, pool
from nn.models.options import TransActOptions
from nn.models.sequence_model import SequenceModel

# B: samples, N: numerical features, K: outputs that the MLP reads


class TransAct(SequenceModel):
    """Dense component: logit = MLP([item, o_1, ..., o_K, W max(o) + b, mean of all events, others, x]).

    A token is an event's vector beside the candidate's (section 3.3.2, early fusion by concatenation), of the latest events
    only. o_1 is the output of the latest one; the MLP reads K of them, zeros where a sample has fewer, and the maximum over
    all (section 3.3.4). For the paper's long-term vector of the user stands the mean of all events. An event's kind of action
    is a feature of the group without a counterpart, whose vector lies beside the item's; the paper adds it. Not here:
    the random mask of a time window, and the layers of its ranker beside the MLP.
    """

    Options = TransActOptions

    def __init__(self, options: TransActOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        own, group = self.inputs.columns, self.inputs.group
        columns = own + self.inputs.item_columns
        self._recent, self._outputs = min(options.recent, group.max_length), options.outputs
        self.tokens = EventTokens(own, group, options.block_dropout)
        self.add_blocks(options, columns, self._recent)
        if self._recent < self.inputs.mean_events:
            self.tokens_per_event, self.tokens_per_sample = 0, self._recent
        self.maximum = nn.Linear(columns, columns)
        self.add_top(options, (options.outputs + 1) * columns + own)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        parts = self.inputs.read(numerical, embeddings)
        recent = latest(parts.events, self._recent)
        tokens = recent.of(self.tokens(parts.vectors, parts.events))
        x = torch.cat([tokens, expand(parts.candidate, recent.at)], dim=1)
        times = None if parts.times is None else recent.of(parts.times)
        for block in self.blocks:
            x = block(x, recent.at, times)
        return self.logits(
            parts,
            latest_vectors(x, recent.at, self._outputs).flatten(1),
            self.maximum(largest(x, recent.at)).to(x.dtype),
            pool(parts.vectors, parts.events, "mean"),
        )
