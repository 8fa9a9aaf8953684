"""Evaluation of the model on a split: exact metrics over all ranks."""

import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, EvalConfig
from dataloading.batch import Batch
from dataloading.dataset.source import Source, read_with_keys
from dataloading.gather import Selection
from dataloading.loader import Loader
from nn.distributed.preemption import Heartbeat
from nn.distributed.process_group import Ranks
from nn.metrics.task_metrics import TaskMetrics
from nn.models.tasks import metrics_of
from nn.observability.progress import Progress
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep


class Evaluator:
    """Evaluation of a split; every row is scored once, for any number of ranks.

    `config`: numbers of batches to score, and the feature whose ids are the groups of GAUC. `heartbeat`: updated after every
    batch. `stored`: source of the groups, where the loader's rows have ids that were changed; None: the loader's.

    `problem`: why the metrics of the latest evaluation are undefined although all inputs are finite, or None; the same on all
    ranks. `predictions`: calibration, gain and lift of every binary label in the latest evaluation, from
    `nn.metrics.prediction_curves`; empty if a prediction was not finite.
    """

    def __init__(
        self,
        step: TrainStep,
        loader: Loader,
        ranks: Ranks,
        config: EvalConfig,
        heartbeat: Heartbeat | None = None,
        stored: Source | None = None,
    ) -> None:
        self._step = step
        self._loader = loader
        self._ranks = ranks
        self._heartbeat = heartbeat or Heartbeat()
        self._group = config.group
        # Groups are the ids of the batches, or are read: the rows of keys are none, since all keys that are new have the same.
        source = loader.source if stored is None else stored
        is_keyed = any(f.name == config.group and f.is_dynamic for f in source.spec.categorical)
        reads_groups = config.group is not None and (is_keyed or stored is not None)
        self._stored = source if reads_groups else None
        self.problem: str | None = None
        self.predictions: dict[str, dict[str, Any]] = {}
        self._num_batches = self._available(config.max_steps)
        final = config.final_max_steps
        self._final_batches = self._num_batches if final is None else self._available(final)

    @property
    def has_final(self) -> bool:
        """Return whether the final evaluation scores other batches than the others."""
        return self._final_batches != self._num_batches

    @property
    def final_part(self) -> float:
        """Return how many times as long as others the final evaluation takes; 0 without one."""
        return self._final_batches / max(self._num_batches, 1) if self.has_final else 0.0

    def run(
        self, progress: Progress | None = None, *, is_final: bool = False
    ) -> dict[str, float | int]:
        """Return the metrics of all tasks (such as `test_auc`, `test_log_loss`), `test_rows` and `eval_s`.

        All but `eval_s` are the same numbers on all ranks.
        """
        started = time.perf_counter()
        metrics = TaskMetrics(
            self._step.tasks,
            self._ranks.device,
            self._ranks,
            has_weights=self._loader.source.spec.weight is not None,
            group=self._group,
        )
        num_batches = self._final_batches if is_final else self._num_batches
        batches = self._loader.batches(0, num_batches)
        self._step.runner.measure(self._loader)
        passed = predictions(self._step, batches, self._ranks.device)
        shown = progress.evaluation(num_batches) if progress else nullcontext(lambda: None)
        with shown as advance:
            try:
                for index, (batch, logits) in enumerate(passed):
                    metrics.update(logits, batch, self._groups(index))
                    self._heartbeat.beat()
                    advance()
            finally:
                # A notebook may interrupt an evaluation and train on, while its traceback keeps the batches.
                passed.close()
                batches.close()
                self._step.set_training(True)
        measured = metrics.compute()
        self.problem = None
        if measured["rows"] and not measured["is_finite"]:
            self.problem = self._what_is_not_finite(metrics, int(measured["rows"]))
        self.predictions = metrics.describe_predictions() if measured["is_finite"] else {}
        return {
            **{metric.test_key: measured[metric.key] for metric in metrics_of(self._step.tasks)},
            "test_rows": measured["rows"],
            "eval_s": time.perf_counter() - started,
        }

    @property
    def scored(self) -> dict[str, Any]:
        """The rows that an evaluation scores, and their groups; metrics of others cannot be compared with it."""
        rows = self._num_batches * self._loader.batch_size
        split = self._loader.split
        available = self._loader.source.num_rows(split)
        return {"split": split, "rows": min(rows, available), "group": self._group}

    def _groups(self, index: int) -> Tensor | None:
        """Return the groups of the rows of a batch, as they are stored; None if they are its ids."""
        if self._stored is None:
            return None
        names = [feature.name for feature in self._stored.spec.categorical]
        columns = read_with_keys(self._stored, self._loader.split, self._loader.rows(index).runs)
        return torch.from_numpy(columns.ids[names.index(str(self._group))].astype(np.int64))

    def _available(self, max_steps: int | None) -> int:
        available = self._loader.steps_per_epoch
        return available if max_steps is None else min(max_steps, available)

    def _what_is_not_finite(self, metrics: TaskMetrics, num_rows: int) -> str:
        """Name the first row whose prediction is not finite; all ranks must call it."""
        found = metrics.first_not_finite()
        here = None
        if found is not None:
            batch, position, count = found
            row = Selection(self._loader.rows(batch).runs).row_at(position)
            here = (row, count, self._largest_number(row))
        problem = None
        if (ranks := self._ranks.gather_objects(here)) is not None:
            bad = [rank for rank in ranks if rank is not None]
            row, _, largest = min(bad)
            count = sum(number for _, number, _ in bad)
            are_binary = all(task.is_binary for task in self._step.tasks)
            metrics_text = "AUC and log loss are" if are_binary else "the metrics are"
            problem = (
                f"the predictions of {count:,} of {num_rows:,} rows of split '{self._loader.split}' are not finite, the first "
                f"of row {row:,}{largest}; {metrics_text} undefined. "
            ) + (
                "The weights have grown too large: lower optimizer.lr or lengthen scheduler.warmup_steps"
                if count == num_rows
                else "Clip or scale such values when preprocessing, or lower optimizer.lr"
            )
        return self._ranks.broadcast_object(problem)

    def _largest_number(self, row: int) -> str:
        source = self._loader.source
        if not source.spec.numerical:
            return ""
        values = source.read(self._loader.split, np.array([[row, row + 1]])).numerical[0]
        column = int(np.abs(values).argmax())
        return (
            f" (its largest numerical value is {source.spec.numerical[column]}={values[column]:g})"
        )


def predictions(
    step: TrainStep, batches: Iterator[Batch], device: torch.device
) -> Generator[tuple[Batch, Tensor], None, None]:
    """Yield each batch, on the device, with its logits [B] or [B, T]; the next batch overwrites them.

    All ranks must iterate alike, to the end. The step is in evaluation mode meanwhile, and uses the average of the dense
    component if there is one.
    """
    step.set_training(False)
    prefetcher = Prefetcher(batches, step.runner, device)
    for batch, rows in prefetcher:
        logits = step.predict(batch, rows)
        prefetcher.start_next()
        yield batch, logits
    step.set_training(True)


def described_predictions(config: Config, evaluator: Evaluator, step: int) -> dict[str, Any]:
    """Return the predictions of the latest evaluation, as `predictions.json` has them; none if they are not defined."""
    if not evaluator.predictions:
        return {}
    return {
        "recipe": config.recipe,
        "model": config.model.name,
        "data": config.data.path,
        "split": config.eval.split,
        "step": step,
        "tasks": evaluator.predictions,
    }
