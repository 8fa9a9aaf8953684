"""Calibration and gain of a binary label's predictions, over the rows of all ranks.

Rows are counted in buckets of scores, whose edges are quantiles of a sample; counts and sums of a bucket are exact. Equal
scores are never parted, so that the curves do not depend on the order of the rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nn.distributed.process_group import Ranks
from nn.metrics.ranking import BLOCK_ROWS

NUM_BUCKETS = 1000
SAMPLED_ROWS = 8192
"""Rows per rank from which the edges of the buckets are taken."""
CALIBRATION_BINS = 20
HISTOGRAM_BINS = 40
LOG_BELOW, LOG_FROM = 0.1, 20.0
"""Predictions are shown by their logarithms where their mean is below the first number, and the largest is at least the second
number times the smallest one."""
GAIN_PERCENT = (0.1, 0.2, 0.5, *range(1, 101))
"""Percentages of the rows, those of the highest scores, at which gain and lift are recorded."""


@dataclass(frozen=True, slots=True)
class ScoreBuckets:
    """Rows by their scores, the lowest first, float64 [N] each: number, weight, weight of label 1, and weighted predictions."""

    rows: np.ndarray
    weight: np.ndarray
    positives: np.ndarray
    predicted: np.ndarray


def score_buckets(
    logits: Tensor, is_positive: Tensor, weights: Tensor | None, collectives: Ranks
) -> ScoreBuckets:
    """Count all ranks' rows in buckets of scores, the same on each; logits, float32 [B], are finite and labels bool."""
    edges = _edges(logits, collectives)
    sums = torch.zeros(4, len(edges) + 1, dtype=torch.float64, device=logits.device)
    for start in range(0, len(logits), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        values = logits[block]
        bucket = torch.searchsorted(edges, values, right=True)
        weight = torch.ones_like(values).double() if weights is None else weights[block].double()
        positive, predicted = weight * is_positive[block], weight * values.double().sigmoid()
        for total, part in zip(
            sums, (torch.ones_like(weight), weight, positive, predicted), strict=True
        ):
            total.index_add_(0, bucket, part)
    counted = collectives.all_reduce_sum(sums).cpu().numpy()
    return ScoreBuckets(*counted[:, counted[0] > 0])


def _edges(logits: Tensor, collectives: Ranks) -> Tensor:
    """Return up to `NUM_BUCKETS` - 1 distinct scores, about equally many rows apart, the same on all ranks."""
    count = min(len(logits), SAMPLED_ROWS)
    # Each rank fills a row of its own, and the last column counts its samples.
    samples = torch.zeros(
        collectives.world_size, SAMPLED_ROWS + 1, dtype=torch.float64, device=logits.device
    )
    if count:
        positions = torch.linspace(0, len(logits) - 1, count, dtype=torch.float64).round().long()
        samples[collectives.rank, :count] = logits[positions.to(logits.device)].double()
        samples[collectives.rank, -1] = count
    samples = collectives.all_reduce_sum(samples)
    is_sampled = torch.arange(SAMPLED_ROWS, device=logits.device) < samples[:, -1:]
    ordered = samples[:, :-1][is_sampled].sort().values
    if not len(ordered):
        return ordered.float()
    positions = torch.linspace(0, len(ordered) - 1, NUM_BUCKETS + 1, dtype=torch.float64)[1:-1]
    return ordered[positions.round().long().to(ordered.device)].float().unique()


def describe_predictions(buckets: ScoreBuckets) -> dict[str, Any]:
    """Return calibration, gain and lift as plain numbers; those that are not defined are None.

    Returns:
        `rows`, `mean_prediction`, `mean_label` and `calibration_error`, the mean distance of the two over the bins.
        `calibration`: per bin of about equally many rows `rows`, `weight`, and the means `prediction` and `label`.
        `scores`: a histogram of the predictions: `edges` [n + 1], whether these are `logarithmic`, and `weight` and `positives`
        [n] of their rows. A bucket of rows counts where its mean prediction is.
        `gain`: of the rows with the highest scores, `rows_percent`, `positives_percent`, their part of all positives, and
        `lift`, the rate of positives among them over that of all rows. A point inside a bucket is interpolated.
    """
    weight, positives = buckets.weight.sum(), buckets.positives.sum()
    is_defined = weight > 0
    bins = list(_bins(buckets)) if is_defined else []
    distance = sum(b["weight"] * abs(b["prediction"] - b["label"]) for b in bins)
    return {
        "rows": int(buckets.rows.sum()),
        "mean_prediction": float(buckets.predicted.sum() / weight) if is_defined else None,
        "mean_label": float(positives / weight) if is_defined else None,
        "calibration_error": float(distance / weight) if is_defined else None,
        "calibration": bins,
        "scores": _histogram(buckets) if is_defined else None,
        "gain": _gain(buckets) if positives > 0 else None,
    }


def _bins(buckets: ScoreBuckets) -> list[dict[str, Any]]:
    """Join buckets to at most `CALIBRATION_BINS` bins of about the same weight."""
    middle = buckets.weight.cumsum() - buckets.weight / 2
    number = (middle / buckets.weight.sum() * CALIBRATION_BINS).astype(int)
    # A light bucket behind heavy ones rounds to the end.
    number = number.clip(max=CALIBRATION_BINS - 1)
    found: list[dict[str, Any]] = []
    # `np.unique` imports what masked arrays need, 5 ms.
    for index in np.flatnonzero(np.bincount(number[buckets.weight > 0])):
        chosen = number == index
        weight = buckets.weight[chosen].sum()
        found.append(
            {
                "rows": int(buckets.rows[chosen].sum()),
                "weight": float(weight),
                "prediction": float(buckets.predicted[chosen].sum() / weight),
                "label": float(buckets.positives[chosen].sum() / weight),
            }
        )
    return found


def _histogram(buckets: ScoreBuckets) -> dict[str, Any]:
    """Count rows by prediction in `HISTOGRAM_BINS` equal intervals, of logarithms where most predictions are small."""
    has_weight = buckets.weight > 0
    weight, positives = buckets.weight[has_weight], buckets.positives[has_weight]
    means = buckets.predicted[has_weight] / weight
    low, high = means.min(), means.max()
    are_logarithms = bool(means @ weight < LOG_BELOW * weight.sum() and 0 < low * LOG_FROM <= high)
    space = np.geomspace if are_logarithms else np.linspace
    edges = space(low, max(high, low + 1e-6), HISTOGRAM_BINS + 1)
    bins = (np.searchsorted(edges, means, side="right") - 1).clip(0, HISTOGRAM_BINS - 1)
    return {
        "logarithmic": are_logarithms,
        "edges": edges.tolist(),
        "weight": np.bincount(bins, weight, HISTOGRAM_BINS).tolist(),
        "positives": np.bincount(bins, positives, HISTOGRAM_BINS).tolist(),
    }


def _gain(buckets: ScoreBuckets) -> dict[str, list[float]]:
    from_top = [
        np.concatenate(([0.0], column[::-1].cumsum()))
        for column in (buckets.weight, buckets.positives)
    ]
    of_rows, of_positives = (100 * column / column[-1] for column in from_top)
    gained = np.interp(GAIN_PERCENT, of_rows, of_positives)
    return {
        "rows_percent": list(GAIN_PERCENT),
        "positives_percent": gained.tolist(),
        "lift": (gained / np.array(GAIN_PERCENT)).tolist(),
    }
