"""Events of a sequence group, for a dense component: rows of their ids, numbers, and where each sample's lie."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nn.layers.distinct_rows import DistinctRows

# B: samples, C: capacity for the events of all samples, D: columns


@dataclass(frozen=True, slots=True)
class SequenceEvents:
    """Events of the samples, oldest first, one sample after another in C positions.

    Positions that belong to no sample hold zeros and must not reach a result. No host knows how many are used.
    """

    rows: Mapping[
        str, DistinctRows
    ]  # by feature of the group; all have the same starts and lengths
    # float32 [C], by name; of the group's time the age in seconds
    numbers: Mapping[str, Tensor]
    starts: Tensor  # first position of each sample, [B]
    lengths: Tensor  # events of each sample, [B]
    samples: Tensor  # sample of each position, [C]; any sample where a position belongs to none
    max_length: int  # no sample has more events
