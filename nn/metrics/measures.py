"""The project's metrics, as functions of the rows of one task; `nn.models.metric.METRICS` names them."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from nn.metrics.grouped_auc import grouped_auc
from nn.metrics.measured_rows import MeasuredRows


def auc(rows: MeasuredRows) -> float:
    """Return the area under the ROC curve; nan if all labels are the same."""
    return rows.totals["auc"]


def log_loss(rows: MeasuredRows) -> float:
    """Return the mean binary cross entropy, natural logarithm."""
    return rows.totals["log_loss"]


def gauc(rows: MeasuredRows) -> float:
    """Return the AUC within the groups of `eval.group`, weighted by their rows; nan if no group has both labels."""
    return rows.on_rank0(grouped_auc, rows.predictions, rows.labels, rows.groups, rows.weights)


def pr_auc(rows: MeasuredRows) -> float:
    """Return the average precision, the area under the steps of the precision-recall curve; nan if no label is 1."""
    return rows.on_rank0(average_precision, rows.predictions, rows.labels, rows.weights)


def average_precision(scores: Tensor, is_positive: Tensor, weights: Tensor | None = None) -> float:
    """Compute the mean precision over the positives, as scikit-learn's `average_precision_score`; nan without, or with a nan."""
    if not scores.numel() or bool(scores.isnan().any()):
        return math.nan
    order = scores.argsort(descending=True)
    scores, is_positive = scores[order], is_positive[order]
    ones = torch.ones_like(scores, dtype=torch.float64)
    counts = ones if weights is None else weights[order].double()
    ends_tie = pad(scores[1:] != scores[:-1], (0, 1), value=True)
    above = counts.cumsum(0)[ends_tie]
    positives = (counts * is_positive).cumsum(0)[ends_tie]
    gained = positives.diff(prepend=positives.new_zeros(1))
    # Rows of weight 0 gain nothing, whatever the precision.
    precision = positives / above.clamp_min(torch.finfo(above.dtype).tiny)
    total = float(positives[-1])
    return float((gained * precision).sum()) / total if total > 0 else math.nan


def normalised_entropy(rows: MeasuredRows) -> float:
    rate = rows.totals["label_mean"]
    return loss_over_entropy(
        rows.totals["log_loss"], rate, rows.totals.get("others_mean", 1 - rate)
    )


def calibration(rows: MeasuredRows) -> float:
    """Return the sum of the predicted probabilities divided by that of the labels; nan if no label is 1."""
    (predicted,) = rows.sums(lambda logits, _, weights: [(logits.sigmoid() * weights).sum()])
    clicks = rows.totals["label_mean"] * rows.totals["weight"]
    return predicted / clicks if clicks > 0 else math.nan


def rmse(rows: MeasuredRows) -> float:
    weight = rows.totals["weight"]
    return math.sqrt(rows.totals["squares"] / weight) if weight > 0 else math.nan


def mae(rows: MeasuredRows) -> float:
    weight = rows.totals["weight"]
    return rows.totals["absolute"] / weight if weight > 0 else math.nan


def loss_over_entropy(loss: float, rate: float, others: float) -> float:
    """Compute log loss / entropy of a label (He et al. 2014, equation 1) with mean `rate`, 1 - `others`; nan if either is 0."""
    if not (rate > 0 and others > 0):
        return math.nan
    return loss / -(rate * _log(rate, others) + others * _log(others, rate))


def _log(part: float, others: float) -> float:
    """Return the logarithm of a part, exact too where the others are nearly nothing."""
    return math.log1p(-others) if others < part else math.log(part)
