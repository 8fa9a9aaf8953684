"""One step: lookup, dense pass, check, update. Nothing here knows of epochs, files or terminals."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.schema import Amp, Config
from dataloading.batch import Batch
from nn.dense_optimizer import build_dense_optimizer
from nn.dense_pass import CapturedPass, DensePass, LossReadback, PassResult
from nn.distributed import Ranks
from nn.errors import DivergedError
from nn.feed import Feed
from nn.flat_gradients import FlatGradients
from nn.marks import mark
from nn.schedule import learning_rate_factor
from nn.sharding import Exchange, ShardedTables


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training step leaves for whoever measures it.

    Attributes:
        batch: on the device.
        loss: mean over the global batch, before the update.
        logits: of this rank, [B]; overwritten by the next step.
    """

    batch: Batch
    loss: float
    logits: Tensor


class Step:
    """Tables and dense half, and how both learn from a batch.

    Args:
        tables: the sparse half.
        dense: the dense half, on its device, with the seed's weights.
        config: the whole run.
        ranks: this process.
    """

    def __init__(
        self, tables: ShardedTables, dense: nn.Module, config: Config, ranks: Ranks
    ) -> None:
        self.tables = tables
        self.dense = dense
        if config.train.compile:
            # In place, so that parameters keep their names; the wrapped module would rename them.
            dense.compile()
        self.dense_optimizer = build_dense_optimizer(dense.parameters(), config.optimizer)
        self._config = config
        self._ranks = ranks
        self._loss_scale = config.train.loss_scale if config.train.amp is Amp.fp16 else 1.0
        self._gradients = FlatGradients(dense.parameters())
        self._readback = LossReadback(ranks.device)
        self._pass = DensePass(
            tables,
            dense,
            self._gradients,
            self._readback,
            amp=config.train.amp,
            loss_scale=self._loss_scale,
            ranks=ranks,
        )
        self._captured: CapturedPass | None = None

    def train(self, step: int, feed: Feed) -> Trained:
        """Learn from the next batch of `feed`.

        Args:
            step: updates made so far; decides the learning rate.
            feed: must hold a batch.

        Raises:
            DivergedError: on all ranks alike, before anything is updated, when the loss is not a number.
        """
        self._set_learning_rate(step)
        batch, ids = next(feed)
        with mark("lookup"):
            lookups = self.tables.look_up(ids)
        with mark("dense pass"):
            result = self._run_pass(batch, ids, lookups)
        feed.start_next()
        # The one point where the host waits for the device. The backward pass still runs, so the device does not wait
        # for the host; the tables' update, which is fused into their own backward pass, has not begun.
        loss = self._readback.wait()
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {loss} at step {step} (learning rate {self.learning_rate:g}); nothing "
                "was updated with it. Lower optimizer.lr, lengthen scheduler.warmup_steps, or look "
                "for bad numerical values in the data"
            )
        gradients = result.gradients
        if self._loss_scale != 1.0:
            gradients = self._unscaled(gradients)
        with mark("table update"):
            self.tables.update(lookups, gradients)
        with mark("dense optimizer"):
            self.dense_optimizer.step()
        return Trained(batch, loss, result.logits)

    @torch.no_grad()
    def predict(self, batch: Batch, ids: Exchange) -> Tensor:
        """Return the logits [B] of a batch, without learning from it."""
        embeddings = self.tables.bring_home(ids.context, self.tables.look_up(ids))
        with self._pass.autocast():
            return self.dense(batch.numerical, embeddings)

    def set_training(self, mode: bool) -> None:
        """Switch both halves between training and evaluation."""
        self.tables.train(mode)
        self.dense.train(mode)

    def close(self) -> None:
        """Free the recorded graph; NCCL would wait for it for ever when its group is closed."""
        self._captured = None

    @property
    def learning_rate(self) -> float:
        """The dense half's rate in the latest step."""
        return self.dense_optimizer.param_groups[0]["lr"]

    @property
    def why_not_captured(self) -> str | None:
        """What keeps the dense pass from being a CUDA graph, or None."""
        if self._ranks.device.type != "cuda":
            return "no GPU"
        if not self._config.train.capture:
            return "train.capture=false"
        return self.tables.why_not_static

    def _run_pass(self, batch: Batch, ids: Exchange, lookups: list[Tensor]) -> PassResult:
        # The tail of an epoch may be static too, but comes too seldom to be worth a graph and its memory.
        full = len(batch.labels) * self._ranks.world_size == self._config.train.batch_size
        if full and ids.is_static and self.why_not_captured is None:
            if self._captured is None:
                self._captured = CapturedPass(self._pass, lookups, ids.context, batch)
            return self._captured.run(lookups, batch)
        return self._pass.run(
            lookups,
            ids.context,
            batch.numerical,
            batch.labels,
            batch.num_valid,
            batch.global_valid,
        )

    def _set_learning_rate(self, step: int) -> None:
        factor = learning_rate_factor(step, self._config.scheduler)
        for group in self.dense_optimizer.param_groups:
            group["lr"] = self._config.optimizer.lr * factor
        self.tables.prepare_update(step, self._config.optimizer.table_lr * factor)

    def _unscaled(self, gradients: list[Tensor]) -> list[Tensor]:
        """Undo the loss scale; the dense half's gradients change in place."""
        finite = self._gradients.are_finite()
        for each in gradients:
            finite = finite & torch.isfinite(each).all()
        overflowed = self._ranks.all_reduce_sum((~finite).float())
        if overflowed.item():
            raise DivergedError(
                "a gradient overflowed fp16; nothing was updated with it. Lower train.loss_scale, now "
                f"{self._loss_scale:g}, or train with train.amp=bf16, which needs no scale"
            )
        self._gradients.vector.div_(self._loss_scale)
        return [each / self._loss_scale for each in gradients]
