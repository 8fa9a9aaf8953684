"""Ids with fixed shapes, of ragged features too: how many a batch has room for, and where each feature's lie on a rank.

A ragged feature has a capacity per rank and batch. Positions behind its ids hold `NO_ID`, and the lengths of the rows travel
with the ids. The rank that looks them up adds where each sample's ids begin and which sample each position belongs to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dataloading.dataset.batch_layout import IdCount

# B: rows of a rank, W: ranks whose ids lie one after the other, G: samples, W * B


@dataclass(frozen=True, slots=True)
class IdBlock:
    """Position of a feature's numbers on the rank that looks them up.

    `count` ids begin at `first`, with those that are `NO_ID`; if the feature is ragged, starts, lengths and samples follow them.
    """

    first: int
    count: int
    num_samples: int
    is_ragged: bool = False

    @property
    def first_start(self) -> int:
        """Position of the starts: where each sample's ids begin, counted from `first`, [G]."""
        return self.first + self.count

    @property
    def first_length(self) -> int:
        """Position of the lengths: ids of each sample, [G]."""
        return self.first_start + self.num_samples

    @property
    def first_sample(self) -> int:
        """Position of the samples: the sample of each id, [count]."""
        return self.first_length + self.num_samples

    @property
    def size(self) -> int:
        return self.count + (2 * self.num_samples + self.count if self.is_ragged else 0)


def id_blocks(
    counts: Mapping[str, IdCount], num_sources: int, batch_size: int
) -> dict[str, IdBlock]:
    """Return the positions of features that lie one after the other, by their counts per source after the expansion."""
    blocks, first = {}, 0
    for feature, count in counts.items():
        block = IdBlock(
            first, num_sources * count.capacity, num_sources * batch_size, not count.hotness
        )
        blocks[feature] = block
        first += block.size
    return blocks


def with_positions(
    arrived: Tensor, capacities: Sequence[int], num_sources: int, batch_size: int
) -> Tensor:
    """Add starts and samples, as in `IdBlock`, to ids [W, C] and lengths [W, B], feature after feature."""
    sources = torch.arange(num_sources, device=arrived.device).unsqueeze(1)
    sizes = [num_sources * (capacity + batch_size) for capacity in capacities]
    pieces = []
    for numbers, capacity in zip(arrived.split(sizes), capacities, strict=True):
        ids, lengths = numbers.split([num_sources * capacity, num_sources * batch_size])
        ends = lengths.view(num_sources, batch_size).long().cumsum(1)
        starts = ends - lengths.view_as(ends) + sources * capacity
        position = torch.arange(capacity, device=arrived.device).expand(num_sources, capacity)
        samples = torch.searchsorted(ends, position.contiguous(), right=True)
        # A position behind the last id belongs to no sample and is not read.
        samples = samples.clamp_(max=batch_size - 1).add_(sources * batch_size)
        pieces += [ids, starts.flatten().to(ids.dtype), lengths, samples.flatten().to(ids.dtype)]
    return torch.cat(pieces)
