"""BST: a transformer over events and the candidate behind them (arXiv:1905.06874)."""

from torch import Tensor
from torch.nn.functional import pad

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.transformer import EventTokens
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import SequencePooling, append
from nn.models.options import BSTOptions
from nn.models.sequence_model import SequenceModel

# B: samples, N: numerical features


class BST(SequenceModel):
    """Dense component: logit = MLP([item, t, others, x]), where t is the blocks' output for the candidate or the mean of all.

    The candidate's token is its vector, zeros for features of an event that it lacks, behind those of the events. Blocks
    (section 2.2, equations 3 to 5) have a leaky ReLU, and LayerNorm behind every layer. The paper takes an event's age for
    its position; here a token has both (`EventTokens`).
    """

    Options = BSTOptions
    tokens_per_sample = 1
    # `append` keeps sample, source and flag of each token, and its time.
    bytes_per_event = 8 + 8 + 1 + 4

    def __init__(self, options: BSTOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        columns, group = self.inputs.columns, self.inputs.group
        self.tokens = EventTokens(columns, group, options.block_dropout)
        self.add_blocks(options, columns, group.max_length + 1, activation="leaky_relu")
        self.pooling = SequencePooling(options.pooling.value, columns)
        self.add_top(options, columns)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        parts = self.inputs.read(numerical, embeddings)
        item, events, times = parts.candidate, parts.events, parts.times
        target = pad(item, (0, self.inputs.columns - item.shape[1]))
        x, at = append(self.tokens(parts.vectors, events), target, events)
        if times is not None:
            times = append(times, times.new_zeros(item.shape[0]), events)[0]
        for block in self.blocks:
            x = block(x, at, times)
        return self.logits(parts, self.pooling(x, at))
