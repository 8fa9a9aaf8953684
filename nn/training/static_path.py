"""The static path: lookup and update with known shapes, on GPUs captured as CUDA graphs, once per batch size."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from configs.schema import Config, Mode
from dataloading.batch import Batch
from nn.ops.cuda_graph import CudaGraph
from nn.sharding.batch_rows import BatchRows
from nn.sharding.id_all_to_all import CapturedIdAllToAll
from nn.sharding.local_ids import LocalIds, Room
from nn.sharding.placement import RankTables
from nn.sharding.request_room import RequestRoom
from nn.sharding.sharded_tables import ShardedTables
from nn.sharding.static_embeddings import StaticEmbeddings
from nn.tiers.stager import Need
from nn.training.batch_ids import BatchIds
from nn.training.pass_context import PassContext
from nn.training.static_pass import StaticForward, StaticPass


class Pass(Protocol):
    """A function on the device with constant shapes and addresses; the host reads nothing back."""

    def run(self, ids: LocalIds, batch: Batch) -> Tensor:
        """Return the logits."""

    def without_updates(self) -> AbstractContextManager:
        """Let `run` change no weight while the context is open."""


class LaunchedPass:
    """A pass whose operations are launched one by one."""

    graph = None

    def __init__(self, function: Pass) -> None:
        self._function = function

    def run(self, rows: BatchRows, batch: Batch) -> Tensor:
        """Run the pass on the rows of a batch."""
        rows.arrive()
        logits = self._function.run(rows.ids, batch)
        rows.ids_are_read()
        return logits


class CapturedPass:
    """A pass as a CUDA graph.

    Its inputs are copied before a replay, so that the next batch can arrive meanwhile: all in one copy if the batch lies in one
    memory.

    Args:
        function: the pass to capture.
        rows: of an example.
        batch: example input.
        beside: the graph of another pass, whose memory is shared.
    """

    def __init__(
        self, function: Pass, rows: BatchRows, batch: Batch, beside: CudaGraph | None = None
    ) -> None:
        rows.arrive()
        ids = rows.ids
        is_in_one = batch.memory is not None and ids.owned is batch.ids.values()
        self._example = batch if is_in_one else None
        count = len(ids.tensors)

        def run(*inputs: Tensor) -> Tensor:
            if is_in_one:
                mine = batch.at(*inputs)
                return function.run(ids.of_tensors([mine.ids.values(), ids.replicated]), mine)
            tensors, columns = inputs[:count], inputs[count:]
            return function.run(ids.of_tensors(tensors), batch.with_columns(columns))

        self.graph: CudaGraph[Tensor] = CudaGraph(
            run, *self._inputs(ids, batch), warm_up=function.without_updates(), beside=beside
        )

    def _inputs(self, ids: LocalIds, batch: Batch) -> Sequence[Tensor]:
        """Return the inputs of the graph, which have the same layout for every batch."""
        if self._example is None:
            return (*ids.tensors, *batch.columns)
        return (batch.packed_as(self._example),)

    def run(self, rows: BatchRows, batch: Batch) -> Tensor:
        """Replay the pass on new inputs; the next call overwrites the logits."""
        self.graph.load(*self._inputs(rows.ids, batch))
        # Before the replay and the wait for rows, so that the next batch's exchange and mapping need not wait for them.
        rows.ids_are_read()
        rows.arrive()
        return self.graph.replay()


AnyPass = LaunchedPass | CapturedPass


class StaticPath:
    """Exchange of ids, and training of the tables; all ranks must call the methods alike.

    Args:
        tables: the sharded tables.
        context: the other objects of a pass.
        config: the complete run.
        capture: whether to capture CUDA graphs.

    Attributes:
        captured_sizes: rows per rank of the batches whose id exchange is captured.
        forwards: rows per rank -> forward pass.
    """

    def __init__(
        self, tables: ShardedTables, context: PassContext, config: Config, *, capture: bool
    ) -> None:
        self._tables = tables
        self._context = context
        self._capture = capture
        self._train_size = config.train.batch_size
        is_inference = config.mode is Mode.inference
        self._forward_sizes = (
            config.inference.batch_sizes if is_inference else [config.eval.batch_size]
        )
        self.captured_sizes: frozenset[int] = frozenset()
        if capture and not is_inference:
            # Not the last batch of an epoch, nor the sizes of `mode=inference`, whose stream cannot be captured.
            sizes = (config.train.batch_size, config.eval.batch_size)
            self.captured_sizes = frozenset(size // context.ranks.world_size for size in sizes)
        # Keys: rows per rank.
        self._exchanges: dict[int, CapturedIdAllToAll] = {}
        self._passes: dict[int, AnyPass] = {}
        self.forwards: dict[int, AnyPass] = {}
        # Keys: rows per rank, and room for their ids.
        self._embeddings: dict[tuple[int, Room], StaticEmbeddings] = {}
        self._batch_ids = BatchIds(tables, context.ranks)
        self._ids_are_here = _arrive_as_they_are(tables.rank_tables)
        self._no_ids = torch.empty(0, dtype=torch.int32, device=context.ranks.device)
        self._request_room = RequestRoom(tables.rank_tables)
        self._has_warned = False

    @property
    def has_host_tables(self) -> bool:
        """Return whether rows of this rank's tables lie in host memory."""
        return self._tables.tier is not None

    @property
    def has_disk_tables(self) -> bool:
        """Return whether rows of any rank's tables lie on disk."""
        return self._tables.has_disk_tables

    def announce(self, batch: Batch) -> Need | None:
        """Send the ids of a batch that comes later; return the rows on disk that this rank needs for it."""
        rows = self._send(batch)
        need = self.embeddings(len(batch.labels), rows.ids.room).needed_rows(rows.ids)
        rows.ids_are_read()
        return need

    def start_pass(self, needs: Sequence[Need | None]) -> None:
        """Start to read rows from disk, which `announce` has returned."""
        own = [need for need in needs if need is not None]
        if own and self._tables.tier is not None and self._tables.tier.stager is not None:
            self._tables.tier.stager.start_pass(own)

    def start(self, batch: Batch, need: Need | None = None) -> BatchRows:
        """Send the ids to their tables, and fetch the rows of those in host memory.

        Args:
            batch: on the device.
            need: result of `announce`, if it was called.
        """
        rows = self._send(batch)
        self._hold(batch, rows, need)
        return rows

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Let the current stream wait for the one on which batches are started."""
        if self._tables.tier is not None:
            self._tables.tier.wait_for(stream)
        else:
            torch.cuda.current_stream(self._context.ranks.device).wait_stream(stream)

    def _hold(self, batch: Batch, rows: BatchRows, need: Need | None = None) -> None:
        """Fetch the rows of tables in host memory; their ids become slots."""
        if self.has_host_tables:
            tables = self.embeddings(len(batch.labels), rows.ids.room)
            rows.keep(tables.hold_rows(rows.ids, need))

    def _send(self, batch: Batch) -> BatchRows:
        size = len(batch.labels)
        level = self._batch_ids.level(batch)
        ids = self._batch_ids.flat(batch, level)
        if level or not self._is_full(batch):
            return self._send_exactly(batch, ids, level)
        if self._ids_are_here:
            return BatchRows(LocalIds(ids, self._no_ids), release=_keep)
        room = self._request_room.usual(size, ids)
        if size not in self.captured_sizes:
            return BatchRows(*self.embeddings(size, room).send_ids(ids))
        if size not in self._exchanges:
            self._exchanges[size] = CapturedIdAllToAll(self.embeddings(size, room).send_ids, ids)
        return self._exchanges[size](ids)

    def _is_full(self, batch: Batch) -> bool:
        return batch.global_valid == len(batch.labels) * self._context.ranks.world_size

    def _send_exactly(self, batch: Batch, ids: Tensor, level: int) -> BatchRows:
        """Send the ids of an unusual batch, with room for them alone."""
        size = len(batch.labels)
        num_valid = None if self._is_full(batch) else batch.global_valid
        room = self._request_room.exact(size, ids, level, num_valid)
        return BatchRows(self.embeddings(size, room).send_ids(ids, num_valid)[0])

    def _with_room(self, batch: Batch, rows: BatchRows) -> BatchRows:
        """Return rows that have room: those given, or, if a rank asked for more than it has room for, others."""
        if not rows.lack_room():
            return rows
        if not self._has_warned:
            self._has_warned = True
            if self._context.ranks.is_rank0:
                logging.getLogger(__name__).warning(
                    "a batch asks for more distinct rows of row-wise tables than the captured step has room for; such batches "
                    "are trained operation by operation, which is slower. Shuffle the rows, if their ids follow their order"
                )
        rows.ids_are_read()
        level = rows.ids.room.level
        sent = self._send_exactly(batch, self._batch_ids.flat(batch, level), level)
        if self.has_host_tables:
            # Rows move on the prefetcher's stream otherwise.
            self._synchronize()
            self._hold(batch, sent)
            self._synchronize()
        return sent

    def _synchronize(self) -> None:
        if self._context.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def prepare_update(self, step: int, lr: float) -> None:
        """Set learning rate and step count in device memory."""
        self._tables.prepare_update(step, lr)

    def forward_backward(self, batch: Batch, rows: BatchRows) -> Tensor:
        """Return the logits [B], which the next step overwrites; tables that are not replicated are updated too."""
        rows = self._with_room(batch, rows)
        with rows.used(is_trained=self._context.update_tables):
            return self._pass(batch, rows).run(rows, batch)

    def update(self) -> None:
        """Update the replicated tables."""
        self._tables.update_replicated(self._context.gradients.further)

    def predict(self, batch: Batch, rows: BatchRows) -> Tensor:
        """Return the logits [B]; the next call overwrites them."""
        rows = self._with_room(batch, rows)
        with rows.used(is_trained=False):
            return self._forward(batch, rows).run(rows, batch)

    def close(self) -> None:
        """Release the CUDA graphs."""
        _close(self._passes)
        _close(self.forwards)
        for size in list(self._exchanges):
            self._exchanges.pop(size).close()

    def embeddings(self, batch_size: int, room: Room) -> StaticEmbeddings:
        """Return the tables for batches of `batch_size` rows per rank, always the same object for the usual room.

        Of other rooms, those of the latest batch alone are kept: their buffers are large, and such batches are rare.
        """
        if (batch_size, room) not in self._embeddings:
            if not room.is_usual:
                self._drop_unusual()
            self._embeddings[batch_size, room] = StaticEmbeddings(
                self._tables.rank_tables,
                batch_size,
                room,
                replicated_gradients=self._context.gradients.further,
                prefix_columns=self._context.dense.prefix_columns,
            )
        return self._embeddings[batch_size, room]

    def _drop_unusual(self) -> None:
        """Release the tables of all rooms but the usual ones; the streams of the passes may still read their memory."""
        unusual = [key for key in self._embeddings if not key[1].is_usual]
        if unusual and self._context.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        for key in unusual:
            del self._embeddings[key]

    def _pass(self, batch: Batch, rows: BatchRows) -> AnyPass:
        """Return the pass for batches of this size; only full training batches justify the memory of a graph."""
        size, room = len(batch.labels), rows.ids.room
        tables = self.embeddings(size, room)
        if not self._is_full(batch):
            function = StaticPass(tables, self._context, batch.num_valid, batch.global_valid)
            return LaunchedPass(function)
        if not room.is_usual:
            return LaunchedPass(StaticPass(tables, self._context))
        if size not in self._passes:
            is_full = batch.global_valid == self._train_size
            function = StaticPass(tables, self._context)
            self._passes[size] = self._built(function, batch, rows, captured=is_full)
        return self._passes[size]

    def _forward(self, batch: Batch, rows: BatchRows) -> AnyPass:
        """Return the forward pass for batches of this size; full batches have a graph, for one size at a time."""
        size, room = len(batch.labels), rows.ids.room
        tables = self.embeddings(size, room)
        if not room.is_usual:
            return LaunchedPass(StaticForward(tables, self._context))
        if size not in self.forwards:
            is_full = batch.global_valid in self._forward_sizes
            if is_full:
                self._drop_forwards()
            function = StaticForward(tables, self._context)
            self.forwards[size] = self._built(function, batch, rows, captured=is_full)
        return self.forwards[size]

    def _drop_forwards(self) -> None:
        """Release the forward passes of other batch sizes and their memory."""
        if self._context.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        for size in self.forwards.keys() - self._passes.keys():
            for key in [key for key in self._embeddings if key[0] == size]:
                del self._embeddings[key]
            if size in self._exchanges:
                self._exchanges.pop(size).close()
        _close(self.forwards)

    def _built(self, function: Pass, batch: Batch, rows: BatchRows, *, captured: bool) -> AnyPass:
        if not (captured and self._capture):
            return LaunchedPass(function)
        others = (*self._passes.values(), *self.forwards.values())
        beside = next((other.graph for other in others if other.graph is not None), None)
        return CapturedPass(function, rows, batch, beside)


def _arrive_as_they_are(tables: RankTables) -> bool:
    """Return whether the ids of a batch are those of the lookups: of one rank's tables, in their order, and not expanded."""
    counts = tables.counts(1, 0)
    looked_up = [lookup.feature for table in tables.placement.owned for lookup in table.lookups]
    return (
        tables.ranks.world_size == 1
        # Of tables in host memory they become slots.
        and tables.tier is None
        and not tables.placement.replicas
        and not tables.expansions
        and all(count.hotness for count in counts.values())
        and list(dict.fromkeys(looked_up)) == list(counts)
    )


def _keep() -> None:
    """Release nothing: the ids are those of the batch."""


def _close(passes: dict[int, AnyPass]) -> None:
    for pass_ in passes.values():
        if pass_.graph is not None:
            pass_.graph.close()
    passes.clear()
