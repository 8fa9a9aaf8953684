"""A training pass whose shapes are all known: lookup to table update, on two queues of the device, as one function.

The tables' work has a queue of its own: lookup and all-to-all run beside the bottom MLP, the sort of the ids beside the
dense half, and the gradients' way back and the update beside the rest of the backward pass and the all-reduce. Nothing
is read back by the host, so that all of it can be recorded once as a CUDA graph (`nn.ops.cuda_graph`). On a CPU the queues
are one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from nn.distributed.process_group import Ranks
from nn.observability.annotations import annotate
from nn.ops.bce_loss import share_of_loss
from nn.ops.pooled_embeddings import PooledEmbeddings
from nn.sharding.id_all_to_all import LocalIds
from nn.sharding.static_embeddings import StaticEmbeddings
from nn.training.gradient_bucket import GradientBucket
from nn.training.loss_readback import LossReadback


class StaticPass:
    """Everything of a step but the update of the dense half and of replicated tables, whose gradients it leaves.

    Args:
        tables: for batches of one size.
        dense: the dense half, on its device.
        gradients: where the gradients go.
        readback: where the loss goes.
        autocast: precision of the dense half.
        loss_scale: multiplies the loss before the backward pass; gradients are checked and divided by it if not 1.
        ranks: this process.
        update_tables: whether the tables learn.
        num_valid: rows of this rank that count, the first ones; None for all. The others are padding.
        global_valid: rows over all ranks that count; None for all.
    """

    def __init__(
        self,
        tables: StaticEmbeddings,
        dense: nn.Module,
        gradients: GradientBucket,
        readback: LossReadback,
        *,
        autocast: Callable[[], AbstractContextManager],
        loss_scale: float,
        ranks: Ranks,
        update_tables: bool,
        num_valid: int | None = None,
        global_valid: int | None = None,
    ) -> None:
        self._tables = tables
        self._dense = dense
        self._update_tables = update_tables
        self._gradients = gradients
        self._readback = readback
        self._autocast = autocast
        self._loss_scale = loss_scale
        self._ranks = ranks
        self._num_valid, self._global_valid = num_valid, global_valid
        on_gpu = ranks.device.type == "cuda"
        self._enabled = torch.ones(1, dtype=torch.int32, device=ranks.device)
        self._queue = _tables_queue(ranks.device) if on_gpu else None

    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Learn from a batch.

        Args:
            ids: at their tables.
            numerical: [B, N].
            labels: [B].

        Returns:
            Logits [B], detached.
        """
        with self._beside():
            with annotate("lookup"):
                values = self._tables.look_up(ids)
            arrived = self._event()
            if self._update_tables:
                with annotate("sort"):
                    sorted_owned, sorted_replicated = self._tables.sort(ids)
        self._gradients.clear()

        def take(gradient: Tensor) -> None:
            """Runs in the backward pass, as soon as the embeddings' gradient is there."""
            nonlocal local_gradient, owned_gradient
            local_gradient = gradient
            if not self._update_tables:
                return
            with self._beside():
                owned_gradient = self._tables.send_back(gradient)
                if self._loss_scale == 1:
                    self._tables.update(sorted_owned, owned_gradient, is_good)
            # Here, while the gradients travel; the ids were sorted before the loss was judged.
            self._wait_for(judged)
            self._tables.accumulate_replicated(sorted_replicated, gradient, is_good)

        def arrive() -> Tensor:
            """Runs where the dense half wants the embeddings; so late, autograd sends their gradient back early."""
            self._wait_for(arrived)
            return _EmbeddingGradient.apply(values.detach().requires_grad_(), take)

        local_gradient = owned_gradient = None
        with self._autocast(), annotate("dense half"):
            logits = self._dense(numerical, PooledEmbeddings(self._tables.layout, arrive))
        share = share_of_loss(logits, labels, *self._counts(len(labels)))
        with self._beside():
            loss = self._ranks.all_reduce_sum(share.detach().clone())
            is_good = torch.isfinite(loss).int().view(1) * self._enabled
            judged = self._event()
            if self._loss_scale == 1:
                self._readback.record(loss, is_good)
        with annotate("backward"):
            (share * self._loss_scale).backward()
        if self._loss_scale != 1:
            self._gradients.signal.copy_(~torch.isfinite(local_gradient).all())
        self._gradients.sum(self._ranks)
        if self._loss_scale != 1:
            # An overflow anywhere is not finite, or not zero, in the sum on every rank.
            finite = self._gradients.are_finite() & (self._gradients.signal == 0)
            self._gradients.vector.div_(self._loss_scale)
            with self._beside():
                is_good = is_good * finite.int()
                self._readback.record(loss, is_good)
                if self._update_tables:
                    self._tables.update(sorted_owned, owned_gradient, is_good)
        if self._queue is not None:
            torch.cuda.current_stream().wait_stream(self._queue)
        return logits.detach()

    def _counts(self, rows: int) -> tuple[int, int]:
        """Rows that count, of this rank and of all."""
        if self._num_valid is None or self._global_valid is None:
            return rows, rows * self._ranks.world_size
        return self._num_valid, self._global_valid

    @contextmanager
    def without_updates(self) -> Iterator[None]:
        """Within it `run` computes all and changes no weight."""
        self._enabled.zero_()
        yield
        self._enabled.fill_(1)

    def _beside(self) -> AbstractContextManager:
        """Queue beside the main queue, after what that one has so far."""
        if self._queue is None:
            return nullcontext()
        self._queue.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._queue)

    def _event(self) -> torch.cuda.Event | None:
        if self._queue is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class StaticForward:
    """The forward pass alone, for evaluation and inference.

    Args:
        tables: for whole batches of one size.
        dense: the dense half, on its device.
        autocast: its precision.
    """

    def __init__(
        self,
        tables: StaticEmbeddings,
        dense: nn.Module,
        autocast: Callable[[], AbstractContextManager],
    ) -> None:
        self._tables = tables
        self._dense = dense
        self._autocast = autocast

    @torch.no_grad()
    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [B]; `labels` are not looked at."""
        values = self._tables.look_up(ids)
        with self._autocast():
            return self._dense(numerical, PooledEmbeddings(self._tables.layout, lambda: values))

    def without_updates(self) -> AbstractContextManager:
        """It changes nothing anyway."""
        return nullcontext()


@cache
def _tables_queue(device: torch.device) -> torch.cuda.Stream:
    """One for all passes: torch has 32 streams and then begins anew, and the feed's would be among them."""
    return torch.cuda.Stream(device)


class _EmbeddingGradient(torch.autograd.Function):
    """Embeddings as they are; hands their gradient over instead of storing it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.receive(gradient)
        return None, None
