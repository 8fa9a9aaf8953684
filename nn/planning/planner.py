"""Sharding plan by TorchRec's planner, with the real properties of tables and hardware.

By default the planner assumes 32 GiB GPUs and one lookup per sample. It then puts tables that would fit into unified
memory, or a hundred-hot table where it slows one rank down. Here it gets the real memory, the measured speed of the
links, the hotness and optimizer state of each table, and only the kernels that this recipe trains.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

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
from nn.planning.host_choice import movable_tables, with_host_tables
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


class TableEnumerator(EmbeddingEnumerator):
    """TorchRec's search space, with memory that TorchRec does not count, and the `costs` of the shards that were estimated.

    That is the expansion of the table's ids, and half of the optimizer state of a 16-bit table: TorchRec takes the state
    to have 16 bits too.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        expansion_bytes: Mapping[str, int],
        rule: TableRule,
        host_tables: Mapping[str, HostTable],
    ) -> None:
        super().__init__(topology=topology, batch_size=batch_size, constraints=constraints)
        self._on_gpu = topology.compute_device == "cuda"
        self._expansion_bytes = expansion_bytes
        self._rule = rule
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
                size += self._expansion_bytes.get(option.name, 0)
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


def planned_tables(
    declared: Sequence[EmbeddingBagConfig], rule: TableRule
) -> EmbeddingBagCollection:
    """Return the tables as TorchRec's planner takes them: on the meta device, with their optimizer, all pooled.

    The planner's own module knows no lookup without pooling; `_constraints` counts what it looks up. TorchRec's own helper would
    also create an optimizer per table, and passes arguments by torch's names, some of which FBGEMM does not accept (`betas`).
    """
    pooled = [replace(table, pooling=PoolingType.SUM) for table in declared]
    embeddings = EmbeddingBagCollection(tables=pooled, device=torch.device("meta"))
    for table in embeddings.parameters():
        table._optimizer_classes = [rule.planner_class]
    return embeddings


def plan_tables(
    declared: Sequence[EmbeddingBagConfig],
    spec: FeatureSpec,
    config: ShardingConfig,
    rule: TableRule,
    hardware: Hardware,
    batch_size: int,
    expansion_bytes: Mapping[str, int],
    live_samples: int,
    traffic_of: Callable[[str], IdTraffic],
) -> tuple[TieredPlan, list[TablePlan]]:
    """Plan the sharding of all tables, as TorchRec's plan and as plain rows; ValueError: they do not fit, or a wrong override."""
    expansions: Counter[str] = Counter()
    for feature, size in expansion_bytes.items():
        expansions.update(dict.fromkeys(tables_of_feature(declared)[feature], size))
    embeddings = planned_tables(declared, rule)
    constraints = _constraints(declared, spec, config, rule, hardware, batch_size)
    # Replicated tables are float32, whatever the dtype of the others; they are on the meta device.
    for table in embeddings.embedding_bag_configs():
        if constraints[table.name].sharding_types == [ShardingType.data_parallel.value]:
            table.data_type = DataType.FP32
            embeddings.embedding_bags[table.name].float()
    live_rows = live_rows_of(declared, spec, live_samples, hardware.world_size)
    chosen = chosen_host_tables(declared, config, live_rows)
    topology = _topology(hardware, config, update_passes(embeddings, rule), chosen)
    inputs = (batch_size, constraints, embeddings, expansions, rule)
    planned = partial(_run_planner, topology, *inputs)
    num_ranks = hardware.table_ranks
    movable = partial(
        movable_tables,
        _candidates(declared, config, hardware, constraints),
        partial(bytes_of, rule=rule),
        live_rows,
        {
            name: num_ranks if {*(limits.sharding_types or ())} & {*ROWS_CUT} else 1
            for name, limits in constraints.items()
        },
        {
            name: batch_size * hardware.world_size * n
            for name, n in ids_per_sample(declared, spec).items()
        },
        traffic_of,
    )
    on_device = sum(bytes_of(table, rule) for table in declared if table.name not in chosen)
    lacking = on_device - num_ranks * usable_bytes(hardware, config)
    in_hosts = num_ranks * usable_host_bytes(hardware, config)
    try:
        plan, host_tables = with_host_tables(planned, chosen, movable, lacking, in_hosts)
    except PlannerError as error:
        fits = _fits_the_devices(lambda more: _run_planner(more, *inputs, chosen), topology)
        refusal = lacks_host_memory if fits else partial(does_not_fit, expansions, error)
        raise ValueError(refusal(embeddings, config, rule, hardware, chosen)) from error
    check_live_rows(plan, host_tables)
    rows = with_exchanges(
        _rows(plan, embeddings, declared, spec, rule, expansions, host_tables),
        declared,
        spec,
        wanted_exchanges(declared, spec, config),
        batch_size,
        hardware,
        traffic_of,
    )
    row_tables = frozenset(row.table for row in rows if row.exchange == "rows")
    return TieredPlan(plan.plan, host_tables, row_tables, num_ranks, hardware.two_hops), rows


def _fits_the_devices(planned: Callable[[Topology], ShardingPlan], topology: Topology) -> bool:
    """Return whether tables that cannot be planned could be with plenty of memory in hosts with GPUs."""
    plenty = deepcopy(topology)
    if topology.compute_device == "cuda":
        for device in plenty.devices:
            device.storage.ddr = 2**60
    try:
        planned(plenty)
    except PlannerError:
        return False
    return True


def _candidates(
    declared: Sequence[EmbeddingBagConfig],
    config: ShardingConfig,
    hardware: Hardware,
    constraints: Mapping[str, ParameterConstraints],
) -> list[EmbeddingBagConfig]:
    """Return the tables that the planner may put into host memory."""
    if Tier.host not in config.tiers or hardware.device_type != "cuda":
        return []
    kept = {name for name, override in overrides_of(declared, config).items() if override.tier}
    replicated = [ShardingType.data_parallel.value]
    return [
        table
        for table in declared
        if table.name not in kept and constraints[table.name].sharding_types != replicated
    ]


def _run_planner(
    topology: Topology,
    batch_size: int,
    constraints: dict[str, ParameterConstraints],
    embeddings: EmbeddingBagCollection,
    expansions: Mapping[str, int],
    rule: TableRule,
    host_tables: Mapping[str, HostTable],
) -> ShardingPlan:
    enumerator = TableEnumerator(topology, batch_size, constraints, expansions, rule, host_tables)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        enumerator=enumerator,
        # `_topology` subtracts the reserve already: TorchRec's reserve has no effect on CPUs.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        debug=False,
        stats=[],
    )
    # The planner takes a module that contains the tables, and names them by their path.
    holder = torch.nn.Module()
    holder.embeddings = embeddings
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


def _topology(
    hardware: Hardware,
    config: ShardingConfig,
    update_passes: float,
    chosen: Mapping[str, HostTable],
) -> Topology:
    """Describe the hardware to TorchRec, without the memory to keep free, and that of the host for rows of `chosen` on disk."""
    host_room = any(table.is_on_disk for table in chosen.values()) * read_ahead_bytes(config)
    cuda = hardware.device_type == "cuda"
    usable = usable_bytes(hardware, config)
    in_host = usable_host_bytes(hardware, config)
    links = HardwareConfig(
        hbm_mem_bw=HBM_BYTES_PER_MS,
        ddr_mem_bw=HOST_BYTES_PER_MS,
        hbm_to_ddr_mem_bw=HOST_LINK_BYTES_PER_MS,
        intra_host_bw=config.within_gb_s * BYTES_PER_MS,
        inter_host_bw=config.between_gb_s * BYTES_PER_MS,
    )
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=hardware.table_ranks,
            local_world_size=hardware.local_table_ranks,
            hbm_cap_bytes=usable if cuda else 0,
            ddr_cap_bytes=max((in_host if cuda else usable) - host_room, 0),
        ),
        links if cuda else HardwareConfig(),
        KernelConfig(
            compute_device=hardware.device_type,
            bwd_compute_multiplier=update_passes,
            use_hardware_based_bandwidth=cuda,
        ),
    )


def _constraints(
    declared: Sequence[EmbeddingBagConfig],
    spec: FeatureSpec,
    config: ShardingConfig,
    rule: TableRule,
    hardware: Hardware,
    batch_size: int,
) -> dict[str, ParameterConstraints]:
    hotness, tables_of = ids_per_sample(declared, spec), tables_of_feature(declared)
    of_feature = {feature.name: feature.mean_hotness for feature in spec.categorical}
    wanted = wanted_exchanges(declared, spec, config)
    overrides = overrides_of(declared, config)
    unknown = sorted({*config.tables} - {*tables_of, *hotness})
    if unknown:
        raise ValueError(
            f"sharding.tables names {', '.join(unknown)}, but the tables are "
            f"{', '.join(hotness)}; correct the names"
        )
    # A rank may have no memory, and features no ids.
    most_bytes = max(usable_bytes(hardware, config) * CUT_ABOVE, 1)
    most_lookups = sum(hotness.values()) / hardware.table_ranks or 1
    constraints = {}
    for table in declared:
        override = overrides.get(table.name, TableOverride())
        chosen = override.type
        types: list[ShardingType]
        if chosen is not None:
            types = [chosen]
        elif hardware.table_ranks == 1:
            types = [ShardingType.table_wise]
        elif override.tier in (Tier.host, Tier.disk):
            types = [kind for kind in config.types if kind is not ShardingType.data_parallel]
            types = types or [ShardingType.table_wise]
        else:
            types = _replicated_or_not(table.num_embeddings, batch_size, config.types)
        if not rule.columns_may_be_cut and ShardingType.column_wise in types:
            types = [kind for kind in types if kind is not ShardingType.column_wise]
            if not types:
                raise ValueError(
                    f"table {table.name} would be column_wise, but {rule.name} keeps one state per row, and a column-wise table "
                    "would have several; choose table_wise, row_wise or data_parallel, or "
                    f"optimizer.embedding_name={with_column_cuts(rule)}"
                )
        # Every column shard repeats the lookup, so only tables that are hard to place on one rank are sharded by columns, for
        # their lookups in two: quarters would take as long as halves.
        size = bytes_of(table, rule)
        parts = max(size / most_bytes, min(hotness[table.name] / most_lookups, 2))
        only = types == [ShardingType.column_wise]
        may_cut = ShardingType.column_wise in types and wanted[table.name] is not Exchange.rows
        cut = may_cut and (only or parts > 1)
        width = _column_width(table.embedding_dim, parts, hardware.table_ranks) if cut else None
        if width is None and only:
            raise ValueError(
                f"sharding sets table {table.name} of {table.embedding_dim} columns to column_wise, which is for shards of a "
                "multiple of 4 columns, and for vectors; choose another sharding type, width or exchange"
            )
        if width is None:
            types = [kind for kind in types if kind is not ShardingType.column_wise]
            assert types, "TorchRec reads an empty list as all layouts"
        constraints[table.name] = ParameterConstraints(
            sharding_types=[kind.value for kind in types],
            min_partition=width,
            pooling_factors=[of_feature[feature] for feature in table.feature_names],
        )
    return constraints


def _replicated_or_not(
    num_embeddings: int, batch_size: int, types: Sequence[ShardingType]
) -> list[ShardingType]:
    """Decide by size alone whether a table is replicated, if both is allowed.

    A replicated table needs no all-to-all; its gradient joins the all-reduce of the dense gradients. TorchRec's cost model
    does not know that this all-reduce happens anyway.
    """
    rest: list[ShardingType] = [kind for kind in types if kind is not ShardingType.data_parallel]
    if not rest or len(rest) == len(types):
        return list(types)
    is_small = batch_size >= REPLICATED_FROM and num_embeddings * REPLICATED_BELOW <= batch_size
    return [ShardingType.data_parallel] if is_small else rest


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


def update_passes(embeddings: EmbeddingBagCollection, rule: TableRule) -> float:
    """Return the passes over a row's bytes of its update: the gradient is read, the weight and its states read and written."""
    weight_bytes = min(map(weight_bytes_of, embeddings.embedding_bag_configs()))
    return 3 + 2 * rule.bytes_per_element // weight_bytes


def _rows(
    plan: ShardingPlan,
    embeddings: EmbeddingBagCollection,
    declared: Sequence[EmbeddingBagConfig],
    spec: FeatureSpec,
    rule: TableRule,
    expansion_bytes: Mapping[str, int],
    host_tables: Mapping[str, HostTable],
) -> list[TablePlan]:
    hotness, vectors = ids_per_sample(declared, spec), vectors_per_sample(declared, spec)
    rows = []
    for table in embeddings.embedding_bag_configs():
        sharding = plan.plan["embeddings"][table.name]
        used: dict[int, int] = {}
        below: dict[int, int] = {}
        slots = 0
        if sharding.sharding_spec is None:
            used = dict.fromkeys(sharding.ranks, bytes_of(table, rule))
        else:
            for shard in sharding.sharding_spec.shards:
                rank = shard.placement.rank()
                num_rows, columns = shard.shard_sizes
                weight_bytes = weight_bytes_of(table)
                size = table_bytes(num_rows, columns, rule, weight_bytes=weight_bytes)
                if table.name in host_tables:
                    below[rank] = below.get(rank, 0) + size
                    host_table = host_tables[table.name]
                    slots += host_table.slots(num_rows)
                    size = arena_bytes(
                        num_rows, host_table, columns, rule, weight_bytes=weight_bytes
                    )
                used[rank] = used.get(rank, 0) + size
        tier = Tier.device
        if below:
            tier = Tier.disk if host_tables[table.name].is_on_disk else Tier.host
        rows.append(
            TablePlan(
                table=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                hotness=hotness[table.name],
                num_vectors=vectors[table.name],
                sharding=sharding.sharding_type,
                kernel=sharding.compute_kernel,
                ranks=tuple(used),
                bytes_per_rank=tuple(used.values()),
                expansion_bytes=expansion_bytes.get(table.name, 0),
                tier=tier.value,
                cache_rows=slots,
                host_bytes_per_rank=tuple(below.values()) if tier is Tier.host else (),
                disk_bytes_per_rank=tuple(below.values()) if tier is Tier.disk else (),
            )
        )
    return rows
