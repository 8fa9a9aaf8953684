"""Sharding plan by TorchRec's planner, with the real properties of tables and hardware.

By default the planner assumes 32 GiB GPUs and one lookup per sample. It then puts tables that would fit into unified
memory, or a hundred-hot table where it slows one rank down. Here it gets the real memory, the measured speed of the
links, the hotness and optimizer state of each table, and only the kernels that this recipe trains.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    PlannerError,
    ShardingOption,
    Storage,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from configs.schema import Exchange, ShardingConfig, ShardingType, TableOverride, Tier
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import ids_per_sample, tables_of_feature, vectors_per_sample
from nn.embedding.optimizer import TableRule, with_column_cuts
from nn.planning.advice import does_not_fit, lacks_host_memory
from nn.planning.balance import ShardCost, balance, join_columns
from nn.planning.exchange_choice import wanted_exchanges, with_exchanges
from nn.planning.host_choice import Movable, choices
from nn.planning.host_tables import (
    DISK_ROW_BYTES,
    check_live_rows,
    chosen_host_tables,
    live_rows_of,
    overrides_of,
    read_ahead_bytes,
)
from nn.planning.plan import Hardware, TablePlan
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
from nn.tiers.traffic import IdTraffic

# Bytes per millisecond of an H200 server, for the planner's cost model: HBM copy as measured, PCIe as specified. Only their
# ratios to those of `sharding.within_gb_s` (NVLink all-to-all as measured) and `between_gb_s` affect the plan.
HBM_BYTES_PER_MS = 4.3e12 / 1e3
HOST_BYTES_PER_MS = 200e9 / 1e3
HOST_LINK_BYTES_PER_MS = 55e9 / 1e3
BYTES_PER_MS = 1e9 / 1e3
"""Of a link with 1 GB/s."""


ID_COLUMNS = 128
"""Columns whose lookup and update take as long as what an id takes whatever the width: expansion, sort, addressing."""
REPLICATED_FROM = 32_768
"""Samples per rank from which small tables are replicated. With fewer, sort and update of the replicas cost more than the
all-to-all that they save (4 H200, DLRM: 32 instead of 36 million samples/s with 16,384 samples per rank, 61 instead of 51
with 65,536)."""
REPLICATED_BELOW = 8
"""Least samples per rank and row of a replicated table: with 2, its gradient would be as large as the embeddings that are
not sent."""
# Without an override, a table is column-wise only if it takes more than this fraction of a rank's usable memory, or more
# than a rank's fair share of all lookups.
CUT_ABOVE = 0.25


class TableSharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with the layouts and kernels that this recipe trains: row-wise on CPUs too, no unified memory."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return one kernel per layout, so that the cost model cannot choose."""
        if sharding_type == ShardingType.data_parallel.value:
            return [EmbeddingComputeKernel.DENSE.value]
        return [EmbeddingComputeKernel.FUSED.value]


class PlanProblem:
    """What is planned: the tables, as declared and as TorchRec takes them, the hardware, and the limits of the options.

    `batch_size` is that of a rank, and `live_samples` are those of a rank's batches at work. `expansion_bytes` are by feature.
    Raises ValueError: a wrong override.
    """

    def __init__(
        self,
        declared: Sequence[EmbeddingBagConfig],
        spec: FeatureSpec,
        config: ShardingConfig,
        rule: TableRule,
        hardware: Hardware,
        batch_size: int,
        expansion_bytes: Mapping[str, int],
        live_samples: int,
        traffic_of: Callable[[str], IdTraffic],
    ) -> None:
        self.declared, self.spec, self.config, self.rule = declared, spec, config, rule
        self.hardware, self.batch_size, self.traffic_of = hardware, batch_size, traffic_of
        self.ids = ids_per_sample(declared, spec)
        self.overrides = overrides_of(declared, config)
        self.wanted = wanted_exchanges(declared, spec, self.overrides, config.exchange)
        self.constraints = _constraints(self)
        self.embeddings = _embeddings(self)
        tables_of = tables_of_feature(declared)
        self.expansion_bytes: Counter[str] = Counter()  # by table
        for feature, size in expansion_bytes.items():
            self.expansion_bytes.update(dict.fromkeys(tables_of[feature], size))
        self.live_rows = live_rows_of(declared, spec, live_samples, hardware.world_size)
        # Those that overrides put into host memory or on disk.
        self.chosen = chosen_host_tables(self.overrides, self.live_rows)
        self.topology = _topology(self)


def plan_tables(problem: PlanProblem) -> tuple[TieredPlan, list[TablePlan]]:
    """Plan the sharding of all tables, as TorchRec's plan and as plain rows; ValueError: they do not fit."""
    hardware = problem.hardware
    try:
        plan, host_tables = _plan_that_fits(problem)
    except PlannerError as error:
        limits = problem.embeddings, problem.config, problem.rule, hardware, problem.chosen
        if _fits_the_devices(problem):
            raise ValueError(lacks_host_memory(*limits)) from error
        raise ValueError(does_not_fit(problem.expansion_bytes, error, *limits)) from error
    check_live_rows(plan, host_tables)
    rows = with_exchanges(
        _table_plans(problem, plan.plan["embeddings"], host_tables),
        problem.declared,
        problem.spec,
        problem.wanted,
        problem.batch_size,
        hardware,
        problem.traffic_of,
    )
    row_tables = frozenset(row.table for row in rows if row.exchange == "rows")
    return TieredPlan(
        plan.plan, host_tables, row_tables, hardware.table_ranks, hardware.two_hops
    ), rows


def _constraints(problem: PlanProblem) -> dict[str, ParameterConstraints]:
    """Return the layouts from which the planner may choose for each table; ValueError: an override leaves none, or names none."""
    hardware, config = problem.hardware, problem.config
    unknown = sorted({*config.tables} - {*tables_of_feature(problem.declared), *problem.ids})
    if unknown:
        raise ValueError(
            f"sharding.tables names {', '.join(unknown)}, but the tables are "
            f"{', '.join(problem.ids)}; correct the names"
        )
    mean_hotness = {feature.name: feature.mean_hotness for feature in problem.spec.categorical}
    # A rank may have no memory, and features no ids.
    most_bytes = max(usable_bytes(hardware, config) * CUT_ABOVE, 1)
    most_lookups = sum(problem.ids.values()) / hardware.table_ranks or 1
    constraints = {}
    for table in problem.declared:
        types = _allowed_types(problem, table)
        # Every column shard repeats the lookup, so only tables that are hard to place on one rank are sharded by columns, for
        # their lookups in two: quarters would take as long as halves.
        size = bytes_of(table, problem.rule)
        parts = max(size / most_bytes, min(problem.ids[table.name] / most_lookups, 2))
        is_only = types == [ShardingType.column_wise]
        may_cut = ShardingType.column_wise in types
        width = None
        if may_cut and (is_only or parts > 1) and problem.wanted[table.name] is not Exchange.rows:
            width = _column_width(table.embedding_dim, parts, hardware.table_ranks)
        if width is None and is_only:
            raise ValueError(
                f"sharding sets table {table.name} of {table.embedding_dim} columns to column_wise, which is for shards of a "
                "multiple of 4 columns, and for vectors; choose another sharding type, width or exchange"
            )
        if width is None:
            types = _without(types, ShardingType.column_wise)
            assert types, "TorchRec reads an empty list as all layouts"
        constraints[table.name] = ParameterConstraints(
            sharding_types=[kind.value for kind in types],
            min_partition=width,
            pooling_factors=[mean_hotness[feature] for feature in table.feature_names],
        )
    return constraints


def _allowed_types(problem: PlanProblem, table: EmbeddingBagConfig) -> list[ShardingType]:
    """Return the sharding types of a table that the options and its optimizer allow; ValueError: none."""
    config, rule = problem.config, problem.rule
    override = problem.overrides.get(table.name, TableOverride())
    if override.type is not None:
        types = [override.type]
    elif problem.hardware.table_ranks == 1:
        types = [ShardingType.table_wise]
    elif override.tier in (Tier.host, Tier.disk):
        types = _without(config.types, ShardingType.data_parallel) or [ShardingType.table_wise]
    else:
        types = _replicated_or_not(table.num_embeddings, problem.batch_size, config.types)
    if rule.columns_may_be_cut:
        return types
    uncut = _without(types, ShardingType.column_wise)
    if not uncut:
        raise ValueError(
            f"table {table.name} would be column_wise, but {rule.name} keeps one state per row, and a column-wise table "
            "would have several; choose table_wise, row_wise or data_parallel, or "
            f"optimizer.embedding_name={with_column_cuts(rule)}"
        )
    return uncut


def _without(types: Sequence[ShardingType], left_out: ShardingType) -> list[ShardingType]:
    return [kind for kind in types if kind is not left_out]


def _replicated_or_not(
    num_embeddings: int, batch_size: int, types: Sequence[ShardingType]
) -> list[ShardingType]:
    """Decide by size alone whether a table is replicated, if both is allowed.

    A replicated table needs no all-to-all; its gradient joins the all-reduce of the dense gradients. TorchRec's cost model
    does not know that this all-reduce happens anyway.
    """
    others = _without(types, ShardingType.data_parallel)
    if not others or ShardingType.data_parallel not in types:
        return list(types)
    is_small = batch_size >= REPLICATED_FROM and num_embeddings * REPLICATED_BELOW <= batch_size
    return [ShardingType.data_parallel] if is_small else others


def _column_width(embedding_dim: int, parts: float, world_size: int) -> int | None:
    """Return the columns per shard, a multiple of 4: the fewest equal shards from `parts` (and 2) up; None without such."""
    counts = [
        count
        for count in range(1, world_size + 1)
        if embedding_dim % count == 0 and (embedding_dim // count) % 4 == 0
    ]
    if not counts:
        return None
    return embedding_dim // next((count for count in counts if count >= max(parts, 2)), counts[-1])


def _embeddings(problem: PlanProblem) -> EmbeddingBagCollection:
    """Return the tables as TorchRec's planner takes them: on the meta device, with their optimizer, all pooled.

    The planner's own module knows no lookup without pooling; `_constraints` counts what it looks up. TorchRec's own helper would
    also create an optimizer per table, and passes arguments by torch's names, some of which FBGEMM does not accept (`betas`).
    """
    pooled = [replace(table, pooling=PoolingType.SUM) for table in problem.declared]
    embeddings = EmbeddingBagCollection(tables=pooled, device=torch.device("meta"))
    for weight in embeddings.parameters():
        weight._optimizer_classes = [problem.rule.planner_class]
    # Replicated tables are float32, whatever the dtype of the others.
    for table in embeddings.embedding_bag_configs():
        if _is_replicated(problem, table):
            table.data_type = DataType.FP32
            embeddings.embedding_bags[table.name].float()
    return embeddings


def _is_replicated(problem: PlanProblem, table: EmbeddingBagConfig) -> bool:
    return problem.constraints[table.name].sharding_types == [ShardingType.data_parallel.value]


def _topology(problem: PlanProblem) -> Topology:
    """Describe the hardware to TorchRec, without the memory to keep free, and that of the host for rows of `chosen` on disk."""
    hardware, config = problem.hardware, problem.config
    is_cuda = hardware.device_type == "cuda"
    usable = usable_bytes(hardware, config)
    in_host = usable_host_bytes(hardware, config) if is_cuda else usable
    if any(table.is_on_disk for table in problem.chosen.values()):
        in_host = max(in_host - read_ahead_bytes(config), 0)
    links = HardwareConfig(
        hbm_mem_bw=HBM_BYTES_PER_MS,
        ddr_mem_bw=HOST_BYTES_PER_MS,
        hbm_to_ddr_mem_bw=HOST_LINK_BYTES_PER_MS,
        intra_host_bw=config.within_gb_s * BYTES_PER_MS,
        inter_host_bw=config.between_gb_s * BYTES_PER_MS,
    )
    # Passes over a row's bytes of its update: the gradient is read, the weight and its states read and written.
    weight_bytes = min(map(weight_bytes_of, problem.embeddings.embedding_bag_configs()))
    update_passes = 3 + 2 * problem.rule.bytes_per_element // weight_bytes
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=hardware.table_ranks,
            local_world_size=hardware.local_table_ranks,
            hbm_cap_bytes=usable if is_cuda else 0,
            ddr_cap_bytes=in_host,
        ),
        links if is_cuda else HardwareConfig(),
        KernelConfig(
            compute_device=hardware.device_type,
            bwd_compute_multiplier=update_passes,
            use_hardware_based_bandwidth=is_cuda,
        ),
    )


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
        self._expansion_bytes = problem.expansion_bytes
        self._rule = problem.rule
        self._host_tables = host_tables
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
                state = table_bytes(rows, columns, self._rule, weight_bytes=0)
                size = state * (FP32_BYTES - weight_bytes) // FP32_BYTES
                size += self._expansion_bytes[option.name]
                shard.storage += Storage(hbm=size * self._on_gpu, ddr=size * (not self._on_gpu))
                if option.name in self._host_tables:
                    shard.storage += self._moved(option.name, rows, columns, weight_bytes)
                key = (option.name, option.sharding_type, (rows, columns))
                self.costs[key] = ShardCost(shard.perf.total, ids_ms, shard.storage)

    def _moved(self, table: str, rows: int, columns: int, weight_bytes: int) -> Storage:
        """Return what a shard takes more, or less, if its rows lie in host memory or on disk."""
        full = table_bytes(rows, columns, self._rule, weight_bytes=weight_bytes)
        host_table = self._host_tables[table]
        arena = arena_bytes(rows, host_table, columns, self._rule, weight_bytes=weight_bytes)
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
        if override.tier is None and not _is_replicated(problem, table):
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
