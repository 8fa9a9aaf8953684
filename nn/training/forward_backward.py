"""The pass of a training step: look up, forward, loss, backward, send back, update tables, reduce, update dense.

The tables have a stream of their own. Lookup and all-to-all run beside the bottom MLP, the sort of the ids beside the
dense component, and the all-to-all of gradients and the update beside the rest of the backward pass and the all-reduce.
On one GPU a dot interaction looks up the rows itself.
The host reads nothing back, so that the pass can be captured once as a CUDA graph (`nn.ops.cuda_graph`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataloading.batch import Batch
from nn.embedding.local_tables import SortedIds
from nn.layers.bce_loss import unit_gradient
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.tasks import loss_share
from nn.observability.annotations import annotate
from nn.ops.table_rows import TableRows
from nn.sharding.local_ids import LocalIds
from nn.sharding.sharded_lookup import OwnedGradients, ShardedLookup, SortedOwnedIds
from nn.training.pass_context import PassContext
from nn.training.side_stream import SideStream


@dataclass(slots=True)
class _Vectors:
    """The vectors of a batch, and what their gradient needs.

    `rows` are set where a kernel of the dense component looks the vectors up itself; otherwise they have `arrived`. Ids are sorted
    if tables are trained. `receive` gets the gradient as soon as the backward pass has it.
    """

    ids: LocalIds
    rows: TableRows | None
    arrived: torch.cuda.Event | None
    owned: SortedOwnedIds | None = None
    replicated: SortedIds | None = None
    receive: Callable[[Tensor], None] | None = None


@dataclass(slots=True)
class _Verdict:
    """The loss over all ranks, whether the step is applied, int32 [1], and the event from which on the main stream may read it."""

    loss: Tensor
    is_good: Tensor
    event: torch.cuda.Event | None


class ForwardBackward:
    """A training step up to the gradients of replicated tables, and of the dense component unless that is updated here too.

    Args:
        lookup: of the tables, for one batch size.
        context: the other objects of a pass.
        num_valid: valid rows of this rank, which come first; None for all. The others are padding.
        global_valid: valid rows over all ranks; None for all.
    """

    def __init__(
        self,
        lookup: ShardedLookup,
        context: PassContext,
        num_valid: int | None = None,
        global_valid: int | None = None,
    ) -> None:
        self._lookup = lookup
        self._context = context
        self._num_valid, self._global_valid = num_valid, global_valid
        self._enabled = torch.ones(1, dtype=torch.int32, device=context.ranks.device)
        self._tables = SideStream(context.ranks.device)

    def run(self, ids: LocalIds, batch: Batch) -> Tensor:
        """Run forward and backward pass, and return the logits, [B] or [B, T] of T tasks, detached."""
        vectors = self._look_up(ids)
        self._context.gradients.clear()
        logits = self._forward(vectors, batch)
        share = self._loss_share(logits, batch.labels, batch.weights)
        if self._context.loss_scale == 1:
            self._train(vectors, share)
        else:
            self._train_scaled(vectors, share)
        self._tables.main_waits()
        return logits.detach()

    def _train(self, vectors: _Vectors, share: Tensor) -> None:
        """Apply the step if the loss is finite; tables are updated as soon as their gradient is known."""
        context = self._context
        verdict = self._check_loss(share)
        with self._tables.launches():
            context.readback.record(verdict.loss, verdict.is_good)

        def receive(gradient: Tensor) -> None:
            returned = self._send_back(vectors, gradient)
            self._update_tables(vectors, returned, verdict)
            self._add_to_replicated(vectors, gradient, verdict)

        vectors.receive = receive
        with annotate("backward"):
            share.backward(unit_gradient(share.device))
        context.gradients.sum(context.ranks)
        self._update_dense(verdict)

    def _train_scaled(self, vectors: _Vectors, share: Tensor) -> None:
        """Apply the step if, besides, no gradient has overflowed fp16, which is known at the end: tables are updated behind that."""
        context = self._context
        verdict = self._check_loss(share)
        received: list[tuple[Tensor, OwnedGradients | None]] = []

        def receive(gradient: Tensor) -> None:
            received.append((gradient, self._send_back(vectors, gradient)))
            self._add_to_replicated(vectors, gradient, verdict)

        vectors.receive = receive
        with annotate("backward"):
            (share * context.loss_scale).backward(unit_gradient(share.device))
        gradient, returned = received[0]
        finite = self._sum_and_check(gradient)
        self._tables.wait_for_main()
        with self._tables.launches():
            verdict = self._let(verdict.loss, verdict.is_good * finite.int())
            context.readback.record(verdict.loss, verdict.is_good)
        self._update_tables(vectors, returned, verdict)
        self._update_dense(verdict)

    def _look_up(self, ids: LocalIds) -> _Vectors:
        """Look up and sort, on the tables' stream."""
        context = self._context
        # Of a kernel that takes rows itself, nothing is looked up before: rows are read once, and not copied twice.
        rows = self._lookup.rows(ids) if context.dense.takes_rows else None
        self._tables.wait_for_main()
        with self._tables.launches():
            if rows is None:
                with annotate("lookup"):
                    self._lookup.look_up(ids)
            vectors = _Vectors(ids, rows, self._tables.mark())
            context.load_scalars()
            if context.update_tables:
                with annotate("sort"):
                    vectors.owned, vectors.replicated = self._lookup.sort(ids)
        return vectors

    def _forward(self, vectors: _Vectors, batch: Batch) -> Tensor:
        """Return the logits. The later the dense component takes the embeddings, the earlier it returns their gradient."""

        def take(is_filled_by_caller: bool) -> Tensor:
            if vectors.rows is not None and not is_filled_by_caller:
                self._lookup.look_up(vectors.ids)
            if not is_filled_by_caller:
                self._tables.main_waits_for(vectors.arrived)
            return _EmbeddingGradient.apply(self._lookup.memory.detach().requires_grad_(), vectors)

        with self._context.autocast(), annotate("dense"):
            embeddings = PooledEmbeddings(self._lookup.layout, take, vectors.rows)
            return self._context.dense(batch.numerical, embeddings)

    def _loss_share(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return this rank's share of the loss."""
        context = self._context
        total_weight = context.total_weight(weights)
        counts = self._counts(len(labels))
        return loss_share(context.tasks, logits, labels, *counts, weights, total_weight)

    def _counts(self, rows: int) -> tuple[int, int]:
        """Return the valid rows of this rank and over all ranks."""
        if self._num_valid is None or self._global_valid is None:
            return rows, rows * self._context.ranks.world_size
        return self._num_valid, self._global_valid

    def _check_loss(self, share: Tensor) -> _Verdict:
        """Add up the loss over ranks, on the tables' stream."""
        self._tables.wait_for_main()
        with self._tables.launches():
            loss = self._context.ranks.all_reduce_sum(share.detach().clone())
            return self._let(loss, torch.isfinite(loss).int().view(1) * self._enabled)

    def _let(self, loss: Tensor, is_good: Tensor) -> _Verdict:
        """Let the dense component be updated in this pass, unless `is_good` is 0."""
        if self._context.dense_update is not None:
            self._context.dense_update.allow(is_good)
        return _Verdict(loss, is_good, self._tables.mark())

    def _send_back(self, vectors: _Vectors, gradient: Tensor) -> OwnedGradients | None:
        """Send the gradients of vectors to the ranks of their tables, if these are trained; on the tables' stream."""
        if vectors.owned is None:
            return None
        self._tables.wait_for_main()
        with self._tables.launches():
            return self._lookup.send_back(vectors.owned, gradient)

    def _update_tables(
        self, vectors: _Vectors, returned: OwnedGradients | None, verdict: _Verdict
    ) -> None:
        """Update the tables that are not replicated, on their stream."""
        if vectors.owned is not None and returned is not None:
            with self._tables.launches():
                self._lookup.update(vectors.owned, returned, verdict.is_good)

    def _add_to_replicated(self, vectors: _Vectors, gradient: Tensor, verdict: _Verdict) -> None:
        """Add the gradients of replicated tables up, beside the all-to-all of the others; their ids were sorted before the check."""
        if vectors.replicated is not None:
            self._tables.main_waits_for(verdict.event)
            self._lookup.accumulate_replicated(vectors.replicated, gradient, verdict.is_good)

    def _sum_and_check(self, local_gradient: Tensor) -> Tensor:
        """All-reduce the gradients, divide them by the loss scale, and return whether none overflowed on any rank."""
        gradients = self._context.gradients
        gradients.signal.copy_(~torch.isfinite(local_gradient).all())
        gradients.sum(self._context.ranks)
        # An overflow on any rank is not finite, or not zero, in the sum on all ranks.
        finite = gradients.are_finite() & (gradients.signal == 0)
        gradients.vector.div_(self._context.loss_scale)
        return finite

    def _update_dense(self, verdict: _Verdict) -> None:
        """Clip the gradients, and update the dense component if that is a part of the pass."""
        self._context.gradients.clip()
        if self._context.dense_update is not None:
            self._tables.main_waits_for(verdict.event)
            self._context.dense_update.apply()

    @contextmanager
    def without_updates(self) -> Iterator[None]:
        """Let `run` change no weight while the context is open."""
        self._enabled.zero_()
        yield
        self._enabled.fill_(1)


class Forward:
    """The forward pass over the same lookups, for evaluation and inference."""

    def __init__(self, lookup: ShardedLookup, context: PassContext) -> None:
        self._lookup = lookup
        self._context = context

    @torch.no_grad()
    def run(self, ids: LocalIds, batch: Batch) -> Tensor:
        """Return the logits."""
        rows = self._lookup.rows(ids)
        # Of a kernel that takes rows itself, nothing is looked up before.
        values = self._lookup.look_up(ids) if rows is None else None

        def take(is_filled_by_caller: bool) -> Tensor:
            return self._lookup.look_up(ids) if values is None else values

        with self._context.autocast():
            embeddings = PooledEmbeddings(self._lookup.layout, take, rows)
            return self._context.dense(batch.numerical, embeddings)

    def without_updates(self) -> AbstractContextManager:
        """Return a null context: a forward pass changes no weight."""
        return nullcontext()


class _EmbeddingGradient(torch.autograd.Function):
    """The identity on embeddings; the backward pass hands their gradient over instead of storing it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, vectors: _Vectors) -> Tensor:
        ctx.vectors = vectors
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        receive = ctx.vectors.receive
        assert receive is not None, "the backward pass runs behind the check of the loss"
        receive(gradient)
        return None, None
