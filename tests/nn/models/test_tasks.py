"""A dataset's labels as tasks: what is trained and measured is read from them."""

import math

import numpy as np
import pytest
import torch

from configs.schema import TaskConfig
from dataloading.dataset.row_columns import RowColumn
from nn.layers.bce_loss import bce_loss_share
from nn.models.metric import AUC, METRICS, Metric, best_of
from nn.models.tasks import (
    Task,
    auc_key,
    loss_share,
    metrics_of,
    tasks_of,
)
from nn.observability.progress import (
    format_test,
    format_train,
)
from nn.observability.run_directory import (
    SUMMARY_KEYS,
    empty_summary,
)

_, LOG_LOSS, _, _, _, CALIBRATION, RMSE, MAE = METRICS

MRR = Metric(name="mrr", title="test MRR", while_training=True)
CLICK = RowColumn("click")
RATING = RowColumn("rating", dtype=np.dtype(np.float32))


def test_a_binary_label_is_one_task():
    (task,) = tasks_of([CLICK])
    assert (task.name, task.is_binary, task.options) == ("click", True, TaskConfig())
    assert metrics_of([task]) == [AUC, LOG_LOSS]
    assert [metric.test_key for metric in task.metrics] == ["test_auc", "test_log_loss"]
    assert [metric.train_key for metric in task.metrics if metric.while_training] == ["train_auc"]


def test_a_regression_label_has_the_root_mean_squared_error():
    (task,) = tasks_of([RATING])
    assert metrics_of([task]) == [RMSE]
    assert metrics_of(tasks_of([RATING], further=["mae"])) == [RMSE, MAE]


def test_metrics_of_several_tasks_have_the_names_of_both():
    tasks = tasks_of([CLICK, RATING], further=["calibration"], has_groups=True)
    assert [metric.test_key for metric in metrics_of(tasks)] == [
        *("test_auc.click", "test_log_loss.click", "test_gauc.click", "test_calibration.click"),
        "test_rmse.rating",
    ]
    assert [metric.title for metric in metrics_of(tasks)][0::4] == ["click AUC", "rating RMSE"]


@pytest.mark.parametrize(
    ("labels", "arguments", "message"),
    [
        ([CLICK], {"options": {"bought": TaskConfig()}}, "no label 'bought', only click"),
        (
            [RATING],
            {"options": {"rating": TaskConfig(focal_gamma=2)}},
            "'rating' is a regression label",
        ),
        (
            [RATING],
            {"options": {"rating": TaskConfig(keep_rate=0.5)}},
            "'rating' is a regression label",
        ),
        ([CLICK], {"options": {"click": TaskConfig(weight=0)}}, "the weight of every label is 0"),
        (
            [CLICK],
            {"further": ["ndcg"]},
            "eval.metrics names ndcg, which is none of pr_auc, normalised_entropy, calibration, mae, nor package.module:NAME",
        ),
        ([CLICK], {"further": ["mae"]}, "eval.metrics=mae is of regression labels"),
        ([RATING], {"further": ["calibration"]}, "eval.metrics=calibration is of binary labels"),
        ([RATING], {"has_groups": True}, "eval.group is of binary labels"),
    ],
)
def test_options_without_use_are_refused(labels, arguments, message):
    with pytest.raises(ValueError, match=message):
        tasks_of(labels, **arguments)


def test_the_plain_loss_of_one_label_is_the_cross_entropy_bit_by_bit():
    logits, labels = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0])
    assert torch.equal(
        loss_share(tasks_of([CLICK]), logits, labels, 2, 4), bce_loss_share(logits, labels, 2, 4)
    )


def test_the_loss_is_the_weighted_sum_of_the_tasks():
    options = {"click": TaskConfig(weight=3.0), "rating": TaskConfig(weight=0.5)}
    logits = torch.tensor([[0.5, 1.0], [-1.0, 2.0], [9.0, 9.0]])
    labels = torch.tensor([[1.0, 3.0], [0.0, 2.5], [0.0, 0.0]])
    share = loss_share(tasks_of([CLICK, RATING], options), logits, labels, 2, 4)
    clicks = math.log1p(math.exp(-0.5)) + math.log1p(math.exp(-1.0))
    assert share.item() == pytest.approx(3 * clicks / 4 + 0.5 * (4 + 0.25) / 4)
    weights = torch.tensor([2.0, 0.0, 0.0])
    weighted = loss_share(
        tasks_of([CLICK, RATING], options), logits, labels, 2, 4, weights, torch.tensor(5.0)
    )
    assert weighted.item() == pytest.approx(
        3 * 2 * math.log1p(math.exp(-0.5)) / 5 + 0.5 * 2 * 4 / 5
    )


@pytest.mark.parametrize(("logits", "got"), [((4,), r"\[B\]"), ((4, 3), r"\[B, 3\]")])
def test_a_model_with_another_number_of_logits_is_refused(logits, got):
    tasks = tasks_of([CLICK, RATING])
    with pytest.raises(ValueError, match=rf"logits {got}, .* \(click, rating\) need \[B, 2\]"):
        loss_share(tasks, torch.zeros(logits), torch.zeros(4, 2), 4, 4)


def test_predictions_are_shifted_by_the_logarithm_of_the_keep_rate():
    logits = torch.tensor([0.0, 1.0])
    (task,) = tasks_of([CLICK], {"click": TaskConfig(keep_rate=0.1)})
    # Odds of 1 among a tenth of the negatives are odds of 1 in 10.
    assert task.shifted(logits, None)[0].sigmoid().item() == pytest.approx(1 / 11)
    (plain,) = tasks_of([CLICK])
    assert plain.shifted(logits, None) is logits
    rates = torch.tensor([0.5, 1.0])
    assert plain.shifted(logits, rates).tolist() == pytest.approx([math.log(0.5), 1.0])
    (rating,) = tasks_of([RATING])
    assert rating.shifted(logits, rates) is logits


def test_a_positive_weight_is_corrected_and_a_focal_loss_is_not():
    logits = torch.tensor([0.0, 1.0])
    (task,) = tasks_of([CLICK], {"click": TaskConfig(positive_weight=20)})
    # Odds of 1 with every positive row counted 20 times are odds of 1 in 20.
    assert task.shifted(logits, None)[0].sigmoid().item() == pytest.approx(1 / 21)
    assert task.note == (
        "tasks.click.positive_weight=20 multiplies the odds of the logits by it; evaluation, predict and serving divide by "
        "it again, so that scores are probabilities"
    )
    both = TaskConfig(positive_weight=20, keep_rate=0.1)
    assert tasks_of([CLICK], {"click": both})[0].shift == pytest.approx(math.log(0.1 / 20))
    rates = torch.tensor([0.5, 1.0])
    assert task.shifted(logits, rates)[0].item() == pytest.approx(math.log(0.5 / 20))
    (focal,) = tasks_of([CLICK], {"click": TaskConfig(positive_weight=20, focal_gamma=2)})
    assert focal.shift == 0
    assert "no probabilities" in focal.note
    (plain,) = tasks_of([CLICK])
    assert (plain.shift, plain.note) == (0, None)


def test_a_model_of_weighted_positives_is_calibrated_after_the_correction():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=draw)
    labels = (torch.rand(20_000, generator=draw) < (x - 3).sigmoid()).float()
    (task,) = tasks_of([CLICK], {"click": TaskConfig(positive_weight=20)})
    weights = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=50)

    def loss():
        optimizer.zero_grad()
        value = task.loss_share(weights[0] + weights[1] * x, labels, len(x), len(x))
        value.backward()
        return value

    optimizer.step(loss)
    logits = (weights[0] + weights[1] * x).detach()
    assert logits.sigmoid().mean() > 5 * labels.mean()
    # Weighted least squares of another weighting fit other weights, so equal up to the error of the fit.
    assert task.shifted(logits, None).sigmoid().mean().item() == pytest.approx(
        labels.mean().item(), rel=0.05
    )


def test_records_and_terminal_have_the_metrics_of_the_tasks():
    metrics = metrics_of([Task(name="click", metrics=(LOG_LOSS, MRR))])
    assert list(empty_summary(metrics)) == [
        SUMMARY_KEYS[0],
        "test_log_loss",
        "test_mrr",
        *SUMMARY_KEYS[1:],
    ]
    record = {"step": 8, "test_mrr": math.nan, "test_log_loss": 0.5, "test_rows": 4, "eval_s": 1.0}
    assert "log loss 0.5000  test MRR n/a  (4 rows" in format_test(record, metrics)
    train = {"step": 8, "loss": 0.5, "train_mrr": 0.25, "samples_per_s": 1.0, "step_ms": 1.0}
    assert "loss 0.5000  mrr 0.2500  " in format_train(train, metrics, 16, 1.0)


def test_the_best_metric_is_the_first_unless_another_is_named():
    tasks = tasks_of([CLICK], further=["calibration"])
    assert best_of(metrics_of(tasks), None) == best_of(metrics_of(tasks), "auc") == AUC
    assert best_of(metrics_of(tasks), "log_loss") == LOG_LOSS
    assert CALIBRATION in metrics_of(tasks)
    for name in ("ndcg", "calibration"):
        with pytest.raises(ValueError, match=rf"eval.best_metric={name} .*auc, log_loss"):
            best_of(metrics_of(tasks), name)
    several = tasks_of([RATING, CLICK])
    assert best_of(metrics_of(several), None).key == "rmse.rating"
    assert best_of(metrics_of(several), "auc.click").test_key == "test_auc.click"


def test_the_auc_of_a_run_is_the_named_or_the_first_one():
    record = {"step": 1, "test_rmse.r": 1.0, "test_auc.a": 0.6, "test_auc.b": 0.7}
    assert auc_key(record, None) == "test_auc.a"
    assert auc_key(record, "rmse.r") == "test_auc.a"
    assert auc_key(record, "auc.b") == "test_auc.b"
    assert auc_key({"step": 1, "test_auc": 0.5}, "log_loss") == "test_auc"
    assert auc_key({"test_rmse": 0.5}, None) is None


@pytest.mark.parametrize("metric", [AUC, LOG_LOSS])
def test_a_metric_knows_which_value_is_better(metric):
    better, worse = (0.8, 0.7) if metric == AUC else (0.4, 0.5)
    assert metric.improves(better, worse)
    assert metric.improves(worse, math.nan)
    assert not metric.improves(worse, better)
    assert not metric.improves(better, better)
    assert not metric.improves(math.nan, worse)
    assert not metric.improves(math.nan, math.nan)
