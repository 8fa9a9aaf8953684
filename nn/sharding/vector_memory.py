"""Memory of the vectors that a batch looks up, and where each of them is."""

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
from nn.sharding.placement import RankTables

# B: rows of this rank


class VectorMemory:
    """Vectors for the samples of a rank, in parts of [B, columns].

    They are a block from each rank of its group, the sums of partial vectors, vectors of requested tables by width, and those
    of replicated tables. `values` are overwritten by each lookup. `block_sizes`: elements of the blocks, which come first.
    Methods that take a `memory`, the values or their gradient, view parts of it.
    """

    def __init__(self, tables: RankTables, batch_size: int, prefix_columns: int) -> None:
        placement = tables.placement
        owned = [sum(shard.width for shard in shards) for shards in placement.owned_by_rank]
        requested = [sum(shard.width for shard in of.shards) for of in placement.requested]
        replicated = sum(shard.width for shard in placement.replicated)
        self._num_partial = sum(
            shard.width for shard in placement.owned_by_rank[0] if shard.is_partial
        )
        is_alone = len(owned) == 1 and not replicated and not requested
        self._prefix_columns = prefix_columns if is_alone else 0
        blocks = [self._prefix_columns + columns for columns in owned]
        self._columns = [*blocks, self._num_partial, *requested, replicated]
        self.batch_size = batch_size
        self.block_sizes = [batch_size * columns for columns in blocks]
        self.layout_of = cache(partial(_layout, tables, self._columns, self._prefix_columns))
        self.values = torch.empty(
            batch_size * sum(self._columns), dtype=tables.dtype, device=tables.ranks.device
        )

    @property
    def layout(self) -> EmbeddingLayout:
        """The places of all samples' vectors; `layout_of` has those of some samples in memory of their own."""
        return self.layout_of(self.batch_size)

    def parts(self, memory: Tensor) -> list[Tensor]:
        found = memory.split([self.batch_size * columns for columns in self._columns])
        pairs = zip(found, self._columns, strict=True)
        return [part.view(self.batch_size, columns) for part, columns in pairs]

    def samples(self, memory: Tensor, first: int, end: int) -> list[Tensor]:
        """View some samples in each part that has columns, contiguous."""
        return [part[first:end] for part in self.parts(memory) if part.shape[1]]

    def blocks(self, memory: Tensor) -> Tensor:
        """View what the ranks of the group send, one behind the other."""
        return memory[: sum(self.block_sizes)]

    def owned(self, memory: Tensor) -> Tensor:
        """View the vectors of tables on this rank, which is its whole group, without the prefix."""
        return self.parts(memory)[0][:, self._prefix_columns :]

    def of_group(self, tables: RankTables) -> Tensor:
        """Return memory for the vectors of tables on this rank, [samples of its group, columns]; of one rank it is `owned`."""
        group = tables.rank_group
        if group.size == 1:
            return self.owned(self.values)
        columns = sum(shard.width for shard in tables.placement.owned_by_rank[group.rank])
        return self.values.new_empty(self.batch_size * group.size, columns)

    def requested(self, memory: Tensor, number: int) -> Tensor:
        return self.parts(memory)[len(self.block_sizes) + 1 + number]

    def replicated(self, memory: Tensor) -> Tensor:
        return self.parts(memory)[-1]

    def add_partial(self) -> None:
        """Add the vectors that each rank has computed of its rows, in the order of the ranks."""
        if not self._num_partial:
            return
        total, (first, *others) = self._partial(self.values)
        if len(others) == 1:
            torch.add(first, others[0], out=total)
            return
        accurate = first.float()
        for other in others:
            accurate += other
        total.copy_(accurate)

    def spread_partial(self, gradients: Tensor) -> None:
        """Give every rank's part the gradient of the sum."""
        if self._num_partial:
            total, of_ranks = self._partial(gradients)
            for part in of_ranks:
                part.copy_(total)

    def _partial(self, memory: Tensor) -> tuple[Tensor, list[Tensor]]:
        """View the sums of partial vectors, and their columns in the block of each rank."""
        parts, count = self.parts(memory), len(self.block_sizes)
        return parts[count], [block[:, -self._num_partial :] for block in parts[:count]]


def _layout(
    tables: RankTables, columns: Sequence[int], prefix_columns: int, num_samples: int
) -> EmbeddingLayout:
    """Describe the positions of vectors: a block per rank, the sums of partial ones, requested and replicated tables.

    A block has `columns` of each sample, which begin with the prefix.
    """
    placement = tables.placement
    by_rank = [
        [shard for shard in shards if not shard.is_partial] for shards in placement.owned_by_rank
    ]
    partial_shards = [shard for shard in placement.owned_by_rank[0] if shard.is_partial]
    requested = [of.shards for of in placement.requested]
    segments = []
    *starts, _ = accumulate((num_samples * width for width in columns), initial=0)
    for start, width, shards in zip(
        starts, columns, [*by_rank, partial_shards, *requested, placement.replicated], strict=True
    ):
        column = prefix_columns
        for shard in shards:
            for vector in range(shard.num_vectors):
                segments.append(
                    LayoutSegment(
                        shard.first_vector + vector,
                        shard.first_column,
                        shard.columns,
                        start + column,
                        width,
                    )
                )
                column += shard.columns
    # Of each rank's part of the partial vectors, beside their sums.
    other_columns = len(by_rank) * sum(shard.width for shard in partial_shards)
    return EmbeddingLayout(
        segments, tables.widths, tables.ranks.device, prefix_columns, other_columns
    )
