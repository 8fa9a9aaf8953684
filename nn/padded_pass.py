"""A training pass over the last batch of an epoch, if not every rank has as many rows: the others are padding."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from nn.distributed import Ranks
from nn.embeddings import Embeddings
from nn.flat_gradients import FlatGradients
from nn.loss import share_of_loss
from nn.readback import Readback
from nn.static_exchange import LocalIds
from nn.static_tables import StaticTables


class PaddedPass:
    """What `nn.static_pass.StaticPass` does, one operation after the other: it comes once an epoch.

    Args:
        tables: for batches of this size.
        dense: the dense half, on its device.
        gradients: where the gradients go.
        readback: where the loss goes.
        num_valid: rows of this rank that count, the first ones.
        global_valid: rows over all ranks that count.
        autocast: precision of the dense half.
        loss_scale: multiplies the loss before the backward pass; gradients are checked and divided by it if not 1.
        ranks: this process.
        update_tables: whether the tables learn.
    """

    def __init__(
        self,
        tables: StaticTables,
        dense: nn.Module,
        gradients: FlatGradients,
        readback: Readback,
        *,
        num_valid: int,
        global_valid: int,
        autocast: Callable[[], AbstractContextManager],
        loss_scale: float,
        ranks: Ranks,
        update_tables: bool,
    ) -> None:
        self._tables = tables
        self._dense = dense
        self._gradients = gradients
        self._readback = readback
        self._num_valid, self._global_valid = num_valid, global_valid
        self._autocast = autocast
        self._loss_scale = loss_scale
        self._ranks = ranks
        self._update_tables = update_tables

    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Learn from the rows that count.

        Args:
            ids: at their tables.
            numerical: [B, N].
            labels: [B].

        Returns:
            Logits [B], detached.
        """
        values = self._tables.look_up(ids).detach().requires_grad_()
        self._gradients.clear()
        with self._autocast():
            logits = self._dense(numerical, Embeddings(self._tables.layout, lambda: values))
        share = share_of_loss(logits, labels, self._num_valid, self._global_valid)
        loss = self._ranks.all_reduce_sum(share.detach().clone())
        is_good = torch.isfinite(loss).int().view(1)
        (share * self._loss_scale).backward()
        if self._loss_scale != 1:
            self._gradients.signal.copy_(~torch.isfinite(values.grad).all())
        if self._update_tables:
            owned, copies = self._tables.sort(ids)
            self._tables.sum_copies(copies, values.grad, is_good)
        self._gradients.sum(self._ranks)
        if self._loss_scale != 1:
            # An overflow anywhere is not finite, or not zero, in the sum on every rank.
            finite = self._gradients.are_finite() & (self._gradients.signal == 0)
            self._gradients.vector.div_(self._loss_scale)
            is_good = is_good * finite.int()
        self._readback.record(loss, is_good)
        if self._update_tables:
            self._tables.update(owned, self._tables.send_back(values.grad), is_good)
        return logits.detach()
