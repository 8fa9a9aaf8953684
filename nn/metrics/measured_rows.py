"""Rows of one task on all ranks, as a metric sees them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from nn.distributed.process_group import Ranks
from nn.metrics.grouped_auc import weighted_auc
from nn.metrics.ranking import BLOCK_ROWS, log_loss_sum, roc_auc


@dataclass(eq=False)
class MeasuredRows:
    """Rows of one task since the last reset; a rank has its own, and the methods return the same numbers on each.

    All ranks call the same methods in the same order, so a metric must not decide by the rows of its rank what it calls.
    `predictions`: float32 [n], logits of a binary label, or the predicted numbers. `labels`: [n], bool of a binary label, else
    float32. `weights`: float32 [n]; None counts every row once. `groups`: int64 [n], ids of `eval.group`; empty without it.
    """

    predictions: Tensor
    labels: Tensor
    weights: Tensor | None
    groups: Tensor
    _gather: "RowGather"

    def sums(self, function: Callable[[Tensor, Tensor, Tensor], list[Tensor]]) -> list[float]:
        """Sum the scalars that a function of (predictions, labels, weights), float64 [m] each, returns, over all ranks.

        Raises ValueError: it returns others than scalars.
        """
        sums = self._block_sums(function)
        shapes = [list(total.shape) for total in sums]
        if any(shapes):
            raise ValueError(
                f"rows.sums: the function returns shapes {shapes}, want a list of scalars; write [*sums, other] of several sums"
            )
        return self._gather.sum(sums)

    def on_rank0(self, function: Callable[..., float], *columns: Tensor | None) -> float:
        """Return what `function` computes on rank 0 of the columns [n] of all ranks; those that are None are left out."""
        present = [column for column in columns if column is not None]
        counts = self._gather.counts(len(present[0]))
        gathered = [self._gather.gather(column, counts) for column in present]
        value = math.nan
        if gathered[0] is not None:
            value = function(*gathered)
        return self._gather.collectives.broadcast_object(value)

    @cached_property
    def totals(self) -> dict[str, float | int]:
        """Sums and means over all ranks: `rows`, `weight`, and those of the kind of label.

        A binary label has `auc`, `log_loss` and `label_mean`, and with weights `others_mean`, the part of label 0, exact
        where label 1 has nearly all of the weight. Another has the sums `squares` and `absolute` of the errors.
        """
        count = float(len(self.predictions))
        num_rows = torch.tensor(count, dtype=torch.float64, device=self.predictions.device)
        if self.labels.dtype is not torch.bool:
            errors = self._block_sums(
                lambda x, y, w: [((x - y).square() * w).sum(), ((x - y).abs() * w).sum(), w.sum()]
            )
            squares, absolute, weight, rows = self._gather.sum([*errors, num_rows])
            return {"squares": squares, "absolute": absolute, "weight": weight, "rows": int(rows)}
        if self.weights is None:
            return self._of_unweighted()
        # Both: where one label has nearly all of the weight, 1 less its part is 0.
        parts = [self.weights[chosen].double().sum() for chosen in (self.labels, ~self.labels)]
        sums = self._block_sums(
            lambda x, y, w: [(softplus(torch.where(y > 0, -x, x)) * w).sum(), w.sum()]
        )
        losses, weight, positives, negatives, rows = self._gather.sum([*sums, *parts, num_rows])
        defined = weight > 0
        return {
            "auc": self.on_rank0(weighted_auc, self.predictions, self.labels, self.weights),
            "log_loss": losses / weight if defined else math.nan,
            "rows": int(rows),
            "weight": weight,
            "label_mean": positives / weight if defined else math.nan,
            "others_mean": negatives / weight if defined else math.nan,
        }

    def _of_unweighted(self) -> dict[str, float | int]:
        positive, negative = self.predictions[self.labels], self.predictions[~self.labels]
        counts = [self.labels.sum(), (~self.labels).sum()]
        losses, positives, negatives = self._gather.sum([log_loss_sum(positive, negative), *counts])
        rows, auc = int(positives + negatives), math.nan
        if positives and negatives:
            auc = self.on_rank0(roc_auc, self.predictions, self.labels)
        return {
            "auc": auc,
            "log_loss": losses / rows if rows else math.nan,
            "rows": rows,
            "label_mean": positives / rows if rows else math.nan,
            "weight": rows,
        }

    def _block_sums(
        self, function: Callable[[Tensor, Tensor, Tensor], list[Tensor]]
    ) -> list[Tensor]:
        """Sum over this rank's rows block by block, which bounds the memory."""
        weights = torch.ones_like(self.predictions) if self.weights is None else self.weights
        columns = (self.predictions, self.labels, weights)
        sums = function(*(column[:0].double() for column in columns))
        for start in range(0, len(self.predictions), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            parts = function(*(column[block].double() for column in columns))
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
        return sums


class RowGather:
    """Sums over ranks, and rows of all ranks on rank 0."""

    def __init__(self, device: torch.device, collectives: Ranks) -> None:
        self._device = device
        self.collectives = collectives

    def sum(self, values: Sequence[Tensor]) -> list[float]:
        """Sum scalars over ranks in float64, in the order of the ranks: the same bits on each of them."""
        group = self.collectives
        sums = torch.zeros(group.world_size, len(values), dtype=torch.float64, device=self._device)
        sums[group.rank] = torch.stack([value.double() for value in values])
        return [
            math.fsum(column) for column in zip(*group.all_reduce_sum(sums).tolist(), strict=True)
        ]

    def counts(self, num_rows: int) -> list[int]:
        group = self.collectives
        counts = torch.zeros(group.world_size, dtype=torch.int64, device=self._device)
        counts[group.rank] = num_rows
        return group.all_reduce_sum(counts).tolist()

    def gather(self, values: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Join the ranks' rows, `counts[r]` of rank r, on rank 0; None elsewhere."""
        padding = (0, 0) * (values.dim() - 1) + (0, max(counts) - len(values))
        gathered = self.collectives.gather(pad(values, padding))
        if gathered is None:
            return None
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])
