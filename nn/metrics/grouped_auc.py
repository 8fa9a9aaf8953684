"""Exact AUC within groups of rows, with weights, and its mean over groups (GAUC)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def auc_of_groups(
    scores: Tensor, is_positive: Tensor, groups: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the AUC of each group that has rows of both classes, and the weight of its rows: float64 [G] both.

    The AUC of a group is the part of its (positive, negative) pairs in the right order, a tie counting half; with weights
    every pair counts the product of its two. Scores, labels (bool), groups (integers) and weights are [B]; scores are not nan.
    """
    by_score = scores.argsort(stable=True)
    order = by_score[groups[by_score].argsort(stable=True)]
    scores, is_positive, groups = scores[order], is_positive[order], groups[order]
    counts = (
        torch.ones_like(scores, dtype=torch.float64) if weights is None else weights[order].double()
    )
    negatives = counts * ~is_positive
    positives = counts * is_positive
    group = _numbered(groups[1:] != groups[:-1])
    # Rows of one group and one score are a tie.
    tie = _numbered((groups[1:] != groups[:-1]) | (scores[1:] != scores[:-1]))
    num_groups, num_ties = int(group[-1]) + 1, int(tie[-1]) + 1
    group_of_tie = torch.zeros(num_ties, dtype=torch.int64, device=group.device)
    group_of_tie[tie] = group
    positives_of_group = _sums(positives, group, num_groups)
    negatives_of_group = _sums(negatives, group, num_groups)
    has_both = (positives_of_group > 0) & (negatives_of_group > 0)
    impressions = positives_of_group + negatives_of_group
    if weights is not None:
        # As parts of their group and class, which leaves its AUC as it is: in sums over all groups, light groups would be lost
        # behind heavy ones.
        positives = positives / positives_of_group.where(positives_of_group > 0, 1)[group]
        negatives = negatives / negatives_of_group.where(negatives_of_group > 0, 1)[group]
        positives_of_group = negatives_of_group = torch.ones_like(impressions)
    negatives_of_tie = _sums(negatives, tie, num_ties)
    # Negatives of the group below each tie: those of all ties before it, less those before the group's first one.
    before = pad(negatives_of_tie.cumsum(0)[:-1], (1, 0))
    numbers = torch.arange(num_groups, device=group.device)
    below = before - before[torch.searchsorted(group_of_tie, numbers)][group_of_tie]
    won = _sums(positives, tie, num_ties) * (below + negatives_of_tie / 2)
    pairs = (positives_of_group * negatives_of_group)[has_both]
    auc = _sums(won, group_of_tie, num_groups)[has_both] / pairs
    return auc, impressions[has_both]


def weighted_auc(scores: Tensor, is_positive: Tensor, weights: Tensor) -> float:
    """Compute the exact AUC of weighted rows; nan if a class has no weight, or a score is nan."""
    if not scores.numel() or bool(scores.isnan().any()):
        return math.nan
    auc, _ = auc_of_groups(
        scores, is_positive, torch.zeros_like(scores, dtype=torch.int64), weights
    )
    return float(auc[0]) if auc.numel() else math.nan


def grouped_auc(
    scores: Tensor, is_positive: Tensor, groups: Tensor, weights: Tensor | None = None
) -> float:
    """Compute GAUC: the mean AUC of the groups with both classes, weighted by their impressions.

    Zhou et al. 2018 (Deep Interest Network), section 6.2, with groups for users. nan if no group has both classes, or a
    score is nan.
    """
    if not scores.numel() or bool(scores.isnan().any()):
        return math.nan
    auc, impressions = auc_of_groups(scores, is_positive, groups, weights)
    return float((auc * impressions).sum() / impressions.sum()) if auc.numel() else math.nan


def _numbered(is_new: Tensor) -> Tensor:
    """Return the number of each run of equal rows, [B], from whether a row after the first begins one, [B - 1]."""
    first = torch.zeros(1, dtype=torch.int64, device=is_new.device)
    return torch.cat([first, is_new.cumsum(0)])


def _sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum values by index, float64 [count]."""
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, index, values)
