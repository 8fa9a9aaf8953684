"""A training pass with known shapes, from lookup to table update, on two CUDA streams.

The tables have a stream of their own. Lookup and all-to-all run beside the bottom MLP, the sort of the ids beside the
dense component, and the all-to-all of gradients and the update beside the rest of the backward pass and the all-reduce.
On one GPU a dot interaction looks up the rows itself.
The host reads nothing back, so that the pass can be captured once as a CUDA graph (`nn.ops.cuda_graph`). On a CPU the
same calls run one after the other.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dataloading.batch import Batch
from nn.layers.bce_loss import unit_gradient
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.tasks import loss_share
from nn.observability.annotations import annotate
from nn.ops.table_rows import TableRows
from nn.sharding.local_ids import LocalIds
from nn.sharding.static_embeddings import OwnedGradients, StaticEmbeddings
from nn.training.pass_context import PassContext


class StaticPass:
    """A training step up to the gradients of replicated tables, and of the dense component unless that is updated here too.

    Args:
        tables: the tables, for one batch size.
        context: the other objects of a pass.
        num_valid: valid rows of this rank, which come first; None for all. The others are padding.
        global_valid: valid rows over all ranks; None for all.
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
        self._stream = _tables_stream(device) if device.type == "cuda" else None

    def run(self, ids: LocalIds, batch: Batch) -> Tensor:
        """Run forward and backward pass, and return the logits, [B] or [B, T] of T tasks, detached.

        Args:
            ids: of the batch, on the ranks that own their tables.
            batch: on the device.
        """
        context, loss_scale = self._context, self._context.loss_scale
        # Of a kernel that takes rows itself, nothing is looked up before: rows are read once, and not copied twice.
        rows = self._tables.rows(ids) if context.dense.takes_rows else None
        arrived, sorted_owned, sorted_replicated = self._begin(ids, look_up=rows is None)
        context.gradients.clear()

        def receive(gradient: Tensor) -> None:
            """Send back the embeddings' gradient and update; the backward pass calls it as soon as that is computed."""
            local_gradients.append(gradient)
            if not context.update_tables:
                return
            with self._beside():
                owned_gradients.append(self._tables.send_back(sorted_owned, gradient))
                if loss_scale == 1:
                    self._tables.update(sorted_owned, owned_gradients[0], is_good)
            # Beside the all-to-all of the gradients; the ids were sorted before the loss was checked.
            self._wait_for(checked)
            self._tables.accumulate_replicated(sorted_replicated, gradient, is_good)

        # The backward pass appends to each list once, the gradient of the embeddings.
        local_gradients: list[Tensor] = []
        owned_gradients: list[OwnedGradients] = []
        with context.autocast(), annotate("dense"):
            embeddings = self._embeddings(ids, rows, arrived, receive)
            logits = context.dense(batch.numerical, embeddings)
        share = self._loss_share(logits, batch.labels, batch.weights)
        with self._beside():
            loss = context.ranks.all_reduce_sum(share.detach().clone())
            is_good = torch.isfinite(loss).int().view(1) * self._enabled
            checked = self._allow_dense_update(is_good)
            if loss_scale == 1:
                context.readback.record(loss, is_good)
        with annotate("backward"):
            scaled = share if loss_scale == 1 else share * loss_scale
            scaled.backward(unit_gradient(share.device))
        if loss_scale == 1:
            context.gradients.sum(context.ranks)
        else:
            finite = self._sum_and_check(local_gradients[0])
            with self._beside():
                is_good = is_good * finite.int()
                checked = self._allow_dense_update(is_good)
                context.readback.record(loss, is_good)
                if context.update_tables:
                    self._tables.update(sorted_owned, owned_gradients[0], is_good)
        context.gradients.clip()
        if context.dense_update is not None:
            self._wait_for(checked)
            context.dense_update.apply()
        self._join(ids)
        return logits.detach()

    def _embeddings(
        self,
        ids: LocalIds,
        rows: TableRows | None,
        arrived: torch.cuda.Event | None,
        receive: Callable[[Tensor], None],
    ) -> PooledEmbeddings:
        """Return the embeddings, whose gradient `receive` gets: the later they are read, the earlier."""

        def room() -> Tensor:
            return _EmbeddingGradient.apply(self._tables.memory.detach().requires_grad_(), receive)

        def arrive() -> Tensor:
            if rows is not None:
                self._tables.look_up(ids)
            self._wait_for(arrived)
            return room()

        return PooledEmbeddings(self._tables.layout, arrive, rows, room)

    def _allow_dense_update(self, is_good: Tensor) -> torch.cuda.Event | None:
        """Let the dense component be updated in this pass, unless `is_good` is 0; return the event of that."""
        if self._context.dense_update is not None:
            self._context.dense_update.allow(is_good)
        return self._event()

    def _loss_share(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return this rank's share of the loss."""
        context = self._context
        total_weight = context.total_weight(weights)
        counts = self._counts(len(labels))

        def share_of(logits: Tensor) -> Tensor:
            return loss_share(context.tasks, logits, labels, *counts, weights, total_weight)

        return context.dense.add_losses(share_of(logits), share_of)

    def _join(self, ids: LocalIds) -> None:
        """Let the main stream wait for that of the tables, and release the ids."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if ids.release is not None:
            ids.release()

    def _begin(self, ids: LocalIds, *, look_up: bool) -> tuple[torch.cuda.Event | None, Any, Any]:
        """Look up and sort; return the event of the embeddings' arrival, and the sorted ids of owned and replicated tables."""
        sorted_owned = sorted_replicated = None
        ids.rows_arrive()
        with self._beside():
            if look_up:
                with annotate("lookup"):
                    self._tables.look_up(ids)
            arrived = self._event()
            self._context.load_scalars()
            if self._context.update_tables:
                with annotate("sort"):
                    sorted_owned, sorted_replicated = self._tables.sort(ids)
        return arrived, sorted_owned, sorted_replicated

    def _sum_and_check(self, local_gradient: Tensor) -> Tensor:
        """All-reduce the gradients, divide them by the loss scale, and return whether none overflowed on any rank."""
        gradients = self._context.gradients
        gradients.signal.copy_(~torch.isfinite(local_gradient).all())
        gradients.sum(self._context.ranks)
        # An overflow on any rank is not finite, or not zero, in the sum on all ranks.
        finite = gradients.are_finite() & (gradients.signal == 0)
        gradients.vector.div_(self._context.loss_scale)
        return finite

    def _counts(self, rows: int) -> tuple[int, int]:
        """Return the valid rows of this rank and over all ranks."""
        if self._num_valid is None or self._global_valid is None:
            return rows, rows * self._context.ranks.world_size
        return self._num_valid, self._global_valid

    @contextmanager
    def without_updates(self) -> Iterator[None]:
        """Let `run` change no weight while the context is open."""
        self._enabled.zero_()
        yield
        self._enabled.fill_(1)

    def _beside(self) -> AbstractContextManager:
        """Return a context that launches on the tables' stream, after the work that the current stream has so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class StaticForward:
    """The forward pass, for evaluation and inference.

    Args:
        tables: the tables, for one batch size.
        context: the other objects of a pass.
    """

    graph = None

    def __init__(self, tables: StaticEmbeddings, context: PassContext) -> None:
        self._tables = tables
        self._context = context

    @torch.no_grad()
    def run(self, ids: LocalIds, batch: Batch) -> Tensor:
        """Return the logits."""
        ids.rows_arrive()
        rows = self._tables.rows(ids)
        # Of a kernel that takes rows itself, nothing is looked up before.
        values = self._tables.look_up(ids) if rows is None else None
        with self._context.autocast():
            embeddings = PooledEmbeddings(
                self._tables.layout,
                lambda: self._tables.look_up(ids) if values is None else values,
                rows,
            )
            logits = self._context.dense(batch.numerical, embeddings)
        if ids.release is not None:
            ids.release()
        return logits

    def without_updates(self) -> AbstractContextManager:
        """Return a null context: a forward pass changes no weight."""
        return nullcontext()


@cache
def _tables_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all passes: torch has 32 streams and then reuses the first, the prefetcher's among them."""
    return torch.cuda.Stream(device)


class _EmbeddingGradient(torch.autograd.Function):
    """The identity on embeddings; the backward pass calls a function with their gradient instead of storing it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.receive(gradient)
        return None, None
