"""Metrics by which a model is judged: names, titles, which is better, and where each is computed. Imports no torch.

A new metric is an entry of `METRICS`, or a `Metric` outside the project that `eval.metrics=[package.module:NAME]` names.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.options import is_import_path, require
from configs.user_objects import load_user_object
from dataloading.dataset.row_columns import RowColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that tells how well a task is learnt."""

    name: str  # in records and options: letters, digits and `_`
    title: str  # of its value on the test split, on the terminal
    # function of `nn.metrics.measured_rows.MeasuredRows` that returns the value, nan where it is not defined, or the
    # function's import path; of the project's metrics that of this name in `nn.metrics.measures`
    compute: Callable[[Any], float] | str = ""
    is_binary: bool = True  # of binary labels, or of regression labels
    is_default: bool = False  # measured without being named
    undefined: str = "n/a"  # printed where it has no value although there are rows
    while_training: bool = False  # also measured on training rows
    larger_is_better: bool | None = True  # None if neither a larger nor a smaller value is better
    task: str | None = None  # the task it is of, where a dataset has several

    def improves(self, value: float, best: float) -> bool:
        """Return whether `value` is better than the best one so far, which is nan before the first; nan never is."""
        if math.isnan(value):
            return False
        return math.isnan(best) or (value > best if self.larger_is_better else value < best)

    def best(self, values: Iterable[tuple[int, float]]) -> tuple[float | None, int | None]:
        """Return the best of values after steps, (step, value) each, and its step; None of none."""
        best, at = math.nan, None
        for step, value in values:
            if self.improves(value, best):
                best, at = value, step
        return (None if at is None else best), at

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
        """Key of its value on `eval.split`, whichever that is, in records and in the summary."""
        return f"test_{self.key}"

    @property
    def best_key(self) -> str:
        """Key of its best value on `eval.split`, in the summary."""
        return f"best_{self.test_key}"

    @property
    def train_key(self) -> str:
        return f"train_{self.key}"


AUC = Metric(
    name="auc",
    title="test AUC",
    is_default=True,
    undefined="undefined (all labels are the same)",
    while_training=True,
)
GAUC = Metric(name="gauc", title="GAUC", undefined="undefined (no group has both labels)")
PR_AUC = Metric(name="pr_auc", title="PR-AUC", undefined="undefined (no label is 1)")
METRICS = (
    AUC,
    Metric(name="log_loss", title="log loss", is_default=True, larger_is_better=False),
    GAUC,
    PR_AUC,
    Metric(
        name="normalised_entropy",
        title="normalised entropy",
        undefined="undefined (all labels are the same)",
        larger_is_better=False,
    ),
    Metric(
        name="calibration",
        title="calibration",
        undefined="undefined (no label is 1)",
        larger_is_better=None,
    ),
    Metric(
        name="rmse",
        title="test RMSE",
        is_binary=False,
        is_default=True,
        while_training=True,
        larger_is_better=False,
    ),
    Metric(name="mae", title="MAE", is_binary=False, larger_is_better=False),
)
"""The project's metrics, in the order of the records. `eval.metrics` names further ones, and `eval.group` measures `GAUC`."""


def further_metrics(names: Sequence[str]) -> list[Metric]:
    """Return the metrics that `eval.metrics` names, those of the project in the order of the records.

    Raises ValueError: there is no such metric, or the object is none; the message says what may be named.
    """
    own = {m.name: m for m in METRICS if not m.is_default and m is not GAUC}
    found = [metric for metric in own.values() if metric.name in names]
    # Beside the metrics, the keys that every record has.
    taken = {metric.name for metric in METRICS} | {"rows", "is_finite", "step", "epoch", "loss"}
    for path in dict.fromkeys(name for name in names if name not in own):
        require(
            is_import_path(path),
            f"eval.metrics names {path}, which is none of {', '.join(own)}, nor package.module:NAME",
        )
        metric = load_user_object(path, "eval.metrics")
        require(
            isinstance(metric, Metric) and bool(metric.compute),
            f"eval.metrics={path} is no nn.models.metric.Metric with a compute; docs/tasks_and_metrics.md has one",
        )
        require(
            metric.name.isidentifier() and metric.name not in taken,
            f"eval.metrics={path}: its name is {metric.name}; want letters, digits and _, and none of {', '.join(taken)}",
        )
        taken.add(metric.name)
        found.append(metric)
    return found


METRIC_FACTS = "metrics"
"""Key in the first line of metrics.jsonl: title and direction of metrics from outside, to read records without their code."""


def metrics_of_facts(facts: object) -> list[Metric]:
    """Return the metrics of `METRIC_FACTS`, which a file has; what is damaged is left out."""
    return [
        Metric(
            name=str(name), title=str(values["title"]), larger_is_better=values["larger_is_better"]
        )
        for name, values in (facts if isinstance(facts, Mapping) else {}).items()
        if isinstance(values, Mapping) and {"title", "larger_is_better"} <= values.keys()
    ]


def metrics_of_label(
    label: RowColumn, *, further: Sequence[Metric], has_groups: bool, is_single: bool
) -> tuple[Metric, ...]:
    """Return the metrics of a label, in the order of the records: default and further ones, with groups the AUC within them."""
    wanted = [m for m in METRICS if m.is_default or m in further or (has_groups and m is GAUC)]
    wanted += [m for m in further if m not in METRICS]
    metrics = tuple(metric for metric in wanted if metric.is_binary == label.is_binary)
    return metrics if is_single else tuple(metric.of(label.name) for metric in metrics)


def best_of(metrics: Iterable[Metric], name: str | None) -> Metric:
    """Return the metric that `eval.best_metric` names, or the first: it tells which evaluation is the best.

    Raises ValueError: there is no such metric, or no value of it is better than another.
    """
    judging = [metric for metric in metrics if metric.larger_is_better is not None]
    for metric in judging:
        if name in (None, metric.key):
            return metric
    raise ValueError(
        f"eval.best_metric={name} is not measured, or says not which model is better; choose one of "
        f"{', '.join(metric.key for metric in judging)}"
    )


def metric_of_key(key: str, further: Sequence[Metric] = ()) -> Metric | None:
    """Return the metric of a key of a record, such as `test_auc` or `test_auc.click`; None if it is of no metric."""
    name, _, task = key.removeprefix("test_").partition(".")
    found = next((metric for metric in (*METRICS, *further) if metric.name == name), None)
    if found is None or not key.startswith("test_"):
        return None
    return found.of(task) if task else found
