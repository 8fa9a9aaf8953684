"""AUC of training rows beside the step: computed on a stream and a communicator of its own, and read when it is there.

The result is exactly that of `nn.metrics.ranking.roc_auc`: pairs are counted in integers. Nothing is read back meanwhile, so
no shape depends on the labels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nn.ops.host_copy import HostCopy
from nn.ops.stream_waits import stream_for


def pair_counts(logits: Tensor, is_positive: Tensor) -> Tensor:
    """Count pairs of a positive and a negative row; the host need not know any value.

    Of logits float32 [N] and labels bool [N], return int64 [4] on their device: twice the pairs whose positive row has the
    larger logit, where a tie counts once; positives; negatives; logits that are nan.
    """
    ascending, order = logits.sort()
    is_sorted_positive = is_positive[order]
    # Negative rows before each position.
    before = pad((~is_sorted_positive).cumsum(0), (1, 0))
    # In ascending order, so that neighbours search the same memory.
    below = before[torch.searchsorted(ascending, ascending)]
    below_or_equal = before[torch.searchsorted(ascending, ascending, right=True)]
    pairs = torch.where(is_sorted_positive, below + below_or_equal, 0).sum()
    return torch.stack([pairs, is_positive.sum(), (~is_positive).sum(), logits.isnan().sum()])


@dataclass(frozen=True, slots=True)
class RankRows:
    """The rows of all ranks by collectives that may run beside those of a step: `gather` returns None except on rank 0."""

    gather: Callable[[Tensor], list[Tensor] | None]
    add_up: Callable[[Tensor], Tensor]

    def pair_counts(self, logits: Tensor, is_positive: Tensor) -> Tensor:
        """Return the counts over all ranks, on each of them, of equally many rows of each."""
        gathered = self.gather(torch.stack([logits, is_positive.float()]))
        if gathered is None:
            counts = torch.zeros(4, dtype=torch.int64, device=logits.device)
        else:
            logits, labels = torch.cat(gathered, dim=1)
            counts = pair_counts(logits, labels > 0.5)
        return self.add_up(counts)


class LateAuc:
    """The AUC of some rows of all ranks, on its way.

    `rows` returns this rank's logits, float32 [N], and whether the label is 1, bool [N]; N is the same on all ranks. It reads
    `pieces`, which are kept until it is done, for the stream that has made them.
    """

    def __init__(
        self,
        pieces: list[Tensor],
        rows: Callable[[], tuple[Tensor, Tensor]],
        device: torch.device,
        of_ranks: RankRows,
    ) -> None:
        if device.type != "cuda":
            self._counts = HostCopy(of_ranks.pair_counts(*rows()))
            return
        self._pieces = pieces
        stream = stream_for("late AUC", device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._counts = HostCopy(of_ranks.pair_counts(*rows()))

    def is_there(self) -> bool:
        return self._counts.is_there()

    def value(self) -> float:
        """Return the AUC, or nan where it is not defined; wait for it."""
        pairs, positives, negatives, num_nan = self._counts.read().tolist()
        if not positives * negatives or num_nan:
            return math.nan
        return pairs / (2 * positives * negatives)
