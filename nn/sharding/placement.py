"""Tables per rank, and what a rank needs to look them up and update them, for any batch size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import OptimizerConfig
from dataloading.dataset.batch_layout import Doublings, IdCount
from nn.distributed.all_to_all import AllToAll, OneHop, TwoHops, has_two_hops
from nn.distributed.process_group import Ranks, open_channel
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.id_blocks import IdBlock
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.embedding.optimizer import ADDITION
from nn.embedding.touched_rows import TouchedRows
from nn.layers.sequence_events import SequenceTables
from nn.ops.addresses import joined
from nn.sharding.owned_shard import ON_DEVICE, OwnedShard
from nn.sharding.planned_tables import PlannedShard, PlannedTable
from nn.sharding.rank_group import RankGroup
from nn.tiers.host_tier import HostTier

BLOCK = "rows"
"""Name of the only block of ids of requested tables on their owner."""
BY_NUMBER = (Lookup(BLOCK, 1),)
"""What looks rows up by their numbers."""


def rows_block(count: int) -> dict[str, IdBlock]:
    return {BLOCK: IdBlock(0, count, count)}


@dataclass(frozen=True, slots=True)
class ColumnShard:
    """A range of a table's columns on one rank.

    `first_vector` is the position of the first lookup's first vector in the model's order; the others follow. If it `is_partial`,
    other ranks have other rows of these columns, so that their vectors are added.
    """

    lookups: tuple[Lookup, ...]
    first_vector: int
    first_column: int
    columns: int
    is_partial: bool = False

    @property
    def num_vectors(self) -> int:
        return sum(lookup.num_vectors for lookup in self.lookups)

    @property
    def width(self) -> int:
        return self.num_vectors * self.columns


@dataclass(frozen=True, slots=True)
class Placement:
    """The tables that each rank of a group looks up.

    `owned_by_rank` has the column shards of every rank, in its order; partial ones come last, alike on all ranks. `owned` are
    this rank's entries with weights. Tables whose distinct rows are sent are `requested`, in groups. The other `replicated`
    tables, as shards with all columns, have this rank's `replicas`, which are numbered as in the plan.
    """

    owned_by_rank: list[list[ColumnShard]]
    replicated: list[ColumnShard]
    requested: list["RequestedTables"]
    owned: list[LocalTable]
    replicas: list[LocalTable]
    replica_numbers: list[int]


@dataclass(frozen=True, slots=True)
class RowShard:
    """Rows of a table on one rank; `base` is the rows of the owner's tables of the group before these."""

    rank: int
    first_row: int
    base: int


@dataclass(frozen=True, slots=True)
class RequestedTables:
    """Tables of one width, whose rows on a rank are numbered table after table; the dense component takes those of one table.

    Attributes:
        names: of the tables.
        shards: the tables, as shards with all columns.
        shards_by_table: shards by rows of each table; shard i has the rows from i * `rows_per_shard` on.
        rows_per_shard: of each table.
        rows_by_rank: rows of all tables on each owner; the only owner of a replicated table is this rank.
        owned: this rank's rows of all tables: as one table for each memory that they lie in, in which they are adjacent.
        owned_rows: rows of each table on this rank.
        memories: position in `owned` of the rows of each table.
        hands_out: whether the dense component takes the rows.
        replica: number of the replicated table, which is alone; None: the tables are sharded.
        touched: collect the rows of updates of `owned`; empty: nobody asks for them.
    """

    names: list[str]
    shards: list[ColumnShard]
    shards_by_table: list[list[RowShard]]
    rows_per_shard: list[int]
    rows_by_rank: list[int]
    owned: list[LocalTable]
    owned_rows: list[int]
    memories: list[int]
    hands_out: bool = False
    replica: int | None = None
    touched: list[TouchedRows] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Channels:
    """Communicators of ids and embeddings; with one for both, ids of the next batch would wait for this one's embeddings.

    Those of ids are all ranks, those of embeddings a group; `owners` are those of this rank's shards, None in a single group.
    `all_ranks` is for further collectives beside those of ids.
    """

    all_ranks: dist.ProcessGroup | None
    ids: AllToAll
    embeddings: AllToAll
    owners: dist.ProcessGroup | None

    @classmethod
    def open(cls, ranks: Ranks, rank_group: RankGroup, *, two_hops: bool) -> "Channels":
        """Open the communicators; in two hops only if there are several nodes of several ranks."""
        all_ranks = open_channel(ranks, "ids")
        if two_hops and has_two_hops(ranks):
            return cls(all_ranks, TwoHops(ranks, "ids"), TwoHops(ranks, "embeddings"), None)
        within, owners = rank_group.open_channels(ranks)
        return cls(all_ranks, OneHop(all_ranks), OneHop(within), owners)


@dataclass(frozen=True, slots=True)
class RankTables:
    """A rank's tables and the settings of their all-to-alls, for any batch size.

    `widths` are the columns of every vector in the model's order. `counts` gives, of a batch size and the doublings of the
    capacities, the ids of each feature before expansion, in the order of the batch; `sequences` are the groups of the dataset.
    `expansions` has the further ids of each id of features that this rank looks up. `scalars` and `touched` are for the update
    of `placement.owned`; `dtype` is that of embeddings and gradients in the all-to-all.
    """

    placement: Placement
    widths: Sequence[int]
    counts: Callable[[int, Doublings], dict[str, IdCount]]
    sequences: SequenceTables
    expansions: dict[str, Tensor]
    config: OptimizerConfig
    scalars: UpdateScalars
    dtype: torch.dtype
    ranks: Ranks
    rank_group: RankGroup
    channels: Channels
    touched: TouchedRows | None = None
    tier: HostTier | None = None

    def bags(
        self, tables: Sequence[LocalTable], blocks: Mapping[str, IdBlock], num_samples: int
    ) -> LocalEmbeddingBags:
        """Return what looks up tables and updates them by the optimizer."""
        return LocalEmbeddingBags(
            tables, blocks, num_samples, self.config, self.scalars, self.dtype, self.ranks.device
        )

    def adding_bags(
        self, tables: Sequence[LocalTable], blocks: Mapping[str, IdBlock], num_samples: int
    ) -> LocalEmbeddingBags:
        """Return what looks up tables and adds gradients to them: an update with learning rate -1."""
        scalars = UpdateScalars(ADDITION, 1.0, self.ranks.device)
        scalars.set(0, -1.0)
        return replace(self, config=ADDITION, scalars=scalars).bags(tables, blocks, num_samples)


def place(
    tables: Sequence[PlannedTable],
    by_rank: Sequence[Sequence[PlannedShard]],
    own: Sequence[OwnedShard],
    replicas: Sequence[Tensor],
    tier: HostTier | None,
    seed: int,
) -> Placement:
    """Return the tables that each rank looks up.

    `own` are this rank's shards of `by_rank` with memory, `replicas` those of the replicated tables; the seed is for the
    rounding of 16-bit weights.
    """
    replicated = [table for table in tables if not table.shards]
    looked_up = [number for number, table in enumerate(replicated) if not table.is_requested]
    sharded = [table for table in tables if table.is_requested and table.shards]
    groups: dict[tuple[int, str], list[PlannedTable]] = {}
    for table in sharded:
        alone = table.name if table.hands_out_rows else ""
        groups.setdefault((table.shape[1], alone), []).append(table)
    return Placement(
        owned_by_rank=[
            [
                ColumnShard(
                    table.lookups,
                    table.first_vector,
                    shard.shard_offsets[1],
                    shard.shard_sizes[1],
                    table.is_row_wise,
                )
                for table, shard in shards
                if not table.is_requested
            ]
            for shards in by_rank
        ],
        replicated=[_whole(replicated[number]) for number in looked_up],
        requested=[_requested_tables(group, by_rank, own, tier) for group in groups.values()]
        + [
            _requested_replica(table, number, replicas[number])
            for number, table in enumerate(replicated)
            if table.is_requested
        ],
        owned=[shard.local_table(seed, tier) for shard in own if not shard.table.is_requested],
        replicas=[
            LocalTable(replicated[number].lookups, replicas[number], {}) for number in looked_up
        ],
        replica_numbers=looked_up,
    )


def _whole(table: PlannedTable) -> ColumnShard:
    return ColumnShard(table.lookups, table.first_vector, 0, table.shape[1])


def _requested_tables(
    tables: Sequence[PlannedTable],
    by_rank: Sequence[Sequence[PlannedShard]],
    own: Sequence[OwnedShard],
    tier: HostTier | None,
) -> RequestedTables:
    names = [table.name for table in tables]
    row_shards: dict[str, list[RowShard]] = {name: [] for name in names}
    rows_by_rank = []
    for rank, shards in enumerate(by_rank):
        base = 0
        for table, shard in shards:
            if table.name in names:
                rows = shard.shard_sizes[0]
                if rows:
                    row_shards[table.name].append(RowShard(rank, shard.shard_offsets[0], base))
                base += rows
        rows_by_rank.append(base)
    for table in tables:
        firsts = [part.shard_offsets[0] for part in table.shards if part.shard_sizes[0]]
        # An id then gives its owner.
        rows = table.shards[0].shard_sizes[0]
        assert firsts == [number * rows for number in range(len(firsts))], "shards are even"
    members = [shard for shard in own if shard.table.name in names]
    by_memory: dict[str, list[OwnedShard]] = {}
    for member in members:
        by_memory.setdefault(member.memory, []).append(member)
    memories = list(by_memory)
    return RequestedTables(
        names=names,
        shards=[_whole(table) for table in tables],
        shards_by_table=[
            sorted(row_shards[name], key=lambda shard: shard.first_row) for name in names
        ],
        rows_per_shard=[max(shard.shard_sizes[0] for shard in t.shards) for t in tables],
        rows_by_rank=rows_by_rank,
        owned=[_joined_table(shards, tier) for shards in by_memory.values()],
        owned_rows=[len(member.weight) for member in members],
        memories=[memories.index(member.memory) for member in members],
        hands_out=tables[0].hands_out_rows,
    )


def _requested_replica(table: PlannedTable, number: int, replica: Tensor) -> RequestedTables:
    """Return a replicated table, whose rows a rank asks of itself, as a group."""
    rows = len(replica)
    return RequestedTables(
        names=[table.name],
        shards=[_whole(table)],
        shards_by_table=[[RowShard(0, 0, 0)]],
        rows_per_shard=[rows],
        rows_by_rank=[rows],
        owned=[LocalTable(BY_NUMBER, replica, {}, first_row=0)],
        owned_rows=[rows],
        memories=[0],
        hands_out=table.hands_out_rows,
        replica=number,
    )


def _joined_table(shards: Sequence[OwnedShard], tier: HostTier | None) -> LocalTable:
    """Return shards of this rank, which are adjacent in one memory, as a table of rows that are asked for."""
    first, lookups = shards[0], BY_NUMBER
    if first.memory != ON_DEVICE:
        assert tier is not None, "there are such tables"
        indices = [shard.tier_index for shard in shards if shard.tier_index is not None]
        return tier.joined_table(indices, LocalTable(lookups, first.weight, {}, first_row=0))
    rows = sum(len(shard.weight) for shard in shards)
    states = {name: joined(state, rows) for name, state in first.states.items()}
    return LocalTable(lookups, joined(first.weight, rows), states, first_row=0)


def track_rows(
    placement: Placement, own: Sequence[OwnedShard], device: torch.device
) -> TouchedRows:
    """Let updates note the rows that they change, in `touched` of each shard; return the marks of `placement.owned`."""
    touched = TouchedRows(placement.owned, device)
    rest = [shard for shard in own if not shard.table.is_requested]
    for position, shard in enumerate(rest):
        shard.touched = touched.of_table(position)
    for requested in placement.requested:
        if requested.replica is not None:
            continue
        requested.touched.extend(TouchedRows([table], device) for table in requested.owned)
        members = (shard for shard in own if shard.table.name in requested.names)
        firsts = [0] * len(requested.owned)
        for shard, rows, memory in zip(
            members, requested.owned_rows, requested.memories, strict=True
        ):
            mask = requested.touched[memory].of_table(0)
            shard.touched = mask[firsts[memory] : firsts[memory] + rows]
            firsts[memory] += rows
    return touched
