"""Metrics of several tasks over the rows of two ranks, against scikit-learn and plain formulas."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    roc_auc_score,
)

from configs.schema import TaskConfig
from dataloading.dataset.row_columns import RowColumn
from nn.metrics.grouped_auc import grouped_auc, weighted_auc
from nn.metrics.measured_rows import MeasuredRows, RowGather
from nn.metrics.measures import loss_over_entropy
from nn.metrics.task_metrics import TaskMetrics
from nn.models.tasks import tasks_of
from tests.helpers.composed import ranks_of_cpu
from tests.helpers.distributed import run_distributed

CLICK = RowColumn("click")
RATING = RowColumn("rating", dtype=np.dtype(np.float32))
FURTHER = ("normalised_entropy", "calibration", "mae", "pr_auc")
ROWS = 300
SHARES = [slice(0, 170), slice(170, ROWS)]


def drawn(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    # Few different logits, so that there are ties; few groups, some of one row.
    click = torch.randn(ROWS, generator=generator).mul(4).round().div(4)
    rating = torch.randn(ROWS, generator=generator)
    labels = torch.stack(
        [(torch.rand(ROWS, generator=generator) < click.sigmoid()).float(), rating * 2], 1
    )
    weights = torch.randint(0, 4, (ROWS,), generator=generator) / 2
    rates = torch.where(torch.rand(ROWS, generator=generator) < 0.5, 0.25, 1.0)
    groups = torch.randint(0, 60, (ROWS,), generator=generator)
    return torch.stack([click, rating], 1), labels, weights, rates, groups


def batch_of(rows, *, padding=0, weights=True, rates=True):
    """A batch of some rows, followed by padding that must not count."""
    logits, labels, weight, rate, groups = (values[rows] for values in drawn())

    def padded(values, fill):
        return torch.cat([values, torch.full((padding, *values.shape[1:]), fill)])

    batch = SimpleNamespace(
        labels=padded(labels, 1.0),
        num_valid=len(labels),
        global_valid=ROWS,
        weights=padded(weight, 0.0) if weights else None,
        keep_rates=padded(rate, 1.0) if rates else None,
        feature=lambda _: SimpleNamespace(values=lambda: groups),
    )
    return padded(logits, math.nan), batch


def measured(weights: bool, rates: bool) -> tuple[list[dict], list[dict]]:
    """Metrics and curves that this rank computes; the second rank has two batches and an idle one has none."""
    options = {"click": TaskConfig(keep_rate=None if rates else 0.5)}
    tasks = tasks_of([CLICK, RATING], options, further=FURTHER, has_groups=True)
    results, curves = [], []
    with ranks_of_cpu() as ranks:
        for shares in (SHARES, [slice(0, ROWS), slice(0, 0)]):
            metrics = TaskMetrics(
                tasks, torch.device("cpu"), ranks, has_weights=weights, group="user"
            )
            share = shares[ranks.rank] if ranks.world_size > 1 else slice(0, ROWS)
            rows = range(*share.indices(ROWS))
            for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                metrics.update(*batch_of(list(part), padding=3, weights=weights, rates=rates))
            results.append(metrics.compute())
            curves.append(metrics.describe_predictions())
    return results, curves


def gauc_by_loop(scores, labels, groups, weights):
    total = impressions = 0.0
    for group in np.unique(groups):
        rows = (groups == group) & (weights > 0)
        if len(set(labels[rows])) == 2:
            share = weights[rows].sum()
            total += share * roc_auc_score(labels[rows], scores[rows], sample_weight=weights[rows])
            impressions += share
    return total / impressions


@pytest.fixture(scope="module")
def of_two_ranks():
    cases = [(weights, rates) for weights in (False, True) for rates in (False, True)]
    return {case: run_distributed(measured, 2, *case) for case in cases}


@pytest.mark.parametrize("rates", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_two_ranks_tell_the_numbers_of_scikit_learn(of_two_ranks, weights, rates):
    logits, labels, weight, rate, groups = (values.double().numpy() for values in drawn())
    weight = weight if weights else np.ones(ROWS)
    shifted = (logits[:, 0].astype("f4") + np.log(rate if rates else 0.5).astype("f4")).astype("f8")
    p, clicks = 1 / (1 + np.exp(-shifted)), labels[:, 0]
    loss = log_loss(clicks, p, sample_weight=weight)
    mean = np.average(clicks, weights=weight)
    squares = mean_squared_error(labels[:, 1], logits[:, 1], sample_weight=weight)
    wanted = {
        "is_finite": True,
        "rows": ROWS,
        "auc.click": roc_auc_score(clicks, shifted, sample_weight=weight),
        "log_loss.click": loss,
        "gauc.click": gauc_by_loop(shifted, clicks, groups, weight),
        "pr_auc.click": average_precision_score(clicks, shifted, sample_weight=weight),
        "normalised_entropy.click": loss / -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)),
        "calibration.click": (p * weight).sum() / (clicks * weight).sum(),
        "rmse.rating": math.sqrt(squares),
        "mae.rating": mean_absolute_error(labels[:, 1], logits[:, 1], sample_weight=weight),
    }
    (first, _), (second, _) = of_two_ranks[weights, rates]
    alone, _ = measured(weights, rates)
    assert first == second
    for result in (*first, *alone):
        assert result == pytest.approx(wanted, rel=1e-6)
    # The number of ranks changes the order of the sums alone.
    assert first[0] == pytest.approx(alone[0], rel=1e-12)


@pytest.mark.parametrize("weights", [False, True])
def test_two_ranks_describe_the_predictions_of_one(of_two_ranks, weights):
    (_, first), (_, second) = of_two_ranks[weights, True]
    _, alone = measured(weights, True)
    assert first == second
    assert list(first[0]) == ["click"]
    for described in first:
        (one,), two = alone[0].values(), described["click"]
        assert two["rows"] == one["rows"] == ROWS
        # So few distinct scores have a bucket each, for any number of ranks.
        for key in ("mean_prediction", "mean_label", "calibration_error"):
            assert two[key] == pytest.approx(one[key], rel=1e-9), key
        assert two["gain"]["lift"] == pytest.approx(one["gain"]["lift"], rel=1e-9)
        for mine, other in zip(one["calibration"], two["calibration"], strict=True):
            assert other == pytest.approx(mine, rel=1e-9)


def one_class(ranks):
    metrics = TaskMetrics(
        tasks_of([CLICK], further=FURTHER[:2], has_groups=True),
        torch.device("cpu"),
        ranks,
        group="user",
    )
    empty = metrics.compute()
    logits, batch = batch_of([0, 1, 2], weights=False, rates=False)
    batch.labels = torch.zeros(3)
    metrics.update(logits[:, 0], batch)
    return empty, metrics.compute()


def test_metrics_without_a_value_are_nan():
    with ranks_of_cpu() as ranks:
        empty, zeros = one_class(ranks)
    undefined = ("auc", "gauc", "normalised_entropy", "calibration")
    assert all(math.isnan(empty[name]) for name in (*undefined, "log_loss"))
    assert all(math.isnan(zeros[name]) for name in undefined)
    assert math.isfinite(zeros["log_loss"])
    assert zeros["is_finite"]


def test_predictions_that_are_not_finite_are_reported_of_any_task():
    tasks = tasks_of([CLICK, RATING])
    with ranks_of_cpu() as ranks:
        for column in (0, 1):
            metrics = TaskMetrics(tasks, torch.device("cpu"), ranks)
            metrics.update(*batch_of([0, 1, 2], weights=False, rates=False))
            logits, batch = batch_of([3, 4, 5], weights=False, rates=False)
            logits[1, column] = math.nan
            metrics.update(logits, batch)
            assert not metrics.compute()["is_finite"]
            assert metrics.first_not_finite() == (1, 1, 1)


def test_kept_rows_are_restored():
    tasks = tasks_of([CLICK, RATING])
    with ranks_of_cpu() as ranks:
        metrics, other = (
            TaskMetrics(tasks, torch.device("cpu"), ranks, has_weights=True, while_training=True)
            for _ in range(2)
        )
        assert metrics.rows() == {}
        metrics.update(*batch_of(list(range(40)), padding=2))
        rows = metrics.rows()
        assert {name: values.shape for name, values in rows.items()} == {
            "logits": (40, 2),
            "labels": (40, 2),
            "weights": (40,),
        }
        other.restore(rows)
        assert other.compute() == metrics.compute()


def test_the_auc_of_weighted_rows_is_that_of_repeated_ones():
    logits, labels, *_ = drawn()
    times = torch.arange(ROWS) % 4
    scores, positive = logits[:, 0], labels[:, 0] > 0.5
    again = scores.repeat_interleave(times), positive.repeat_interleave(times)
    assert weighted_auc(scores, positive, times.float()) == pytest.approx(
        roc_auc_score(again[1], again[0]), abs=1e-14
    )


@pytest.mark.parametrize("heavy", [1e13, 1e14, 1e15, 1e16, 1e-300, 1e300])
def test_light_groups_count_behind_heavy_ones_that_do_not(heavy):
    """Sums over all groups lost them: GAUC was -0.47 for a weight of 1e15."""
    draw = torch.Generator().manual_seed(4)
    scores, groups = torch.rand(900, generator=draw), torch.arange(900) // 300
    positive = (torch.rand(900, generator=draw) < scores) & (groups > 0)
    weights = torch.ones(900, dtype=torch.float64).masked_fill(groups == 0, heavy)
    alone = grouped_auc(scores[300:], positive[300:], groups[300:])
    assert grouped_auc(scores, positive, groups, weights) == pytest.approx(alone, abs=1e-14)
    # Weights of all groups together change nothing.
    assert grouped_auc(scores[300:], positive[300:], groups[300:], weights[300:] * heavy) == (
        pytest.approx(alone, abs=1e-14)
    )


def test_gauc_is_that_of_each_group_by_itself():
    draw = np.random.default_rng(5)
    for _ in range(100):
        size = int(draw.integers(2, 120))
        groups = draw.integers(0, draw.integers(1, 12), size)
        scores, labels = draw.integers(0, 9, size) / 8, draw.random(size) < 0.4
        spread = draw.integers(0, 31)
        weights = 10.0 ** draw.integers(-spread, spread + 1, size) * (draw.random(size) < 0.9)
        both = [
            group
            for group in np.unique(groups)
            if len(set(labels[(groups == group) & (weights > 0)])) == 2
        ]
        found = grouped_auc(*map(torch.from_numpy, (scores, labels, groups, weights)))
        if not both:
            assert math.isnan(found)
            continue
        assert found == pytest.approx(
            gauc_by_pairs(scores, labels, groups, weights, both), rel=1e-12
        )


def gauc_by_pairs(scores, labels, groups, weights, both) -> float:
    """Count pairs with exact fractions."""
    total, impressions = Fraction(0), Fraction(0)
    for group in both:
        rows = np.flatnonzero((groups == group) & (weights > 0))
        exact = {row: Fraction(weights[row]) for row in rows}
        won = pairs = Fraction(0)
        for up in rows[labels[rows]]:
            for down in rows[~labels[rows]]:
                pair = exact[up] * exact[down]
                pairs += pair
                won += pair * Fraction(
                    int(scores[up] > scores[down]) * 2 + int(scores[up] == scores[down]), 2
                )
        share = sum(exact.values())
        total += share * won / pairs
        impressions += share
    return float(total / impressions)


def test_the_entropy_of_a_label_of_which_one_value_has_all_the_weight():
    logits, labels = torch.tensor([2.0, 1.0]), torch.tensor([True, False])
    losses = [math.log1p(math.exp(-2.0)), math.log1p(math.exp(1.0))]
    with ranks_of_cpu() as ranks:
        for heavy in (1.0, 1e16):
            weights = torch.tensor([heavy, 1.0], dtype=torch.float64)
            device = torch.device("cpu")
            gather = RowGather(device, ranks)
            measured = MeasuredRows(logits, labels, weights, torch.empty(0), gather).totals
            rate, others = measured["label_mean"], measured["others_mean"]
            loss = (heavy * losses[0] + losses[1]) / (heavy + 1)
            entropy = others * (1 - math.log(others)) if heavy > 1 else math.log(2)
            assert loss_over_entropy(measured["log_loss"], rate, others) == pytest.approx(
                loss / entropy
            )


def test_groups_of_one_class_do_not_count():
    scores = torch.tensor([0.1, 0.9, 0.5, 0.4, 0.3])
    positive = torch.tensor([False, True, True, False, True])
    groups = torch.tensor([7, 7, 3, 9, 9])
    # Group 7 has AUC 1, group 9 has 0 (0.3 below 0.4), group 3 has one class.
    assert grouped_auc(scores, positive, groups) == 0.5
    assert grouped_auc(scores, positive, groups, torch.tensor([3.0, 3, 1, 1, 1])) == 0.75
    assert math.isnan(grouped_auc(scores, torch.ones(5, dtype=torch.bool), groups))
