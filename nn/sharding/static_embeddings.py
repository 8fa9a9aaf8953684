"""Sharded lookup and update with known shapes: all-to-all of ids, lookup, all-to-all of embeddings and back, update.

Buffers are allocated once per batch size; the host reads nothing back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import OptimizerConfig
from nn.distributed.process_group import Ranks
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.id_blocks import IdBlock, IdCount, id_blocks, with_positions
from nn.embedding.id_expansion import IdExpansion
from nn.embedding.local_tables import LocalTable, SortedIds, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.embedding.optimizer import ADDITION
from nn.embedding.touched_rows import TouchedRows
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
from nn.ops.table_rows import TableRows
from nn.sharding.id_all_to_all import IdAllToAll, LocalIds

# B: rows of this rank, W: ranks, T: columns of the vectors that a rank looks up for the others


@dataclass(frozen=True, slots=True)
class ColumnShard:
    """A range of a table's columns on one rank.

    Attributes:
        lookups: of the table.
        first_vector: position of the first lookup's first vector in the model's order; the others follow.
        first_column: of the table.
        columns: number of columns.
        is_partial: whether other ranks have other rows of them, so that their vectors are added.
    """

    lookups: tuple[Lookup, ...]
    first_vector: int
    first_column: int
    columns: int
    is_partial: bool = False

    @property
    def num_vectors(self) -> int:
        """Vectors of all lookups."""
        return sum(lookup.num_vectors for lookup in self.lookups)

    @property
    def width(self) -> int:
        """Columns of all vectors."""
        return self.num_vectors * self.columns


@dataclass(frozen=True, slots=True)
class Placement:
    """The tables that each rank looks up.

    Attributes:
        owned_by_rank: column shards per rank, in the rank's order; partial ones come last, alike on all ranks.
        replicated: the replicated tables, as shards with all columns.
        owned: this rank's entries of `owned_by_rank`, with weights.
        replicas: this rank's replicas of the replicated tables.
    """

    owned_by_rank: list[list[ColumnShard]]
    replicated: list[ColumnShard]
    owned: list[LocalTable]
    replicas: list[LocalTable]


@dataclass(frozen=True, slots=True)
class Channels:
    """Communicators of the all-to-alls; with one for both, ids of the next batch would wait for this one's embeddings."""

    ids: dist.ProcessGroup | None
    embeddings: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class RankTables:
    """A rank's tables and the settings of their all-to-alls, for any batch size.

    Attributes:
        placement: tables per rank.
        widths: columns of every vector, in the model's order.
        counts: returns feature -> ids of a batch before expansion, in the order of the batch, of a batch size and the level of
            the capacities.
        expansions: feature -> further ids of each id, for expanded features that this rank looks up.
        config: optimizer of the tables.
        scalars: of the update of this rank's own tables.
        dtype: of embeddings and gradients in the all-to-all.
        ranks: this process.
        channels: communicators.
        touched: collects the rows of updates of this rank's own tables; None: nobody asks for them.
    """

    placement: Placement
    widths: Sequence[int]
    counts: Callable[[int, int], dict[str, IdCount]]
    expansions: dict[str, Tensor]
    config: OptimizerConfig
    scalars: UpdateScalars
    dtype: torch.dtype
    ranks: Ranks
    channels: Channels
    touched: TouchedRows | None = None


class StaticEmbeddings:
    """The tables, for batches of one size.

    Args:
        tables: of this rank.
        batch_size: B.
        level: of the capacities of ragged features.
        replicated_gradients: gradient [rows, D] of each replicated table, zero at the start of a step.
        prefix_columns: columns that the dense component puts before each sample's embeddings; they are left free if
            nothing is sent.

    Attributes:
        layout: of the result of `look_up`.
    """

    def __init__(
        self,
        tables: RankTables,
        batch_size: int,
        *,
        level: int = 0,
        replicated_gradients: Sequence[Tensor],
        prefix_columns: int,
    ) -> None:
        placement, ranks = tables.placement, tables.ranks
        num_samples = batch_size * ranks.world_size
        self._ranks, self._channel = ranks, tables.channels.embeddings
        self._level = level
        counts = tables.counts(batch_size, level)
        self._exchange = IdAllToAll(
            [_features(shards, counts) for shards in placement.owned_by_rank],
            _features(placement.replicated, counts),
            counts,
            batch_size=batch_size,
            rank=ranks.rank,
            device=ranks.device,
            channel=tables.channels.ids,
        )
        self._prepare_owned = ArrivedIds(
            tables, _features(placement.owned, counts), counts, ranks.world_size, batch_size
        )
        self._prepare_replicated = ArrivedIds(
            tables, _features(placement.replicas, counts), counts, 1, batch_size
        )
        self._owned = _embedding_bags(
            tables, placement.owned, self._prepare_owned.blocks, num_samples
        )
        self._owned.touched = tables.touched
        self._replicated = _embedding_bags(
            tables, placement.replicas, self._prepare_replicated.blocks, batch_size
        )
        self._replicated_sums = _gradient_sums(
            tables, replicated_gradients, self._prepare_replicated.blocks, batch_size
        )
        self._set_sizes(tables, batch_size, prefix_columns)

    def _set_sizes(self, tables: RankTables, batch_size: int, prefix_columns: int) -> None:
        """Allocate the buffers of the embeddings' all-to-all, and describe the positions of vectors in them."""
        placement, ranks = tables.placement, tables.ranks
        world_size = ranks.world_size
        widths = [sum(shard.width for shard in shards) for shards in placement.owned_by_rank]
        partial = [shard for shard in placement.owned_by_rank[0] if shard.is_partial]
        self._partial_columns = sum(shard.width for shard in partial)
        replicated_columns = sum(shard.width for shard in placement.replicated)
        is_alone = world_size == 1 and not replicated_columns
        self._prefix_columns = prefix_columns if is_alone else 0
        self._widths = widths
        self._local_sizes = [batch_size * (self._prefix_columns + width) for width in widths]
        self._owned_sizes_by_rank = [batch_size * widths[ranks.rank]] * world_size
        self._starts = list(accumulate(self._local_sizes, initial=0))
        self._replicated_start = self._starts[-1] + batch_size * self._partial_columns
        self.layout = _layout(
            tables,
            [*self._starts, self._replicated_start],
            [*widths, self._partial_columns, replicated_columns],
            self._prefix_columns,
        )
        self._local = torch.empty(
            self._replicated_start + batch_size * replicated_columns,
            dtype=tables.dtype,
            device=ranks.device,
        )
        if world_size > 1:
            self._sent = torch.empty(
                batch_size * world_size,
                widths[ranks.rank],
                dtype=tables.dtype,
                device=ranks.device,
            )
        else:
            self._sent = self._owned_part(self._local)

    def send_ids(self, ids: Tensor, num_valid: int | None = None) -> LocalIds:
        """Send this rank's ids to their tables, and expand them there.

        Args:
            ids: feature after feature, each [B, hotness].
            num_valid: valid rows of the global batch, if not all. Padding rows come last, and get the ids of the first
                row: so the lookup, and the update with their zero gradients, touch no row that the batch does not use.
        """
        arrived = self._exchange(ids)
        if num_valid is not None:
            self._prepare_owned.repeat_first_row(arrived.owned, num_valid)
        return LocalIds(
            self._prepare_owned(arrived.owned),
            self._prepare_replicated(arrived.replicated),
            level=self._level,
        )

    @cached_property
    def _returned(self) -> Tensor:
        """The buffer in which gradients arrive; evaluation does not need it."""
        return torch.empty_like(self._sent)

    def look_up(self, ids: LocalIds) -> Tensor:
        """Look up the ids and send the embeddings to the ranks of their samples.

        Returns:
            The memory that `layout` describes; the next call overwrites it.
        """
        self._owned.look_up(ids.owned, self._sent)
        self._replicated.look_up(ids.replicated, self._replicated_part(self._local))
        if self._ranks.world_size > 1:
            dist.all_to_all_single(
                self._local[: self._starts[-1]],
                self._sent.view(-1),
                self._local_sizes,
                self._owned_sizes_by_rank,
                group=self._channel,
            )
            self._add_partial()
        return self._local

    def rows(self, ids: LocalIds) -> TableRows | None:
        """Return the rows of the ids, in the model's order; None if they are elsewhere, or no vectors as they are."""
        is_here = self._ranks.world_size == 1 and not self._replicated.tables
        return self._owned.rows(ids.owned) if is_here else None

    def _add_partial(self) -> None:
        """Add the vectors that each rank has computed of its rows, in the order of the ranks."""
        if not self._partial_columns:
            return
        first, *others = self._partial_of_ranks(self._local)
        total = self._partial_sum(self._local)
        if len(others) == 1:
            torch.add(first, others[0], out=total)
            return
        accurate = first.float()
        for other in others:
            accurate += other
        total.copy_(accurate)

    def _partial_of_ranks(self, local: Tensor) -> list[Tensor]:
        """View the columns of partial vectors in the block of each rank, [B, columns] each."""
        blocks = local[: self._starts[-1]].split(self._local_sizes)
        return [
            block.view(-1, width)[:, width - self._partial_columns :]
            for block, width in zip(blocks, self._widths, strict=True)
        ]

    def _partial_sum(self, local: Tensor) -> Tensor:
        """View the columns of the sums of partial vectors, [B, columns]."""
        return local[self._starts[-1] : self._replicated_start].view(-1, self._partial_columns)

    def sort(self, ids: LocalIds) -> tuple[SortedIds, SortedIds]:
        """Sort the ids for the updates: of this rank's tables, and of the replicated tables."""
        return self._owned.sort(ids.owned), self._replicated_sums.sort(ids.replicated)

    def send_back(self, gradients: Tensor) -> Tensor:
        """Send the gradients of the embeddings to the ranks that own the tables: [B * W, T]."""
        if self._ranks.world_size == 1:
            return self._owned_part(gradients)
        if self._partial_columns:
            # Every rank needs the gradient of a sum.
            total = self._partial_sum(gradients)
            for part in self._partial_of_ranks(gradients):
                part.copy_(total)
        dist.all_to_all_single(
            self._returned.view(-1),
            gradients[: self._starts[-1]],
            self._owned_sizes_by_rank,
            self._local_sizes,
            group=self._channel,
        )
        return self._returned

    def update(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Update this rank's tables with the gradients from `send_back`, unless `is_good` [1] is 0."""
        self._owned.update(ids, gradients, is_good)

    def accumulate_replicated(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Add the gradients of this rank's embeddings to those of the replicated tables."""
        self._replicated_sums.update(ids, self._replicated_part(gradients), is_good)

    def _owned_part(self, local: Tensor) -> Tensor:
        """View the looked-up embeddings in the local memory; world size 1 only."""
        return local[: self._starts[-1]].view(self._owned.num_samples, -1)[
            :, self._prefix_columns :
        ]

    def _replicated_part(self, local: Tensor) -> Tensor:
        return local[self._replicated_start :].view(self._replicated.num_samples, -1)


class ArrivedIds:
    """Ids of some features as they arrive, made ready for lookups: expanded, or with the positions of ragged ones.

    Args:
        tables: of this rank.
        features: in the order of their ids; ragged ones last.
        counts: feature -> ids of a batch before expansion.
        num_sources: ranks whose ids lie one after the other.
        batch_size: B.

    Attributes:
        blocks: feature -> position of its ids in the result.
    """

    def __init__(
        self,
        tables: RankTables,
        features: Sequence[str],
        counts: Mapping[str, IdCount],
        num_sources: int,
        batch_size: int,
    ) -> None:
        num_samples = num_sources * batch_size
        self._num_sources, self._batch_size = num_sources, batch_size
        fixed = [feature for feature in features if counts[feature].hotness]
        stored = {feature: counts[feature].hotness for feature in fixed}
        self._sizes = [num_samples * hotness for hotness in stored.values()]
        self._capacities = [counts[name].capacity for name in features[len(fixed) :]]
        self._expand = IdExpansion(fixed, num_samples, stored, tables.expansions)
        expanded = {
            feature: IdCount(hotness, batch_size * hotness)
            for feature, hotness in stored.items()
            for hotness in (hotness * (1 + _further_ids(tables, feature)),)
        }
        ragged = {feature: counts[feature] for feature in features[len(fixed) :]}
        self.blocks = id_blocks(expanded | ragged, num_sources, batch_size)

    def repeat_first_row(self, arrived: Tensor, num_valid: int) -> None:
        """Give padding rows, which come last, the ids of the first row; those of ragged features have none."""
        for ids in arrived[: sum(self._sizes)].split(self._sizes):
            rows = ids.view(self._num_sources * self._batch_size, -1)
            rows[num_valid:] = rows[0]

    def __call__(self, arrived: Tensor) -> Tensor:
        """Return the ids in the order of `blocks`."""
        if not self._capacities:
            return self._expand(arrived)
        num_fixed = sum(self._sizes)
        ragged = with_positions(
            arrived[num_fixed:], self._capacities, self._num_sources, self._batch_size
        )
        return torch.cat([self._expand(arrived[:num_fixed]), ragged])


def _further_ids(tables: RankTables, feature: str) -> int:
    expansion = tables.expansions.get(feature)
    return 0 if expansion is None else expansion.shape[1]


def _features(
    tables: Iterable[LocalTable | ColumnShard], counts: Mapping[str, IdCount]
) -> list[str]:
    """Return the features of tables, each once, in the order in which their ids are sent: ragged ones last."""
    features = dict.fromkeys(lookup.feature for table in tables for lookup in table.lookups)
    return sorted(features, key=lambda feature: not counts[feature].hotness)


def _embedding_bags(
    tables: RankTables,
    local_tables: Sequence[LocalTable],
    blocks: Mapping[str, IdBlock],
    num_samples: int,
) -> LocalEmbeddingBags:
    return LocalEmbeddingBags(
        local_tables,
        blocks,
        num_samples,
        tables.config,
        tables.scalars,
        tables.dtype,
        tables.ranks.device,
    )


def _gradient_sums(
    tables: RankTables,
    gradients: Sequence[Tensor],
    blocks: Mapping[str, IdBlock],
    batch_size: int,
) -> LocalEmbeddingBags:
    """Return what sums the gradients of the replicated tables: an update with learning rate -1."""
    minus_one = UpdateScalars(ADDITION, 1.0, tables.ranks.device)
    minus_one.set(0, -1.0)
    sums = [
        LocalTable(table.lookups, gradient, {})
        for table, gradient in zip(tables.placement.replicas, gradients, strict=True)
    ]
    return LocalEmbeddingBags(
        sums,
        blocks,
        batch_size,
        ADDITION,
        minus_one,
        tables.dtype,
        tables.ranks.device,
    )


def _layout(
    tables: RankTables, starts: Sequence[int], widths: Sequence[int], prefix_columns: int
) -> EmbeddingLayout:
    """Describe the positions of vectors: a block per rank, one of the sums of partial vectors, one of replicated tables."""
    placement = tables.placement
    by_rank = [
        [shard for shard in shards if not shard.is_partial] for shards in placement.owned_by_rank
    ]
    partial = [shard for shard in placement.owned_by_rank[0] if shard.is_partial]
    segments = []
    for start, width, shards in zip(
        starts, widths, [*by_rank, partial, placement.replicated], strict=True
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
                        prefix_columns + width,
                    )
                )
                column += shard.columns
    # Of each rank's part of the partial vectors, beside their sums.
    other_columns = len(by_rank) * sum(shard.width for shard in partial)
    return EmbeddingLayout(
        segments, tables.widths, tables.ranks.device, prefix_columns, other_columns
    )
