"""Sharding plan by TorchRec's planner, with the real properties of tables and hardware.

By default the planner assumes 32 GiB GPUs and one lookup per sample. It then puts tables that would fit into unified
memory, or a hundred-hot table where it slows one rank down. Here it gets the real memory, the measured speed of the
links, the hotness and optimizer state of each table, and only the kernels that this recipe trains.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Storage, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import ShardingType, TableOverride, Tier
from nn.embedding.declared_tables import vectors_per_sample
from nn.embedding.optimizer import TableRule
from nn.planning.advice import does_not_fit, lacks_host_memory
from nn.planning.balance import ShardCost, balance, join_columns
from nn.planning.exchange_choice import with_exchanges
from nn.planning.host_choice import Movable, choices
from nn.planning.host_tables import DISK_ROW_BYTES, check_live_rows
from nn.planning.plan import TablePlan
from nn.planning.plan_problem import PlanProblem
from nn.planning.table_sizes import (
    FP32_BYTES,
    arena_bytes,
    bytes_of,
    table_bytes,
    usable_bytes,
    usable_host_bytes,
    weight_bytes_of,
)
from nn.sharding.tables import ROWS_CUT, HostTable, TieredPlan

ID_COLUMNS = 128
"""Columns whose lookup and update take as long as what an id takes whatever the width: expansion, sort, addressing."""


class TableSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with the layouts and kernels that this recipe trains: row-wise on CPUs too, no unified memory."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return one kernel per layout, so that the cost model cannot choose."""
        if sharding_type == ShardingType.data_parallel.value:
            return [EmbeddingComputeKernel.DENSE.value]
        return [EmbeddingComputeKernel.FUSED.value]


def plan_tables(problem: PlanProblem) -> tuple[TieredPlan, list[TablePlan]]:
    """Plan the sharding of all tables, as TorchRec's plan and as plain rows; ValueError: they do not fit."""
    hardware = problem.hardware
    try:
        plan, host_tables = _plan_that_fits(problem)
    except PlannerError as error:
        if _fits_the_devices(problem):
            raise ValueError(lacks_host_memory(problem)) from error
        raise ValueError(does_not_fit(problem, error)) from error
    check_live_rows(plan, host_tables)
    rows = with_exchanges(_table_plans(problem, plan.plan["embeddings"], host_tables), problem)
    row_tables = frozenset(row.table for row in rows if row.exchange == "rows")
    return TieredPlan(
        plan.plan, host_tables, row_tables, hardware.table_ranks, hardware.two_hops
    ), rows


class TableEnumerator(EmbeddingEnumerator):
    """TorchRec's search space, with memory that TorchRec does not count, and the `costs` of the shards that were estimated.

    That is the expansion of the table's ids, and half of the optimizer state of a 16-bit table: TorchRec takes the state
    to have 16 bits too.
    """

    def __init__(
        self, problem: PlanProblem, topology: Topology, host_tables: Mapping[str, HostTable]
    ) -> None:
        super().__init__(
            topology=topology, batch_size=problem.batch_size, constraints=problem.constraints
        )
        self._on_gpu = topology.compute_device == "cuda"
        self._problem, self._host_tables = problem, host_tables
        self.costs: dict[tuple[str, str, tuple[int, ...]], ShardCost] = {}

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        super().populate_estimates(sharding_options)
        for option in sharding_options:
            weight_bytes = option.tensor.element_size()
            for shard in option.shards:
                rows, columns = shard.size
                assert shard.perf is not None
                of_ids = (columns + ID_COLUMNS) / columns
                shard.perf.fwd_compute *= of_ids
                shard.perf.bwd_compute *= of_ids
                compute = shard.perf.fwd_compute + shard.perf.bwd_compute
                ids_ms = compute * ID_COLUMNS / (columns + ID_COLUMNS)
                state = table_bytes(rows, columns, self._problem.rule, weight_bytes=0)
                size = state * (FP32_BYTES - weight_bytes) // FP32_BYTES
                size += self._problem.expansion_bytes[option.name]
                shard.storage += Storage(hbm=size * self._on_gpu, ddr=size * (not self._on_gpu))
                if option.name in self._host_tables:
                    shard.storage += self._moved(option.name, rows, columns, weight_bytes)
                key = (option.name, option.sharding_type, (rows, columns))
                self.costs[key] = ShardCost(shard.perf.total, ids_ms, shard.storage)

    def _moved(self, table: str, rows: int, columns: int, weight_bytes: int) -> Storage:
        """Return what a shard takes more, or less, if its rows lie in host memory or on disk."""
        rule, host_table = self._problem.rule, self._host_tables[table]
        full = table_bytes(rows, columns, rule, weight_bytes=weight_bytes)
        arena = arena_bytes(rows, host_table, columns, rule, weight_bytes=weight_bytes)
        in_host = DISK_ROW_BYTES * rows if host_table.is_on_disk else full
        if self._on_gpu:
            return Storage(hbm=arena - full, ddr=in_host)
        return Storage(hbm=0, ddr=arena + in_host - full)


def _run_planner(
    problem: PlanProblem, topology: Topology, host_tables: Mapping[str, HostTable]
) -> ShardingPlan:
    """Return the plan with some tables in host memory or on disk; PlannerError: they do not fit."""
    enumerator = TableEnumerator(problem, topology, host_tables)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=problem.batch_size,
        constraints=problem.constraints,
        enumerator=enumerator,
        # `_topology` subtracts the reserve already: TorchRec's reserve has no effect on CPUs.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        debug=False,
        stats=[],
    )
    # The planner takes a module that contains the tables, and names them by their path.
    holder = torch.nn.Module()
    holder.embeddings = problem.embeddings
    # The planner warns for every replicated table that it has no shards.
    logging.disable(logging.WARNING)
    try:
        plan = planner.plan(holder, [TableSharder()])
    finally:
        logging.disable(logging.NOTSET)
    tables = plan.plan["embeddings"]
    local_size = topology.local_world_size
    balance(tables, enumerator.costs, topology.world_size, topology.compute_device, local_size)
    join_columns(tables)
    return plan


def _plan_that_fits(problem: PlanProblem) -> tuple[ShardingPlan, dict[str, HostTable]]:
    """Plan with the chosen tables in host memory, or with those too that cost the least traffic; PlannerError: none fits."""
    for host_tables in _host_tables_to_try(problem):
        try:
            return _run_planner(problem, problem.topology, host_tables), host_tables
        except PlannerError as refused:
            error = refused
    raise error


def _host_tables_to_try(problem: PlanProblem) -> Iterator[dict[str, HostTable]]:
    yield problem.chosen
    hardware, config = problem.hardware, problem.config
    if Tier.host not in config.tiers or hardware.device_type != "cuda":
        return
    on_device = sum(
        bytes_of(table, problem.rule)
        for table in problem.declared
        if table.name not in problem.chosen
    )
    lacking_bytes = on_device - hardware.table_ranks * usable_bytes(hardware, config)
    host_bytes = hardware.table_ranks * usable_host_bytes(hardware, config)
    for choice in choices(_movable_tables(problem)):
        if choice.freed_bytes >= lacking_bytes and choice.host_bytes <= host_bytes:
            yield {**problem.chosen, **choice.tables}


def _movable_tables(problem: PlanProblem) -> dict[str, Movable]:
    """Return the tables that the planner may put into host memory, with what host memory for them costs."""
    hardware = problem.hardware
    step_rows = problem.batch_size * hardware.world_size
    tables = {}
    for table in problem.declared:
        override = problem.overrides.get(table.name, TableOverride())
        if override.tier is None and not problem.is_replicated(table):
            rows, traffic = table.num_embeddings, problem.traffic_of(table.name)
            types = problem.constraints[table.name].sharding_types or ()
            shards = hardware.table_ranks if {*types} & {*ROWS_CUT} else 1
            tables[table.name] = Movable(
                rows=rows,
                live_rows=problem.live_rows[table.name],
                row_bytes=bytes_of(table, problem.rule) / rows,
                ids=step_rows * problem.ids[table.name] / (1 + traffic.drawn),
                traffic=traffic,
                shard_rows=max(rows // shards, 1),
            )
    return tables


def _fits_the_devices(problem: PlanProblem) -> bool:
    """Return whether tables that cannot be planned could be with plenty of memory in hosts with GPUs."""
    plenty = deepcopy(problem.topology)
    if plenty.compute_device == "cuda":
        for device in plenty.devices:
            device.storage.ddr = 2**60
    try:
        _run_planner(problem, plenty, problem.chosen)
    except PlannerError:
        return False
    return True


def _table_plans(
    problem: PlanProblem, plan: Mapping[str, Any], host_tables: Mapping[str, HostTable]
) -> list[TablePlan]:
    """Return TorchRec's `ParameterSharding` of each table as plain values."""
    vectors = vectors_per_sample(problem.declared, problem.spec)
    rows = []
    for table in problem.embeddings.embedding_bag_configs():
        sharding, host_table = plan[table.name], host_tables.get(table.name)
        on_device, below, slots = _bytes_by_rank(table, sharding, problem.rule, host_table)
        is_on_disk = host_table is not None and host_table.is_on_disk
        tier = Tier.device if host_table is None else Tier.disk if is_on_disk else Tier.host
        rows.append(
            TablePlan(
                table=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                hotness=problem.ids[table.name],
                num_vectors=vectors[table.name],
                sharding=sharding.sharding_type,
                kernel=sharding.compute_kernel,
                ranks=tuple(on_device),
                bytes_per_rank=tuple(on_device.values()),
                expansion_bytes=problem.expansion_bytes[table.name],
                tier=tier.value,
                cache_rows=slots,
                host_bytes_per_rank=tuple(below.values()) if tier is Tier.host else (),
                disk_bytes_per_rank=tuple(below.values()) if tier is Tier.disk else (),
            )
        )
    return rows


def _bytes_by_rank(
    table: EmbeddingBagConfig, sharding: Any, rule: TableRule, host_table: HostTable | None
) -> tuple[dict[int, int], dict[int, int], int]:
    """Return a table's bytes on the devices, and in host memory or on disk, by rank, and the slots of its arenas."""
    if sharding.sharding_spec is None:
        return dict.fromkeys(sharding.ranks, bytes_of(table, rule)), {}, 0
    on_device: Counter[int] = Counter()
    below: Counter[int] = Counter()
    slots = 0
    weight_bytes = weight_bytes_of(table)
    for shard in sharding.sharding_spec.shards:
        rank, (num_rows, columns) = shard.placement.rank(), shard.shard_sizes
        size = table_bytes(num_rows, columns, rule, weight_bytes=weight_bytes)
        if host_table is not None:
            below[rank] += size
            slots += host_table.slots(num_rows)
            size = arena_bytes(num_rows, host_table, columns, rule, weight_bytes=weight_bytes)
        on_device[rank] += size
    return on_device, below, slots
