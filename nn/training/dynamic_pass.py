"""A training pass through TorchRec: for ragged features, row-wise tables and tables in host memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dataloading.batch import Batch
from nn.distributed.process_group import Ranks
from nn.ops.bce_loss import share_of_loss
from nn.sharding.sharded_embeddings import Exchange, ShardedEmbeddings
from nn.training.gradient_bucket import GradientBucket
from nn.training.loss_readback import LossReadback


@dataclass(frozen=True, slots=True)
class Lookups:
    """What a pass leaves for the tables' update.

    Attributes:
        values: what this rank looked up, a tensor a group of tables.
        gradients: of each, loss scale taken off.
    """

    values: list[Tensor]
    gradients: list[Tensor]


class DynamicPass:
    """Everything of a step but its updates, queued operation by operation.

    Args:
        tables: the sparse half.
        dense: the dense half, on its device.
        gradients: where the dense half's gradients go.
        readback: where the loss goes.
        autocast: precision of the dense half.
        loss_scale: multiplies the loss before the backward pass; gradients are checked and divided by it if not 1.
        ranks: this process.
        update_tables: whether the tables learn.
    """

    def __init__(
        self,
        tables: ShardedEmbeddings,
        dense: nn.Module,
        gradients: GradientBucket,
        readback: LossReadback,
        *,
        autocast: Callable[[], AbstractContextManager],
        loss_scale: float,
        ranks: Ranks,
        update_tables: bool,
    ) -> None:
        self._tables = tables
        self._dense = dense
        self._gradients = gradients
        self._readback = readback
        self._autocast = autocast
        self._loss_scale = loss_scale
        self._ranks = ranks
        self._update_tables = update_tables

    def run(self, exchange: Exchange, batch: Batch) -> tuple[Tensor, Lookups]:
        """Return the logits [B], detached, and what `ShardedEmbeddings.update` takes."""
        # A lookup that records itself wants its backward pass: replicated tables would wait for it in the next step.
        with torch.set_grad_enabled(self._update_tables):
            looked_up = self._tables.look_up(exchange)
        leaves = [each.detach().requires_grad_() for each in looked_up]
        self._gradients.clear()
        with self._autocast():
            embeddings = self._tables.output_dist(exchange.context, leaves)
            logits = self._dense(batch.numerical, embeddings)
        share = share_of_loss(logits, batch.labels, batch.num_valid, batch.global_valid)
        loss = self._ranks.all_reduce_sum(share.detach().clone())
        is_good = torch.isfinite(loss)
        # TorchRec divides what it sends back by the number of ranks.
        world_size = self._ranks.world_size
        (share * (self._loss_scale * world_size)).backward()
        gradients = [leaf.grad for leaf in leaves]
        if self._loss_scale != 1:
            for each in gradients:
                self._gradients.signal += ~torch.isfinite(each).all()
            gradients = [each / self._loss_scale for each in gradients]
        self._gradients.sum(self._ranks)
        if self._loss_scale != 1:
            is_good = is_good & self._gradients.are_finite() & (self._gradients.signal == 0)
        self._gradients.vector.div_(self._loss_scale * world_size)
        self._readback.record(loss, is_good)
        return logits.detach(), Lookups(looked_up, gradients)
