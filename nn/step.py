"""One step: lookup, dense half, loss, backward, update. Nothing here knows of epochs, files or terminals."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from configs.schema import Amp, Config
from dataloading.batch import Batch
from nn.dense_optimizer import build_dense_optimizer
from nn.distributed import Ranks, replicate
from nn.errors import DivergedError
from nn.feed import Feed
from nn.schedule import learning_rate_factor
from nn.sharding import Exchange, ShardedTables

AMP_DTYPES = {Amp.bf16: torch.bfloat16, Amp.fp16: torch.float16}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training step leaves for whoever measures it: `loss` is the mean over the global batch, `logits` [B]."""

    batch: Batch
    loss: float
    logits: Tensor


class Step:
    """Tables and dense half, and how both learn from a batch.

    The loss is the mean over the rows of the global batch, whatever the number of ranks: each rank scales its sum so
    that the mean over ranks, which is what gradients are reduced by, is that global mean.

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
        self._replica = replicate(dense, ranks)
        self.dense_optimizer = build_dense_optimizer(dense.parameters(), config.optimizer)
        self._config = config
        self._ranks = ranks
        self._loss_scale = config.train.loss_scale if config.train.amp is Amp.fp16 else 1.0

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
        embeddings = self.tables.lookup(ids)
        if self._loss_scale != 1.0:
            embeddings.register_hook(self._unscale)
        with self._autocast():
            logits = self._replica(batch.numerical, embeddings)
        losses = binary_cross_entropy_with_logits(
            logits[: batch.num_valid], batch.labels[: batch.num_valid], reduction="sum"
        )
        local_loss = losses / batch.global_valid
        global_loss = self._ranks.all_reduce_sum(local_loss.detach().clone())
        feed.start_next()

        # The one point where the host waits for the device: the tables' update is fused into the backward pass, so a
        # loss that is no number must be seen before it.
        loss = global_loss.item()
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {loss} at step {step} (learning rate {self.learning_rate:g}); nothing "
                "was updated with it. Lower optimizer.lr, lengthen scheduler.warmup_steps, or look "
                "for bad numerical values in the data"
            )
        (local_loss * (self._ranks.world_size * self._loss_scale)).backward()
        if self._loss_scale != 1.0:
            self._unscale_dense()
        self.dense_optimizer.step()
        self.tables.step()
        return Trained(batch, loss, logits.detach())

    @torch.no_grad()
    def predict(self, batch: Batch, ids: Exchange) -> Tensor:
        """Return the logits [B] of a batch, without learning from it."""
        embeddings = self.tables.lookup(ids)
        with self._autocast():
            return self.dense(batch.numerical, embeddings)

    def set_training(self, mode: bool) -> None:
        """Switch both halves between training and evaluation."""
        self.tables.train(mode)
        self.dense.train(mode)

    @property
    def learning_rate(self) -> float:
        """The dense half's rate in the latest step."""
        return self.dense_optimizer.param_groups[0]["lr"]

    def _autocast(self) -> AbstractContextManager:
        dtype = AMP_DTYPES.get(self._config.train.amp)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._ranks.device.type, dtype)

    def _set_learning_rate(self, step: int) -> None:
        factor = learning_rate_factor(step, self._config.scheduler)
        for group in self.dense_optimizer.param_groups:
            group["lr"] = self._config.optimizer.lr * factor
        self.dense_optimizer.zero_grad(set_to_none=True)
        self.tables.prepare_update(step, self._config.optimizer.table_lr * factor)

    def _unscale(self, gradient: Tensor) -> Tensor:
        """Undo the loss scale before the gradient reaches the tables, whose update follows at once."""
        self._require_finite([gradient])
        return gradient / self._loss_scale

    def _unscale_dense(self) -> None:
        gradients = [each.grad for each in self.dense.parameters()]
        torch._foreach_mul_(gradients, 1.0 / self._loss_scale)
        self._require_finite(gradients)

    def _require_finite(self, gradients: list[Tensor]) -> None:
        norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
        overflowed = self._ranks.all_reduce_sum((~torch.isfinite(norms)).any().float())
        if overflowed.item():
            raise DivergedError(
                "a gradient overflowed fp16 and the step was abandoned. Lower train.loss_scale, now "
                f"{self._loss_scale:g}, or train with train.amp=bf16, which needs no scale"
            )
