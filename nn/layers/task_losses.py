"""Losses of single rows, for labels that the plain binary cross entropy of `nn.layers.bce_loss` does not serve.

A new loss is an entry of `LOSSES`, or a function outside the project that `tasks={LABEL: {loss: package.module:NAME}}` names.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from configs.options import is_import_path, require
from configs.schema import TaskConfig
from configs.user_objects import load_user_object, one_line_if_it_fails

Loss = Callable[[Tensor, Tensor], Tensor]
"""The losses [B] of predictions [B], logits of a binary label, and labels [B]; all float32. The host reads nothing back."""


def binary_losses(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    focal_gamma: float = 0.0,
    focal_alpha: float | None = None,
    positive_weight: float = 1.0,
) -> Tensor:
    """Compute the binary cross entropy of each row [B] float32, with p = sigmoid(logit) and any of three changes.

        loss = - y a (1 - p)^gamma ln p  -  (1 - y) b p^gamma ln(1 - p)

    Label smoothing s: y = label (1 - s) + s / 2 (Szegedy et al. 2016, section 7, for two classes). Focal loss: gamma, and
    a = alpha, b = 1 - alpha (Lin et al. 2017, equation 5); without alpha a = b = 1 (equation 4). Positive weight w: a = w,
    as in `torch.nn.BCEWithLogitsLoss`.
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


def distilled_losses(
    losses: Tensor, logits: Tensor, scores: Tensor, weight: float, temperature: float
) -> Tensor:
    """Compute the losses of rows that learn from a teacher too, [B], from those of their labels [B].

        (1 - w) loss + w CE(q, sigmoid(logit)),  q = sigmoid(logit(score) / T)

    The idea is Hinton et al.'s (arXiv:1503.02531, section 2); T softens the teacher alone, so that predictions stay
    probabilities. `scores` [B]: the teacher's, from 0 to 1.
    """
    soft = torch.sigmoid(torch.logit(scores) / temperature)
    return (1 - weight) * losses + weight * binary_losses(logits, soft)


def squared_errors(predictions: Tensor, labels: Tensor) -> Tensor:
    """Compute the squared error of each row, [B], of predictions [B] and labels [B], float32."""
    return (predictions - labels).square()


LOSSES: dict[bool, dict[str, Callable[..., Tensor]]] = {
    True: {"cross_entropy": binary_losses},
    False: {"squared_error": squared_errors},
}
"""The project's losses by name, of binary labels and of regression labels; the first is the default."""


def loss_of(options: TaskConfig, *, is_binary: bool, key: str) -> Loss:
    """Return the loss of a label; `key` is that of its option.

    Raises ValueError: there is no such loss of this kind of label, or the object is no function.
    """
    own = LOSSES[is_binary]
    name = options.loss or next(iter(own))
    if name == "cross_entropy" and is_binary:
        return partial(
            binary_losses,
            label_smoothing=options.label_smoothing,
            focal_gamma=options.focal_gamma,
            focal_alpha=options.focal_alpha,
            positive_weight=options.positive_weight,
        )
    require(
        not options.changes_cross_entropy,
        f"{key}={name}: label_smoothing, focal_gamma, focal_alpha and positive_weight are of cross_entropy; leave them out",
    )
    if name in own:
        return own[name]
    kind = "binary" if is_binary else "regression"
    require(
        is_import_path(name),
        f"{key}={name} is none of {', '.join(own)}, the losses of {kind} labels, nor package.module:NAME",
    )
    loss = load_user_object(name, key)
    require(
        callable(loss),
        f"{key}={name} is no function of predictions and labels; docs/add_a_metric.md has one",
    )
    return partial(_checked, loss, f"{key}={name}")


def _checked(loss: Loss, option: str, predictions: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of a user's function.

    Raises ValueError: it fails, or returns anything but one number with a gradient for each row.
    """
    with one_line_if_it_fails(option):
        losses = loss(predictions, labels)
    is_tensor = isinstance(losses, Tensor)
    require(
        is_tensor and losses.shape == predictions.shape and losses.is_floating_point(),
        f"{option} returns {list(losses.shape) if is_tensor else type(losses).__name__} for {list(predictions.shape)} "
        "predictions; want a float of each row",
    )
    require(
        losses.requires_grad or not predictions.requires_grad,
        f"{option} returns losses without a gradient; compute them from the predictions by torch's operations",
    )
    return losses


def mean_share(losses: Tensor, weights: Tensor | None, total: Tensor | int) -> Tensor:
    """Compute this rank's share of the mean of the rows' losses; the sum of the shares over ranks is the mean.

        mean = sum of weight * loss over all rows / sum of weight over all rows

    Losses [B] are of this rank's valid rows; weights [B] are not negative, None counts every row once. `total`: sum of the
    weights over all ranks, or their number of rows. If all weights of a batch are 0, so is its mean.
    """
    if weights is not None:
        losses = losses * weights
    if isinstance(total, Tensor):
        total = total.clamp(min=torch.finfo(torch.float32).tiny)
    return losses.sum() / total
