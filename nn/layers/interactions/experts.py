"""Experts, gates and towers of models with several tasks (MMoE, 10.1145/3219819.3220007; PLE, 10.1145/3383313.3412236)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nn.layers.mlp import MLP

# B: samples, I: columns of an input, E: experts, W: columns of an expert's output, T: tasks


class Experts(nn.Module):
    """MLPs of the same widths with the same input.

    I is `num_inputs`. E is `num_experts`. `widths`: of every expert, ReLU after each; the last is W. `rates`: as of `MLP`.
    """

    def __init__(
        self, num_inputs: int, num_experts: int, widths: Sequence[int], **rates: Any
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            MLP(num_inputs, widths, final_activation=True, **rates) for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, I] to [B, E, W]."""
        return torch.stack([expert(x) for expert in self.experts], dim=1)


class Gate(nn.Module):
    """Mean of experts, weighted by softmax(W x), as in MMoE and PLE.

    I is `num_inputs`. E is `num_experts`.
    """

    def __init__(self, num_inputs: int, num_experts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_experts, bias=False)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Map x [B, I] and the outputs of experts [B, E, W] to [B, W]."""
        weights = torch.softmax(self.linear(x), dim=1).to(experts.dtype)
        return torch.bmm(weights.unsqueeze(1), experts).squeeze(1)


class Towers(nn.Module):
    """A tower per task: an MLP that ends in the logit of the task.

    I is `num_inputs`. T is `num_tasks`. `hidden`: widths of the hidden layers of every tower; may be empty. `rates`: as of `MLP`.
    """

    def __init__(
        self, num_inputs: int, num_tasks: int, hidden: Sequence[int], **rates: Any
    ) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            MLP(num_inputs, [*hidden, 1], **rates) for _ in range(num_tasks)
        )

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Map an input [B, I] per task to logits in float32, [B, T], or [B] of a single task."""
        logits = [tower(x) for tower, x in zip(self.towers, inputs, strict=True)]
        # ONNX squeezes no dimension of several columns.
        joined = logits[0].squeeze(1) if len(logits) == 1 else torch.cat(logits, dim=1)
        return joined.float()
