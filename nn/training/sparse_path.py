"""The way of a batch through the tables: one protocol, which `StaticPath` and `DynamicPath` implement."""

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
    """Ids of a batch on the ranks that own their tables, in the form of the path that sent them."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from being reused before `stream` is done with it."""


class SparsePath(Protocol):
    """Sends ids to their tables and trains the tables; all ranks must call its methods alike.

    Ids that one method returns are passed on to the next one of the same path.
    """

    def start(self, batch: Batch) -> Any:
        """Queue the exchange of a batch's ids, as far as the host need not wait for it."""

    def finish(self, ids: Any) -> Any:
        """Complete what `start` began."""

    def prepare_update(self, step: int, lr: float) -> None:
        """Set what the update after `step` others needs; comes before `forward_backward`."""

    def forward_backward(self, batch: Batch, ids: Any) -> Tensor:
        """Queue everything of a training step but `update` and the dense half's, and return the logits [B], detached."""

    def update(self) -> None:
        """Queue what is left of the tables' update, once the loss is known to be finite."""

    def predict(self, batch: Batch, ids: Any) -> Tensor:
        """Return the logits [B] of a batch, without gradients; overwritten by the next call."""

    def close(self) -> None:
        """Release the recorded graphs; NCCL would wait for them forever when its group is closed."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """The objects and settings of a pass over a batch, beside the tables.

    Attributes:
        dense: the dense component, on its device.
        tasks: what it learns.
        gradients: where its gradients go, followed by those of the replicated tables.
        readback: where the loss goes.
        ranks: this process.
        autocast: enters the precision of the dense half.
        loss_scale: multiplies the loss before the backward pass; gradients are checked and divided by it if not 1.
        update_tables: whether the tables learn.
    """

    dense: Model
    tasks: Sequence[Task]
    gradients: GradientBucket
    readback: LossReadback
    ranks: Ranks
    autocast: Callable[[], AbstractContextManager]
    loss_scale: float
    update_tables: bool
