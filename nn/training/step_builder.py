"""Builds what batches of a size need, each once: exchange of ids, lookup, and the passes of training and evaluation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import Config, Mode
from dataloading.batch import Batch
from nn.sharding.batch_rows import BatchRows
from nn.sharding.id_all_to_all import CapturedIdAllToAll
from nn.sharding.local_ids import Capacity
from nn.sharding.sharded_lookup import ShardedLookup
from nn.sharding.sharded_tables import ShardedTables
from nn.training.captured_pass import AnyPass, CapturedPass, LaunchedPass, PassFunction
from nn.training.forward_backward import Forward, ForwardBackward
from nn.training.pass_context import PassContext


@dataclass(slots=True)
class SizeParts:
    """Parts that full batches of one size need; None before a batch needs them."""

    lookup: ShardedLookup
    exchange: CapturedIdAllToAll | None = None
    training: AnyPass | None = None
    forward: AnyPass | None = None


class StepBuilder:
    """Parts of the step by rows per rank; all ranks must call the methods alike.

    `captured_sizes` are those whose id exchange is captured; `sizes` has what full batches of a size need.
    """

    def __init__(
        self, tables: ShardedTables, context: PassContext, config: Config, *, capture: bool
    ) -> None:
        self._tables, self._context, self._capture = tables, context, capture
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
        self.sizes: dict[int, SizeParts] = {}
        # Of other capacities, that of the latest batch alone: its buffers are large, and such batches are rare.
        self._unusual: tuple[int, Capacity, ShardedLookup] | None = None

    def lookup(self, size: int, capacity: Capacity) -> ShardedLookup:
        """Return the lookup for batches of `size` rows per rank, always the same object for the usual capacity, which stays."""
        if capacity.is_usual:
            return self._parts(size, capacity).lookup
        if self._unusual is None or self._unusual[:2] != (size, capacity):
            self._drop_unusual()
            self._unusual = size, capacity, self._built_lookup(size, capacity)
        return self._unusual[2]

    def exchanged(self, size: int, capacity: Capacity, ids: Tensor, turn: int | None) -> BatchRows:
        parts = self._parts(size, capacity)
        if size not in self.captured_sizes:
            return BatchRows(*parts.lookup.send_ids(ids))
        if parts.exchange is None:
            parts.exchange = CapturedIdAllToAll(parts.lookup.send_ids, ids)
        return parts.exchange(ids, turn)

    def training(self, batch: Batch, rows: BatchRows, *, is_full: bool) -> AnyPass:
        """Return the pass that trains a batch; only full training batches justify the memory of a graph."""
        size, capacity = batch.layout.rows, rows.ids.capacity
        lookup = self.lookup(size, capacity)
        if not is_full:
            counts = batch.num_valid, batch.global_valid
            return LaunchedPass(ForwardBackward(lookup, self._context, *counts))
        if not capacity.is_usual:
            return LaunchedPass(ForwardBackward(lookup, self._context))
        parts = self.sizes[size]
        if parts.training is None:
            is_captured = batch.global_valid == self._train_size
            function = ForwardBackward(lookup, self._context)
            parts.training = self._pass(function, batch, rows, is_captured=is_captured)
        return parts.training

    def forward(self, batch: Batch, rows: BatchRows) -> AnyPass:
        """Return the pass that evaluates a batch; full ones have a graph, for one size at a time."""
        size, capacity = len(batch.labels), rows.ids.capacity
        function = Forward(self.lookup(size, capacity), self._context)
        if not capacity.is_usual:
            return LaunchedPass(function)
        parts = self.sizes[size]
        if parts.forward is None:
            is_captured = batch.global_valid in self._forward_sizes
            if is_captured:
                self._drop_forwards()
            parts.forward = self._pass(function, batch, rows, is_captured=is_captured)
        return parts.forward

    def close(self) -> None:
        for parts in self.sizes.values():
            _close(parts.training)
            _close(parts.forward)
            if parts.exchange is not None:
                parts.exchange.close()
            parts.training = parts.forward = parts.exchange = None

    def _parts(self, size: int, capacity: Capacity) -> SizeParts:
        """Return what full batches of a size need; `capacity` is the usual one."""
        if size not in self.sizes:
            self.sizes[size] = SizeParts(self._built_lookup(size, capacity))
        return self.sizes[size]

    def _built_lookup(self, size: int, capacity: Capacity) -> ShardedLookup:
        return ShardedLookup(
            self._tables.rank_tables,
            size,
            capacity,
            replicated_gradients=self._context.gradients.further,
            prefix_columns=self._context.dense.prefix_columns,
            in_chunks=self._context.chunk_rows is not None,
        )

    def _pass(
        self, function: PassFunction, batch: Batch, rows: BatchRows, *, is_captured: bool
    ) -> AnyPass:
        if not (is_captured and self._capture):
            return LaunchedPass(function)
        # The graphs share one memory.
        passes = [parts.training for parts in self.sizes.values()]
        passes += [parts.forward for parts in self.sizes.values()]
        graphs = (found.graph for found in passes if found is not None)
        beside = next((graph for graph in graphs if graph is not None), None)
        return CapturedPass(function, rows, batch, beside)

    def _drop_unusual(self) -> None:
        """Release the lookup of an unusual capacity; the streams of the passes may still read its memory."""
        if self._unusual is not None and self._context.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        self._unusual = None

    def _drop_forwards(self) -> None:
        """Release the forward passes, with the other parts of their sizes that are not trained."""
        if self._context.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        for size, parts in list(self.sizes.items()):
            if parts.forward is None:
                continue
            _close(parts.forward)
            parts.forward = None
            if parts.training is None:
                if parts.exchange is not None:
                    parts.exchange.close()
                del self.sizes[size]
                if self._unusual is not None and self._unusual[0] == size:
                    self._unusual = None


def _close(found: AnyPass | None) -> None:
    if isinstance(found, CapturedPass):
        found.close()
