"""The training loop: a list of events. What a step does is in `nn.step`."""

import math
from typing import Any

import torch

from configs.schema import Config
from dataloading.loader import Loader
from nn.breakdown import STEP
from nn.console import Progress
from nn.distributed import Ranks
from nn.evaluation import Evaluator
from nn.feed import Feed
from nn.marks import mark
from nn.metrics import RankingMetrics
from nn.profiler import Profiler
from nn.recorder import Recorder
from nn.speed import Speedometer
from nn.step import Step, Trained

# The AUC shown while training is that of the last rows before a record; sorting more would cost time and tell no more.
TRAIN_AUC_ROWS = 2**20


class Trainer:
    """Runs steps, records them, evaluates, and decides when to end.

    Args:
        step: both halves and their optimizers.
        train_loader: the training split.
        evaluator: the split to evaluate on.
        recorder: the run directory.
        progress: the terminal.
        config: the whole run.
        ranks: this process.
        profiler: takes a profile of some steps, or None.
    """

    def __init__(
        self,
        step: Step,
        train_loader: Loader,
        evaluator: Evaluator,
        recorder: Recorder,
        progress: Progress,
        config: Config,
        ranks: Ranks,
        profiler: Profiler | None = None,
    ) -> None:
        self._step = step
        self._train_loader = train_loader
        self._evaluator = evaluator
        self._recorder = recorder
        self._progress = progress
        self._config = config
        self._ranks = ranks
        self._profiler = profiler
        self._last_step = total_steps(config, train_loader.steps_per_epoch)
        self._train_metrics = RankingMetrics(ranks.device, ranks)
        self._loss_sum = 0.0
        self._loss_steps = 0
        self.num_steps = 0
        self.best_auc = math.nan

    def train(self, start_step: int = 0) -> dict[str, Any]:
        """Train from `start_step` to the end and return the run's summary."""
        last_step = self._last_step
        eval_at = eval_steps(
            last_step, self._train_loader.steps_per_epoch, self._config.eval.per_epoch
        )
        self.num_steps = start_step
        stopped, test = "all steps done", {}
        first = self.evaluate() if self._config.eval.at_start else {}
        batches = self._train_loader.batches(start_step, last_step - start_step)
        feed = Feed(batches, self._step.tables, self._ranks.device)
        self._step.set_training(True)
        speed = Speedometer()
        while self.num_steps < last_step:
            self._begin_profile(speed)
            with mark(STEP):
                trained = self._step.train(self.num_steps, feed)
            self.num_steps += 1
            speed.count(trained.batch.global_valid)
            self._end_profile(speed)
            self._progress.advance(self.num_steps)
            self._count(trained)
            if self._due(self._config.log.every) or self.num_steps == last_step:
                self._record(speed, feed)
            if self.num_steps in eval_at:
                speed.pause()
                test = self.evaluate()
                speed.resume()
                if self._is_good_enough(test):
                    stopped = "eval.auc_threshold reached"
                    break
        batches.close()
        if self._loss_steps:
            self._record(speed, feed)
        return {
            "recipe": self._config.recipe,
            "steps": self.num_steps,
            "epochs": self._epoch(),
            "stopped": stopped,
            "test_auc": test.get("test_auc"),
            "test_log_loss": test.get("test_log_loss"),
            "test_rows": test.get("test_rows"),
            "best_test_auc": self.best_auc,
            "untrained_test_auc": None if start_step else first.get("test_auc"),
            **speed.run(),
            "peak_hbm_bytes": self._peak_hbm_bytes(),
        }

    def evaluate(self) -> dict[str, Any]:
        """Evaluate on the test split; record and return the result, the same on all ranks."""
        record = {"step": self.num_steps, "epoch": self._epoch(), **self._evaluator.run()}
        auc = record["test_auc"]
        if not (math.isnan(auc) or self.best_auc >= auc):
            self.best_auc = auc
        self._recorder.write_test(record)
        self._progress.show_test(record)
        return record

    def _count(self, trained: Trained) -> None:
        self._loss_sum += trained.loss
        self._loss_steps += 1
        every = self._config.log.every
        steps_to_record = min(-self.num_steps % every, self._last_step - self.num_steps)
        if steps_to_record * self._config.train.batch_size < TRAIN_AUC_ROWS:
            batch = trained.batch
            self._train_metrics.update(trained.logits, batch.labels, batch.num_valid)

    def _record(self, speed: Speedometer, feed: Feed) -> None:
        measured = self._train_metrics.compute()
        self._train_metrics.reset()
        record = {
            "step": self.num_steps,
            "epoch": self._epoch(),
            "loss": self._loss_sum / self._loss_steps,
            "train_auc": measured["auc"],
            "lr": self._step.learning_rate,
            **speed.window(),
            "data_wait_ms": feed.data_wait_ms / self._loss_steps,
            "hbm_bytes": self._peak_hbm_bytes(),
        }
        self._loss_sum, self._loss_steps, feed.data_wait_ms = 0.0, 0, 0.0
        self._recorder.write_train(record)
        self._progress.show_train(record)

    def _begin_profile(self, speed: Speedometer) -> None:
        """Start the profiler where its steps begin; they are left out of the speed."""
        if self._profiler is not None and self.num_steps == self._profiler.steps.start:
            speed.pause()
            self._profiler.start()

    def _end_profile(self, speed: Speedometer) -> None:
        """Tell the profiler of a step, and go on as before after its last one."""
        if self._profiler is not None and self.num_steps - 1 in self._profiler.steps:
            self._profiler.step()
            if self.num_steps == self._profiler.steps.stop:
                speed.resume()

    def _due(self, every: int) -> bool:
        return self.num_steps % every == 0

    def _epoch(self) -> float:
        return self.num_steps / self._train_loader.steps_per_epoch

    def _is_good_enough(self, test: dict[str, Any]) -> bool:
        threshold = self._config.eval.auc_threshold
        return threshold is not None and test["test_auc"] >= threshold

    def _peak_hbm_bytes(self) -> int | None:
        """The most memory that tensors took on this rank's GPU so far."""
        if self._ranks.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._ranks.device)


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Steps of the whole run."""
    steps = config.train.epochs * steps_per_epoch
    return steps if config.train.max_steps is None else min(steps, config.train.max_steps)


def eval_steps(last_step: int, steps_per_epoch: int, per_epoch: int) -> set[int]:
    """Steps after which to evaluate: `per_epoch` evenly spaced ones an epoch, and the last step of the run."""
    epochs = math.ceil(last_step / steps_per_epoch)
    points = {
        epoch * steps_per_epoch + round(steps_per_epoch * part / per_epoch)
        for epoch in range(epochs)
        for part in range(1, per_epoch + 1)
    }
    return {point for point in points if 0 < point < last_step} | {last_step}
