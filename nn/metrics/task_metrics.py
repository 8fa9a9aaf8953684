"""Metrics of all tasks, exact over the rows of all ranks.

Rows count by their weights, as in scikit-learn's `sample_weight` and TorchRec's metric modules; without weights every row
counts once. A binary label without weights takes `RankingMetrics`.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from dataloading.batch import Batch
from nn.metrics.grouped_auc import grouped_auc, weighted_auc
from nn.metrics.late_auc import LateAuc
from nn.metrics.prediction_curves import describe_predictions, score_buckets
from nn.metrics.ranking import BLOCK_ROWS, Collectives, RankingMetrics, first_not_finite
from nn.models.metric import AUC, CALIBRATION, GAUC, LOG_LOSS, MAE, NORMALISED_ENTROPY, RMSE
from nn.models.tasks import Task, check_logits, column_of


class TaskMetrics:
    """Metrics of the rows of all `update` calls on all ranks since the last `reset`.

    Args:
        tasks: in the order of the labels.
        device: where rows are kept, and where rank 0 sorts those of all ranks.
        collectives: the process group.
        has_weights: whether batches have weights.
        while_training: measure the metrics of training rows alone, on the logits as they are trained.
        group: categorical feature whose ids are the groups of GAUC, or None.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        collectives: Collectives,
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
        self._rows = _RowGather(device, collectives)
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._of_task: list[_TaskRows] = [
            RankingMetrics(self._device, self._collectives)
            if task.is_binary
            else _Numbers(self._device)
            for task in self._tasks
        ]
        self._weights: list[Tensor] = []
        self._groups: list[Tensor] = []

    def update(self, logits: Tensor, batch: Batch, groups: Tensor | None = None) -> None:
        """Keep one batch. The host does not wait for the device.

        Args:
            logits: [B], or [B, T] of several tasks; copied, so a captured step may overwrite them.
            batch: on the device; its padding rows are not counted.
            groups: int64 [num_valid], where the ids of the batch are not those of the groups.
        """
        check_logits(self._tasks, logits, batch.labels)
        self._keep(
            logits.detach().float(),
            batch.labels,
            batch.num_valid,
            batch.weights,
            None if self._while_training else batch.keep_rates,
        )
        if self._group is not None:
            ids = batch.ids[self._group].values()[: batch.num_valid] if groups is None else groups
            self._groups.append(ids.to(self._device, torch.int64, copy=True))

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Keep the rows that `rows` returned, on one rank."""
        rows = {name: values.to(self._device) for name, values in rows.items()}
        logits, labels = rows["logits"], rows["labels"]
        self._keep(logits, labels.float(), len(logits), rows.get("weights"), None)

    def rows(self) -> dict[str, Tensor]:
        """Return logits, labels and, if rows have them, weights of all ranks so far, on rank 0; all must call it.

        Without a row, and on other ranks, nothing is returned.
        """
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
        """Return the metrics over all ranks by their keys, the same numbers on each of them; all must call it.

        `rows` is the number of rows, and `is_finite` is false if a prediction is not finite. A metric that is not defined is
        nan, as all are without rows.
        """
        results: dict[str, float | int] = {"is_finite": True}
        for task, kept in zip(self._tasks, self._of_task, strict=True):
            wanted = [m for m in task.metrics if m.while_training or not self._while_training]
            if isinstance(kept, RankingMetrics):
                measured = self._binary(kept, {metric.name for metric in wanted})
                main = measured[LOG_LOSS.name]
            else:
                measured = self._regression(*kept.kept())
                main = measured[RMSE.name]
            results["rows"] = measured["rows"]
            if measured["weight"] > 0 and not math.isfinite(main):
                results["is_finite"] = False
            results |= {metric.key: measured[metric.name] for metric in wanted}
        return results

    def start(self) -> "StartedMetrics":
        """Start to compute the metrics of training rows, beside further steps if possible; all ranks must call it.

        Several ranks, weights and labels that are numbers are measured at once.
        """
        kept = [rows for rows in self._of_task if isinstance(rows, RankingMetrics)]
        is_exchanged = self._collectives.world_size > 1 or self._has_weights
        if is_exchanged or not self._while_training or len(kept) < len(self._tasks):
            return StartedMetrics(self.compute(), {})
        return StartedMetrics(
            {},
            {
                metric.key: rows.late_auc()
                for task, rows in zip(self._tasks, kept, strict=True)
                for metric in task.metrics
                if metric.name == AUC.name
            },
        )

    def describe_predictions(self) -> dict[str, dict[str, Any]]:
        """Return calibration, gain and lift of every binary label over all ranks by its name; all must call it.

        All predictions must be finite. Regression labels have none.
        """
        return {
            task.name: describe_predictions(
                score_buckets(*kept.kept(), self._kept_weights(), self._collectives)
            )
            for task, kept in zip(self._tasks, self._of_task, strict=True)
            if isinstance(kept, RankingMetrics)
        }

    def first_not_finite(self) -> tuple[int, int, int] | None:
        """Return the first of this rank's logits that is not finite: its `update` call, its place there, and their number.

        Rows that are not finite in several tasks are counted in each.
        """
        found = [found for kept in self._of_task if (found := kept.first_not_finite()) is not None]
        if not found:
            return None
        call, place, _ = min(found)
        return call, place, sum(count for _, _, count in found)

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

    def _binary(self, kept: RankingMetrics, names: Collection[str]) -> dict[str, float | int]:
        """Return the metrics of a binary label, with the sum of weights and the mean label."""
        logits, is_positive = kept.kept()
        weights = self._kept_weights()
        if weights is None:
            measured = kept.compute()
            measured["weight"] = measured["rows"]
        else:
            measured = self._weighted(logits, is_positive, weights)
        rate, weight = measured["label_mean"], measured["weight"]
        if NORMALISED_ENTROPY.name in names:
            others = measured.get("others_mean", 1 - rate)
            loss = measured[LOG_LOSS.name]
            measured[NORMALISED_ENTROPY.name] = normalised_entropy(loss, rate, others)
        if CALIBRATION.name in names:
            (predicted,) = self._rows.sum(
                _block_sums(lambda x, w: [(x.sigmoid() * w).sum()], logits, weights)
            )
            clicks = rate * weight
            measured[CALIBRATION.name] = predicted / clicks if clicks > 0 else math.nan
        if GAUC.name in names:
            groups = torch.cat(
                [torch.empty(0, dtype=torch.int64, device=self._device), *self._groups]
            )
            measured[GAUC.name] = self._on_rank0(grouped_auc, logits, is_positive, groups, weights)
        return measured

    def _weighted(
        self, logits: Tensor, is_positive: Tensor, weights: Tensor
    ) -> dict[str, float | int]:
        """Return AUC, log loss, rows, weight, and the parts of labels 1 and 0 of weighted rows."""
        signed = torch.where(is_positive, -logits, logits)
        sums = _block_sums(lambda x, w: [(softplus(x) * w).sum(), w.sum()], signed, weights)
        # Both: where one label has nearly all of the weight, 1 less its part is 0.
        sums += [weights[chosen].double().sum() for chosen in (is_positive, ~is_positive)]
        losses, weight, positives, negatives, rows = self._rows.sum([*sums, self._count(logits)])
        defined = weight > 0
        return {
            AUC.name: self._on_rank0(weighted_auc, logits, is_positive, weights),
            LOG_LOSS.name: losses / weight if defined else math.nan,
            "rows": int(rows),
            "weight": weight,
            "label_mean": positives / weight if defined else math.nan,
            "others_mean": negatives / weight if defined else math.nan,
        }

    def _regression(self, predictions: Tensor, labels: Tensor) -> dict[str, float | int]:
        """Return root mean squared error and mean absolute error, with rows and the sum of weights."""
        errors = predictions.double() - labels.double()
        sums = _block_sums(
            lambda x, w: [(x.square() * w).sum(), (x.abs() * w).sum(), w.sum()],
            errors,
            self._kept_weights(),
        )
        squares, absolute, weight, rows = self._rows.sum([*sums, self._count(errors)])
        defined = weight > 0
        return {
            RMSE.name: math.sqrt(squares / weight) if defined else math.nan,
            MAE.name: absolute / weight if defined else math.nan,
            "rows": int(rows),
            "weight": weight,
        }

    def _kept_weights(self) -> Tensor | None:
        """Return the weights of this rank's rows, [n]; None without weights."""
        if not self._has_weights:
            return None
        return torch.cat([torch.empty(0, device=self._device), *self._weights])

    def _count(self, rows: Tensor) -> Tensor:
        return torch.tensor(float(len(rows)), dtype=torch.float64, device=self._device)

    def _on_rank0(self, function: Callable[..., float], *columns: Tensor | None) -> float:
        """Compute a function of the columns of all ranks on rank 0, and return its result on all of them."""
        present = [column for column in columns if column is not None]
        counts = self._rows.counts(len(present[0]))
        gathered = [self._rows.gather(column, counts) for column in present]
        value = math.nan
        if gathered[0] is not None:
            value = function(*gathered)
        return self._collectives.broadcast_object(value)


def normalised_entropy(log_loss: float, rate: float, others: float) -> float:
    """Compute the log loss divided by the entropy of the label (He et al. 2014, equation 1); nan if all labels are the same.

    Args:
        log_loss: mean over rows, natural logarithm.
        rate: mean label.
        others: 1 - rate.
    """
    if not (rate > 0 and others > 0):
        return math.nan
    return log_loss / -(rate * _log(rate, others) + others * _log(others, rate))


def _log(part: float, others: float) -> float:
    """Return the logarithm of a part, exact too where the others are nearly nothing."""
    return math.log1p(-others) if others < part else math.log(part)


def _block_sums(
    function: Callable[[Tensor, Tensor], list[Tensor]], values: Tensor, weights: Tensor | None
) -> list[Tensor]:
    """Sum what `function` returns for (values, weights) in float64, block by block, which bounds the memory."""
    weights = torch.ones_like(values) if weights is None else weights
    sums = function(values[:0].double(), weights[:0].double())
    for start in range(0, len(values), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        parts = function(values[block].double(), weights[block].double())
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    return sums


class StartedMetrics:
    """Metrics of training rows, of which some are on their way.

    Args:
        values: those that are there, by their keys.
        late: the others.
    """

    def __init__(self, values: dict[str, float | int], late: Mapping[str, LateAuc]) -> None:
        self._values, self._late = values, late

    def are_there(self) -> bool:
        """Return whether `values` need not wait."""
        return all(auc.is_there() for auc in self._late.values())

    def values(self) -> dict[str, float | int]:
        """Return all metrics by their keys, the same on all ranks; wait for them."""
        return self._values | {key: auc.value() for key, auc in self._late.items()}


class _TaskRows(Protocol):
    """Kept rows of one task."""

    def update(self, logits: Tensor, labels: Tensor, num_valid: int) -> None: ...
    def kept(self) -> tuple[Tensor, Tensor]: ...
    def first_not_finite(self) -> tuple[int, int, int] | None: ...


class _Numbers:
    """Predictions and labels of a regression task on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._predictions: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor, num_valid: int) -> None:
        """Keep one batch, without its padding rows."""
        for kept, values in ((self._predictions, logits), (self._labels, labels)):
            kept.append(values.detach()[:num_valid].to(self._device, torch.float32, copy=True))

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return predictions and labels, float32 [n]."""
        none = torch.empty(0, device=self._device)
        return torch.cat([none, *self._predictions]), torch.cat([none, *self._labels])

    def first_not_finite(self) -> tuple[int, int, int] | None:
        """See `RankingMetrics.first_not_finite`."""
        return first_not_finite(self._predictions)


class _RowGather:
    """Sums over ranks, and rows of all ranks on rank 0."""

    def __init__(self, device: torch.device, collectives: Collectives) -> None:
        self._device = device
        self._collectives = collectives

    def sum(self, values: Sequence[Tensor]) -> list[float]:
        """Sum scalars over ranks in float64, in the order of the ranks: the same bits on each of them."""
        group = self._collectives
        sums = torch.zeros(group.world_size, len(values), dtype=torch.float64, device=self._device)
        sums[group.rank] = torch.stack([value.double() for value in values])
        return [
            math.fsum(column) for column in zip(*group.all_reduce_sum(sums).tolist(), strict=True)
        ]

    def counts(self, num_rows: int) -> list[int]:
        """Return the rows of every rank."""
        group = self._collectives
        counts = torch.zeros(group.world_size, dtype=torch.int64, device=self._device)
        counts[group.rank] = num_rows
        return group.all_reduce_sum(counts).tolist()

    def gather(self, values: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Join the ranks' rows, `counts[r]` of rank r, on rank 0; None elsewhere."""
        padding = (0, 0) * (values.dim() - 1) + (0, max(counts) - len(values))
        gathered = self._collectives.gather(pad(values, padding))
        if gathered is None:
            return None
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])
