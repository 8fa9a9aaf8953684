"""Exact ROC AUC and log loss over the rows of all ranks, both from logits: neither needs the sigmoid."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nn.metrics.late_auc import LateAuc, RankRows

# Log loss is summed in float64 in blocks of so many rows, which takes about 32 MiB of device memory.
BLOCK_ROWS = 1 << 22
MOST_LATEST = 16
"""Batches that are kept as they come, with one launch each: the host of small steps has no time for more."""
TRAIN_AUC_ROWS = 2**20
"""The training AUC of a record covers the last rows before it: sorting more rows takes time and adds little."""


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Compute the exact area under the ROC curve: the trapezoid rule over distinct scores, so a tie counts half.

    Only the order of the scores [B] matters, so logits will do; labels [B] are positive above 0.5. It is nan where it is not
    defined, all labels being of one class or a score nan: an evaluation on rows without clicks should not end a run.
    """
    assert scores.shape == labels.shape, (scores.shape, labels.shape)
    is_positive = labels > 0.5
    positives, negatives = scores[is_positive], scores[~is_positive]
    # Mann-Whitney's U over pairs counted in integers (up to 2**63): exact, whatever the order of rows and the ranks.
    num_pairs = positives.numel() * negatives.numel()
    if num_pairs == 0 or bool(positives.isnan().any() | negatives.isnan().any()):
        return math.nan
    negatives = _searchable(negatives).sort().values
    positives = _searchable(positives)
    below = torch.searchsorted(negatives, positives).sum()
    below_or_equal = torch.searchsorted(negatives, positives, right=True).sum()
    return (int(below) + int(below_or_equal)) / (2 * num_pairs)


def _searchable(scores: Tensor) -> Tensor:
    """Widen half-precision scores, which `searchsorted` may not take; the order stays the same."""
    return scores if scores.dtype == torch.float64 else scores.float()


def log_loss_sum(positives: Tensor, negatives: Tensor) -> Tensor:
    """Sum binary cross entropy over rows, from the logits of each class; float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=positives.device)
    for block in positives.split(BLOCK_ROWS):
        total -= logsigmoid(block.double()).sum()
    for block in negatives.split(BLOCK_ROWS):
        total -= logsigmoid(-block.double()).sum()
    return total


class KeptRows:
    """Predictions and labels of one task on this rank so far, float32; of a binary one whether the label is 1."""

    def __init__(self, device: torch.device, *, is_binary: bool = True) -> None:
        self.device = device
        self.is_binary = is_binary
        self._predictions: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._latest: list[Tensor] = []

    def update(self, predictions: Tensor, labels: Tensor, num_valid: int) -> None:
        """Keep a copy of one batch, both [B], without its padding; the host does not wait for the device."""
        assert predictions.shape == labels.shape, (predictions.shape, labels.shape)
        if num_valid < labels.shape[0]:
            predictions, labels = predictions[:num_valid], labels[:num_valid]
        # A stack has the larger of both dtypes.
        self._latest.append(torch.stack((predictions, labels)).to(self.device, torch.float32))
        if len(self._latest) == MOST_LATEST:
            self._keep_latest()

    def _keep_latest(self) -> None:
        """Keep the latest batches with 5 bytes per row of a binary label."""
        if not self._latest:
            return
        predictions, labels = torch.cat(self._latest, dim=1)
        self._predictions += predictions.clone().split([both.shape[1] for both in self._latest])
        self._labels.append(labels > 0.5 if self.is_binary else labels.clone())
        self._latest = []

    def late_auc(self, of_ranks: RankRows) -> LateAuc:
        """Start to compute the AUC of the rows of all ranks, which have equally many, beside further work."""
        pieces = [*self._predictions, *self._labels, *self._latest]
        return LateAuc(pieces, self.kept, self.device, of_ranks)

    def first_not_finite(self) -> tuple[int, int, int] | None:
        """Return the first prediction that is not finite: its `update` call, its row there, and how many there are."""
        self._keep_latest()
        counts = [int((~numbers.isfinite()).sum()) for numbers in self._predictions]
        for call, count in enumerate(counts):
            if count:
                return call, int(self._predictions[call].isfinite().int().argmin()), sum(counts)
        return None

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return predictions and labels, [n]."""
        self._keep_latest()
        no_rows = torch.empty(0, device=self.device)
        no_labels = no_rows.bool() if self.is_binary else no_rows
        return torch.cat([no_rows, *self._predictions]), torch.cat([no_labels, *self._labels])
