"""Shards of tables on this rank, with the memory that is trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._shard.sharding_spec import ShardMetadata

from nn.embedding.declared_tables import initial_bound
from nn.embedding.local_tables import LocalTable
from nn.embedding.optimizer import StateField
from nn.layers.initialization import fill_uniform_
from nn.ops.stochastic_rounding import rounding_key
from nn.sharding.planned_tables import PlannedShard, PlannedTable
from nn.sharding.tables import TableSettings, TableShard
from nn.tiers.host_tier import HostTier, TieredShard
from nn.tiers.initial_rows import InitialRows
from nn.tiers.row_store import WEIGHT

ON_DEVICE, IN_HOST_MEMORY, ON_DISK = "device", "host", "disk"
FILLED_ROWS = 2**18
"""Rows of a table in host memory that a GPU fills at once."""


@dataclass(slots=True)
class OwnedShard:
    """A shard of a table on this rank.

    `weight` [rows, columns] and `states` are all its rows, wherever they lie; what is looked up of those in host memory or on
    disk is an arena of the tier, in which the shard has the number `tier_index`. Of a shard on disk `weight` has the changes of
    the weights that `initial` gives. `touched` is the mask of the rows that updates have changed, uint8 [rows], where rows are
    tracked.
    """

    table: PlannedTable
    metadata: ShardMetadata
    weight: Tensor
    states: dict[str, Tensor]
    tier_index: int | None = None
    touched: Tensor | None = None
    initial: InitialRows | None = None

    @property
    def memory(self) -> str:
        if self.tier_index is None:
            return ON_DEVICE
        assert self.table.host is not None, "it lies in host memory or on disk"
        return ON_DISK if self.table.host.is_on_disk else IN_HOST_MEMORY

    @property
    def described(self) -> TableShard:
        row, column = self.metadata.shard_offsets
        return TableShard(self.table.name, self.weight, row, column, self.initial)

    def local_table(self, seed: int, tier: HostTier | None) -> LocalTable:
        """Return the shard with the memory that is looked up and updated."""
        row, column = self.metadata.shard_offsets
        table = LocalTable(
            self.table.lookups,
            self.weight,
            self.states,
            column,
            rounding_key(seed, self.table.name),
            row if self.table.is_row_wise else None,
        )
        if self.tier_index is None or tier is None:
            return table
        return tier.local_table(self.tier_index, table)


def fill_shard(shard: TableShard, bound: float, seed: int, device: torch.device) -> None:
    """Fill a shard or a replica with the seed's weights, by a device that may not hold its memory."""
    size = max(len(shard.weight), 1) if shard.weight.device == device else FILLED_ROWS
    for first in range(0, len(shard.weight), size):
        rows = shard.weight[first : first + size]
        block = rows if rows.device == device else torch.empty_like(rows, device=device)
        fill_uniform_(
            block,
            seed=seed,
            table=shard.table,
            row_offset=shard.row_offset + first,
            col_offset=shard.column_offset,
            bound=bound,
        )
        if block is not rows:
            rows.copy_(block)


def allocate_shards(
    placed: Sequence[PlannedShard],
    states: Sequence[StateField],
    settings: TableSettings,
    device: torch.device,
) -> tuple[list[OwnedShard], HostTier | None]:
    """Allocate this rank's shards, and the memory of those in host memory or on disk; weights are not filled.

    Tables of one width and dtype are adjacent in one memory, so that plain torch makes one call for all of them.
    """
    in_tier = [table.host is not None and metadata.shard_sizes[0] > 0 for table, metadata in placed]
    shapes = [
        torch.Size((0 if is_elsewhere else metadata.shard_sizes[0], metadata.shard_sizes[1]))
        for (_, metadata), is_elsewhere in zip(placed, in_tier, strict=True)
    ]
    dtypes = [table.dtype for table, _ in placed]
    kinds = [(shape[1], dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    weights = adjacent(shapes, kinds, dtypes, device)
    floats = [torch.float32] * len(placed)
    of_states = {
        state.name: adjacent(
            [shape[:1] if state.per_row else shape for shape in shapes], kinds, floats, device
        )
        for state in states
    }
    for tensors in of_states.values():
        for tensor in tensors:
            tensor.zero_()
    shards = [
        OwnedShard(
            table, metadata, weight, {name: tensors[at] for name, tensors in of_states.items()}
        )
        for at, ((table, metadata), weight) in enumerate(zip(placed, weights, strict=True))
    ]
    elsewhere = [shard for shard, is_elsewhere in zip(shards, in_tier, strict=True) if is_elsewhere]
    return shards, _tier_of(elsewhere, states, settings, device) if elsewhere else None


def _tier_of(
    shards: Sequence[OwnedShard],
    states: Sequence[StateField],
    settings: TableSettings,
    device: torch.device,
) -> HostTier:
    """Allocate host memory, files and arenas, and give them to the shards."""
    tiered = []
    for index, shard in enumerate(shards):
        (rows, columns), host = shard.metadata.shard_sizes, shard.table.host
        assert host is not None, "it lies in host memory or on disk"
        (first_row, first_column), slots = shard.metadata.shard_offsets, host.slots(rows)
        if host.is_on_disk:
            bound = initial_bound(shard.table.declared)
            shard.initial = InitialRows(settings.seed, shard.table.name, bound)
        tiered.append(
            TieredShard(
                rows,
                columns,
                shard.table.dtype,
                slots,
                host.live_rows,
                first_row,
                shard.initial,
                first_column,
            )
        )
        shard.tier_index = index
    needs_disk = any(shard.is_on_disk for shard in tiered)
    tier = HostTier(tiered, states, device, settings.disk if needs_disk else None)
    for index, shard in enumerate(shards):
        shard.states = tier.host_rows(index)
        shard.weight = shard.states.pop(WEIGHT)
    return tier


def adjacent(
    shapes: Sequence[torch.Size],
    kinds: Sequence[object],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Tensor]:
    """Allocate tensors; those of one kind, which have one dtype, lie one after the other in one memory."""
    tensors: list[Tensor] = [torch.empty(0)] * len(shapes)
    for kind in dict.fromkeys(kinds):
        members = [index for index, other in enumerate(kinds) if other == kind]
        sizes = [shapes[index].numel() for index in members]
        memory = torch.empty(sum(sizes), dtype=dtypes[members[0]], device=device)
        for index, flat in zip(members, memory.split(sizes), strict=True):
            tensors[index] = flat.view(shapes[index])
    return tensors
