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

    `gradients` are those of the dense component, followed by those of the replicated tables. If `loss_scale`, the factor on the
    loss before the backward pass, is not 1, gradients are checked and divided by it. `dense_update` is None if that is no part
    of the pass. `update_replicated_in_pass` takes sums of gradients and whether the step is applied, int32 [1]. The dense
    component takes `chunk_rows` of a rank at once (`train.accumulate`), or all. `layers` is the state of those that depend on
    the rows of a pass.
    """

    dense: Model
    tasks: Sequence[Task]
    gradients: GradientBucket
    readback: LossReadback
    ranks: Ranks
    autocast: Callable[[], AbstractContextManager]
    loss_scale: float
    update_tables: bool
    update_replicated_in_pass: Callable[[Sequence[Tensor], Tensor], None]
    dense_update: DenseUpdate | None
    table_scalars: UpdateScalars
    chunk_rows: int | None = None
    layers: PassState | None = None

    def load_scalars(self) -> None:
        """Queue the copies of what the updates read and the host has written since the last pass.

        They must precede the loss on their stream: when the host has read that, it may write again. Of a pass with `layers` the
        tables' are copied before, on the stream of these.
        """
        if self.layers is None:
            self.table_scalars.load()
        if self.dense_update is not None:
            self.dense_update.load()

    def total_weight(self, weights: Tensor | None) -> Tensor | None:
        """Return the sum of the rows' weights over all ranks, a scalar; padding rows have weight 0. None without weights."""
        return None if weights is None else self.ranks.all_reduce_sum(weights.sum())
