"""PLE: progressive layered extraction for several tasks (Tang et al., RecSys 2020, 10.1145/3383313.3412236)."""

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.experts import Experts, Gate, Towers
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, TaskModel
from nn.models.options import PLEOptions

# B: samples, N: numerical features, F: categorical features, D: columns of a table, T: tasks, I: columns of an input


class ExtractionLevel(nn.Module):
    """One level of extraction: section "Customized Gate Control" (CGC), with the shared gate of "Progressive Layered Extraction".

    Every task has experts, and all tasks share some. The gate of a task weighs its own experts and the shared ones; the shared
    gate, which the last level lacks, weighs all.

    I is `num_inputs`. T is `num_tasks`. `is_last`: whether no level follows.
    """

    def __init__(
        self, num_inputs: int, num_tasks: int, options: PLEOptions, *, is_last: bool
    ) -> None:
        super().__init__()
        counts = [options.task_experts] * num_tasks + [options.shared_experts]
        self.experts = nn.ModuleList(
            Experts(num_inputs, count, options.expert_hidden, **rates(options)) for count in counts
        )
        self.gates = nn.ModuleList(
            Gate(num_inputs, options.task_experts + options.shared_experts)
            for _ in range(num_tasks)
        )
        self.shared_gate = None if is_last else Gate(num_inputs, sum(counts))

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """Map the inputs [B, I] of the tasks and the shared one to outputs [B, W] in the same order."""
        *own, shared = [experts(x) for experts, x in zip(self.experts, inputs, strict=True)]
        outputs = [
            gate(x, torch.cat([experts, shared], dim=1))
            for gate, experts, x in zip(self.gates, own, inputs[:-1], strict=True)
        ]
        if self.shared_gate is not None:
            outputs.append(self.shared_gate(inputs[-1], torch.cat([*own, shared], dim=1)))
        return outputs


class PLE(TaskModel):
    """Dense component of PLE: levels of extraction, and a tower per task (section "Progressive Layered Extraction").

    The inputs of the first level are all x, the numerical features and the embeddings; those of a further level are the
    outputs of the level before. With one level this is CGC. The paper gives no initial weights; experts and towers begin as
    `MLP`, gates as PyTorch's linear layers.
    """

    Options = PLEOptions

    def __init__(self, options: PLEOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        self._options, width = options, options.expert_hidden[-1]
        sizes = [self._inputs] + [width] * (options.levels - 1)
        self.levels = nn.ModuleList(
            ExtractionLevel(size, self._num_tasks, options, is_last=number == options.levels)
            for number, size in enumerate(sizes, 1)
        )
        self.towers = Towers(width, self._num_tasks, options.tower_hidden, **rates(options))

    def activations(self) -> Activations:
        """Return the experts' outputs as the gates read them: stacked, and joined with the shared ones."""
        options, last = self._options, len(self.levels) - 1
        own = options.task_experts + options.shared_experts
        every = options.task_experts * self._num_tasks + options.shared_experts
        columns = options.expert_hidden[-1] * (
            len(self.levels) * (every + own * self._num_tasks) + last * every
        )
        return Activations(backward_columns=columns, products={"gates": 2 * columns})

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        outputs = [self.join_inputs(numerical, embeddings)] * (self._num_tasks + 1)
        for level in self.levels:
            outputs = level(outputs)
        return self.towers(outputs)
