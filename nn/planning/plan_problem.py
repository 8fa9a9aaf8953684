"""Problem of the planner: the tables with the layouts that options allow, and the hardware, as TorchRec takes them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace

import torch
from torchrec import EmbeddingBagCollection
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from configs.schema import Exchange, ShardingConfig, ShardingType, TableOverride, Tier
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import hands_out_rows, ids_per_sample, tables_of_feature
from nn.embedding.optimizer import TableRule, with_column_cuts
from nn.planning.host_tables import chosen_host_tables, live_rows_of, overrides_of, read_ahead_bytes
from nn.planning.plan import Hardware
from nn.planning.table_sizes import bytes_of, usable_bytes, usable_host_bytes, weight_bytes_of
from nn.tiers.traffic import IdTraffic

# Bytes per millisecond of an H200 server, for the planner's cost model: HBM copy as measured, PCIe as specified. Only their
# ratios to those of `sharding.within_gb_s` (NVLink all-to-all as measured) and `between_gb_s` affect the plan.
HBM_BYTES_PER_MS = 4.3e12 / 1e3
HOST_BYTES_PER_MS = 200e9 / 1e3
HOST_LINK_BYTES_PER_MS = 55e9 / 1e3
BYTES_PER_MS = 1e9 / 1e3
"""Of a link with 1 GB/s."""
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


@dataclass(eq=False)
class PlanProblem:
    """Tables to plan, as declared and as TorchRec takes them, with the hardware and the limits of the options.

    Raises ValueError: a wrong override.
    """

    declared: Sequence[EmbeddingBagConfig]
    spec: FeatureSpec  # with the ids that the tables look up
    config: ShardingConfig
    rule: TableRule
    hardware: Hardware
    batch_size: int  # of a rank
    expanded: InitVar[Mapping[str, int]]  # bytes of the expansion of ids, by feature
    live_samples: int  # of a rank's batches at work
    traffic_of: Callable[[str], IdTraffic]

    def __post_init__(self, expanded: Mapping[str, int]) -> None:
        self.ids = ids_per_sample(self.declared, self.spec)
        self.overrides = overrides_of(self.declared, self.config)
        self.wanted = _wanted_exchanges(self)
        self.constraints = _constraints(self)
        self.embeddings = _embeddings(self)
        tables_of = tables_of_feature(self.declared)
        self.expansion_bytes: Counter[str] = Counter()  # by table
        for feature, size in expanded.items():
            self.expansion_bytes.update(dict.fromkeys(tables_of[feature], size))
        self.live_rows = live_rows_of(
            self.declared, self.spec, self.live_samples, self.hardware.world_size
        )
        # Those that overrides put into host memory or on disk.
        self.chosen = chosen_host_tables(self.overrides, self.live_rows)
        self.topology = _topology(self)

    def is_replicated(self, table: EmbeddingBagConfig) -> bool:
        return self.constraints[table.name].sharding_types == [ShardingType.data_parallel.value]


def _wanted_exchanges(problem: PlanProblem) -> dict[str, Exchange | None]:
    """Return what is wanted of each table: rows where the dense component takes them; ValueError for rows of 16 bits."""
    wanted = {}
    for table in problem.declared:
        override = problem.overrides.get(table.name, TableOverride())
        chosen = override.exchange or problem.config.exchange
        wanted[table.name] = Exchange.rows if hands_out_rows(table, problem.spec) else chosen
        if wanted[table.name] is Exchange.rows and table.data_type.name != "FP32":
            raise ValueError(
                f"table {table.name} has weights of 16 bits, and exchange: rows is for float32; set "
                "model.embedding_dtype=fp32, or another exchange"
            )
    return wanted


def _constraints(problem: PlanProblem) -> dict[str, ParameterConstraints]:
    """Return the layouts from which the planner may choose for each table; ValueError: an override leaves none, or names none."""
    hardware, config = problem.hardware, problem.config
    unknown = sorted({*config.tables} - {*tables_of_feature(problem.declared), *problem.ids})
    if unknown:
        raise ValueError(
            f"sharding.tables names {', '.join(unknown)}, but the tables are {', '.join(problem.ids)}; correct the names"
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
            f"table {table.name} would be column_wise, but {rule.name} keeps one state per row, and a column-wise table would "
            f"have several; choose table_wise, row_wise or data_parallel, or optimizer.embedding_name={with_column_cuts(rule)}"
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
    counts = [count for count in range(1, world_size + 1) if embedding_dim % (4 * count) == 0]
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
        if problem.is_replicated(table):
            table.data_type = DataType.FP32
            embeddings.embedding_bags[table.name].float()
    return embeddings


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
