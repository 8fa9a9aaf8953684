"""One step: a pass over a batch, a look at its loss, and the updates. Nothing here knows of epochs, files or terminals."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.schema import Amp, Component, Config, Mode
from dataloading.batch import Batch
from nn.distributed.errors import DivergedError
from nn.distributed.process_group import Ranks
from nn.observability.annotations import annotate
from nn.ops.cuda_graph import CudaGraph, Pass
from nn.sharding.id_all_to_all import LocalIds
from nn.sharding.sharded_embeddings import Exchange, ShardedEmbeddings
from nn.training.dense_optimizer import build_dense_optimizer
from nn.training.dynamic_pass import DynamicPass, Lookups
from nn.training.gradient_bucket import GradientBucket
from nn.training.loss_readback import LossReadback
from nn.training.lr_scheduler import learning_rate_factor
from nn.training.prefetch import Prefetcher
from nn.training.static_pass import StaticForward, StaticPass

AMP_DTYPES = {Amp.bf16: torch.bfloat16, Amp.fp16: torch.float16}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a training step leaves for whoever measures it.

    Attributes:
        batch: on the device.
        loss: mean over the global batch, before the update.
        logits: of this rank, [B]; overwritten by the next step.
    """

    batch: Batch
    loss: float
    logits: Tensor


def loss_scale(config: Config) -> float:
    """What the loss is multiplied by before the backward pass: only fp16 needs it."""
    return config.train.loss_scale if config.train.amp is Amp.fp16 else 1.0


class TrainStep:
    """Tables and dense half, and how both learn from a batch.

    Args:
        tables: the sparse half.
        dense: the dense half, on its device, with the seed's weights.
        config: the whole run.
        ranks: this process.

    Attributes:
        frozen: halves that keep their weights.
    """

    def __init__(
        self, tables: ShardedEmbeddings, dense: nn.Module, config: Config, ranks: Ranks
    ) -> None:
        self.tables = tables
        self.dense = dense
        if config.train.compile:
            # In place, so that parameters keep their names; the wrapped module would rename them.
            dense.compile()
        self.dense_optimizer = build_dense_optimizer(dense.parameters(), config.effective_optimizer)
        self.frozen = frozenset(config.train.freeze)
        dense.requires_grad_(Component.dense not in self.frozen)
        self._config = config
        self._ranks = ranks
        copies = [part.weight.shape for part in tables.placement.replicated]
        self._gradients = GradientBucket(dense.parameters(), copies)
        tables.replicated_gradients = self._gradients.further
        tables.prefix_columns = getattr(dense, "prefix_columns", 0)
        if self.capture_blocker is None and config.mode is not Mode.inference:
            # Not an epoch's tail, nor the sizes of `mode=inference`, which come once and on no stream that can be recorded.
            batches = (config.train.batch_size, config.eval.batch_size)
            tables.recorded_sizes = frozenset(each // ranks.world_size for each in batches)
        self._readback = LossReadback(ranks.device)
        settings = {
            "autocast": self._autocast,
            "loss_scale": loss_scale(config),
            "ranks": ranks,
            "update_tables": Component.tables not in self.frozen,
        }
        components = (dense, self._gradients, self._readback)
        self._dynamic = DynamicPass(tables, *components, **settings)
        self._make_static = lambda static, **valid: StaticPass(
            static, *components, **settings, **valid
        )
        inference = config.mode is Mode.inference
        self._forward_sizes = (
            config.inference.batch_sizes if inference else [config.eval.batch_size]
        )
        # By rows a rank.
        self._passes: dict[int, Pass] = {}
        self._forwards: dict[int, Pass] = {}

    def train(self, step: int, prefetcher: Prefetcher) -> StepResult:
        """Learn from the next batch of `prefetcher`.

        Args:
            step: updates made so far; decides the learning rate.
            prefetcher: must hold a batch.

        Raises:
            DivergedError: on all ranks alike, before anything is updated, when the loss is not a number.
        """
        batch, ids = next(prefetcher)
        is_static = isinstance(ids, LocalIds)
        self._set_learning_rate(step, by_fbgemm=not is_static)
        lookups = None
        with annotate("pass"):
            if is_static:
                logits = _run(self._pass(batch, ids), ids, batch)
            else:
                logits, lookups = self._dynamic.run(ids, batch)
        prefetcher.start_next()
        # The one point where the host waits for the device, which still has the backward pass before it.
        loss, is_good = self._readback.wait()
        if not is_good:
            raise DivergedError(self._what_diverged(step, loss))
        with annotate("update"):
            self._update(lookups)
        return StepResult(batch, loss, logits)

    @torch.no_grad()
    def predict(self, batch: Batch, ids: LocalIds | Exchange) -> Tensor:
        """Return the logits [B] of a batch, without learning from it; overwritten by the next call."""
        if isinstance(ids, LocalIds):
            return _run(self._forward(batch, ids), ids, batch)
        embeddings = self.tables.output_dist(ids.context, self.tables.look_up(ids))
        with self._autocast():
            return self.dense(batch.numerical, embeddings)

    def set_training(self, mode: bool) -> None:
        """Switch both halves between training and evaluation."""
        self.tables.train(mode)
        self.dense.train(mode)

    def close(self) -> None:
        """Free the recorded graphs; NCCL would wait for them for ever when its group is closed."""
        _free(self._passes)
        _free(self._forwards)
        self.tables.close()

    @property
    def learning_rate(self) -> float:
        """The dense half's rate in the latest step."""
        return self.dense_optimizer.param_groups[0]["lr"]

    @property
    def capture_blocker(self) -> str | None:
        """What keeps the step from being a CUDA graph, or None."""
        if self._ranks.device.type != "cuda":
            return "no GPU"
        if not self._config.train.capture:
            return "train.capture=false"
        return self.tables.static_blocker

    def _pass(self, batch: Batch, ids: LocalIds) -> Pass:
        """The pass for batches of this size; only that of whole training batches is worth a graph and its memory."""
        size = len(batch.labels)
        if batch.global_valid < size * self._ranks.world_size:
            valid = {"num_valid": batch.num_valid, "global_valid": batch.global_valid}
            return self._make_static(self.tables.static(size), **valid)
        if size not in self._passes:
            plain = self._make_static(self.tables.static(size))
            whole = batch.global_valid == self._config.train.batch_size
            self._passes[size] = self._recorded(plain, batch, ids) if whole else plain
        return self._passes[size]

    def _forward(self, batch: Batch, ids: LocalIds) -> Pass:
        """The forward pass for batches of this size; a graph for whole ones, of one size at a time."""
        size = len(batch.labels)
        if size not in self._forwards:
            whole = batch.global_valid in self._forward_sizes
            if whole:
                self._drop_forwards()
            plain = StaticForward(self.tables.static(size), self.dense, self._autocast)
            self._forwards[size] = self._recorded(plain, batch, ids) if whole else plain
        return self._forwards[size]

    def _drop_forwards(self) -> None:
        """Free what batches of other sizes were evaluated with."""
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        for size in self._forwards.keys() - self._passes.keys():
            self.tables.drop_static(size)
        _free(self._forwards)

    def _recorded(self, plain: Pass, batch: Batch, ids: LocalIds) -> Pass:
        if self.capture_blocker is not None:
            return plain
        others = (*self._passes.values(), *self._forwards.values())
        beside = next((each for each in others if isinstance(each, CudaGraph)), None)
        return CudaGraph(plain, ids, batch.numerical, batch.labels, beside=beside)

    def _autocast(self) -> AbstractContextManager:
        """The precision that the dense half runs in."""
        dtype = AMP_DTYPES.get(self._config.train.amp)
        return nullcontext() if dtype is None else torch.autocast(self._ranks.device.type, dtype)

    def _set_learning_rate(self, step: int, *, by_fbgemm: bool) -> None:
        factor = learning_rate_factor(step, self._config.scheduler)
        for group in self.dense_optimizer.param_groups:
            group["lr"] = self._config.effective_optimizer.lr * factor
        self.tables.prepare_update(
            step, self._config.effective_optimizer.table_lr * factor, by_fbgemm=by_fbgemm
        )

    def _update(self, lookups: Lookups | None) -> None:
        if Component.tables not in self.frozen:
            if lookups is None:
                self.tables.update_replicated()
            else:
                self.tables.update(lookups.values, lookups.gradients)
        if Component.dense not in self.frozen:
            self.dense_optimizer.step()

    def _what_diverged(self, step: int, loss: float) -> str:
        if math.isfinite(loss):
            return (
                "a gradient overflowed fp16; nothing was updated with it. Lower train.loss_scale, now "
                f"{self._config.train.loss_scale:g}, or train with train.amp=bf16, which needs no scale"
            )
        return (
            f"the loss is {loss} at step {step} (learning rate {self.learning_rate:g}); nothing "
            "was updated with it. Lower optimizer.lr, lengthen scheduler.warmup_steps, or look "
            "for bad numerical values in the data"
        )


def _free(passes: dict[int, Pass]) -> None:
    for each in passes.values():
        if isinstance(each, CudaGraph):
            each.close()
    passes.clear()


def _run(each: Pass, ids: LocalIds, batch: Batch) -> Tensor:
    logits = each.run(ids, batch.numerical, batch.labels)
    # A recording gives them up itself, as soon as it has copied them.
    if ids.release is not None and not isinstance(each, CudaGraph):
        ids.release()
    return logits
