"""Tables in host memory or on disk: those that overrides name, the room that they need, and what a step moves of them."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import DEFAULT_CACHE, ShardingConfig, TableOverride, Tier
from dataloading.dataset.batch_layout import id_counts
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import tables_of_feature
from nn.planning.plan import TablePlan
from nn.sharding.tables import HostTable, TieredPlan
from nn.tiers.host_tier import ring_slots
from nn.tiers.read_ahead import READ_AHEAD_BATCHES
from nn.tiers.traffic import (
    Classes,
    IdTraffic,
    expected_fetches,
    expected_looked_up,
    expected_reads,
    row_classes,
)

MOST_ROWS = 2**31 - 2
"""Rows in host memory or on disk per rank; slots and rows have 32 bits."""
DISK_ROW_BYTES = 8
"""Host memory per row on disk: its buffer row, and in the journal."""


def read_ahead_bytes(config: ShardingConfig) -> int:
    """Return the host memory per rank for rows of tables on disk."""
    return int(config.read_ahead_gib * 2**30)


def overrides_of(
    declared: Sequence[EmbeddingBagConfig], config: ShardingConfig
) -> dict[str, TableOverride]:
    """Return the overrides of tables; a name that is no table's names all tables of the feature."""
    names, tables_of = {table.name for table in declared}, tables_of_feature(declared)
    return {
        table: value if isinstance(value, TableOverride) else TableOverride(type=value)
        for name, value in config.tables.items()
        for table in ([name] if name in names else tables_of.get(name, ()))
    }


def live_rows_of(
    declared: Sequence[EmbeddingBagConfig], spec: FeatureSpec, live_samples: int, world_size: int
) -> dict[str, int]:
    """Return the ids per table of the live batches of all ranks; of ragged features, those that batches have room for."""
    counts = id_counts(spec, live_samples)
    return {
        table.name: world_size * sum(counts[name].capacity for name in table.feature_names)
        for table in declared
    }


def chosen_host_tables(
    overrides: Mapping[str, TableOverride], live_rows: Mapping[str, int]
) -> dict[str, HostTable]:
    return {
        table: HostTable(
            override.cache or DEFAULT_CACHE, live_rows[table], override.tier is Tier.disk
        )
        for table, override in overrides.items()
        if override.tier in (Tier.host, Tier.disk)
    }


def check_live_rows(plan: ShardingPlan, host_tables: Mapping[str, HostTable]) -> None:
    """Refuse arenas that cannot hold the rows of all live batches, and more rows than slots have bits for."""
    rows_of_rank = defaultdict[int, int](int)
    for name, table in host_tables.items():
        spec = plan.plan["embeddings"][name].sharding_spec
        assert spec is not None, "tables in host memory are not replicated"
        tier = (Tier.disk if table.is_on_disk else Tier.host).value
        sizes = [shard.shard_sizes[0] for shard in spec.shards]
        if 0 in sizes:
            raise ValueError(
                f"table {name} with tier: {tier} has {sum(sizes):,} rows, which leave a rank of {len(sizes)} without any; set "
                "tier: device, or shard it table_wise"
            )
        rows = max(sizes)
        needed = min(rows, table.live_rows)
        if table.slots(rows) < needed:
            least = math.ceil(1e4 * needed / rows) / 1e4
            raise ValueError(
                f"table {name} with tier: {tier} and cache: {table.cache:g} has room on the device for {table.slots(rows):,} of "
                f"its {rows:,} rows per rank, and the batches at work may look up {needed:,} different ones; set cache: {least:g}"
                f"{' or more' if least < 1 else ''}, lower the batch sizes, or set tier: device"
            )
        for shard, size in zip(spec.shards, sizes, strict=True):
            rows_of_rank[shard.placement.rank()] += size
    most = max(rows_of_rank.values(), default=0)
    if most > MOST_ROWS:
        raise ValueError(
            f"the tables with tier: host or disk of a rank have {most:,} rows, and want at most {MOST_ROWS:,}; start more "
            "ranks, or raise the frequency limit of the dataset"
        )


LINK_BYTES_PER_MS = 76e9 / 1e3
"""Bytes per millisecond that a kernel exchanges between host memory and an H200, both ways together."""
LINK_ROWS_PER_MS = 55e6 / 1e3
"""The same in rows, both ways together: sorted rows of 32 GiB, for each of which the GPU looks up a page."""


def with_expected_fetches(
    plan: TieredPlan,
    tables: Sequence[TablePlan],
    traffic_of: Callable[[str], IdTraffic],
    global_batch: int,
    host_room: int,
    memories: int,
    steps_between_saves: int,
) -> list[TablePlan]:
    """Return the rows of a plan with those that a table is expected to fetch per step, and to read per read-ahead group.

    Rows on disk that change between two saves are expected too. Raises ValueError: `host_room` per rank for these is too little.
    """
    by_name = {table.table: table for table in tables}
    fetched, read, changed = (defaultdict[str, float](float) for _ in range(3))
    arenas = _arenas(plan)
    buffer_rows = _buffer_rows(arenas, by_name, host_room)

    def class_of(arena: _Arena, table: str, first: int, rows: int) -> Classes:
        traffic, slots = traffic_of(table), plan.host_tables[table].slots(rows)
        fixed = int(slots * (1 - arena.ring / max(arena.slots, 1)))
        ids = global_batch * by_name[table].hotness / (1 + traffic.drawn)
        return row_classes(traffic, first, rows, fixed, ids)

    def add(found: dict[str, float], arena: _Arena, numbers: Sequence[float]) -> None:
        for (table, _, _), number in zip(arena.shards, numbers, strict=True):
            found[table] += number

    for key, arena in arenas.items():
        classes = [class_of(arena, *shard) for shard in arena.shards]
        add(fetched, arena, expected_fetches(classes, arena.ring))
        if arena.is_on_disk:
            reads = expected_reads(classes, arena.ring, buffer_rows[key], READ_AHEAD_BATCHES)
            add(read, arena, [READ_AHEAD_BATCHES * number for number in reads])
            if any(reads):
                add(changed, arena, expected_looked_up(classes, steps_between_saves))
    return [
        replace(
            row,
            fetched_rows=fetched.get(row.table, 0.0),
            staged_rows=read.get(row.table, 0.0),
            journal_rows=changed.get(row.table, 0.0),
            memories=memories if row.has_arena else 1,
        )
        for row in tables
    ]


@dataclass(slots=True)
class _Arena:
    """The shards of one width on a rank, in one tier, which share slots on the device."""

    is_on_disk: bool
    shards: list[tuple[str, int, int]] = field(default_factory=list)  # table, first row, and rows
    rows: int = 0
    slots: int = 0
    live_rows: int = 0

    @property
    def ring(self) -> int:
        """Slots whose rows change; those of the others stay."""
        return max(self.live_rows, ring_slots(self.slots))


_Arenas = dict[tuple[int, int, bool], _Arena]
"""Arenas by rank, columns, and whether the rows are on disk."""


def _arenas(plan: TieredPlan) -> _Arenas:
    arenas: _Arenas = {}
    for name, table in plan.host_tables.items():
        spec = plan.plan["embeddings"][name].sharding_spec
        assert spec is not None, "tables in host memory are not replicated"
        for shard in spec.shards:
            rank, (rows, columns) = shard.placement.rank(), shard.shard_sizes
            key = (rank, columns, table.is_on_disk)
            arena = arenas.setdefault(key, _Arena(table.is_on_disk))
            arena.shards.append((name, shard.shard_offsets[0], rows))
            arena.rows += rows
            arena.slots += table.slots(rows)
            arena.live_rows += min(table.live_rows, rows)
    return arenas


def _buffer_rows(
    arenas: _Arenas, by_name: Mapping[str, TablePlan], host_room: int
) -> dict[tuple[int, int, bool], int]:
    """Return the rows on disk that host memory has room for, by arena; ValueError: the live ones do not fit."""
    on_disk = {key: arena for key, arena in arenas.items() if arena.is_on_disk}
    sizes = defaultdict[int, float](float)  # by rank
    for (rank, *_), arena in on_disk.items():
        sizes[rank] += sum(disk_row_bytes(by_name[name]) * rows for name, _, rows in arena.shards)
    buffer_rows = {}
    for key, arena in on_disk.items():
        size = sizes[key[0]]
        needed = min(arena.rows, arena.ring + arena.live_rows)
        buffer_rows[key] = int(arena.rows * min(host_room / size, 1))
        if buffer_rows[key] < needed:
            least = math.ceil(1e4 * needed / arena.rows * size / 2**30) / 1e4
            raise ValueError(
                f"sharding.read_ahead_gib={host_room / 2**30:.4g} has room for {buffer_rows[key]:,} rows of "
                f"{arena.shards[0][0]} and others with tier: disk, and the device and the batches at work may need {needed:,}; "
                f"set sharding.read_ahead_gib={least:g} or more, or lower cache of these tables"
            )
    return buffer_rows


def disk_row_bytes(table: TablePlan) -> float:
    """Return the bytes of a row of a shard on disk, with optimizer state; 0 of other tables."""
    return _row_bytes(table, table.disk_bytes_per_rank)


def _row_bytes(table: TablePlan, bytes_per_rank: Sequence[int]) -> float:
    shards = len(table.ranks) if table.sharding == "column_wise" else 1
    return sum(bytes_per_rank) / (table.num_embeddings * shards)


def fetched_bytes(table: TablePlan) -> float:
    """Return the bytes that a table is expected to fetch per step from host memory, with optimizer state, over all ranks."""
    return table.fetched_rows * (
        _row_bytes(table, table.host_bytes_per_rank) + disk_row_bytes(table)
    )


def link_ms(tables: Sequence[TablePlan]) -> float:
    """Return the milliseconds per step in which the link of the busiest rank moves rows, if it has nothing else to do."""
    num_bytes, num_rows = defaultdict[int, float](float), defaultdict[int, float](float)
    for table in tables:
        for rank in table.ranks:
            share = 2 / len(table.ranks)
            num_bytes[rank] += share * fetched_bytes(table)
            num_rows[rank] += share * table.fetched_rows * table.memories
    bytes_ms = max(num_bytes.values(), default=0.0) / LINK_BYTES_PER_MS
    return max(bytes_ms, max(num_rows.values(), default=0.0) / LINK_ROWS_PER_MS)
