"""Tables per rank, and what a rank needs to look them up and update them, for any batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import OptimizerConfig
from nn.distributed.process_group import Ranks
from nn.embedding.id_blocks import IdCount
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.embedding.touched_rows import TouchedRows
from nn.tiers.host_tier import HostTier


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
        requested: row-wise tables whose rows are asked of their owners, by width; the others are partial.
        owned: this rank's entries of `owned_by_rank`, with weights.
        replicas: this rank's replicas of the replicated tables.
    """

    owned_by_rank: list[list[ColumnShard]]
    replicated: list[ColumnShard]
    requested: list["RequestedTables"]
    owned: list[LocalTable]
    replicas: list[LocalTable]


@dataclass(frozen=True, slots=True)
class RowShard:
    """Rows of a table on one rank.

    Attributes:
        rank: the owner.
        first_row: of the table.
        base: rows of the owner's tables of the group before these.
    """

    rank: int
    first_row: int
    base: int


@dataclass(frozen=True, slots=True)
class RequestedTables:
    """Row-wise tables of one width, whose rows on a rank are numbered table after table.

    Attributes:
        shards: the tables, as shards with all columns.
        shards_by_table: shards by rows of each table; shard i has the rows from i * `rows_per_shard` on.
        rows_per_shard: of each table.
        rows_by_rank: rows of all tables on each rank.
        owned: this rank's rows of all tables: as one table for each memory that they lie in, in which they are adjacent.
        owned_rows: rows of each table on this rank.
        memories: position in `owned` of the rows of each table.
        touched: collect the rows of updates of `owned`; empty: nobody asks for them.
    """

    shards: list[ColumnShard]
    shards_by_table: list[list[RowShard]]
    rows_per_shard: list[int]
    rows_by_rank: list[int]
    owned: list[LocalTable]
    owned_rows: list[int]
    memories: list[int]
    touched: list[TouchedRows] = field(default_factory=list)


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
        touched: collects the rows of updates of `placement.owned`; None: nobody asks for them.
        tier: this rank's tables whose rows lie in host memory; None without any.
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
    tier: HostTier | None = None
