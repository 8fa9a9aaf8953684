"""Common parts of models of a sequence group: tables, transformer blocks, the last MLP, and their memory."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import Tables
from nn.layers.initialization import initialise_without_bias_
from nn.layers.interactions.transformer import BlockKind, TransformerBlock
from nn.layers.mlp import MLP
from nn.models.features import rates
from nn.models.model import Activations, Model
from nn.models.sequences import SequenceInput, SequenceParts


class TopMLP(MLP):
    """MLP behind events, whose biases begin at 0."""

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights from a CPU generator."""
        for layer in self.layers:
            initialise_without_bias_(layer, generator)


class SequenceModel(Model):
    """Model that reads a candidate and the events of a sequence group.

    `blocks` are transformer blocks, of which `tokens_per_event` and `tokens_per_sample` are read: what they keep and compute
    follows, and `bytes_per_event` beside them. `top` is the MLP behind them.

    Only products of candidate and events tell which events matter. Rows of tables begin near 0, and so do biases here: larger
    ones make a layer's output nearly the same for all rows, and products are learned late (benchmarks/README.md).
    """

    tokens_per_event = 1
    tokens_per_sample = 0
    bytes_per_event = 0

    def __init__(self, options: Any, spec: FeatureSpec) -> None:
        super().__init__()
        self.inputs = SequenceInput.of(options, spec)
        self.blocks = nn.ModuleList()

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the linear layers that do not draw their own weights from a CPU generator."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                initialise_without_bias_(layer, generator)

    @classmethod
    def tables(cls, options: Any, spec: FeatureSpec) -> Tables:
        """Return a table per feature; those of events have no pooling."""
        return SequenceInput.of(options, spec).declare(options, spec)

    def add_blocks(self, options: Any, columns: int, longest: int, **of_model: Any) -> None:
        """Add the blocks of the options for samples of at most `longest` tokens."""
        kind = BlockKind(
            options.heads,
            options.expansion,
            options.residual.value,
            options.block_dropout,
            longest=longest if options.relative_bias else None,
            has_times=self.inputs.group.time is not None,
            **of_model,
        )
        self.blocks.extend(TransformerBlock(columns, kind) for _ in range(options.blocks))

    def add_top(self, options: Any, columns: int) -> None:
        """Add the MLP of the candidate, `columns` that were found in the events, and the other features."""
        self.top = TopMLP(
            self.inputs.item_columns + columns + self.inputs.num_others,
            [*options.hidden, 1],
            **rates(options),
        )

    def activations(self) -> Activations:
        """Return what events and blocks keep, and the operations of the blocks."""
        blocks = cast("list[TransformerBlock]", list(self.blocks))  # or others with their methods
        kept = sum(block.kept_per_position for block in blocks)
        kept += max((block.gradients_per_position for block in blocks), default=0)
        tokens = self.inputs.mean_events * self.tokens_per_event + self.tokens_per_sample
        # Tokens of the latest events alone leave the others their vectors with a gradient.
        of_event = self.tokens_per_event * kept or 2 * self.inputs.columns
        return Activations(
            backward_columns=self.tokens_per_sample * kept,
            event_columns={self.inputs.group.name: of_event},
            event_bytes={self.inputs.group.name: self.bytes_per_event},
            products={"transformer": round(sum(block.flops(tokens) for block in blocks))},
        )

    def logits(self, parts: SequenceParts, *found: Tensor) -> Tensor:
        """Return the logits of the MLP, [B] in float32."""
        x = torch.cat([parts.candidate, *found, parts.others], dim=1)
        return self.top(x).squeeze(1).float()
