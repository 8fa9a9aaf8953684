"""Tasks of a model: the labels that it learns, with the loss and the metrics of each."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from nn.layers.bce_loss import bce_loss_share

Loss = Callable[[Tensor, Tensor, int, int], Tensor]
"""A rank's share of a mean loss: logits [B], labels [B], valid rows of this rank and over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that tells how well a task is learnt.

    Attributes:
        name: as `RankingMetrics` and the records call it.
        title: of its value on the test split, on the terminal.
        undefined: printed where it has no value although there are rows.
        while_training: whether it is also measured on training rows.
        larger_is_better: whether a model with a larger value is the better one.
    """

    name: str
    title: str
    undefined: str = "n/a"
    while_training: bool = False
    larger_is_better: bool = True

    def improves(self, value: float, best: float) -> bool:
        """Return whether `value` is better than the best one so far, which is nan before the first; nan never is."""
        if math.isnan(value):
            return False
        return math.isnan(best) or (value > best if self.larger_is_better else value < best)

    @property
    def test_key(self) -> str:
        """Key of its value on the test split, in records and in the summary."""
        return f"test_{self.name}"

    @property
    def best_key(self) -> str:
        """Key of its best value on the test split, in the summary."""
        return f"best_{self.test_key}"

    @property
    def train_key(self) -> str:
        """Key of its value on training rows."""
        return f"train_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A label that a model learns.

    Attributes:
        name: of the task.
        label: its column in the dataset.
        loss: that is trained.
        metrics: that are measured, in the order of the records.
    """

    name: str
    label: str
    loss: Loss
    metrics: tuple[Metric, ...]


AUC = Metric(
    name="auc",
    title="test AUC",
    undefined="undefined (all labels are the same)",
    while_training=True,
)
LOG_LOSS = Metric(name="log_loss", title="log loss", larger_is_better=False)


def binary_tasks(labels: Sequence[str]) -> list[Task]:
    """Return a task per binary label.

    Raises:
        ValueError: there is not exactly one label; several are not supported yet.
    """
    if len(labels) != 1:
        raise ValueError(
            f"the dataset has {len(labels)} labels ({', '.join(labels)}), and exactly one binary label is supported "
            "yet; keep one of them in the feature spec's channel_spec.label"
        )
    return [
        Task(name=label, label=label, loss=bce_loss_share, metrics=(AUC, LOG_LOSS))
        for label in labels
    ]


def metrics_of(tasks: Iterable[Task]) -> list[Metric]:
    """Return the metrics of all tasks, in the order of the records."""
    return [metric for task in tasks for metric in task.metrics]


def best_metric(tasks: Iterable[Task], name: str | None) -> Metric:
    """Return the metric that `eval.best_metric` names: it tells which evaluation is the best.

    Args:
        tasks: of the model.
        name: of one of their metrics; None for the first.

    Raises:
        ValueError: no task has such a metric.
    """
    metrics = metrics_of(tasks)
    for metric in metrics:
        if name in (None, metric.name):
            return metric
    raise ValueError(
        f"eval.best_metric={name} is not measured; choose one of {', '.join(metric.name for metric in metrics)}"
    )


def loss_share(
    tasks: Sequence[Task], logits: Tensor, labels: Tensor, num_valid: int, global_valid: int
) -> Tensor:
    """Compute this rank's share of the loss of all tasks; the sum of the shares over ranks is the loss.

    Args:
        tasks: one.
        logits: [B], float32.
        labels: [B], float32.
        num_valid: number of valid rows on this rank; they come first, the others are padding.
        global_valid: number of valid rows over all ranks.
    """
    (task,) = tasks  # A single label is a vector, not a matrix of one column.
    return task.loss(logits, labels, num_valid, global_valid)
