"""Exact ROC AUC and log loss over the rows of all ranks, both from logits: neither needs the sigmoid."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from nn.metrics.late_auc import LateAuc

# Log loss is summed in float64 in blocks of so many rows, which takes about 32 MiB of device memory.
BLOCK_ROWS = 1 << 22
MOST_LATEST = 16
"""Batches that are kept as they come, with one launch each: the host of small steps has no time for more."""
TRAIN_AUC_ROWS = 2**20
"""The training AUC of a record covers the last rows before it: sorting more rows takes time and adds little."""


class Collectives(Protocol):
    """The part of the process group that `RankingMetrics` uses."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Return every rank's tensor, all of one shape, in rank order on rank 0; None elsewhere."""
        ...

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on every rank."""
        ...

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's object on every rank."""
        ...


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Compute the exact area under the ROC curve: the trapezoid rule over distinct scores, so a tie counts half.

    Only the order of the scores [B] matters, so logits will do; labels [B] are positive above 0.5. It is nan where it is not
    defined, all labels being of one class or a score nan: an evaluation on rows without clicks should not end a run.
    """
    assert scores.shape == labels.shape, (scores.shape, labels.shape)
    is_positive = labels > 0.5
    return _auc_of_classes(scores[is_positive], scores[~is_positive])


def _auc_of_classes(positives: Tensor, negatives: Tensor) -> float:
    """Compute the fraction of (positive, negative) pairs in the right order: Mann-Whitney's U, equal to the area.

    Pairs are counted in integers (up to 2**63, three billion rows of each class), so the result is
    exact up to its last rounding, whatever the order of the rows and the number of ranks.
    """
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


def _log_loss_sum(positives: Tensor, negatives: Tensor) -> Tensor:
    """Sum binary cross entropy over rows, from the logits of each class; float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=positives.device)
    for block in positives.split(BLOCK_ROWS):
        total -= logsigmoid(block.double()).sum()
    for block in negatives.split(BLOCK_ROWS):
        total -= logsigmoid(-block.double()).sum()
    return total


def first_not_finite(calls: Sequence[Tensor]) -> tuple[int, int, int] | None:
    """Return the first number that is not finite: its tensor, its place there, and how many there are; None without any."""
    counts = [int((~numbers.isfinite()).sum()) for numbers in calls]
    for call, count in enumerate(counts):
        if count:
            return call, int(calls[call].isfinite().int().argmin()), sum(counts)
    return None


class RankingMetrics:
    """AUC and log loss of the rows of all `update` calls on all ranks since the last `reset`; of one process without collectives.

    Rows are kept on `device`, 5 bytes each, where rank 0 sorts those of all ranks.
    """

    def __init__(self, device: torch.device, collectives: Collectives | None = None) -> None:
        self.device = device
        self.collectives = collectives
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._logits: list[Tensor] = []
        self._is_positive: list[Tensor] = []
        self._latest: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor, num_valid: int) -> None:
        """Keep one batch, logits and labels [B], without its padding. They are copied, so a captured step may overwrite them.

        The host does not wait for the device.
        """
        assert logits.shape == labels.shape, (logits.shape, labels.shape)
        both = torch.stack([logits.detach()[:num_valid].float(), labels[:num_valid].float()])
        self._latest.append(both.to(self.device))
        if len(self._latest) == MOST_LATEST:
            self._keep_latest()

    def _keep_latest(self) -> None:
        """Keep the latest batches with 5 bytes per row."""
        if not self._latest:
            return
        logits, labels = torch.cat(self._latest, dim=1)
        self._logits += logits.clone().split([both.shape[1] for both in self._latest])
        self._is_positive.append(labels > 0.5)
        self._latest = []

    def late_auc(self) -> LateAuc:
        """Start to compute the AUC of this rank's rows beside further work."""
        pieces = [*self._logits, *self._is_positive, *self._latest]
        return LateAuc(pieces, self.kept, self.device)

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """Return the logits and labels (bool) of all ranks' rows so far, on rank 0; all must call it."""
        kept = self.kept()
        if self.collectives is None:
            return kept
        counts = torch.zeros(self.collectives.world_size, dtype=torch.int64, device=self.device)
        counts[self.collectives.rank] = len(kept[0])
        num_rows = self.collectives.all_reduce_sum(counts).tolist()
        logits, labels = (self._gather(values, num_rows) for values in kept)
        return None if logits is None or labels is None else (logits, labels)

    def compute(self) -> dict[str, float | int]:
        """Return the metrics over all ranks, the same numbers on each of them; all must call it.

        They are `auc` (nan as in `roc_auc`), `log_loss` (mean over rows), `rows` and `label_mean`. Without rows the three numbers
        are nan; with labels of one class only `auc` is.
        """
        logits, is_positive = self.kept()
        positives, negatives = logits[is_positive], logits[~is_positive]
        sums = self._sums_of_ranks(positives, negatives)
        log_loss_sum = math.fsum(log_loss for log_loss, _, _ in sums)
        num_positives = [int(positive) for _, positive, _ in sums]
        num_negatives = [int(negative) for _, _, negative in sums]
        rows = sum(num_positives) + sum(num_negatives)
        return {
            "auc": self._auc(positives, negatives, num_positives, num_negatives),
            "log_loss": log_loss_sum / rows if rows else math.nan,
            "rows": rows,
            "label_mean": sum(num_positives) / rows if rows else math.nan,
        }

    def first_not_finite(self) -> tuple[int, int, int] | None:
        """Return the first of this rank's logits that is not finite: its `update` call, its place there, and their number."""
        self._keep_latest()
        return first_not_finite(self._logits)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return this rank's rows: logits, and whether the label is 1."""
        self._keep_latest()
        no_logits = torch.empty(0, device=self.device)
        no_labels = torch.empty(0, dtype=torch.bool, device=self.device)
        return torch.cat([no_logits, *self._logits]), torch.cat([no_labels, *self._is_positive])

    def _sums_of_ranks(self, positives: Tensor, negatives: Tensor) -> list[list[float]]:
        """Return [world_size][3]: log loss sum, positives and negatives per rank, by one all-reduce.

        Each rank fills its own row, so the sum over ranks is the same on all ranks, bit by bit.
        """
        group = self.collectives
        rank, world_size = (group.rank, group.world_size) if group else (0, 1)
        sums = torch.zeros(world_size, 3, dtype=torch.float64, device=self.device)
        sums[rank, 0] = _log_loss_sum(positives, negatives)
        sums[rank, 1] = positives.numel()
        sums[rank, 2] = negatives.numel()
        return (group.all_reduce_sum(sums) if group else sums).tolist()

    def _auc(
        self,
        positives: Tensor,
        negatives: Tensor,
        num_positives: list[int],
        num_negatives: list[int],
    ) -> float:
        """Gather the scores on rank 0, compute the area there and broadcast it."""
        if self.collectives is None:
            return _auc_of_classes(positives, negatives)
        auc = math.nan
        if sum(num_positives) == 0 or sum(num_negatives) == 0:
            return auc
        all_positives = self._gather(positives, num_positives)
        all_negatives = self._gather(negatives, num_negatives)
        if all_positives is not None and all_negatives is not None:
            auc = _auc_of_classes(all_positives, all_negatives)
        return self.collectives.broadcast_object(auc)

    def _gather(self, scores: Tensor, num_scores: list[int]) -> Tensor | None:
        """Join the ranks' scores, `num_scores[r]` of rank r, on rank 0; None elsewhere."""
        padded = pad(scores, (0, max(num_scores) - scores.numel()))
        assert self.collectives is not None, "several ranks have a process group"
        gathered = self.collectives.gather(padded)
        if gathered is None:
            return None
        return torch.cat([scores[:num] for scores, num in zip(gathered, num_scores, strict=True)])
