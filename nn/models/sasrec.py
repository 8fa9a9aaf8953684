"""SASRec as a ranker: causal self-attention over events, whose last state meets a candidate (arXiv:1808.09781)."""

import torch
from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.transformer import EventTokens
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import LayerNorm, pool
from nn.models.options import SASRecOptions
from nn.models.sequence_model import SequenceModel

# B: samples, N: numerical features


class SASRec(SequenceModel):
    """Dense component: logit = <s, item> + MLP([item, others, x]).

    s is the last event's state behind all blocks (section III.C), normalised as in the authors' program, or zeros without
    events. The product is the paper's score (equation 7); the MLP makes a ranker over all features of it. It does not read s,
    which it would learn samples by heart from (benchmarks/README.md). A position counts from the last event, which needs no
    padding in front. Blocks have an output product behind the heads, which the paper's lack.
    """

    Options = SASRecOptions

    def __init__(self, options: SASRecOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        columns, group = self.inputs.columns, self.inputs.group
        self.tokens = EventTokens(columns, group, options.block_dropout)
        self.add_blocks(options, columns, group.max_length, causal=True)
        self.norm = LayerNorm(columns)
        self.add_top(options, 0)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        parts = self.inputs.read(numerical, embeddings)
        item, events = parts.candidate, parts.events
        x = self.tokens(parts.vectors, events)
        for block in self.blocks:
            x = block(x, events, parts.times)
        state = torch.where(events.lengths[:, None] > 0, self.norm(pool(x, events, "last")), 0)
        product = (state[:, : item.shape[1]] * item).sum(1, dtype=torch.float32)
        return product + self.logits(parts)
