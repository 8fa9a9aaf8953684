"""Exact average precision: what an AUC hides where labels of 1 are rare."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


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
