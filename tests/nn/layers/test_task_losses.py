"""Losses of single rows against plain formulas, forward and backward, and their mean over weighted rows."""

import math

import pytest
import torch

from nn.layers.task_losses import binary_losses, mean_share, squared_errors

LOGITS = torch.tensor([-30.0, -3.0, -0.5, 0.0, 0.25, 2.0, 4.0, 30.0], dtype=torch.float64)
CASES = [
    {},
    {"label_smoothing": 0.1},
    {"focal_gamma": 2.0},
    {"focal_gamma": 0.5, "focal_alpha": 0.25},
    {"focal_alpha": 0.75},
    {"positive_weight": 3.0},
    {"label_smoothing": 0.2, "focal_gamma": 1.0, "positive_weight": 0.5},
]


def by_formula(
    logits, label, label_smoothing=0.0, focal_gamma=0.0, focal_alpha=None, positive_weight=1.0
):
    """The loss in terms of p, as papers write it."""
    p = 1 / (1 + torch.exp(-logits))
    y = label * (1 - label_smoothing) + label_smoothing / 2
    a, b = (1, 1) if focal_alpha is None else (focal_alpha, 1 - focal_alpha)
    positive = -a * positive_weight * (1 - p) ** focal_gamma * torch.log(p)
    negative = -b * p**focal_gamma * torch.log(1 / (1 + torch.exp(logits)))
    return y * positive + (1 - y) * negative


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_losses_and_gradients_are_those_of_the_formula(options, label):
    ours, theirs = (LOGITS.clone().requires_grad_() for _ in range(2))
    losses = binary_losses(ours, torch.full_like(LOGITS, label), **options)
    wanted = by_formula(theirs, label, **options)
    torch.testing.assert_close(losses, wanted, rtol=1e-9, atol=1e-14)
    losses.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-13)


def test_the_plain_loss_is_pytorchs():
    labels = torch.tensor([0.0, 1.0] * 4, dtype=torch.float64)
    plain = torch.nn.functional.binary_cross_entropy_with_logits
    weight = torch.tensor(2.5, dtype=torch.float64)
    torch.testing.assert_close(
        binary_losses(LOGITS, labels, positive_weight=2.5),
        plain(LOGITS, labels, pos_weight=weight, reduction="none"),
    )


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_gradients_are_finite_at_any_logit(gamma):
    logits = torch.tensor([-2e4, -200.0, 200.0, 2e4] * 2, requires_grad=True)
    labels = torch.tensor([0.0] * 4 + [1.0] * 4)
    losses = binary_losses(logits, labels, focal_gamma=gamma, focal_alpha=0.25, label_smoothing=0.1)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logits.grad.isfinite().all()


def test_the_weighted_mean_divides_by_the_sum_of_weights():
    losses, weights = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 1.0, 3.0])
    mean = (2 + 12) / 4
    shares = [
        mean_share(losses[rows], weights[rows], weights.sum()) for rows in (slice(2), slice(2, 3))
    ]
    assert sum(shares).item() == pytest.approx(mean)
    # Constant weights change nothing.
    assert mean_share(losses, torch.full((3,), 7.0), torch.tensor(21.0)).item() == pytest.approx(
        7 / 3
    )
    assert mean_share(losses, None, 3).item() == pytest.approx(7 / 3)


def test_a_batch_without_weight_has_no_loss_and_no_gradient():
    losses = torch.tensor([1.0, 2.0], requires_grad=True)
    share = mean_share(losses, torch.zeros(2), torch.tensor(0.0))
    share.backward()
    assert share.item() == 0
    assert losses.grad.tolist() == [0, 0]


def test_squared_errors():
    assert squared_errors(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0])).tolist() == [0.25, 9]
    assert math.isclose(mean_share(torch.tensor([0.25, 9.0]), None, 2).item(), 4.625)
