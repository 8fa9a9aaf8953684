"""A batch's way through tables whose shapes are all known: on GPUs recorded as CUDA graphs, once per batch size."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from configs.schema import Config, Mode
from dataloading.batch import Batch
from nn.ops.cuda_graph import CudaGraph
from nn.sharding.id_all_to_all import CapturedIdAllToAll, LocalIds
from nn.sharding.sharded_embeddings import ShardedEmbeddings
from nn.sharding.static_embeddings import StaticEmbeddings
from nn.training.sparse_path import PassContext
from nn.training.static_pass import StaticForward, StaticPass


class Pass(Protocol):
    """A function of the device's queues: same shapes, same addresses, nothing read back by the host."""

    @property
    def graph(self) -> CudaGraph | None:
        """The recording of it, if there is one."""

    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [B], and release the ids."""

    def without_updates(self) -> AbstractContextManager:
        """Within it `run` computes all and changes nothing."""


class CapturedPass:
    """A pass as a CUDA graph.

    Args:
        plain: the pass to record.
        ids: example.
        batch: example.
        beside: the graph of another pass, to share memory with.
    """

    def __init__(
        self, plain: Pass, ids: LocalIds, batch: Batch, beside: CudaGraph | None = None
    ) -> None:
        self.graph: CudaGraph[Tensor] = CudaGraph(
            lambda owned, replicated, *rest: plain.run(LocalIds(owned, replicated), *rest),
            *ids.tensors,
            batch.numerical,
            batch.labels,
            warm_up=plain.without_updates(),
            beside=beside,
        )
        self.without_updates = plain.without_updates

    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Replay the pass on new inputs; the logits are overwritten by the next call."""
        self.graph.load(ids.owned, ids.replicated, numerical, labels)
        # Before the replay, so that the next batch's exchange need not wait for it.
        if ids.release is not None:
            ids.release()
        return self.graph.replay()


class StaticPath:
    """See `SparsePath` for its methods.

    Args:
        tables: the sparse half.
        context: what else a pass works with.
        config: the complete run.
        capture: whether to record CUDA graphs.

    Attributes:
        captured_sizes: rows per rank of the batches whose id exchange is recorded.
        forwards: by rows per rank, what batches are scored with.
    """

    def __init__(
        self, tables: ShardedEmbeddings, context: PassContext, config: Config, *, capture: bool
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
            # Not an epoch's tail, nor the sizes of `mode=inference`, which come once and on no stream that can be recorded.
            sizes = (config.train.batch_size, config.eval.batch_size)
            self.captured_sizes = frozenset(size // context.ranks.world_size for size in sizes)
        # All by rows per rank.
        self._embeddings: dict[int, StaticEmbeddings] = {}
        self._exchanges: dict[int, CapturedIdAllToAll] = {}
        self._passes: dict[int, Pass] = {}
        self.forwards: dict[int, Pass] = {}

    def start(self, batch: Batch) -> LocalIds:
        """Send the ids to their tables."""
        size, ids = len(batch.labels), batch.ids.values()
        if batch.global_valid < size * self._context.ranks.world_size:
            ids = _padded(
                ids, list(self._tables.rank_tables.hotness.values()), batch.num_valid, size
            )
            return self.embeddings(size).send_ids(ids, batch.global_valid)
        if size not in self.captured_sizes:
            return self.embeddings(size).send_ids(ids)
        if size not in self._exchanges:
            self._exchanges[size] = CapturedIdAllToAll(self.embeddings(size).send_ids, ids)
        return self._exchanges[size](ids)

    def finish(self, ids: LocalIds) -> LocalIds:
        """Nothing is left to do."""
        return ids

    def prepare_update(self, step: int, lr: float) -> None:
        """Set learning rate and step count in device memory."""
        self._tables.prepare_update(step, lr)

    def forward_backward(self, batch: Batch, ids: LocalIds) -> Tensor:
        """Return the logits [B], overwritten by the next step; the tables that are not replicated are then updated."""
        return self._pass(batch, ids).run(ids, batch.numerical, batch.labels)

    def update(self) -> None:
        """Update the replicated tables."""
        self._tables.update_replicated(self._context.gradients.further)

    def predict(self, batch: Batch, ids: LocalIds) -> Tensor:
        """Return the logits [B]; overwritten by the next call."""
        return self._forward(batch, ids).run(ids, batch.numerical, batch.labels)

    def close(self) -> None:
        """Release the recorded graphs."""
        _close(self._passes)
        _close(self.forwards)
        for size in list(self._exchanges):
            self._exchanges.pop(size).close()

    def embeddings(self, batch_size: int) -> StaticEmbeddings:
        """Return the tables for batches of `batch_size` rows per rank, always the same object for a size."""
        if batch_size not in self._embeddings:
            self._embeddings[batch_size] = StaticEmbeddings(
                self._tables.rank_tables,
                batch_size,
                replicated_gradients=self._context.gradients.further,
                prefix_columns=self._context.dense.prefix_columns,
            )
        return self._embeddings[batch_size]

    def _pass(self, batch: Batch, ids: LocalIds) -> Pass:
        """The pass for batches of this size; only that of full training batches is worth a graph and its memory."""
        size = len(batch.labels)
        if batch.global_valid < size * self._context.ranks.world_size:
            return StaticPass(
                self.embeddings(size), self._context, batch.num_valid, batch.global_valid
            )
        if size not in self._passes:
            plain = StaticPass(self.embeddings(size), self._context)
            is_full = batch.global_valid == self._train_size
            self._passes[size] = self._captured(plain, batch, ids) if is_full else plain
        return self._passes[size]

    def _forward(self, batch: Batch, ids: LocalIds) -> Pass:
        """The forward pass for batches of this size; a graph for full ones, of one size at a time."""
        size = len(batch.labels)
        if size not in self.forwards:
            is_full = batch.global_valid in self._forward_sizes
            if is_full:
                self._drop_forwards()
            plain = StaticForward(self.embeddings(size), self._context)
            self.forwards[size] = self._captured(plain, batch, ids) if is_full else plain
        return self.forwards[size]

    def _drop_forwards(self) -> None:
        """Free what batches of other sizes were evaluated with."""
        if self._context.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        for size in self.forwards.keys() - self._passes.keys():
            self._embeddings.pop(size, None)
            if size in self._exchanges:
                self._exchanges.pop(size).close()
        _close(self.forwards)

    def _captured(self, plain: Pass, batch: Batch, ids: LocalIds) -> Pass:
        if not self._capture:
            return plain
        others = (*self._passes.values(), *self.forwards.values())
        beside = next((other.graph for other in others if other.graph is not None), None)
        return CapturedPass(plain, ids, batch, beside)


def _close(passes: dict[int, Pass]) -> None:
    for made in passes.values():
        if made.graph is not None:
            made.graph.close()
    passes.clear()


def _padded(ids: Tensor, ids_per_row: list[int], num_valid: int, rows: int) -> Tensor:
    """Give rows of padding the id 0, which every table has: feature after feature, [rows, ids per row] each."""
    valid = ids.split([num_valid * count for count in ids_per_row])
    padding = [ids.new_zeros((rows - num_valid) * count) for count in ids_per_row]
    return torch.cat([part for pair in zip(valid, padding, strict=True) for part in pair])
