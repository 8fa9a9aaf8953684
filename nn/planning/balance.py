"""Balance of a plan over ranks: tables are moved and swapped, and column shards of one table on one rank are joined.

TorchRec's planner places one table after the other, the largest first, each on the rank that has least to do at that time.
What it places last are small tables, which cannot fill the gaps that large ones have left. And it may place two column
shards of a table on one rank, where every id would be looked up twice.
"""

from collections import defaultdict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.planner.types import Storage
from torchrec.distributed.planner.utils import placement

from configs.schema import ShardingType

WHOLE = (ShardingType.table_wise.value, ShardingType.column_wise.value)
"""Sharding types whose shards may lie on any rank."""
LEAST_GAIN = 1e-6
"""Fraction of the busiest rank's work that a change must save."""
MOST_CHANGES = 10_000
"""Bound of the search, which ends by itself much earlier."""


@dataclass(frozen=True, slots=True)
class ShardCost:
    ms: float  # of a step, as the planner estimates it
    ids_ms: float  # the part of it that its ids take whatever the columns
    storage: Storage


Costs = Mapping[tuple[str, str, tuple[int, ...]], ShardCost]
"""Costs by table, sharding type, and rows and columns of a shard."""
Plan = MutableMapping[str, Any]
"""TorchRec's `ParameterSharding` by table."""


@dataclass(slots=True)
class _Group:
    """Shards of a table on one rank, which are moved together."""

    table: str
    shards: list[ShardMetadata]  # of the table; their ids are looked up once
    ms: float
    storage: Storage


def balance(plan: Plan, costs: Costs, world_size: int, device: str, local_size: int) -> None:
    """Move and swap tables until none lowers the busiest rank's time; no rank gets more memory than the fullest had."""
    groups: list[dict[str, _Group]] = [{} for _ in range(world_size)]
    fixed = [0.0] * world_size
    used = [Storage(hbm=0, ddr=0)] * world_size
    for table, sharding in plan.items():
        if sharding.sharding_spec is None:
            continue
        for shard in sharding.sharding_spec.shards:
            rank = shard.placement.rank()
            cost = costs[table, sharding.sharding_type, tuple(shard.shard_sizes)]
            used[rank] += cost.storage
            if sharding.sharding_type not in WHOLE:
                fixed[rank] += cost.ms
            elif table in groups[rank]:
                group = groups[rank][table]
                group.shards.append(shard)
                group.ms += cost.ms - cost.ids_ms
                group.storage += cost.storage
            else:
                groups[rank][table] = _Group(table, [shard], cost.ms, cost.storage)
    fullest = Storage(hbm=max(size.hbm for size in used), ddr=max(size.ddr for size in used))
    free = [fullest - size for size in used]
    times = [
        other + sum(group.ms for group in held.values())
        for other, held in zip(fixed, groups, strict=True)
    ]
    for _ in range(MOST_CHANGES):
        busiest = max(range(world_size), key=times.__getitem__)
        change = _best_change(busiest, groups, times, free)
        if change is None:
            break
        group, rank, partner = change
        _move(group, busiest, rank, groups, times, free)
        if partner is not None:
            _move(partner, rank, busiest, groups, times, free)
    for rank, held in enumerate(groups):
        for group in held.values():
            for shard in group.shards:
                shard.placement = _remote_device(placement(device, rank, local_size))
    for sharding in plan.values():
        if sharding.sharding_spec is not None:
            sharding.ranks = [shard.placement.rank() for shard in sharding.sharding_spec.shards]


def _best_change(
    busiest: int, groups: list[dict[str, _Group]], times: list[float], free: list[Storage]
) -> tuple[_Group, int, _Group | None] | None:
    """Return a group of the busiest rank, another rank, and what comes back from there; None if nothing helps."""
    best, best_time = None, times[busiest] * (1 - LEAST_GAIN)
    for rank in range(len(groups)):
        if rank == busiest:
            continue
        for group in groups[busiest].values():
            if group.table in groups[rank]:
                continue
            for partner in (None, *groups[rank].values()):
                if partner is not None and partner.table in groups[busiest]:
                    continue
                gain = group.ms - (0.0 if partner is None else partner.ms)
                time = max(times[busiest] - gain, times[rank] + gain)
                if time < best_time and _fits(group, partner, free[rank], free[busiest]):
                    best, best_time = (group, rank, partner), time
    return best


def _fits(group: _Group, partner: _Group | None, there: Storage, here: Storage) -> bool:
    if partner is None:
        return bool(group.storage.fits_in(there))
    fits_there = group.storage.fits_in(there + partner.storage)
    return bool(fits_there and partner.storage.fits_in(here + group.storage))


def _move(
    group: _Group,
    source: int,
    target: int,
    groups: list[dict[str, _Group]],
    times: list[float],
    free: list[Storage],
) -> None:
    groups[target][group.table] = groups[source].pop(group.table)
    times[source] -= group.ms
    times[target] += group.ms
    free[source] += group.storage
    free[target] -= group.storage


def join_columns(plan: Plan) -> None:
    """Join the column shards of a table that lie on one rank to one, in place; all on one rank: the table is table-wise."""
    for sharding in plan.values():
        if sharding.sharding_type != ShardingType.column_wise.value:
            continue
        shards = sharding.sharding_spec.shards
        by_rank: dict[int, list[ShardMetadata]] = defaultdict(list)
        for shard in shards:
            by_rank[shard.placement.rank()].append(shard)
        if len(by_rank) == len(shards):
            continue
        # Shards have equally many columns, so any of them may be those of any rank.
        column = 0
        joined = []
        for held in by_rank.values():
            rows, columns = held[0].shard_sizes
            width = columns * len(held)
            joined.append(ShardMetadata([0, column], [rows, width], held[0].placement))
            column += width
        sharding.sharding_spec = EnumerableShardingSpec(joined)
        sharding.ranks = list(by_rank)
        if len(by_rank) == 1:
            sharding.sharding_type = ShardingType.table_wise.value
