"""Memory of the vectors that a batch looks up, and where each of them is."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from nn.layers.pooled_embeddings import copy_columns
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
from nn.sharding.placement import ColumnShard, RankTables

# B: rows of this rank


class VectorMemory:
    """Vectors for the samples of a rank, in parts of [B, columns].

    They are a block from each rank of its group, the sums of partial vectors, vectors of requested tables by width, and those
    of replicated tables. `values` are overwritten by each lookup. `block_sizes`: elements of the blocks, which come first.
    Methods that take a `memory`, the values or their gradient, view parts of it.

    If the dense component has `prefix_columns`, the values are a matrix [B, prefix_columns + T]. Lookups of requested and
    replicated tables have columns in it (`placed`). Blocks and sums are then in `arrived`, which is otherwise the values: `join`
    copies them to the matrix, and `take_apart` their gradients back. A rank that has all tables needs no copy: the matrix is its
    block. Of a batch that is taken `in_chunks`, several ranks have no matrix: each chunk is joined for itself, in less memory.
    """

    def __init__(
        self, tables: RankTables, batch_size: int, prefix_columns: int, *, in_chunks: bool
    ) -> None:
        placement, owned = tables.placement, tables.placement.owned_by_rank
        partial_shards = [shard for shard in owned[0] if shard.is_partial]
        here = [*(of.shards for of in placement.requested), placement.replicated]
        is_alone = len(owned) == 1 and not any(here)
        self._block_prefix = prefix_columns if is_alone else 0
        self._matrix_prefix = 0 if is_alone or in_chunks else prefix_columns
        self._num_partial = _width(partial_shards)
        arriving = [
            (self._block_prefix + _width(shards), [x for x in shards if not x.is_partial])
            for shards in owned
        ] + [(self._num_partial, partial_shards)]
        parts = arriving + [(_width(shards), shards) for shards in here]
        assert sum(_width(shards) for _, shards in parts) == sum(tables.widths)
        self._arriving = [columns for columns, _ in arriving]
        self.batch_size = batch_size
        self.block_sizes = [batch_size * columns for columns in self._arriving[:-1]]
        new = partial(torch.empty, dtype=tables.dtype, device=tables.ranks.device)
        if self._matrix_prefix:
            self._columns = [prefix_columns + sum(tables.widths)]
            dense = EmbeddingLayout.dense(tuple(tables.widths), tables.ranks.device, prefix_columns)
            self.layout_of = cache(lambda _: dense)
            self._copied = _layout(tables, arriving, 0, batch_size)
            self.values = new(batch_size * sum(self._columns))
            self.arrived = new(batch_size * sum(self._arriving))
        else:
            self._columns = [columns for columns, _ in parts]
            self.layout_of = cache(partial(_layout, tables, parts, self._block_prefix))
            self.values = self.arrived = new(batch_size * sum(self._columns))

    @property
    def layout(self) -> EmbeddingLayout:
        """The places of all samples' vectors; `layout_of` has those of some samples in memory of their own."""
        return self.layout_of(self.batch_size)

    def parts(self, memory: Tensor) -> list[Tensor]:
        return self._split(memory, self._columns)

    def _split(self, memory: Tensor, columns: Sequence[int]) -> list[Tensor]:
        sizes = [self.batch_size * count for count in columns]
        found = zip(memory[: sum(sizes)].split(sizes), columns, strict=True)
        return [part.view(self.batch_size, count) for part, count in found]

    def samples(self, memory: Tensor, first: int, end: int) -> list[Tensor]:
        """View some samples in each part that has columns, contiguous."""
        return [part[first:end] for part in self.parts(memory) if part.shape[1]]

    def blocks(self, arrived: Tensor) -> Tensor:
        """View what the ranks of the group send, one behind the other."""
        return arrived[: sum(self.block_sizes)]

    def owned(self, arrived: Tensor) -> Tensor:
        """View the vectors of tables on this rank, which is its whole group, without the prefix."""
        return self._split(arrived, self._arriving)[0][:, self._block_prefix :]

    def of_group(self, tables: RankTables) -> Tensor:
        """Return memory for the vectors of tables on this rank, [samples of its group, columns]; of one rank it is `owned`."""
        group = tables.rank_group
        if group.size == 1:
            return self.owned(self.arrived)
        columns = sum(shard.width for shard in tables.placement.owned_by_rank[group.rank])
        return self.values.new_empty(self.batch_size * group.size, columns)

    def requested(self, memory: Tensor, number: int) -> Tensor:
        """View the vectors of requested tables of one width; of a matrix all columns."""
        return self.parts(memory)[0 if self._matrix_prefix else len(self._arriving) + number]

    def replicated(self, memory: Tensor) -> Tensor:
        """View the vectors of replicated tables; of a matrix all columns."""
        return self.parts(memory)[-1]

    def placed(self, tables: RankTables) -> RankTables:
        """Return the tables, with the column in the matrix of each lookup of requested and replicated ones, if there is one."""
        if not self._matrix_prefix:
            return tables
        placement = tables.placement
        starts = [*accumulate(tables.widths, initial=self._matrix_prefix)]

        def placed(shard: ColumnShard) -> ColumnShard:
            vectors = accumulate((x.num_vectors for x in shard.lookups), initial=shard.first_vector)
            pairs = zip(shard.lookups, vectors, strict=False)
            return replace(
                shard, lookups=tuple(replace(lookup, column=starts[at]) for lookup, at in pairs)
            )

        replicated = [placed(shard) for shard in placement.replicated]
        replicas = [
            replace(table, lookups=shard.lookups)
            for table, shard in zip(placement.replicas, replicated, strict=True)
        ]
        requested = [
            replace(of, shards=[placed(shard) for shard in of.shards]) for of in placement.requested
        ]
        placement = replace(
            placement, replicated=replicated, replicas=replicas, requested=requested
        )
        return replace(tables, placement=placement)

    def join(self) -> None:
        """Copy what has arrived to the matrix, if the values are one."""
        if self._matrix_prefix:
            copy_columns(self.arrived, self._matrix(self.values), self._copied, to_matrix=True)

    def take_apart(self, gradients: Tensor) -> Tensor:
        """Return the gradients of what has arrived; those in a matrix are copied to `arrived`, which nobody reads any more."""
        if not self._matrix_prefix:
            return gradients
        copy_columns(self.arrived, self._matrix(gradients), self._copied, to_matrix=False)
        return self.arrived

    def _matrix(self, memory: Tensor) -> Tensor:
        return self.parts(memory)[0][:, self._matrix_prefix :]

    def add_partial(self) -> None:
        """Add the vectors that each rank has computed of its rows, in the order of the ranks."""
        if not self._num_partial:
            return
        total, (first, *others) = self._partial(self.arrived)
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

    def _partial(self, arrived: Tensor) -> tuple[Tensor, list[Tensor]]:
        """View the sums of partial vectors, and their columns in the block of each rank."""
        *blocks, total = self._split(arrived, self._arriving)
        return total, [block[:, -self._num_partial :] for block in blocks]


def _width(shards: Sequence[ColumnShard]) -> int:
    return sum(shard.width for shard in shards)


def _layout(
    tables: RankTables,
    parts: Sequence[tuple[int, Sequence[ColumnShard]]],
    prefix_columns: int,
    num_samples: int,
) -> EmbeddingLayout:
    """Describe the positions of vectors in parts, each the columns of a sample, which begin with the prefix, and its shards."""
    segments = []
    starts = accumulate((num_samples * width for width, _ in parts), initial=0)
    for start, (width, shards) in zip(starts, parts, strict=False):
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
    other_columns = sum(width - _width(shards) for width, shards in parts) - prefix_columns
    return EmbeddingLayout(
        segments, tables.widths, tables.ranks.device, prefix_columns, other_columns
    )
