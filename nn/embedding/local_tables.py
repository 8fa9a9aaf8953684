"""Inputs of lookup and update: local tables, sorted ids, and the scalars of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import OptimizerConfig
from nn.embedding.optimizer import table_rule

# D: columns of a local table, N: total number of ids


@dataclass(frozen=True, slots=True)
class LocalTable:
    """A table, or a range of its columns, on this rank.

    Attributes:
        feature: feature whose ids are row numbers of the table.
        hotness: ids per sample.
        weight: [rows, D], contiguous.
        state: optimizer state by name, float32; the optimizer's `TableRule` has names and shapes.
        first_column: column of the table at which `weight` begins; even.
        rounding_key: key of the table (`nn.ops.stochastic_rounding`); ignored for float32 weights.
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
        keys: row + rows of all tables before, [N].
        order: position of each id before sorting, [N].
    """

    keys: Tensor
    order: Tensor


class UpdateScalars:
    """Scalars of an update that change from step to step; in device memory, where each replay of a CUDA graph reads them.

    Attributes:
        values: float32 [5 or more]: learning rate, 1 / (1 - beta1 ** step) and 1 / (1 - beta2 ** step) if the optimizer uses
            the step, the factor of gradients, `optimizer.embedding_l2`, and the options that the `TableRule` names.
        step: number of updates before this one, int32 [1].
    """

    def __init__(
        self, config: OptimizerConfig, gradient_scale: float, device: torch.device
    ) -> None:
        self._beta1, self._beta2 = config.beta1, config.beta2
        rule = table_rule(config.table_name)
        self._has_bias = rule.uses_step
        options = [getattr(config, name) for name in rule.options]
        values = [1.0, 1.0, 1.0, gradient_scale, config.embedding_l2, *options]
        self.values = torch.tensor(values, dtype=torch.float32, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self._lr: float | None = None

    def set(self, step: int, lr: float) -> None:
        """Queue the values of the update after `step` others; they are passed as kernel arguments, without copies."""
        self.step.fill_(step)
        if lr != self._lr:
            self.values[0].fill_(lr)
            self._lr = lr
        if self._has_bias:
            self.values[1].fill_(1 / (1 - self._beta1 ** (step + 1)))
            self.values[2].fill_(1 / (1 - self._beta2 ** (step + 1)))
