"""Tables in host memory or on disk: those that overrides name, the room that they need, and what a step moves of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

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
    rows_of_rank: dict[int, int] = {}
    for name, table in host_tables.items():
        spec = plan.plan["embeddings"][name].sharding_spec
        assert spec is not None, "tables in host memory are not replicated"
        tier = (Tier.disk if table.is_on_disk else Tier.host).value
        rows = max(shard.shard_sizes[0] for shard in spec.shards)
        if not all(shard.shard_sizes[0] for shard in spec.shards):
            total = sum(shard.shard_sizes[0] for shard in spec.shards)
            raise ValueError(
                f"table {name} with tier: {tier} has {total:,} rows, which leave a rank of {len(spec.shards)} without any; set "
                "tier: device, or shard it table_wise"
            )
        needed = min(rows, table.live_rows)
        if table.slots(rows) < needed:
            least = math.ceil(1e4 * needed / rows) / 1e4
            raise ValueError(
                f"table {name} with tier: {tier} and cache: {table.cache:g} has room on the device for {table.slots(rows):,} of "
                f"its {rows:,} rows per rank, and the batches at work may look up {needed:,} different ones; set cache: {least:g}"
                f"{' or more' if least < 1 else ''}, lower the batch sizes, or set tier: device"
            )
        for shard in spec.shards:
            rank = shard.placement.rank()
            rows_of_rank[rank] = rows_of_rank.get(rank, 0) + shard.shard_sizes[0]
    most = max(rows_of_rank.values(), default=0)
    if most > MOST_ROWS:
        raise ValueError(
            f"the tables with tier: host or disk of a rank have {most:,} rows, and want at most {MOST_ROWS:,}; start more "
            "ranks, or raise the frequency limit of the dataset"
        )


Members = Sequence[tuple[str, int, int]]
"""Table, first row and number of rows of the shards that share an arena."""

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
    fetched: dict[str, float] = {}
    read: dict[str, float] = {}
    changed: dict[str, float] = {}
    by_name = {table.table: table for table in tables}
    rings = _arenas(plan)
    buffer_rows = _buffer_rows(plan, by_name, rings, host_room)

    def classes_of(members: Members) -> Iterator[Classes]:
        for name, first, count in members:
            # Rows that keep their slots.
            share = 1 - _ring(plan, members) / max(_slots(plan, members), 1)
            traffic, fixed = traffic_of(name), int(plan.host_tables[name].slots(count) * share)
            ids = global_batch * by_name[name].hotness / (1 + traffic.drawn)
            yield row_classes(traffic, first, count, fixed, ids)

    def add(members: Members, numbers: Sequence[float], found: dict[str, float]) -> None:
        for (name, _, _), number in zip(members, numbers, strict=True):
            found[name] = found.get(name, 0.0) + number

    for (rank, columns, is_on_disk), members in rings.items():
        ring, classes = _ring(plan, members), list(classes_of(members))
        add(members, expected_fetches(classes, ring), fetched)
        if is_on_disk:
            reads = expected_reads(classes, ring, buffer_rows[rank, columns], READ_AHEAD_BATCHES)
            add(members, [READ_AHEAD_BATCHES * number for number in reads], read)
            if any(reads):
                add(members, expected_looked_up(classes, steps_between_saves), changed)
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


def _arenas(plan: TieredPlan) -> dict[tuple[int, int, bool], Members]:
    """Return the shards of every arena, by rank, columns, and whether they are on disk."""
    arenas: dict[tuple[int, int, bool], Members] = {}
    for name, table in plan.host_tables.items():
        spec = plan.plan["embeddings"][name].sharding_spec
        assert spec is not None, "tables in host memory are not replicated"
        for shard in spec.shards:
            # Tables of one width share an arena.
            key = shard.placement.rank(), shard.shard_sizes[1], table.is_on_disk
            member = (name, shard.shard_offsets[0], shard.shard_sizes[0])
            arenas[key] = [*arenas.get(key, []), member]
    return arenas


def _buffer_rows(
    plan: TieredPlan,
    by_name: Mapping[str, TablePlan],
    rings: Mapping[tuple[int, int, bool], Members],
    host_room: int,
) -> dict[tuple[int, int], int]:
    """Return the rows on disk that host memory has room for, by rank and columns, or ValueError if the live ones do not fit."""
    groups = {
        (rank, columns): members
        for (rank, columns, is_on_disk), members in rings.items()
        if is_on_disk
    }
    sizes = dict.fromkeys((rank for rank, _ in groups), 0.0)
    for (rank, _), members in groups.items():
        sizes[rank] += sum(disk_row_bytes(by_name[name]) * count for name, _, count in members)
    buffer_rows = {}
    for (rank, columns), members in groups.items():
        rows = sum(count for _, _, count in members)
        share = min(host_room / sizes[rank], 1)
        ring = _ring(plan, members)
        needed = min(rows, ring + sum(_live_rows(plan, name, count) for name, _, count in members))
        buffer_rows[rank, columns] = int(rows * share)
        if buffer_rows[rank, columns] < needed:
            least = math.ceil(1e4 * needed / rows * sizes[rank] / 2**30) / 1e4
            raise ValueError(
                f"sharding.read_ahead_gib={host_room / 2**30:.4g} has room for {buffer_rows[rank, columns]:,} rows of "
                f"{members[0][0]} and others with tier: disk, and the device and the batches at work may need {needed:,}; set "
                f"sharding.read_ahead_gib={least:g} or more, or lower cache of these tables"
            )
    return buffer_rows


def disk_row_bytes(table: TablePlan) -> float:
    """Return the bytes of a row of a shard on disk, with optimizer state; 0 of other tables."""
    return _row_bytes(table, table.disk_bytes_per_rank)


def _row_bytes(table: TablePlan, bytes_per_rank: Sequence[int]) -> float:
    shards = len(table.ranks) if table.sharding == "column_wise" else 1
    return sum(bytes_per_rank) / (table.num_embeddings * shards)


def _slots(plan: TieredPlan, members: Members) -> int:
    return sum(plan.host_tables[name].slots(count) for name, _, count in members)


def _ring(plan: TieredPlan, members: Members) -> int:
    needed = sum(_live_rows(plan, name, count) for name, _, count in members)
    return max(needed, ring_slots(_slots(plan, members)))


def _live_rows(plan: TieredPlan, name: str, count: int) -> int:
    return min(plan.host_tables[name].live_rows, count)


def fetched_bytes(table: TablePlan) -> float:
    """Return the bytes that a table is expected to fetch per step from host memory, with optimizer state, over all ranks."""
    return table.fetched_rows * (
        _row_bytes(table, table.host_bytes_per_rank) + disk_row_bytes(table)
    )


def link_ms(tables: Sequence[TablePlan]) -> float:
    """Return the milliseconds per step in which the link of the busiest rank moves rows, if it has nothing else to do."""
    num_bytes: dict[int, float] = {}
    num_rows: dict[int, float] = {}
    for table in tables:
        for rank in table.ranks:
            share = 2 / len(table.ranks)
            num_bytes[rank] = num_bytes.get(rank, 0.0) + share * fetched_bytes(table)
            searches = share * table.fetched_rows * table.memories
            num_rows[rank] = num_rows.get(rank, 0.0) + searches
    of_bytes = [size / LINK_BYTES_PER_MS for size in num_bytes.values()]
    return max([*of_bytes, *(count / LINK_ROWS_PER_MS for count in num_rows.values())], default=0.0)
