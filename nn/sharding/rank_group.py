"""Groups of ranks: the ranks of a group share the tables, and the groups hold the same ones.

A rank gets vectors and rows from the owners of its group, and sends them their gradients. Of rows, an owner sums those of a
row, and sends it once to the owners of the same shard in the other groups (`nn.sharding.merged_rows`). Gradients of vectors go
there as they are, and their ids to the owners of all groups. So every owner of a shard sums the gradients of the global
batch in the same order, and the groups keep the same bits. With one group nothing is sent twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nn.distributed.all_to_all import AllToAll
from nn.distributed.process_group import Ranks, open_channel
from nn.embedding.id_blocks import IdBlock


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The `size` ranks that share the tables with this one, which has `rank` among them, of `count` groups."""

    size: int
    rank: int
    number: int
    count: int

    @classmethod
    def of(cls, ranks: Ranks, size: int) -> "RankGroup":
        """Return this rank's group, where as many ranks in a row are one."""
        return cls(size, ranks.rank % size, ranks.rank // size, ranks.world_size // size)

    def send_within(self, numbers: Tensor, sizes: Sequence[int], channel: AllToAll) -> Tensor:
        """Send `sizes` of the numbers to the group's ranks; return those that they send here, in their order.

        `channel` is of all ranks, each of which must know the same sizes.
        """
        here = sizes[self.rank]
        received = numbers.new_empty(here * self.size)
        channel(
            received, numbers, self._of_all_ranks([here] * self.size), self._of_all_ranks(sizes)
        )
        return received

    def _of_all_ranks(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes of the group's ranks, and 0 of all others."""
        others = self.size * (self.count - 1 - self.number)
        return [0] * (self.size * self.number) + list(sizes) + [0] * others

    def numbers_of_all_groups(self, numbers: Tensor, channel: AllToAll) -> Tensor:
        """Return as many numbers of each group's rank that has the same shards, in the order of the groups."""
        gathered = numbers.new_empty(self.count * len(numbers))
        sizes = [len(numbers) * (rank == self.rank) for rank in range(self.size)] * self.count
        channel(gathered, numbers.repeat(self.count), sizes, sizes)
        return gathered

    def open_channels(
        self, ranks: Ranks
    ) -> "tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]":
        """Open the communicators of embeddings: within this group, and between the owners of one shard, None without others."""
        if self.count == 1:
            return open_channel(ranks, "embeddings"), None
        firsts = range(0, ranks.world_size, self.size)
        groups = [list(range(first, first + self.size)) for first in firsts]
        owners = [list(ranks_of_shard) for ranks_of_shard in zip(*groups, strict=True)]
        is_alone = self.size == 1
        within = None if is_alone else open_channel(ranks, f"embeddings of {self.size}", groups)
        return within, open_channel(ranks, f"gradients of {self.size}", owners)


def gradients_of_all_groups(gradients: Tensor, owners: dist.ProcessGroup | None) -> Tensor:
    """Return the gradients [n, ...] that the `owners` of one shard have, one after the other in the order of the ranks."""
    if owners is None or not gradients.numel():
        return gradients
    gathered = gradients.new_empty(owners.size() * len(gradients), *gradients.shape[1:])
    dist.all_gather_into_tensor(gathered, gradients.contiguous(), group=owners)
    return gathered


class GroupIds:
    """Picks the ids of a group's samples from those of all samples.

    `blocks` are the positions of each feature's in the result, those given of all samples; ragged ones begin with the group.
    """

    def __init__(
        self, blocks: Mapping[str, IdBlock], group: RankGroup, device: torch.device
    ) -> None:
        self.blocks: dict[str, IdBlock] = {}
        positions, shifts, first = [], [], 0
        for feature, block in blocks.items():
            count, num_samples = block.count // group.count, block.num_samples // group.count
            own = IdBlock(first, count, num_samples, block.is_ragged)
            # Where the numbers of all samples begin, how many the group has, and what counts from the first sample.
            parts = [(block.first, count, 0)]
            if block.is_ragged:
                parts += [
                    (block.first_start, num_samples, count),
                    (block.first_length, num_samples, 0),
                    (block.first_sample, count, num_samples),
                ]
            for start, size, before in parts:
                positions.append(torch.arange(size) + start + group.number * size)
                shifts.append(torch.full((size,), group.number * before, dtype=torch.int32))
            self.blocks[feature] = own
            first += own.size
        empty = torch.empty(0, dtype=torch.int32)
        self._positions = torch.cat([empty.long(), *positions]).to(device)
        self._shifts = torch.cat([empty, *shifts]).to(device)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the ids of the group, with starts and samples that count from its own."""
        return ids.index_select(0, self._positions) - self._shifts
