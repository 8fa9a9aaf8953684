"""Objects and settings of a training pass, beside the tables."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from nn.distributed.process_group import Ranks
from nn.embedding.local_tables import UpdateScalars
from nn.layers.pass_state import PassState
from nn.models.model import Model
from nn.models.tasks import Task
from nn.training.dense_optimizer import DenseUpdate
from nn.training.gradient_bucket import GradientBucket
from nn.training.loss_readback import LossReadback


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
        dense_update: update of the dense component; None if it is no part of the pass.
        table_scalars: learning rate and step count of the tables' update.
        chunk_rows: rows of a rank that the dense component takes at once (`train.accumulate`); None for all.
        layers: state of the layers that depend on the rows of a pass; None if there are none.
    """

    dense: Model
    tasks: Sequence[Task]
    gradients: GradientBucket
    readback: LossReadback
    ranks: Ranks
    autocast: Callable[[], AbstractContextManager]
    loss_scale: float
    update_tables: bool
    dense_update: DenseUpdate | None
    table_scalars: UpdateScalars
    chunk_rows: int | None = None
    layers: PassState | None = None

    def load_scalars(self) -> None:
        """Queue the copies of what the updates read and the host has written since the last pass.

        They must precede the loss on their stream: when the host has read that, it may write again.
        """
        self.table_scalars.load()
        if self.dense_update is not None:
            self.dense_update.load()

    def total_weight(self, weights: Tensor | None) -> Tensor | None:
        """Return the sum of the rows' weights over all ranks, a scalar; padding rows have weight 0. None without weights."""
        return None if weights is None else self.ranks.all_reduce_sum(weights.sum())
