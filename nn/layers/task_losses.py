"""Losses of single rows, for labels that the plain binary cross entropy of `nn.layers.bce_loss` does not serve."""

import torch
from torch import Tensor
from torch.nn.functional import softplus


def binary_losses(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
    focal_alpha: float | None = None,
    positive_weight: float = 1.0,
) -> Tensor:
    """Compute the binary cross entropy of each row, with p = sigmoid(logit) and any of three changes.

        loss = - y a (1 - p)^gamma ln p  -  (1 - y) b p^gamma ln(1 - p)

    Label smoothing s: y = label (1 - s) + s / 2 (Szegedy et al. 2016, section 7, for two classes). Focal loss: gamma, and
    a = alpha, b = 1 - alpha (Lin et al. 2017, equation 5); without alpha a = b = 1 (equation 4). Positive weight w: a = w,
    as in `torch.nn.BCEWithLogitsLoss`.

    Args:
        logits: [B], float32.
        labels: [B], float32, 0 or 1.
        label_smoothing: s, in [0, 1).
        focal_gamma: gamma, not negative; 0 leaves the cross entropy.
        focal_alpha: alpha, in (0, 1), or None.
        positive_weight: w, above 0.

    Returns:
        [B], float32.
    """
    if label_smoothing:
        labels = labels * (1 - label_smoothing) + label_smoothing / 2
    # softplus(-x) = -ln p and softplus(x) = -ln(1 - p): no overflow, and finite gradients at any logit.
    of_positive, of_negative = softplus(-logits), softplus(logits)
    positive, negative = of_positive, of_negative
    if focal_gamma:
        positive = torch.exp(-focal_gamma * of_negative) * of_positive
        negative = torch.exp(-focal_gamma * of_positive) * of_negative
    a, b = (1.0, 1.0) if focal_alpha is None else (focal_alpha, 1 - focal_alpha)
    return labels * positive * (a * positive_weight) + (1 - labels) * negative * b


def squared_errors(predictions: Tensor, labels: Tensor) -> Tensor:
    """Compute the squared error of each row, [B], of predictions [B] and labels [B], float32."""
    return (predictions - labels).square()


def mean_share(losses: Tensor, weights: Tensor | None, total: Tensor | int) -> Tensor:
    """Compute this rank's share of the mean of the rows' losses; the sum of the shares over ranks is the mean.

        mean = sum of weight * loss over all rows / sum of weight over all rows

    Args:
        losses: [B] of this rank's valid rows.
        weights: [B], not negative; None counts every row once.
        total: sum of the weights over all ranks, or their number of rows. If all weights of a batch are 0, so is its mean.
    """
    if weights is not None:
        losses = losses * weights
    if isinstance(total, Tensor):
        total = total.clamp(min=torch.finfo(torch.float32).tiny)
    return losses.sum() / total
