"""Choice of the tables whose rows lie in host memory, the rows for which ranks have room, and what a step then moves."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import DEFAULT_CACHE, ShardingConfig, TableOverride, Tier
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import id_counts, tables_of_feature
from nn.sharding.plan import TablePlan
from nn.sharding.tables import HostTable, TieredPlan
from nn.tiers.host_tier import ring_slots
from nn.tiers.traffic import IdShare, expected_fetches, row_classes

CACHES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
"""Fractions of rows on the device that are tried for tables in host memory, if GPUs have too little memory."""
COUNTS = (1, 2, 3, 5, 8, 13, 26, 100, 1000)
"""Numbers of tables in host memory that are tried."""
USELESS_CACHE = 0.8
"""Fraction of rows on the device from which a table stays there with all its rows."""
MOST_ROWS = 2**31 - 2
"""Rows in host memory per rank; slots and rows have 32 bits."""


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


def windows_of(
    declared: Sequence[EmbeddingBagConfig], spec: FeatureSpec, live_samples: int, world_size: int
) -> dict[str, int]:
    """Return the ids per table of the live batches of all ranks; of ragged features, those that batches have room for.

    Args:
        declared: the tables.
        spec: feature spec after the expansion of ids.
        live_samples: rows per rank of the live batches.
        world_size: ranks.
    """
    counts = id_counts(spec, live_samples)
    return {
        table.name: world_size * sum(counts[name].capacity for name in table.feature_names)
        for table in declared
    }


def chosen_host_tables(
    declared: Sequence[EmbeddingBagConfig],
    config: ShardingConfig,
    windows: Mapping[str, int],
    keyed: Collection[str],
) -> dict[str, HostTable]:
    """Return the tables that overrides put into host memory.

    Raises:
        ValueError: one of them is `keyed`, a table for raw keys, whose rows change on the device.
    """
    chosen = {
        table: HostTable(override.cache or DEFAULT_CACHE, windows[table])
        for table, override in overrides_of(declared, config).items()
        if override.tier is Tier.host
    }
    for name in chosen:
        if name in keyed:
            raise ValueError(
                f"table {name} has raw keys (vocabulary: dynamic), whose rows change on the device: tier: host is not for it; "
                "set tier: device, or a smaller cardinality"
            )
    return chosen


def with_host_tables(
    planned: Callable[[Mapping[str, HostTable]], ShardingPlan],
    chosen: Mapping[str, HostTable],
    movable: Mapping[str, int],
    windows: Mapping[str, int],
    parts: int,
) -> tuple[ShardingPlan, dict[str, HostTable]]:
    """Plan with the chosen tables in host memory; if they do not fit, with further ones.

    The arenas are the largest that fit, and then the tables the fewest.

    Args:
        planned: returns the plan with some tables in host memory.
        chosen: tables in host memory by overrides.
        movable: rows of the tables that may follow them, the largest table first.
        windows: table -> ids of the live batches.
        parts: shards into which the rows of a table may be cut.

    Raises:
        PlannerError: the tables do not fit into both memories.
    """
    try:
        return planned(chosen), dict(chosen)
    except PlannerError as refused:
        error = refused
    for cache in CACHES:
        tables = {}
        for name, rows in movable.items():
            # Of every shard, the rows that the live batches may need have room.
            least = math.ceil(1e4 * min(1, windows[name] * parts / rows)) / 1e4
            if max(cache, least) < USELESS_CACHE:
                tables[name] = HostTable(max(cache, least), windows[name])
        for count in sorted({min(count, len(tables)) for count in COUNTS} - {0}):
            host_tables = {**chosen, **dict(list(tables.items())[:count])}
            try:
                return planned(host_tables), host_tables
            except PlannerError as refused:
                error = refused
    raise error


def check_windows(plan: ShardingPlan, host_tables: Mapping[str, HostTable]) -> None:
    """Refuse arenas that cannot hold the rows of all live batches, and more rows than slots have bits for.

    Raises:
        ValueError: the first of them, with the fraction that would do.
    """
    rows_of_rank: dict[int, int] = {}
    for name, table in host_tables.items():
        spec = plan.plan["embeddings"][name].sharding_spec
        assert spec is not None, "tables in host memory are not replicated"
        rows = max(shard.shard_sizes[0] for shard in spec.shards)
        if not all(shard.shard_sizes[0] for shard in spec.shards):
            total = sum(shard.shard_sizes[0] for shard in spec.shards)
            raise ValueError(
                f"table {name} with tier: host has {total:,} rows, which leave a rank of {len(spec.shards)} without any; set "
                "tier: device, or shard it table_wise"
            )
        needed = min(rows, table.window)
        if table.slots(rows) < needed:
            least = math.ceil(1e4 * needed / rows) / 1e4
            raise ValueError(
                f"table {name} with tier: host and cache: {table.cache:g} has room on the device for {table.slots(rows):,} of "
                f"its {rows:,} rows per rank, and the batches at work may look up {needed:,} different ones; set "
                f"cache: {least:g} or more, lower train.batch_size and eval.batch_size, or set tier: device"
            )
        for shard in spec.shards:
            rank = shard.placement.rank()
            rows_of_rank[rank] = rows_of_rank.get(rank, 0) + shard.shard_sizes[0]
    most = max(rows_of_rank.values(), default=0)
    if most > MOST_ROWS:
        raise ValueError(
            f"the tables with tier: host of a rank have {most:,} rows, and want at most {MOST_ROWS:,}; start more ranks, or "
            "raise the frequency limit of the dataset"
        )


LINK_BYTES_PER_MS = 40e9 / 1e3
"""Bytes per millisecond of a kernel that copies sorted rows of 512 bytes between host memory and an H200, each way in turn."""


def with_expected_fetches(
    plan: TieredPlan,
    tables: Sequence[TablePlan],
    shares: Mapping[str, IdShare],
    global_batch: int,
) -> list[TablePlan]:
    """Return the rows of a plan with the rows that each table in host memory is expected to fetch per step.

    Args:
        plan: of the tables.
        tables: the same as plain rows.
        shares: table -> share of its ids.
        global_batch: rows of all ranks.
    """
    fetched: dict[str, float] = {}
    rings: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    by_name = {table.table: table for table in tables}
    for name in plan.host_tables:
        spec = plan.plan["embeddings"][name].sharding_spec
        assert spec is not None, "tables in host memory are not replicated"
        for shard in spec.shards:
            # Tables of one width share an arena.
            key = shard.placement.rank(), shard.shard_sizes[1]
            rings.setdefault(key, []).append((name, shard.shard_offsets[0], shard.shard_sizes[0]))
    for members in rings.values():
        classes = [
            row_classes(
                shares[name],
                first,
                count,
                _fixed(plan, members, name, count),
                global_batch * by_name[name].hotness,
            )
            for name, first, count in members
        ]
        for (name, _, _), number in zip(
            members, expected_fetches(classes, _ring(plan, members)), strict=True
        ):
            fetched[name] = fetched.get(name, 0.0) + number
    return [replace(table, fetched_rows=fetched.get(table.table, 0.0)) for table in tables]


Members = Sequence[tuple[str, int, int]]
"""Table, first row and number of rows of the shards that share an arena."""


def _slots(plan: TieredPlan, members: Members) -> int:
    return sum(plan.host_tables[name].slots(count) for name, _, count in members)


def _ring(plan: TieredPlan, members: Members) -> int:
    """Return the slots of an arena whose rows change."""
    needed = sum(min(plan.host_tables[name].window, count) for name, _, count in members)
    return max(needed, ring_slots(_slots(plan, members)))


def _fixed(plan: TieredPlan, members: Members, name: str, count: int) -> int:
    """Return the rows of a shard that keep their slots."""
    share = 1 - _ring(plan, members) / max(_slots(plan, members), 1)
    return int(plan.host_tables[name].slots(count) * share)


def fetched_bytes(table: TablePlan) -> float:
    """Return the bytes that a table in host memory is expected to fetch per step, weights and optimizer state, over all ranks."""
    if not table.cache_rows:
        return 0.0
    shards = len(table.ranks) if table.sharding == "column_wise" else 1
    row_bytes = sum(table.host_bytes_per_rank) / (table.num_embeddings * shards)
    return table.fetched_rows * row_bytes
