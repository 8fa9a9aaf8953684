"""The pass of a training step: look up, forward, loss, backward, send back, update tables, reduce, update dense.

The tables have a stream of their own. Lookup and all-to-all run beside the bottom MLP, the sort of the ids beside the
dense component, and the all-to-all of gradients and the update beside the rest of the backward pass and the all-reduce,
whose larger part begins at the same time.
On one GPU a dot interaction looks up the rows of one-hot tables itself (`Model.fuses_lookup`).
The host reads nothing back, so that the pass can be captured once as a CUDA graph (`nn.ops.cuda_graph`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
class _Verdict:
    """The loss over all ranks, whether the step is applied, int32 [1], and the event behind both."""

    loss: Tensor
    is_good: Tensor
    event: torch.cuda.Event | None


@dataclass(slots=True)
class _Vectors:
    """The vectors of a batch, and what their gradient needs.

    `table_rows` are set where a kernel of the dense component looks the vectors up itself; otherwise they have `arrived`. Ids
    are sorted if tables are trained. The `verdict` is there before the last chunk's backward pass, which sets `gradients` (to
    which earlier chunks add theirs) and what was `returned` of them. It refers to nothing that refers to it: so its memory is
    free when the pass ends, and not when Python collects cycles.
    """

    ids: LocalIds
    table_rows: TableRows | None
    arrived: torch.cuda.Event | None
    sorted_ids: SortedBatch | None = None
    total_weight: Tensor | None = None
    verdict: _Verdict | None = None
    # Kept while the tables' stream may read them.
    gradients: LookupGradients = field(init=False)
    returned: ReturnedGradients | None = None


class _LookedUp:
    """Vectors, distinct rows and sequences of samples `first` to `end`, which the dense component may take.

    `values` returns the vectors and the rows of all tables that hand them out, and is called once; whoever takes first says
    whether it fills the memory of the vectors itself. `unused` are tables of which no rows were taken. Of a batch taken as a
    whole (`is_whole`) the sort that found its distinct rows adds up the gradients of the rows by id.
    """

    def __init__(
        self,
        lookup: ShardedLookup,
        ids: LocalIds,
        batch: Batch,
        first: int,
        end: int,
        values: Callable[[bool], list[Tensor]],
    ) -> None:
        self._lookup, self._ids, self._events = lookup, ids, batch.flat_events
        self._first, self._end = first, end
        self._values = values
        self._taken: list[Tensor] = []
        self._by_id: dict[str, dict[str, Tensor]] = {}
        self.unused = dict.fromkeys(lookup.handed_out)
        self.is_whole = False

    def embeddings(self, layout: EmbeddingLayout, rows: TableRows | None) -> PooledEmbeddings:
        return PooledEmbeddings(layout, self._vectors, rows, self._rows_of, self._sequence_of)

    def _take(self, is_filled_by_caller: bool) -> list[Tensor]:
        self._taken = self._taken or self._values(is_filled_by_caller)
        return self._taken

    def _vectors(self, is_filled_by_caller: bool) -> Tensor:
        return self._take(is_filled_by_caller)[0]

    def _all_rows_of(self, table: str, feature: str) -> DistinctRows:
        self.unused.pop(table, None)
        rows = dict(zip(self._lookup.handed_out, self._take(False)[1:], strict=True))[table]
        found = self._lookup.distinct_rows(self._ids, rows, table, feature)

        def vectors_of_feature() -> Tensor:
            if table not in self._by_id:
                self._by_id[table] = self._lookup.vectors(self._ids, rows, table)
            return self._by_id[table][feature]

        return replace(found, vectors=vectors_of_feature) if self.is_whole else found

    def _rows_of(self, table: str, feature: str) -> DistinctRows:
        room = self._lookup.part_events.get(feature)
        return self._all_rows_of(table, feature).of_samples(self._first, self._end, room)

    def _sequence_of(self, group: str) -> SequenceEvents:
        events = self._lookup.sequence(self._ids, group, self._all_rows_of, self._events)
        # All features of a group have as many.
        room = self._lookup.part_events.get(next(iter(events.rows)))
        return events.of_samples(self._first, self._end, room)


class ForwardBackward:
    """A training step up to the gradients of the dense component, and of replicated tables, unless they are updated here too.

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
        rows, world_size = lookup.memory.batch_size, context.ranks.world_size
        self._global_valid = rows * world_size if global_valid is None else global_valid
        num_valid = rows if num_valid is None else num_valid
        self._chunks = [_Chunk(0, 0, rows, num_valid, self._global_valid, None)]
        if context.chunk_rows is not None:
            firsts = range(0, rows, context.chunk_rows)
            self._chunks = [
                self._chunk(number, first, min(first + context.chunk_rows, rows), num_valid)
                for number, first in enumerate(firsts)
            ]
        self._is_whole = len(self._chunks) == 1
        self._enabled = torch.ones(1, dtype=torch.int32, device=context.ranks.device)
        self._table_stream = SideStream(context.ranks.device)

    def _chunk(self, number: int, first: int, end: int, num_valid: int) -> _Chunk:
        """Return a chunk; ranks have as many rows, and valid ones come first over all ranks."""
        rows = self._lookup.memory.batch_size
        valid = [
            min(max(self._global_valid - rank * rows - first, 0), end - first)
            for rank in range(self._context.ranks.world_size)
        ]
        here = min(max(num_valid - first, 0), end - first)
        return _Chunk(
            number, first, end, here, sum(valid), self._lookup.memory.layout_of(end - first)
        )

    def run(self, ids: LocalIds, batch: Batch) -> Tensor:
        """Run forward and backward pass, and return the logits, [B] or [B, T] of T tasks, detached."""
        vectors = self._look_up(ids)
        self._context.gradients.clear()
        *earlier, last = self._chunks
        logits, shares = [], []
        for chunk in earlier:
            out = self._forward(vectors, batch, chunk)
            share = self._loss_share(vectors, out, batch, chunk)
            self._add_gradients(share)
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
        return torch.cat([*logits, out.detach()]) if logits else out.detach()

    def _add_gradients(self, share: Tensor) -> None:
        """Add the gradients of a chunk up; the tables' go back with those of the last chunk."""
        context = self._context
        with annotate("backward"):
            scaled = share if context.loss_scale == 1 else share * context.loss_scale
            scaled.backward(unit_gradient(share.device))
        context.gradients.keep()

    def _train(self, vectors: _Vectors, share: Tensor, total: Tensor) -> None:
        """Apply the step if the loss is finite; tables are updated as soon as their gradient is known."""
        context = self._context
        verdict = vectors.verdict = self._check_loss(total)
        with self._table_stream.launches():
            context.readback.record(verdict.loss, verdict.is_good)
        with annotate("backward"):
            share.backward(unit_gradient(share.device))
        context.gradients.sum(context.ranks)
        self._update_rest(verdict)

    def _train_scaled(self, vectors: _Vectors, share: Tensor, total: Tensor) -> None:
        """Apply the step if, besides, no gradient has overflowed fp16; that is known at the end, and tables wait for it."""
        context = self._context
        verdict = vectors.verdict = self._check_loss(total)
        with annotate("backward"):
            (share * context.loss_scale).backward(unit_gradient(share.device))
        finite = self._sum_and_check(vectors.gradients)
        self._table_stream.wait_for_main()
        with self._table_stream.launches():
            verdict = self._let(verdict.loss, verdict.is_good * finite.int())
            context.readback.record(verdict.loss, verdict.is_good)
        self._update_tables(vectors, verdict)
        self._update_rest(verdict)

    def _look_up(self, ids: LocalIds) -> _Vectors:
        """Look up and sort, on the tables' stream."""
        context = self._context
        # Where a kernel looks up rows itself, nothing is looked up before: rows are read once, and not copied twice.
        is_fused = context.dense.fuses_lookup and self._is_whole
        table_rows = self._lookup.table_rows(ids) if is_fused else None
        self._table_stream.wait_for_main()
        if context.layers is not None:
            # On the stream of the layers, which read the step; tables are updated behind the loss, which is behind this.
            context.table_scalars.load()
        with self._table_stream.launches():
            if table_rows is None:
                with annotate("lookup"):
                    self._lookup.look_up(ids)
            vectors = _Vectors(ids, table_rows, self._table_stream.mark())
            context.load_scalars()
            if context.update_tables:
                with annotate("sort"):
                    vectors.sorted_ids = self._lookup.sort(ids)
        if not self._is_whole:
            vectors.gradients = LookupGradients(
                torch.empty_like(self._lookup.memory.values),
                {
                    table: torch.zeros(out.shape, device=out.device)
                    for table, out in self._lookup.handed_out.items()
                },
            )
        return vectors

    def _forward(self, vectors: _Vectors, batch: Batch, chunk: _Chunk) -> Tensor:
        """Return the logits. The later the dense component takes the embeddings, the earlier it returns their gradient."""
        context, lookup = self._context, self._lookup
        values = partial(self._values, vectors, chunk)
        looked_up = _LookedUp(lookup, vectors.ids, batch, chunk.first, chunk.end, values)
        looked_up.is_whole = self._is_whole
        if context.layers is not None and context.chunk_rows is not None:
            context.layers.set_chunk(chunk.number, chunk.first, chunk.num_valid, chunk.global_valid)
        with context.autocast(), annotate("dense"):
            embeddings = looked_up.embeddings(
                chunk.layout or lookup.memory.layout, vectors.table_rows
            )
            logits = context.dense(_rows(batch.numerical, chunk), embeddings)
        if looked_up.unused:
            raise ValueError(
                f"table {shown(next(iter(looked_up.unused)))} without pooling has a ragged feature, and the model takes none of "
                "its rows; take them by embeddings.sequence or embeddings.distinct_rows, or pool them by sum or mean"
            )
        return logits

    def _values(self, vectors: _Vectors, chunk: _Chunk, is_filled_by_caller: bool) -> list[Tensor]:
        """Return the vectors and rows for `_LookedUp`, whose gradients go to `_receive`."""
        lookup = self._lookup
        if not is_filled_by_caller:
            if vectors.table_rows is not None:
                lookup.look_up(vectors.ids)
            self._table_stream.main_waits_for(vectors.arrived)
        of_samples = lookup.memory.values.detach()
        if not self._is_whole:
            of_samples = _vectors(lookup, of_samples, chunk.first, chunk.end)
        looked_up = [of_samples, *(rows.detach() for rows in lookup.handed_out.values())]
        receive = partial(self._receive, vectors, chunk)
        return [*_EmbeddingGradient.apply(receive, *(x.requires_grad_() for x in looked_up))]

    def _receive(
        self, vectors: _Vectors, chunk: _Chunk, gradient: Tensor, *of_rows: Tensor
    ) -> None:
        """Take a chunk's gradients of vectors and rows; those of the batch go back to the tables with the last chunk's."""
        by_table = dict(zip(self._lookup.handed_out, of_rows, strict=True))
        if self._is_whole:
            vectors.gradients = LookupGradients(gradient, by_table)
        else:
            self._add_chunk(vectors.gradients, chunk, gradient, by_table)
        if vectors.verdict is not None:
            self._send_back(vectors)
            # A gradient in fp16 may still overflow, which is known behind the backward pass.
            if self._context.loss_scale == 1:
                self._update_tables(vectors, vectors.verdict)
            if self._context.chunk_rows is None:
                # What follows is the backward pass of layers below the embeddings.
                self._context.gradients.start_sum(self._context.ranks)
            self._add_to_replicated(vectors, vectors.verdict)

    def _add_chunk(
        self, whole: LookupGradients, chunk: _Chunk, gradient: Tensor, of_rows: dict[str, Tensor]
    ) -> None:
        parts = self._lookup.memory.samples(whole.vectors, chunk.first, chunk.end)
        arrived = gradient.split([part.numel() for part in parts])
        if parts:
            torch._foreach_copy_(
                parts, [one.view_as(part) for one, part in zip(arrived, parts, strict=True)]
            )
        # Every chunk has a part of the gradient of a row.
        for table, rows in of_rows.items():
            whole.rows[table].add_(rows)

    def _loss_share(self, vectors: _Vectors, logits: Tensor, batch: Batch, chunk: _Chunk) -> Tensor:
        """Return this rank's share of the loss of the batch; the first chunk all-reduces the weights of its rows."""
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

        share = self._context.dense.add_losses(share_of(logits), share_of)
        if not isinstance(share, Tensor) or share.dim() or not share.requires_grad:
            raise ValueError(
                "the model's loss is no tensor [] with a gradient, which detach(), item(), torch.no_grad() and NumPy take away; "
                "compute what forward(), extra_losses() and add_losses() return by torch's operations"
            )
        return share

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

    def _send_back(self, vectors: _Vectors) -> None:
        """Send the gradients of vectors and rows to the ranks of their tables, if these are trained; on the tables' stream."""
        if vectors.sorted_ids is not None:
            self._table_stream.wait_for_main()
            with self._table_stream.launches():
                vectors.returned = self._lookup.send_back(vectors.sorted_ids, vectors.gradients)

    def _update_tables(self, vectors: _Vectors, verdict: _Verdict) -> None:
        if vectors.sorted_ids is not None and vectors.returned is not None:
            with self._table_stream.launches():
                self._lookup.update(vectors.sorted_ids, vectors.returned, verdict.is_good)

    def _add_to_replicated(self, vectors: _Vectors, verdict: _Verdict) -> None:
        """Add up the gradients of replicated tables, whose ids were sorted before the check, beside the all-to-all."""
        if vectors.sorted_ids is not None:
            self._table_stream.main_waits_for(verdict.event)
            self._lookup.accumulate_replicated(
                vectors.sorted_ids, vectors.gradients, verdict.is_good
            )

    def _sum_and_check(self, local: LookupGradients) -> Tensor:
        """All-reduce the gradients, divide them by the loss scale (updates divide the tables'), return whether all are finite."""
        gradients = self._context.gradients
        if self._context.update_tables:
            # That stream spreads gradients of sums over the parts of ranks, which hold anything before.
            self._table_stream.main_waits()
            parts = [local.vectors, *local.rows.values()]
            are_finite = [torch.isfinite(part).all() for part in parts]
            gradients.signal.copy_(~torch.stack(are_finite).all())
        gradients.sum(self._context.ranks)
        # An overflow on any rank is not finite, or not zero, in the sum on all ranks.
        finite = gradients.are_finite() & (gradients.signal == 0)
        gradients.vector.div_(self._context.loss_scale)
        return finite

    def _update_rest(self, verdict: _Verdict) -> None:
        """Clip the gradients; update replicated tables and the dense component, where they are a part of the pass."""
        context = self._context
        context.gradients.clip()
        self._table_stream.main_waits_for(verdict.event)
        if context.update_tables:
            context.update_replicated_in_pass(context.gradients.further, verdict.is_good)
        if context.dense_update is not None:
            context.dense_update.apply()

    @contextmanager
    def without_updates(self) -> Iterator[None]:
        """Let `run` change no weight while the context is open."""
        self._enabled.zero_()
        yield
        self._enabled.fill_(1)


class Forward:
    """The forward pass over the same lookups and chunks, for evaluation and inference."""

    def __init__(self, lookup: ShardedLookup, context: PassContext) -> None:
        self._lookup = lookup
        self._context = context

    @torch.no_grad()
    def run(self, ids: LocalIds, batch: Batch) -> Tensor:
        size = self._lookup.memory.batch_size
        chunk_rows = min(self._context.chunk_rows or size, size)
        # Where vectors are single rows of tables here, the lookup waits until somebody takes them.
        rows = self._lookup.table_rows(ids) if chunk_rows == size else None
        values = self._lookup.look_up(ids) if rows is None else None
        with self._context.autocast():
            logits = [
                self._logits(ids, batch, rows, values, first, min(first + chunk_rows, size))
                for first in range(0, size, chunk_rows)
            ]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _logits(
        self,
        ids: LocalIds,
        batch: Batch,
        rows: TableRows | None,
        values: Tensor | None,
        first: int,
        end: int,
    ) -> Tensor:
        """Return the logits of some samples; `values` are the vectors of all, None if they are not looked up yet."""
        lookup = self._lookup

        def taken(_: bool) -> list[Tensor]:
            of_all = lookup.look_up(ids) if values is None else values
            is_part = end - first != lookup.memory.batch_size
            of_samples = _vectors(lookup, of_all, first, end) if is_part else of_all
            return [of_samples, *lookup.handed_out.values()]

        looked_up = _LookedUp(lookup, ids, batch, first, end, taken)
        embeddings = looked_up.embeddings(lookup.memory.layout_of(end - first), rows)
        return self._context.dense(batch.numerical[first:end], embeddings)

    def without_updates(self) -> AbstractContextManager:
        """Return a null context: a forward pass changes no weight."""
        return nullcontext()


def _vectors(lookup: ShardedLookup, values: Tensor, first: int, end: int) -> Tensor:
    """Return the vectors of some samples, of those of all, in the layout of `VectorMemory.layout_of`."""
    parts = [part.flatten() for part in lookup.memory.samples(values, first, end)]
    return parts[0] if len(parts) == 1 else torch.cat([values[:0], *parts])


def _rows(values: Tensor, chunk: _Chunk) -> Tensor:
    return values if len(values) == chunk.end - chunk.first else values[chunk.first : chunk.end]


class _EmbeddingGradient(torch.autograd.Function):
    """The identity on embeddings; inside the backward pass it hands their gradients over, by which tables are updated."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[..., None], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.receive = receive
        return tuple(part.view_as(part) for part in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.receive(*gradients)
        return (None,) * (1 + len(gradients))
