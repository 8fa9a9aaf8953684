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
from torch import Tensor

from nn.models.tasks import loss_share
from nn.observability.annotations import annotate
from nn.ops.pooled_embeddings import PooledEmbeddings
from nn.sharding.id_all_to_all import LocalIds
from nn.sharding.static_embeddings import StaticEmbeddings
from nn.training.sparse_path import PassContext


class StaticPass:
    """Everything of a step but the update of the dense half and of replicated tables, whose gradients it leaves.

    Args:
        tables: for batches of one size.
        context: the dense half, and where loss and gradients go.
        num_valid: rows of this rank that count, the first ones; None for all. The others are padding.
        global_valid: rows over all ranks that count; None for all.
    """

    graph = None

    def __init__(
        self,
        tables: StaticEmbeddings,
        context: PassContext,
        num_valid: int | None = None,
        global_valid: int | None = None,
    ) -> None:
        self._tables = tables
        self._context = context
        self._num_valid, self._global_valid = num_valid, global_valid
        device = context.ranks.device
        self._enabled = torch.ones(1, dtype=torch.int32, device=device)
        self._queue = _tables_queue(device) if device.type == "cuda" else None

    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Learn from a batch, and return its logits [B], detached.

        Args:
            ids: at their tables.
            numerical: [B, N].
            labels: [B].
        """
        context, loss_scale = self._context, self._context.loss_scale
        values, arrived, sorted_owned, sorted_replicated = self._look_up(ids)
        context.gradients.clear()

        def receive(gradient: Tensor) -> None:
            """Runs in the backward pass, as soon as the embeddings' gradient is there."""
            local_gradients.append(gradient)
            if not context.update_tables:
                return
            with self._beside():
                owned_gradients.append(self._tables.send_back(gradient))
                if loss_scale == 1:
                    self._tables.update(sorted_owned, owned_gradients[0], is_good)
            # Here, while the gradients travel; the ids were sorted before the loss was judged.
            self._wait_for(judged)
            self._tables.accumulate_replicated(sorted_replicated, gradient, is_good)

        def arrive() -> Tensor:
            """Runs where the dense half reads the embeddings; so late, autograd sends their gradient back early."""
            self._wait_for(arrived)
            return _EmbeddingGradient.apply(values.detach().requires_grad_(), receive)

        # Of the embeddings, one tensor in either list once the backward pass has come to them.
        local_gradients: list[Tensor] = []
        owned_gradients: list[Tensor] = []
        with context.autocast(), annotate("dense"):
            logits = context.dense(numerical, PooledEmbeddings(self._tables.layout, arrive))
        share = loss_share(context.tasks, logits, labels, *self._counts(len(labels)))
        with self._beside():
            loss = context.ranks.all_reduce_sum(share.detach().clone())
            is_good = torch.isfinite(loss).int().view(1) * self._enabled
            judged = self._event()
            if loss_scale == 1:
                context.readback.record(loss, is_good)
        with annotate("backward"):
            (share * loss_scale).backward()
        if loss_scale == 1:
            context.gradients.sum(context.ranks)
        else:
            finite = self._sum_and_judge(local_gradients[0])
            with self._beside():
                is_good = is_good * finite.int()
                context.readback.record(loss, is_good)
                if context.update_tables:
                    self._tables.update(sorted_owned, owned_gradients[0], is_good)
        if self._queue is not None:
            torch.cuda.current_stream().wait_stream(self._queue)
        if ids.release is not None:
            ids.release()
        return logits.detach()

    def _look_up(self, ids: LocalIds) -> tuple[Tensor, torch.cuda.Event | None, Any, Any]:
        """Return the embeddings, when they are there, and for the updates the ids of owned and replicated tables, sorted."""
        sorted_owned = sorted_replicated = None
        with self._beside():
            with annotate("lookup"):
                values = self._tables.look_up(ids)
            arrived = self._event()
            if self._context.update_tables:
                with annotate("sort"):
                    sorted_owned, sorted_replicated = self._tables.sort(ids)
        return values, arrived, sorted_owned, sorted_replicated

    def _sum_and_judge(self, local_gradient: Tensor) -> Tensor:
        """Sum the gradients over ranks, take the loss scale off, and return whether none overflowed anywhere."""
        gradients = self._context.gradients
        gradients.signal.copy_(~torch.isfinite(local_gradient).all())
        gradients.sum(self._context.ranks)
        # An overflow anywhere is not finite, or not zero, in the sum on every rank.
        finite = gradients.are_finite() & (gradients.signal == 0)
        gradients.vector.div_(self._context.loss_scale)
        return finite

    def _counts(self, rows: int) -> tuple[int, int]:
        """Rows that count, of this rank and over all."""
        if self._num_valid is None or self._global_valid is None:
            return rows, rows * self._context.ranks.world_size
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
        tables: for full batches of one size.
        context: the dense half and its precision.
    """

    graph = None

    def __init__(self, tables: StaticEmbeddings, context: PassContext) -> None:
        self._tables = tables
        self._context = context

    @torch.no_grad()
    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [B]; `labels` are not used."""
        values = self._tables.look_up(ids)
        with self._context.autocast():
            embeddings = PooledEmbeddings(self._tables.layout, lambda: values)
            logits = self._context.dense(numerical, embeddings)
        if ids.release is not None:
            ids.release()
        return logits

    def without_updates(self) -> AbstractContextManager:
        """It changes nothing anyway."""
        return nullcontext()


@cache
def _tables_queue(device: torch.device) -> torch.cuda.Stream:
    """One for all passes: torch has 32 streams and then hands out the first again, the prefetcher's among them."""
    return torch.cuda.Stream(device)


class _EmbeddingGradient(torch.autograd.Function):
    """The identity on embeddings; passes their gradient to a function instead of storing it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.receive(gradient)
        return None, None
