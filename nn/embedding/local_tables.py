"""What the lookup and the update of tables are told: parts of tables, sorted ids, and the numbers of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import OptimizerConfig
from nn.embedding.table_rules import table_rule

# D: columns of a part, N: ids in all


@dataclass(frozen=True, slots=True)
class LocalTable:
    """A table, or a range of its columns, on this rank.

    Attributes:
        feature: whose ids are its rows.
        hotness: ids a sample.
        weight: [rows, D], contiguous.
        state: what the optimizer keeps beside it, as its `TableRule` names and shapes it. Float32.
        first_column: of the table that `weight` begins at, even.
        rounding_key: of the table, see `nn.ops.stochastic_rounding`; not looked at where weights are float32.
    """

    feature: str
    hotness: int
    weight: Tensor
    state: dict[str, Tensor]
    first_column: int = 0
    rounding_key: int = 0


@dataclass(frozen=True, slots=True)
class SortedIds:
    """Ids in ascending order, ready for an update.

    Attributes:
        keys: row + rows of all parts before, [N].
        order: where each stood, [N].
    """

    keys: Tensor
    order: Tensor


class UpdateScalars:
    """What changes in an update from step to step, in device memory, where each replay of a captured update reads it.

    Attributes:
        values: learning rate, 1 / (1 - beta ** step) of either beta where the optimizer uses the step, and what gradients are multiplied by; float32 [4].
        step: updates before this one, int32 [1].
    """

    def __init__(
        self, config: OptimizerConfig, gradient_scale: float, device: torch.device
    ) -> None:
        self._beta1, self._beta2 = config.beta1, config.beta2
        self._has_bias = table_rule(config.table_name).uses_step
        self.values = torch.ones(4, device=device)
        self.values[3] = gradient_scale
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self._lr: float | None = None

    def set(self, step: int, lr: float) -> None:
        """Queue the values of the update after `step` others; numbers travel as kernel arguments, not by copies."""
        self.step.fill_(step)
        if lr != self._lr:
            self.values[0].fill_(lr)
            self._lr = lr
        if self._has_bias:
            self.values[1].fill_(1 / (1 - self._beta1 ** (step + 1)))
            self.values[2].fill_(1 / (1 - self._beta2 ** (step + 1)))
