"""Tasks of a model: the labels that it learns, with the loss and the metrics of each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from configs.built_in import SEVERAL_LABELS
from configs.schema import Config, TaskConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from nn.layers.bce_loss import bce_loss_share
from nn.layers.task_losses import distilled_losses, loss_of, mean_share
from nn.models.metric import AUC, GAUC, METRICS, Metric, best_of, further_metrics, metrics_of_label

# B: samples, T: tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A label that a model learns, with its metrics in the order of the records.

    A binary label is 0 or 1; otherwise it is a number, and the model predicts that number.
    """

    name: str
    is_binary: bool = True
    metrics: tuple[Metric, ...] = tuple(m for m in METRICS if m.is_default and m.is_binary)
    options: TaskConfig = field(default_factory=TaskConfig)

    def loss_share(
        self,
        logits: Tensor,
        labels: Tensor,
        num_valid: int,
        global_valid: int,
        weights: Tensor | None = None,
        total_weight: Tensor | None = None,
        teachers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Compute this rank's share of the mean loss; `nn.models.tasks.loss_share` describes the arguments."""
        if self.is_binary and weights is None and not self.options.changes_loss:
            return bce_loss_share(logits, labels, num_valid, global_valid)
        loss = loss_of(self.options, is_binary=self.is_binary, key=f"tasks.{self.name}.loss")
        losses, own = loss(logits[:num_valid], labels[:num_valid]), self.options
        if own.teacher is not None:
            scores = (teachers or {})[own.teacher][:num_valid]
            how = own.teacher_weight, own.teacher_temperature
            losses = distilled_losses(losses, logits[:num_valid], scores, *how)
        return mean_share(
            losses,
            None if weights is None else weights[:num_valid],
            global_valid if total_weight is None else total_weight,
        )

    def shifted(self, logits: Tensor, keep_rates: Tensor | None) -> Tensor:
        """Return the logits [B] of predictions: those of a model that was trained on all negatives.

        With a fraction r of the negatives kept, the odds in the training rows are 1 / r times too large, so ln r is added (He
        et al. 2014, section 6.3, in terms of logits). `keep_rates` are [B] of the rows, or else `shift` has the constant.
        """
        # In this order, which is that of the server's.
        shifted = logits + self.shift if self.shift else logits
        if keep_rates is None or not self.is_binary:
            return shifted
        return shifted + keep_rates.log()

    @property
    def trains_log_loss(self) -> bool:
        """Return whether the loss of training is the log loss that evaluation measures."""
        options = self.options
        is_plain = not options.changes_loss and options.weight == 1 and options.keep_rate is None
        return self.is_binary and is_plain

    @property
    def shift(self) -> float:
        """The addend of every logit: ln of the keep rate, less that of the positive weight, which multiplies the odds too.

        Of the focal loss neither logit nor correction is a log-odds, so its weight is not corrected.
        """
        options = self.options
        weight = 1.0 if options.focal_gamma else options.positive_weight
        return math.log((options.keep_rate or 1.0) / weight) if self.is_binary else 0.0

    @property
    def note(self) -> str | None:
        """Return what to know of the scores of a loss that is not the plain cross entropy, or None."""
        options, key = self.options, f"tasks.{self.name}"
        if options.focal_gamma or options.focal_alpha is not None:
            return f"{key}: scores of a focal loss are no probabilities; they rank rows, and need a calibration of their own"
        if options.positive_weight == 1:
            return None
        return (
            f"{key}.positive_weight={options.positive_weight:g} multiplies the odds of the logits by it; evaluation, predict "
            "and serving divide by it again, so that scores are probabilities"
        )

    def scores(self, predictions: Tensor) -> Tensor:
        """Return the scores of `shifted` logits, float64: the probability of label 1, or the number of a regression.

        Probabilities of 32 bits would make ties of different logits, and another AUC. A logit that is not finite gives NaN,
        also where its probability would be 0 or 1.
        """
        exact = predictions.double()
        values = exact.sigmoid() if self.is_binary else exact
        return torch.where(exact.isfinite(), values, math.nan)


def tasks_of(
    labels: Sequence[RowColumn],
    options: Mapping[str, TaskConfig] | None = None,
    *,
    further: Sequence[str] = (),
    has_groups: bool = False,
) -> list[Task]:
    """Return a task per label, with the metrics `further` of `eval.metrics` and, with groups, the AUC within them.

    Raises ValueError: an option names a label that the dataset lacks or that has no use for it, or a metric has no task.
    """
    options = options or {}
    chosen = further_metrics(further)
    names = [label.name for label in labels]
    for name in options:
        if name not in names:
            raise ValueError(
                f"tasks.{name}: the dataset has no label '{name}', only {', '.join(names)}"
            )
    tasks = []
    for label in labels:
        own = options.get(label.name, TaskConfig())
        others = own.keep_rate, own.teacher
        if not label.is_binary and (own.changes_cross_entropy or others != (None, None)):
            raise ValueError(
                f"tasks.{label.name}: '{label.name}' is a regression label, of which weight and loss alone may be set; the "
                "other options are of binary labels (dtype bool)"
            )
        metrics = metrics_of_label(
            label, further=chosen, has_groups=has_groups, is_single=len(labels) == 1
        )
        loss_of(own, is_binary=label.is_binary, key=f"tasks.{label.name}.loss")  # which checks it
        tasks.append(Task(name=label.name, is_binary=label.is_binary, metrics=metrics, options=own))
    if not any(task.options.weight for task in tasks):
        raise ValueError(
            "tasks: the weight of every label is 0, and nothing would be learnt; raise one"
        )
    measured = {metric.name for metric in metrics_of(tasks)}
    for metric in chosen:
        if metric.name not in measured:
            kind = "binary" if metric.is_binary else "regression"
            raise ValueError(
                f"eval.metrics={metric.name} is of {kind} labels, and the dataset has none"
            )
    if has_groups and GAUC.name not in measured:
        raise ValueError("eval.group is of binary labels, and the dataset has none")
    return tasks


def tasks_of_run(config: Config, spec: FeatureSpec) -> list[Task]:
    """Return the tasks of a run. Raises ValueError: options and dataset contradict each other."""
    tasks = tasks_of(
        spec.labels,
        config.task_options,
        further=config.eval.metrics,
        has_groups=config.eval.group is not None,
    )
    best_of(metrics_of(tasks), config.eval.best_metric)
    group = config.eval.group
    if group is not None:
        found = next((f for f in spec.categorical if f.name == group), None)
        if found is None:
            raise ValueError(f"eval.group={group}: the dataset has no such categorical feature")
        if found.hotness != 1:
            ids = "several ids" if found.hotness else "any number of ids"
            raise ValueError(
                f"eval.group={group}: the feature has {ids} per row, and a row belongs to one group; name a feature of hotness 1"
            )
    for task in tasks:
        if task.options.keep_rate is not None and spec.keep_rate is not None:
            raise ValueError(
                f"tasks.{task.name}.keep_rate={task.options.keep_rate:g}: the dataset has a column of keep rates, "
                f"'{spec.keep_rate.name}'; leave one of the two out"
            )
    if config.eval.auc_threshold is not None and not any(task.is_binary for task in tasks):
        raise ValueError("eval.auc_threshold is of binary labels, and the dataset has none")
    split = config.eval.split
    return [
        replace(task, metrics=tuple(metric.on(split) for metric in task.metrics)) for task in tasks
    ]


def metrics_of(tasks: Iterable[Task]) -> list[Metric]:
    return [metric for task in tasks for metric in task.metrics]


def auc_key(record: Mapping[str, Any], best: str | None) -> str | None:
    """Return the key, in an evaluation's record, of the AUC that stands for a run: `eval.auc_threshold` compares it.

    It is the AUC that `eval.best_metric` names, `best`, else that of the first binary label; None without one.
    """
    keys = [key for key in record if key.partition(".")[0] == AUC.test_key]
    named = f"test_{best}"
    return named if named in keys else next(iter(keys), None)


def loss_share(
    tasks: Sequence[Task],
    logits: Tensor,
    labels: Tensor,
    num_valid: int,
    global_valid: int,
    weights: Tensor | None = None,
    total_weight: Tensor | None = None,
    teachers: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Compute this rank's share of the loss, the weighted sum of all tasks' losses; the shares' sum over ranks is the loss.

    Logits and labels are [B], or [B, T] of several tasks, float32. This rank's `num_valid` rows come first, the others are
    padding; all ranks have `global_valid`. `total_weight`, a scalar, is the sum of the weights [B] of valid rows over all
    ranks. `teachers`: scores [B] by column. Raises ValueError: the model does not return one logit per task.
    """
    check_logits(tasks, logits, labels)
    shares = []
    for index, task in enumerate(tasks):
        share = task.loss_share(
            column_of(logits, index),
            column_of(labels, index),
            num_valid,
            global_valid,
            weights,
            total_weight,
            teachers,
        )
        shares.append(share if task.options.weight == 1 else share * task.options.weight)
    return shares[0] if len(shares) == 1 else torch.stack(shares).sum()


def scores_of(tasks: Sequence[Task], logits: Tensor, keep_rates: Tensor | None) -> Tensor:
    """Return the scores of all tasks, [B, T] float64, of the predictions that evaluation measures.

    Logits are [B], or [B, T] of several tasks; `keep_rates` [B].
    """
    logits = logits.detach().float()
    columns = (column_of(logits, index) for index in range(len(tasks)))
    return torch.stack(
        [
            task.scores(task.shifted(column, keep_rates))
            for task, column in zip(tasks, columns, strict=True)
        ],
        dim=1,
    )


def column_of(values: Tensor, index: int) -> Tensor:
    """Return the numbers [B] of one task among those of all: [B] of a single task, [B, T] of several."""
    return values if values.dim() == 1 else values[:, index].contiguous()


def check_logits(tasks: Sequence[Task], logits: Tensor, labels: Tensor) -> None:
    """Raise `ValueError` unless the model returned a tensor with one logit per row and task."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = f"a tensor of {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the model's forward() returns {got}; want a tensor of logits in float32, such as logits.float()"
        )
    if logits.shape == labels.shape:
        return
    if logits.dim() and len(logits) != len(labels):
        raise ValueError(
            f"the model's forward() returns logits of {len(logits)} rows for a batch of {len(labels)}; want one per row"
        )
    names = ", ".join(task.name for task in tasks)
    want = "[B]" if labels.dim() == 1 else f"[B, {labels.shape[1]}]"
    got = ", ".join(["B", *map(str, logits.shape[1:])] if logits.dim() else [])
    models = ", ".join(SEVERAL_LABELS)
    raise ValueError(
        f"the model returns logits [{got}], and the dataset's labels ({names}) need {want}, one logit per label; choose a "
        f"model of as many tasks ({models}) with model.name, or list other labels in the spec's channel_spec.label"
    )
