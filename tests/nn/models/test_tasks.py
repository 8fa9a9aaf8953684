"""A dataset's labels as tasks: what is trained and measured is read from them."""

import math
from dataclasses import replace

import pytest
import torch

from nn.layers.bce_loss import bce_loss_share
from nn.models.tasks import (
    AUC,
    LOG_LOSS,
    Metric,
    best_metric,
    binary_tasks,
    loss_share,
    metrics_of,
)
from nn.observability.console import format_test, format_train
from nn.observability.run_directory import SUMMARY_KEYS, empty_summary

MRR = Metric(name="mrr", title="test MRR", while_training=True)


def test_a_binary_label_is_one_task():
    (task,) = binary_tasks(["clicked"])
    assert (task.name, task.label, task.loss) == ("clicked", "clicked", bce_loss_share)
    assert metrics_of([task]) == [AUC, LOG_LOSS]
    assert [metric.test_key for metric in task.metrics] == ["test_auc", "test_log_loss"]
    assert [metric.train_key for metric in task.metrics if metric.while_training] == ["train_auc"]


@pytest.mark.parametrize("labels", [[], ["clicked", "bought"]])
def test_another_number_of_labels_is_refused(labels):
    with pytest.raises(ValueError, match=rf"has {len(labels)} labels .*exactly one"):
        binary_tasks(labels)


def test_the_loss_is_the_tasks():
    logits, labels = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0])
    (task,) = tasks = binary_tasks(["clicked"])
    assert torch.equal(loss_share(tasks, logits, labels, 2, 4), task.loss(logits, labels, 2, 4))
    squared = replace(task, loss=lambda logits, labels, num, total: logits.square().sum() / total)
    assert loss_share([squared], logits, labels, 2, 4).item() == 5.25 / 4


def test_records_and_terminal_have_the_metrics_of_the_tasks():
    (task,) = binary_tasks(["clicked"])
    metrics = metrics_of([replace(task, metrics=(LOG_LOSS, MRR))])
    assert list(empty_summary(metrics)) == [
        SUMMARY_KEYS[0],
        "test_log_loss",
        "test_mrr",
        *SUMMARY_KEYS[1:],
    ]
    record = {"step": 8, "test_mrr": math.nan, "test_log_loss": 0.5, "test_rows": 4, "eval_s": 1.0}
    assert "log loss 0.5000  test MRR n/a  (4 rows" in format_test(record, metrics)
    train = {"step": 8, "loss": 0.5, "train_mrr": 0.25, "samples_per_s": 1.0, "step_ms": 1.0}
    assert "loss 0.5000  mrr 0.2500  " in format_train(train, metrics, 16)


def test_the_best_metric_is_the_first_unless_another_is_named():
    tasks = binary_tasks(["clicked"])
    assert best_metric(tasks, None) == best_metric(tasks, "auc") == AUC
    assert best_metric(tasks, "log_loss") == LOG_LOSS
    with pytest.raises(ValueError, match=r"eval.best_metric=ndcg is not measured; .*auc, log_loss"):
        best_metric(tasks, "ndcg")


@pytest.mark.parametrize("metric", [AUC, LOG_LOSS])
def test_a_metric_knows_which_value_is_better(metric):
    better, worse = (0.8, 0.7) if metric == AUC else (0.4, 0.5)
    assert metric.improves(better, worse)
    assert metric.improves(worse, math.nan)
    assert not metric.improves(worse, better)
    assert not metric.improves(better, better)
    assert not metric.improves(math.nan, worse)
    assert not metric.improves(math.nan, math.nan)
