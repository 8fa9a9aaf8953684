"""Sharded lookup and update with known shapes: all-to-all of ids, lookup, all-to-all of embeddings and back, update.

Buffers are allocated once per batch size; the host reads nothing back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import OptimizerConfig
from nn.distributed.process_group import Ranks
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.id_expansion import IdExpansion
from nn.embedding.local_tables import LocalTable, SortedIds, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.embedding.optimizer import ADDITION
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
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
    """

    lookups: tuple[Lookup, ...]
    first_vector: int
    first_column: int
    columns: int

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
        owned_by_rank: column shards per rank, in the rank's order.
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
        hotness: feature -> ids per row before expansion, in the order of the batch.
        expansions: feature -> further ids of each id, for expanded features that this rank looks up.
        config: optimizer of the tables.
        scalars: of the update of this rank's own tables.
        dtype: of embeddings and gradients in the all-to-all.
        ranks: this process.
        channels: communicators.
    """

    placement: Placement
    widths: Sequence[int]
    hotness: dict[str, int]
    expansions: dict[str, Tensor]
    config: OptimizerConfig
    scalars: UpdateScalars
    dtype: torch.dtype
    ranks: Ranks
    channels: Channels


class StaticEmbeddings:
    """The tables, for batches of one size.

    Args:
        tables: of this rank.
        batch_size: B.
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
        replicated_gradients: Sequence[Tensor],
        prefix_columns: int,
    ) -> None:
        placement, ranks = tables.placement, tables.ranks
        num_samples = batch_size * ranks.world_size
        self._ranks, self._channel = ranks, tables.channels.embeddings
        self._exchange = IdAllToAll(
            [_features(shards) for shards in placement.owned_by_rank],
            _features(placement.replicated),
            tables.hotness,
            batch_size=batch_size,
            rank=ranks.rank,
            device=ranks.device,
            channel=tables.channels.ids,
        )
        self._owned_sizes = [
            num_samples * tables.hotness[feature] for feature in _features(placement.owned)
        ]
        self._expand_owned = _expansion(tables, placement.owned, num_samples)
        self._expand_replicated = _expansion(tables, placement.replicas, batch_size)
        self._owned = _embedding_bags(tables, placement.owned, num_samples)
        self._replicated = _embedding_bags(tables, placement.replicas, batch_size)
        self._replicated_sums = _gradient_sums(tables, replicated_gradients, batch_size)
        self._set_sizes(tables, batch_size, prefix_columns)

    def _set_sizes(self, tables: RankTables, batch_size: int, prefix_columns: int) -> None:
        """Allocate the buffers of the embeddings' all-to-all, and describe the positions of vectors in them."""
        placement, ranks = tables.placement, tables.ranks
        world_size = ranks.world_size
        widths = [sum(shard.width for shard in shards) for shards in placement.owned_by_rank]
        replicated_columns = sum(shard.width for shard in placement.replicated)
        self._prefix_columns = prefix_columns if world_size == 1 and not replicated_columns else 0
        self._local_sizes = [batch_size * (self._prefix_columns + width) for width in widths]
        self._owned_sizes_by_rank = [batch_size * widths[ranks.rank]] * world_size
        starts = list(accumulate(self._local_sizes, initial=0))
        self._replicated_start = starts[-1]
        self.layout = _layout(tables, starts, [*widths, replicated_columns], self._prefix_columns)
        self._local = torch.empty(
            starts[-1] + batch_size * replicated_columns, dtype=tables.dtype, device=ranks.device
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
            for feature_ids in arrived.owned.split(self._owned_sizes):
                rows = feature_ids.view(self._owned.num_samples, -1)
                rows[num_valid:] = rows[0]
        return LocalIds(
            self._expand_owned(arrived.owned), self._expand_replicated(arrived.replicated)
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
                self._local[: self._replicated_start],
                self._sent.view(-1),
                self._local_sizes,
                self._owned_sizes_by_rank,
                group=self._channel,
            )
        return self._local

    def sort(self, ids: LocalIds) -> tuple[SortedIds, SortedIds]:
        """Sort the ids for the updates: of this rank's tables, and of the replicated tables."""
        return self._owned.sort(ids.owned), self._replicated.sort(ids.replicated)

    def send_back(self, gradients: Tensor) -> Tensor:
        """Send the gradients of the embeddings to the ranks that own the tables: [B * W, T]."""
        if self._ranks.world_size == 1:
            return self._owned_part(gradients)
        dist.all_to_all_single(
            self._returned.view(-1),
            gradients[: self._replicated_start],
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
        return local[: self._replicated_start].view(self._owned.num_samples, -1)[
            :, self._prefix_columns :
        ]

    def _replicated_part(self, local: Tensor) -> Tensor:
        return local[self._replicated_start :].view(self._replicated.num_samples, -1)


def _expansion(
    tables: RankTables, local_tables: Sequence[LocalTable], num_samples: int
) -> IdExpansion:
    return IdExpansion(_features(local_tables), num_samples, tables.hotness, tables.expansions)


def _features(tables: Iterable[LocalTable | ColumnShard]) -> list[str]:
    """Return the features of tables, each once, in the order in which their ids are sent."""
    return list(_looked_up_hotness(tables))


def _looked_up_hotness(tables: Iterable[LocalTable | ColumnShard]) -> dict[str, int]:
    """Return feature -> ids per sample after expansion."""
    return {lookup.feature: lookup.hotness for table in tables for lookup in table.lookups}


def _embedding_bags(
    tables: RankTables, local_tables: Sequence[LocalTable], num_samples: int
) -> LocalEmbeddingBags:
    return LocalEmbeddingBags(
        local_tables,
        _looked_up_hotness(local_tables),
        num_samples,
        tables.config,
        tables.scalars,
        tables.dtype,
        tables.ranks.device,
    )


def _gradient_sums(
    tables: RankTables, gradients: Sequence[Tensor], batch_size: int
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
        _looked_up_hotness(sums),
        batch_size,
        ADDITION,
        minus_one,
        tables.dtype,
        tables.ranks.device,
    )


def _layout(
    tables: RankTables, starts: Sequence[int], widths: Sequence[int], prefix_columns: int
) -> EmbeddingLayout:
    """Describe the positions of vectors: a block per rank, then one of the replicated tables."""
    placement = tables.placement
    segments = []
    for start, width, shards in zip(
        starts, widths, [*placement.owned_by_rank, placement.replicated], strict=True
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
    return EmbeddingLayout(segments, tables.widths, tables.ranks.device, prefix_columns)
