"""The pass of a training step: look up, forward, loss, backward, send back, update tables, reduce, update dense.

The tables have a stream of their own. Lookup and all-to-all run beside the bottom MLP, the sort of the ids beside the
dense component, and the all-to-all of gradients and the update beside the rest of the backward pass and the all-reduce.
On one GPU a dot interaction looks up the rows of one-hot tables itself (`Model.fuses_lookup`).
The host reads nothing back, so that the pass can be captured once as a CUDA graph (`nn.ops.cuda_graph`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configs.messages import shown
from dataloading.batch import Batch
from nn.layers.bce_loss import unit_gradient
from nn.layers.distinct_rows import DistinctRows
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceEvents
from nn.models.tasks import loss_share
from nn.observability.annotations import annotate
from nn.ops.embedding_layout import EmbeddingLayout
from nn.ops.table_rows import TableRows
from nn.sharding.local_ids import LocalIds
from nn.sharding.sharded_lookup import (
    LookupGradients,
    ReturnedGradients,
    ShardedLookup,
    SortedBatch,
)
from nn.training.pass_context import PassContext
from nn.training.side_stream import SideStream


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of this rank that the dense component takes at once, valid ones of this rank, and over all ranks.

    `layout` is that of their vectors, if these are copied from those of the batch.
    """

    number: int
    first: int
    end: int
    num_valid: int
    global_valid: int
    layout: EmbeddingLayout | None


@dataclass(slots=True)
class _Vectors:
    """The vectors of a batch, and what their gradient needs.

    The `gradients` of the batch are there if they come chunk by chunk. `table_rows` are set where a kernel of the dense
    component looks the vectors up itself; otherwise they have `arrived`. Ids are sorted if tables are trained. `receive` gets
    the gradients of the batch as soon as the backward pass has them.
    """

    ids: LocalIds
    table_rows: TableRows | None
    arrived: torch.cuda.Event | None
    sorted_ids: SortedBatch | None = None
    gradients: LookupGradients | None = None
    total_weight: Tensor | None = None
    receive: Callable[[LookupGradients], None] | None = None
    # Kept while the tables' stream may read them.
    received: LookupGradients | None = None


@dataclass(slots=True)
class _Verdict:
    """The loss over all ranks, whether the step is applied, int32 [1], and the event behind both."""

    loss: Tensor
    is_good: Tensor
    event: torch.cuda.Event | None


class ForwardBackward:
    """A training step up to the gradients of replicated tables, and of the dense component unless that is updated here too.

    Valid rows of this rank come first, and the others are padding; without numbers all are valid.
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
        rows, world_size = lookup.batch_size, context.ranks.world_size
        self._global_valid = rows * world_size if global_valid is None else global_valid
        num_valid = rows if num_valid is None else num_valid
        self._chunks = [_Chunk(0, 0, rows, num_valid, self._global_valid, None)]
        if context.chunk_rows is not None:
            firsts = range(0, rows, context.chunk_rows)
            self._chunks = [
                self._chunk(number, first, min(first + context.chunk_rows, rows), num_valid)
                for number, first in enumerate(firsts)
            ]
        self._enabled = torch.ones(1, dtype=torch.int32, device=context.ranks.device)
        self._table_stream = SideStream(context.ranks.device)

    def _chunk(self, number: int, first: int, end: int, num_valid: int) -> _Chunk:
        """Return a chunk; ranks have as many rows, and valid ones come first over all ranks."""
        rows = self._lookup.batch_size
        valid = [
            min(max(self._global_valid - rank * rows - first, 0), end - first)
            for rank in range(self._context.ranks.world_size)
        ]
        here = min(max(num_valid - first, 0), end - first)
        return _Chunk(number, first, end, here, sum(valid), self._lookup.layout_of(end - first))

    def run(self, ids: LocalIds, batch: Batch) -> Tensor:
        """Run forward and backward pass, and return the logits, [B] or [B, T] of T tasks, detached."""
        vectors = self._look_up(ids)
        self._context.gradients.clear()
        *earlier, last = self._chunks
        logits, shares = [], []
        for chunk in earlier:
            out = self._forward(vectors, batch, chunk)
            share = self._loss_share(vectors, out, batch, chunk)
            self._add_gradients(vectors, share)
            logits.append(out.detach())
            shares.append(share.detach())
        out = self._forward(vectors, batch, last)
        share = self._loss_share(vectors, out, batch, last)
        total = torch.stack([*shares, share.detach()]).sum() if shares else share.detach()
        if self._context.loss_scale == 1:
            self._train(vectors, share, total)
        else:
            self._train_scaled(vectors, share, total)
        self._table_stream.main_waits()
        # It refers to the vectors, whose memory would otherwise be kept until Python collects cycles.
        vectors.receive = None
        return torch.cat([*logits, out.detach()]) if logits else out.detach()

    def _add_gradients(self, vectors: _Vectors, share: Tensor) -> None:
        """Add the gradients of a chunk up; the tables' go back with those of the last chunk."""
        context = self._context
        vectors.receive = lambda _: None
        with annotate("backward"):
            scaled = share if context.loss_scale == 1 else share * context.loss_scale
            scaled.backward(unit_gradient(share.device))
        context.gradients.keep()

    def _train(self, vectors: _Vectors, share: Tensor, total: Tensor) -> None:
        """Apply the step if the loss is finite; tables are updated as soon as their gradient is known."""
        context = self._context
        verdict = self._check_loss(total)
        with self._table_stream.launches():
            context.readback.record(verdict.loss, verdict.is_good)

        def receive(gradients: LookupGradients) -> None:
            returned = self._send_back(vectors, gradients)
            self._update_tables(vectors, returned, verdict)
            self._add_to_replicated(vectors, gradients, verdict)

        vectors.receive = receive
        with annotate("backward"):
            share.backward(unit_gradient(share.device))
        context.gradients.sum(context.ranks)
        self._update_dense(verdict)

    def _train_scaled(self, vectors: _Vectors, share: Tensor, total: Tensor) -> None:
        """Apply the step if, besides, no gradient has overflowed fp16; that is known at the end, and tables wait for it."""
        context = self._context
        verdict = self._check_loss(total)
        received: list[tuple[LookupGradients, ReturnedGradients | None]] = []

        def receive(gradients: LookupGradients) -> None:
            received.append((gradients, self._send_back(vectors, gradients)))
            self._add_to_replicated(vectors, gradients, verdict)

        vectors.receive = receive
        with annotate("backward"):
            (share * context.loss_scale).backward(unit_gradient(share.device))
        gradients, returned = received[0]
        finite = self._sum_and_check(gradients)
        self._table_stream.wait_for_main()
        with self._table_stream.launches():
            verdict = self._let(verdict.loss, verdict.is_good * finite.int())
            context.readback.record(verdict.loss, verdict.is_good)
        self._update_tables(vectors, returned, verdict)
        self._update_dense(verdict)

    def _look_up(self, ids: LocalIds) -> _Vectors:
        """Look up and sort, on the tables' stream."""
        context = self._context
        # Where a kernel looks up rows itself, nothing is looked up before: rows are read once, and not copied twice.
        is_fused = context.dense.fuses_lookup and len(self._chunks) == 1
        table_rows = self._lookup.table_rows(ids) if is_fused else None
        self._table_stream.wait_for_main()
        with self._table_stream.launches():
            if table_rows is None:
                with annotate("lookup"):
                    self._lookup.look_up(ids)
            vectors = _Vectors(ids, table_rows, self._table_stream.mark())
            context.load_scalars()
            if context.update_tables:
                with annotate("sort"):
                    vectors.sorted_ids = self._lookup.sort(ids)
        if len(self._chunks) > 1:
            vectors.gradients = LookupGradients(
                torch.empty_like(self._lookup.memory),
                {
                    table: torch.zeros(rows.shape, device=rows.device)
                    for table, rows in self._lookup.handed_out.items()
                },
            )
        return vectors

    def _forward(self, vectors: _Vectors, batch: Batch, chunk: _Chunk) -> Tensor:
        """Return the logits. The later the dense component takes the embeddings, the earlier it returns their gradient."""
        context, lookup = self._context, self._lookup
        taken: list[Tensor] = []
        unused = dict.fromkeys(lookup.handed_out)
        by_id: dict[str, dict[str, Tensor]] = {}

        def take_all(is_filled_by_caller: bool) -> list[Tensor]:
            """Return the vectors, and the rows that the dense component takes; always the same."""
            if taken:
                return taken
            if vectors.table_rows is not None and not is_filled_by_caller:
                lookup.look_up(vectors.ids)
            if not is_filled_by_caller:
                self._table_stream.main_waits_for(vectors.arrived)
            values = lookup.memory.detach()
            if vectors.gradients is not None:
                parts = [part.flatten() for part in lookup.samples(values, chunk.first, chunk.end)]
                values = parts[0] if len(parts) == 1 else torch.cat([values[:0], *parts])
            looked_up = [values, *(rows.detach() for rows in lookup.handed_out.values())]
            receive = partial(self._receive, vectors, chunk)
            taken.extend(
                _EmbeddingGradient.apply(receive, *(part.requires_grad_() for part in looked_up))
            )
            return taken

        def take(is_filled_by_caller: bool) -> Tensor:
            return take_all(is_filled_by_caller)[0]

        def all_rows_of(table: str, feature: str) -> DistinctRows:
            unused.pop(table, None)
            rows = dict(zip(lookup.handed_out, take_all(False)[1:], strict=True))[table]
            found = lookup.distinct_rows(vectors.ids, rows, table, feature)
            if len(self._chunks) > 1:
                return found

            def vectors_of_feature() -> Tensor:
                if table not in by_id:
                    by_id[table] = lookup.vectors(vectors.ids, rows, table)
                return by_id[table][feature]

            return replace(found, vectors=vectors_of_feature)

        def rows_of(table: str, feature: str) -> DistinctRows:
            return all_rows_of(table, feature).of_samples(chunk.first, chunk.end)

        def sequence_of(group: str) -> SequenceEvents:
            events = lookup.sequence(vectors.ids, group, all_rows_of, batch.flat_events)
            return events.of_samples(chunk.first, chunk.end)

        if context.layers is not None and context.chunk_rows is not None:
            context.layers.set_chunk(chunk.number, chunk.first, chunk.num_valid, chunk.global_valid)
        with context.autocast(), annotate("dense"):
            layout = chunk.layout or lookup.layout
            embeddings = PooledEmbeddings(layout, take, vectors.table_rows, rows_of, sequence_of)
            logits = context.dense(_rows(batch.numerical, chunk), embeddings)
        for table in unused:
            raise ValueError(
                f"table {shown(table)} without pooling has a ragged feature, and the model takes none of its rows; take them by "
                "embeddings.sequence or embeddings.distinct_rows, or pool them by sum or mean"
            )
        return logits

    def _receive(
        self, vectors: _Vectors, chunk: _Chunk, gradient: Tensor, *of_rows: Tensor
    ) -> None:
        """Take the gradients of a chunk's vectors and rows to those of the batch."""
        assert vectors.receive is not None, "the backward pass runs behind the check of the loss"
        gradients = LookupGradients(
            gradient, dict(zip(self._lookup.handed_out, of_rows, strict=True))
        )
        if vectors.gradients is not None:
            whole = vectors.gradients
            parts = self._lookup.samples(whole.vectors, chunk.first, chunk.end)
            arrived = gradient.split([part.numel() for part in parts])
            if parts:
                torch._foreach_copy_(
                    parts, [one.view_as(part) for one, part in zip(arrived, parts, strict=True)]
                )
            # Every chunk has a part of the gradient of a row.
            for table, rows in gradients.rows.items():
                whole.rows[table].add_(rows)
            gradients = whole
        vectors.received = gradients
        vectors.receive(gradients)

    def _loss_share(self, vectors: _Vectors, logits: Tensor, batch: Batch, chunk: _Chunk) -> Tensor:
        """Return this rank's share of the loss of the batch."""
        weights = batch.weights
        if chunk.number == 0:
            vectors.total_weight = self._context.total_weight(weights)

        def share_of(logits: Tensor) -> Tensor:
            return loss_share(
                self._context.tasks,
                logits,
                _rows(batch.labels, chunk),
                chunk.num_valid,
                self._global_valid,
                None if weights is None else _rows(weights, chunk),
                vectors.total_weight,
                {name: _rows(scores, chunk) for name, scores in batch.teachers.items()},
            )

        return self._context.dense.add_losses(share_of(logits), share_of)

    def _check_loss(self, total: Tensor) -> _Verdict:
        self._table_stream.wait_for_main()
        with self._table_stream.launches():
            loss = self._context.ranks.all_reduce_sum(total.clone())
            return self._let(loss, torch.isfinite(loss).int().view(1) * self._enabled)

    def _let(self, loss: Tensor, is_good: Tensor) -> _Verdict:
        """Let the dense component be updated in this pass, unless `is_good` is 0."""
        if self._context.dense_update is not None:
            self._context.dense_update.allow(is_good)
        return _Verdict(loss, is_good, self._table_stream.mark())

    def _send_back(self, vectors: _Vectors, gradients: LookupGradients) -> ReturnedGradients | None:
        """Send the gradients of vectors and rows to the ranks of their tables, if these are trained; on the tables' stream."""
        if vectors.sorted_ids is None:
            return None
        self._table_stream.wait_for_main()
        with self._table_stream.launches():
            return self._lookup.send_back(vectors.sorted_ids, gradients)

    def _update_tables(
        self, vectors: _Vectors, returned: ReturnedGradients | None, verdict: _Verdict
    ) -> None:
        if vectors.sorted_ids is not None and returned is not None:
            with self._table_stream.launches():
                self._lookup.update(vectors.sorted_ids, returned, verdict.is_good)

    def _add_to_replicated(
        self, vectors: _Vectors, gradients: LookupGradients, verdict: _Verdict
    ) -> None:
        """Add up the gradients of replicated tables, whose ids were sorted before the check, beside the all-to-all."""
        if vectors.sorted_ids is not None:
            self._table_stream.main_waits_for(verdict.event)
            self._lookup.accumulate_replicated(vectors.sorted_ids, gradients, verdict.is_good)

    def _sum_and_check(self, local: LookupGradients) -> Tensor:
        """All-reduce the gradients, divide them by the loss scale, and return whether none overflowed on any rank."""
        gradients = self._context.gradients
        parts = [local.vectors, *local.rows.values()]
        are_finite = [torch.isfinite(part).all() for part in parts]
        gradients.signal.copy_(~torch.stack(are_finite).all())
        gradients.sum(self._context.ranks)
        # An overflow on any rank is not finite, or not zero, in the sum on all ranks.
        finite = gradients.are_finite() & (gradients.signal == 0)
        gradients.vector.div_(self._context.loss_scale)
        return finite

    def _update_dense(self, verdict: _Verdict) -> None:
        """Clip the gradients, and update the dense component if that is a part of the pass."""
        self._context.gradients.clip()
        if self._context.dense_update is not None:
            self._table_stream.main_waits_for(verdict.event)
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
        table_rows = self._lookup.table_rows(ids)
        # Where vectors are single rows of tables here, the lookup waits until somebody takes them.
        values = self._lookup.look_up(ids) if table_rows is None else None

        def take(is_filled_by_caller: bool) -> Tensor:
            return self._lookup.look_up(ids) if values is None else values

        def rows_of(table: str, feature: str) -> DistinctRows:
            of_table = self._lookup.handed_out[table]
            return self._lookup.distinct_rows(ids, of_table, table, feature)

        def sequence_of(group: str) -> SequenceEvents:
            return self._lookup.sequence(ids, group, rows_of, batch.flat_events)

        with self._context.autocast():
            embeddings = PooledEmbeddings(
                self._lookup.layout, take, table_rows, rows_of, sequence_of
            )
            return self._context.dense(batch.numerical, embeddings)

    def without_updates(self) -> AbstractContextManager:
        """Return a null context: a forward pass changes no weight."""
        return nullcontext()


def _rows(values: Tensor, chunk: _Chunk) -> Tensor:
    return values if len(values) == chunk.end - chunk.first else values[chunk.first : chunk.end]


class _EmbeddingGradient(torch.autograd.Function):
    """The identity on embeddings; the backward pass hands their gradients over, all at once, instead of storing them."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[..., None], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.receive = receive
        return tuple(part.view_as(part) for part in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.receive(*gradients)
        return (None,) * (1 + len(gradients))
