"""Calibration, gain and lift against scikit-learn and plain sorting."""

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve

from nn.metrics.prediction_curves import (
    CALIBRATION_BINS,
    GAIN_PERCENT,
    NUM_BUCKETS,
    describe_predictions,
    score_buckets,
)

ROWS = 40_000


class OneRank:
    rank, world_size = 0, 1

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


def described(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None):
    return describe_predictions(score_buckets(logits, labels, weights, OneRank()))


@pytest.fixture(scope="module")
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, generator=generator) - 1
    return logits, torch.rand(ROWS, generator=generator) < (0.7 * logits).sigmoid()


def test_buckets_hold_every_row_and_never_part_equal_scores(drawn):
    logits, labels = drawn
    buckets = score_buckets(logits, labels, None, OneRank())
    assert NUM_BUCKETS / 2 < len(buckets.rows) <= NUM_BUCKETS
    assert buckets.rows.sum() == ROWS
    assert buckets.positives.sum() == int(labels.sum())
    assert buckets.predicted.sum() == pytest.approx(float(logits.double().sigmoid().sum()))
    assert buckets.rows.max() < 5 * ROWS / NUM_BUCKETS
    rounded = (logits * 2).round()
    ends = score_buckets(rounded, labels, None, OneRank()).rows.cumsum()
    _, counts = np.unique(rounded, return_counts=True)
    assert len(counts) - 5 <= len(ends) <= len(counts)
    assert set(ends) <= set(counts.cumsum())


def test_calibration_is_that_of_scikit_learn(drawn):
    logits, labels = drawn
    rates, predictions = calibration_curve(
        labels.numpy(), logits.sigmoid().numpy(), n_bins=CALIBRATION_BINS, strategy="quantile"
    )
    bins = described(*drawn)["calibration"]
    assert sum(b["rows"] for b in bins) == ROWS
    # Edges lie between buckets of a thousandth of the rows.
    assert [b["prediction"] for b in bins] == pytest.approx(predictions, rel=0.02)
    assert [b["label"] for b in bins] == pytest.approx(rates, rel=0.05)


@pytest.mark.parametrize("shift", [0.0, -6.0])
def test_the_histogram_is_that_of_the_predictions(drawn, shift):
    logits, labels = drawn[0] + shift, drawn[1]
    scores = described(logits, labels)["scores"]
    assert scores["logarithmic"] == (shift < 0)
    for part, rows in (("weight", logits), ("positives", logits[labels])):
        wanted, _ = np.histogram(rows.double().sigmoid().numpy(), scores["edges"])
        # A bucket of rows, a thousandth of them, is not parted at an edge.
        assert np.abs(np.cumsum(scores[part]) - np.cumsum(wanted)).max() < 5 * ROWS / NUM_BUCKETS
    assert sum(scores["weight"]) == ROWS


def test_gain_is_that_of_sorted_rows(drawn):
    logits, labels = drawn
    gain = described(*drawn)["gain"]
    ordered = labels[logits.argsort(descending=True)].double().cumsum(0)
    for percent, gained, lift in zip(
        GAIN_PERCENT, gain["positives_percent"], gain["lift"], strict=True
    ):
        wanted = 100 * ordered[round(ROWS * percent / 100) - 1] / ordered[-1]
        assert gained == pytest.approx(float(wanted), abs=0.1)
        assert lift == pytest.approx(gained / percent)


def test_weights_count_as_repeated_rows(drawn):
    logits, labels = (values[:2000] for values in drawn)
    times = torch.arange(2000) % 3
    weighted = described(logits, labels, times.float())
    repeated = described(logits.repeat_interleave(times), labels.repeat_interleave(times))
    for key in ("mean_prediction", "mean_label"):
        assert weighted[key] == pytest.approx(repeated[key])
    lifts = [found["gain"]["lift"][GAIN_PERCENT.index(5) :] for found in (weighted, repeated)]
    assert lifts[0] == pytest.approx(lifts[1], rel=0.05)


@pytest.mark.parametrize("label", [False, True])
def test_a_single_class_has_no_gain_or_a_lift_of_one(label):
    found = described(torch.linspace(-2, 2, 100), torch.full((100,), label))
    assert found["mean_label"] == float(label)
    assert found["gain"] is None if not label else set(found["gain"]["lift"]) == {1.0}


def test_constant_scores_are_one_bin_in_random_order():
    found = described(torch.zeros(100), torch.arange(100) < 30)
    assert [b["prediction"] for b in found["calibration"]] == [0.5]
    assert found["calibration_error"] == pytest.approx(0.2)
    assert found["gain"]["lift"] == pytest.approx([1.0] * len(GAIN_PERCENT))


def test_without_rows_nothing_is_defined():
    found = described(torch.empty(0), torch.empty(0, dtype=torch.bool))
    assert found == {
        "rows": 0,
        "mean_prediction": None,
        "mean_label": None,
        "calibration_error": None,
        "calibration": [],
        "scores": None,
        "gain": None,
    }
