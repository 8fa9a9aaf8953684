"""The AUC beside the step is exactly the one that waits for the device."""

import math

import pytest
import torch

from nn.metrics.late_auc import LateAuc
from nn.metrics.ranking import roc_auc

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def late_auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    rows = logits.to(DEVICE), labels.to(DEVICE) > 0.5
    return LateAuc([*rows], lambda: rows, DEVICE).value()


@pytest.mark.parametrize("distinct", [3, 40, 10**6])
def test_it_is_exact_with_and_without_ties(distinct):
    generator = torch.Generator().manual_seed(distinct)
    logits = torch.randint(distinct, (1001,), generator=generator).float() - distinct / 2
    labels = (torch.rand(1001, generator=generator) < 0.2).float()
    assert late_auc(logits, labels) == roc_auc(logits, labels)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [([], []), ([1.0, 2.0], [1.0, 1.0]), ([1.0, 2.0], [0.0, 0.0]), ([1.0, math.nan], [0.0, 1.0])],
)
def test_it_is_nan_where_it_is_not_defined(logits, labels):
    assert math.isnan(late_auc(torch.tensor(logits), torch.tensor(labels)))
