"""Metrics by which a model is judged: names, titles, which is better. Imports no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dataloading.dataset.row_columns import RowColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that tells how well a task is learnt.

    Attributes:
        name: of the metric.
        title: of its value on the test split, on the terminal.
        undefined: printed where it has no value although there are rows.
        while_training: whether it is also measured on training rows.
        larger_is_better: whether a model with a larger value is the better one; None if neither is.
        task: the task it is of, where a dataset has several.
    """

    name: str
    title: str
    undefined: str = "n/a"
    while_training: bool = False
    larger_is_better: bool | None = True
    task: str | None = None

    def improves(self, value: float, best: float) -> bool:
        """Return whether `value` is better than the best one so far, which is nan before the first; nan never is."""
        if math.isnan(value):
            return False
        return math.isnan(best) or (value > best if self.larger_is_better else value < best)

    def of(self, task: str) -> "Metric":
        """Return this metric of one of several tasks."""
        return replace(self, task=task, title=f"{task} {self.title.removeprefix('test ')}")

    def on(self, split: str) -> "Metric":
        """Return this metric with the title of its value on another split than `test`."""
        has_split = self.title.startswith("test ")
        title = f"{split} {self.title.removeprefix('test ')}" if has_split else self.title
        return replace(self, title=title)

    @property
    def key(self) -> str:
        """Its name among the metrics of all tasks, such as `auc`, or `auc.click` of several."""
        return self.name if self.task is None else f"{self.name}.{self.task}"

    @property
    def test_key(self) -> str:
        """Key of its value on the test split, in records and in the summary."""
        return f"test_{self.key}"

    @property
    def best_key(self) -> str:
        """Key of its best value on the test split, in the summary."""
        return f"best_{self.test_key}"

    @property
    def train_key(self) -> str:
        """Key of its value on training rows."""
        return f"train_{self.key}"


AUC = Metric(
    name="auc",
    title="test AUC",
    undefined="undefined (all labels are the same)",
    while_training=True,
)
LOG_LOSS = Metric(name="log_loss", title="log loss", larger_is_better=False)
GAUC = Metric(name="gauc", title="GAUC", undefined="undefined (no group has both labels)")
NORMALISED_ENTROPY = Metric(
    name="normalised_entropy",
    title="normalised entropy",
    undefined="undefined (all labels are the same)",
    larger_is_better=False,
)
CALIBRATION = Metric(
    name="calibration",
    title="calibration",
    undefined="undefined (no label is 1)",
    larger_is_better=None,
)
RMSE = Metric(name="rmse", title="test RMSE", while_training=True, larger_is_better=False)
MAE = Metric(name="mae", title="MAE", larger_is_better=False)

DEFAULT_METRICS = {True: (AUC, LOG_LOSS), False: (RMSE,)}
"""Metrics of a label, by whether it is binary."""
FURTHER_METRICS = {True: (NORMALISED_ENTROPY, CALIBRATION), False: (MAE,)}
"""Metrics that `eval.metrics` may name."""

ALL_METRICS = (AUC, LOG_LOSS, GAUC, NORMALISED_ENTROPY, CALIBRATION, RMSE, MAE)


def metrics_of_label(
    label: RowColumn, *, further: Iterable[str], has_groups: bool, is_single: bool
) -> tuple[Metric, ...]:
    """Return the metrics of a label, in the order of the records.

    Args:
        label: of the dataset.
        further: names of metrics beyond the default ones.
        has_groups: whether the AUC within groups is measured too.
        is_single: whether the dataset has no other label.
    """
    metrics = DEFAULT_METRICS[label.is_binary]
    metrics += (GAUC,) if has_groups and label.is_binary else ()
    metrics += tuple(m for m in FURTHER_METRICS[label.is_binary] if m.name in further)
    return metrics if is_single else tuple(metric.of(label.name) for metric in metrics)


def best_of(metrics: Iterable[Metric], name: str | None) -> Metric:
    """Return the metric that `eval.best_metric` names: it tells which evaluation is the best.

    Args:
        metrics: of all labels.
        name: key of one of them; None for the first.

    Raises:
        ValueError: there is no such metric, or no value of it is better than another.
    """
    judging = [metric for metric in metrics if metric.larger_is_better is not None]
    for metric in judging:
        if name in (None, metric.key):
            return metric
    raise ValueError(
        f"eval.best_metric={name} is not measured, or says not which model is better; choose one of "
        f"{', '.join(metric.key for metric in judging)}"
    )


def metric_of_key(key: str) -> Metric | None:
    """Return the metric of a key of a record, such as `test_auc` or `test_auc.click`; None if it is of no metric."""
    name, _, task = key.removeprefix("test_").partition(".")
    found = next((metric for metric in ALL_METRICS if metric.name == name), None)
    if found is None or not key.startswith("test_"):
        return None
    return found.of(task) if task else found
