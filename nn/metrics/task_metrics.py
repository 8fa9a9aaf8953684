"""Metrics of all tasks, exact over the rows of all ranks.

Rows count by their weights, as in scikit-learn's `sample_weight` and TorchRec's metrics; without weights each counts once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configs.user_objects import described, has_raised, load_user_object
from dataloading.batch import Batch
from nn.distributed.process_group import Ranks, open_channel
from nn.metrics import measures
from nn.metrics.late_auc import LateAuc, RankRows
from nn.metrics.measured_rows import MeasuredRows, RowGather
from nn.metrics.prediction_curves import describe_predictions, score_buckets
from nn.metrics.ranking import KeptRows
from nn.models.metric import AUC, Metric
from nn.models.tasks import Task, check_logits, column_of


class TaskMetrics:
    """Metrics of the rows of all `update` calls on all ranks since the last `reset`.

    Rows are kept on `device`, where rank 0 sorts those of all ranks. With `while_training` the metrics of training rows alone are
    measured, on the logits as they are trained. `group` is the categorical feature whose ids are the groups of GAUC.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        collectives: Ranks,
        *,
        has_weights: bool = False,
        while_training: bool = False,
        group: str | None = None,
    ) -> None:
        self._tasks = tasks
        self._device = device
        self._collectives = collectives
        self._has_weights = has_weights
        self._while_training = while_training
        self._group = group
        self._rows = RowGather(device, collectives)
        # Beside further steps, whose collectives must not wait for those of the metrics.
        channel = open_channel(collectives, "metrics") if while_training else None
        self._of_ranks = RankRows(
            partial(collectives.gather, channel=channel),
            partial(collectives.all_reduce_sum, channel=channel),
        )
        self.reset()

    def reset(self) -> None:
        self._of_task = [KeptRows(self._device, is_binary=task.is_binary) for task in self._tasks]
        self._weights: list[Tensor] = []
        self._groups: list[Tensor] = []
        self._are_full = True  # so that ranks have equally many rows

    def update(self, logits: Tensor, batch: Batch, groups: Tensor | None = None) -> None:
        """Keep one batch without its padding rows. The host does not wait for the device.

        Logits are [B], or [B, T] of several tasks; they are copied, so a captured step may overwrite them. `groups`, int64
        [num_valid], are given where the ids of the batch are not those of the groups.
        """
        check_logits(self._tasks, logits, batch.labels)
        self._are_full &= batch.global_valid == len(batch.labels) * self._collectives.world_size
        self._keep(
            logits.detach().float(),
            batch.labels,
            batch.num_valid,
            batch.weights,
            None if self._while_training else batch.keep_rates,
        )
        if self._group is not None:
            ids = batch.feature(self._group).values() if groups is None else groups
            self._groups.append(ids.to(self._device, torch.int64, copy=True))

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Keep the rows of all ranks that `rows` returned on one rank; the others call it without rows."""
        self._are_full = False
        if not rows:
            return
        rows = {name: values.to(self._device) for name, values in rows.items()}
        logits, labels = rows["logits"], rows["labels"]
        self._keep(logits, labels.float(), len(logits), rows.get("weights"), None)

    def rows(self) -> dict[str, Tensor]:
        """Return logits, labels and, if there are any, weights of all ranks so far, on rank 0; all must call it."""
        kept = [rows.kept() for rows in self._of_task]
        logits, labels = (
            columns[0]
            if len(self._tasks) == 1
            else torch.stack([c.float() for c in columns], dim=1)
            for columns in zip(*kept, strict=True)
        )
        counts = self._rows.counts(len(logits))
        named = {"logits": logits, "labels": labels}
        weights = self._kept_weights()
        if weights is not None:
            named["weights"] = weights
        gathered = {name: self._rows.gather(values, counts) for name, values in named.items()}
        return {
            name: values for name, values in gathered.items() if values is not None and len(values)
        }

    def compute(self) -> dict[str, float | int]:
        """Return the metrics over all ranks by their keys, the same on each; all must call it. One that is not defined is nan."""
        results: dict[str, float | int] = {"is_finite": True}
        for task, rows in zip(self._tasks, self._measured(), strict=True):
            results["rows"] = rows.totals["rows"]
            # Of a prediction that is not finite, so are these.
            main = rows.totals["log_loss" if task.is_binary else "squares"]
            if rows.totals["weight"] > 0 and not math.isfinite(main):
                results["is_finite"] = False
            for metric in task.metrics:
                if metric.while_training or not self._while_training:
                    results[metric.key] = self._value(metric, rows)
        return results

    def _value(self, metric: Metric, rows: MeasuredRows) -> float:
        """Return a metric; ValueError if one of the user's fails, or returns no number."""
        try:
            compute = metric.compute or getattr(measures, metric.name)
            if isinstance(compute, str):
                compute = load_user_object(compute, f"the metric {metric.name}")
            return float(compute(rows))
        except (Exception, SystemExit) as error:  # the user's may raise anything
            is_lost_rank = has_raised("torch.distributed.distributed_c10d", error)
            if not metric.compute or is_lost_rank:
                raise
            raise ValueError(
                f"the metric {metric.name} of eval.metrics has failed ({described(error)}); correct it"
            ) from error

    def _measured(self) -> Iterator[MeasuredRows]:
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        groups = torch.cat([none, *self._groups])
        for kept in self._of_task:
            yield MeasuredRows(*kept.kept(), self._kept_weights(), groups, self._rows)

    def start(self) -> "StartedMetrics":
        """Start to compute the metrics of training rows, of equally many unweighted ones the AUC beside further steps.

        All ranks must call it.
        """
        others = {m.name for task in self._tasks for m in task.metrics if m.while_training} - {
            AUC.name
        }
        is_even = self._are_full or self._collectives.world_size == 1
        if self._has_weights or not is_even or others:
            return StartedMetrics(self.compute(), {})
        late = {
            metric.key: rows.late_auc(self._of_ranks)
            for task, rows in zip(self._tasks, self._of_task, strict=True)
            for metric in task.metrics
            if metric.name == AUC.name
        }
        return StartedMetrics({}, late)

    def describe_predictions(self) -> dict[str, dict[str, Any]]:
        """Return calibration, gain and lift of every binary label by name; predictions are finite, and all ranks must call it."""
        return {
            task.name: describe_predictions(
                score_buckets(*kept.kept(), self._kept_weights(), self._collectives)
            )
            for task, kept in zip(self._tasks, self._of_task, strict=True)
            if kept.is_binary
        }

    def first_not_finite(self) -> tuple[int, int, int] | None:
        """Return this rank's first logit that is not finite: `update` call, row, and their number over all tasks."""
        found = [found for kept in self._of_task if (found := kept.first_not_finite()) is not None]
        if not found:
            return None
        call, row, _ = min(found)
        return call, row, sum(count for _, _, count in found)

    def _keep(
        self,
        logits: Tensor,
        labels: Tensor,
        num_valid: int,
        weights: Tensor | None,
        keep_rates: Tensor | None,
    ) -> None:
        for index, (task, kept) in enumerate(zip(self._tasks, self._of_task, strict=True)):
            predictions = column_of(logits, index)
            if not self._while_training:
                predictions = task.shifted(predictions, keep_rates)
            kept.update(predictions, column_of(labels, index), num_valid)
        if weights is not None:
            self._weights.append(weights[:num_valid].to(self._device, torch.float32, copy=True))

    def _kept_weights(self) -> Tensor | None:
        if not self._has_weights:
            return None
        return torch.cat([torch.empty(0, device=self._device), *self._weights])


class StartedMetrics:
    """Metrics of training rows by their keys: values that are there, and others that are on their way."""

    def __init__(self, values: dict[str, float | int], late: Mapping[str, LateAuc]) -> None:
        self._values, self._late = values, late

    def are_there(self) -> bool:
        return all(auc.is_there() for auc in self._late.values())

    def values(self) -> dict[str, float | int]:
        """Return all metrics by their keys, the same on all ranks; wait for them."""
        return self._values | {key: auc.value() for key, auc in self._late.items()}
