"""The sparse path: the protocol that `StaticPath` and `DynamicPath` implement."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dataloading.batch import Batch
from nn.distributed.process_group import Ranks
from nn.models.model import Model
from nn.models.tasks import Task
from nn.training.gradient_bucket import GradientBucket
from nn.training.loss_readback import LossReadback


class RoutedIds(Protocol):
    """Ids of a batch on the ranks that own their tables; the type depends on the path."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from being reused before `stream` is done with it."""


class SparsePath(Protocol):
    """Exchange of ids, and training of the tables; all ranks must call the methods alike.

    The ids that one method returns are the argument of the next one of the same path.
    """

    def start(self, batch: Batch) -> Any:
        """Queue the id exchange of a batch, as far as the host need not wait."""

    def finish(self, ids: Any) -> Any:
        """Complete the id exchange."""

    def prepare_update(self, step: int, lr: float) -> None:
        """Set learning rate and step count of the next update; call it before `forward_backward`."""

    def forward_backward(self, batch: Batch, ids: Any) -> Tensor:
        """Queue forward and backward pass, without the updates after it, and return the logits [B], detached."""

    def update(self) -> None:
        """Queue the rest of the tables' update, once the loss is known to be finite."""

    def predict(self, batch: Batch, ids: Any) -> Tensor:
        """Return the logits [B] of a batch, without gradients; the next call overwrites them."""

    def close(self) -> None:
        """Release the CUDA graphs; NCCL would wait for them forever when its group is closed."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """The objects and settings of a pass, beside the tables.

    Attributes:
        dense: the dense component, on its device.
        tasks: the labels that it learns.
        gradients: its gradients, followed by those of the replicated tables.
        readback: copies the loss to the host.
        ranks: this process.
        autocast: returns the autocast context of the dense component.
        loss_scale: factor on the loss before the backward pass; if not 1, gradients are checked and divided by it.
        update_tables: whether the tables are trained.
    """

    dense: Model
    tasks: Sequence[Task]
    gradients: GradientBucket
    readback: LossReadback
    ranks: Ranks
    autocast: Callable[[], AbstractContextManager]
    loss_scale: float
    update_tables: bool

    def total_weight(self, weights: Tensor | None) -> Tensor | None:
        """Return the sum of the rows' weights over all ranks, a scalar; padding rows have weight 0. None without weights."""
        return None if weights is None else self.ranks.all_reduce_sum(weights.sum())
