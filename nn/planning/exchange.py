"""Bytes that a step sends from rank to rank, over the links within a node and those between nodes.

The bytes follow from the plan: which ranks look up which columns, which tables are replicated, and how many distinct rows are
expected to be asked for. Times are these bytes at the rates `sharding.within_gb_s` and `between_gb_s`.
Nothing here is measured while training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.schema import Amp, Config, ShardingConfig
from dataloading.dataset.batch_layout import id_counts
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.multi_hot import MultiHot
from nn.models.registry import build_meta, declared_tables
from nn.planning.memory_estimate import not_requested, replicated_weights, requests_of
from nn.planning.plan import Hardware, TablePlan
from nn.planning.planner import BYTES_PER_MS

ID_BYTES = 4
FP32_BYTES = 4
WITHIN, BETWEEN = "within a node", "between nodes"
TERMS = ("ids", "embeddings", "gradients", "dense gradients")


@dataclass(frozen=True, slots=True)
class RankExchange:
    """Bytes that one rank sends per training step."""

    within: Mapping[str, float]  # bytes to other ranks of its node, by what is sent
    between: Mapping[str, float]  # bytes to ranks of other nodes, by what is sent


@dataclass(frozen=True, slots=True)
class Link:
    """The rank that sends most over one kind of link."""

    name: str
    rank: int
    sent: Mapping[str, float]  # bytes per step, by what is sent
    gb_s: float

    @property
    def num_bytes(self) -> float:
        return sum(self.sent.values())

    @property
    def ms(self) -> float:
        """Milliseconds per step, if nothing else uses the link."""
        return self.num_bytes / (self.gb_s * BYTES_PER_MS)


def busiest_links(exchange: Sequence[RankExchange], rates: ShardingConfig) -> list[Link]:
    """Return the busiest link within a node, and the one between nodes; without those over which nothing is sent."""
    links = []
    for name, of_ranks, rate in (
        (WITHIN, [rank.within for rank in exchange], rates.within_gb_s),
        (BETWEEN, [rank.between for rank in exchange], rates.between_gb_s),
    ):
        of_links = [Link(name, rank, sent, rate) for rank, sent in enumerate(of_ranks)]
        links += [max(of_links, key=lambda link: link.num_bytes)] if of_links else []
    return [link for link in links if link.num_bytes]


def planned_links(
    config: Config, spec: FeatureSpec, plan: Sequence[TablePlan], hardware: Hardware
) -> list[Link]:
    """Return the busiest links of a plan, at the rates of the options."""
    return busiest_links(planned_exchange(config, spec, plan, hardware), config.sharding)


def planned_exchange(
    config: Config, spec: FeatureSpec, plan: Sequence[TablePlan], hardware: Hardware
) -> list[RankExchange]:
    """Count what each rank sends per training step of a full batch.

    Counted: ids, embeddings and their gradients; requested rows, with their expected capacity; the all-reduce of the gradients
    of the dense component and of replicated tables, as a ring over all ranks (mean over ranks). Where groups of ranks have the
    same tables, an owner sends the distinct rows of its group and their gradients to those of the same shards, and so the
    gradients of vectors, whose ids go to all groups. Not counted: losses, flags, metrics, and the maxima of `train.fp8`.
    """
    world_size, in_node = hardware.world_size, hardware.local_world_size
    group_size = hardware.table_ranks
    seen = MultiHot(spec, config.data.multi_hot).expanded_spec(spec)
    owners = _owner_bytes(config, spec, seen, plan, hardware)
    exchanges = []
    reduced = build_meta(config.model, seen).num_parameters() + replicated_weights(plan)
    dense_in_node, dense_across = _ring(FP32_BYTES * reduced, hardware)
    for rank in range(world_size):
        within: dict[str, float] = dict.fromkeys(TERMS, 0.0)
        between = dict(within)
        for other in range(world_size):
            if other == rank:
                continue
            link = within if rank // in_node == other // in_node else between
            here, there = owners[rank % group_size], owners[other % group_size]
            link["ids"] += there.ids
            if rank // group_size == other // group_size:
                link["ids"] += there.asked
                link["embeddings"] += here.looked_up
                link["gradients"] += there.looked_up
            elif here is there:
                link["ids"] += here.asked_by_group
                link["gradients"] += here.gradients_of_group
        within["dense gradients"] += dense_in_node
        between["dense gradients"] += dense_across
        exchanges.append(RankExchange(within, between))
    return exchanges


@dataclass(frozen=True, slots=True)
class _OwnerBytes:
    """Bytes that concern the tables of one owner; rows are of tables whose distinct rows are sent."""

    ids: float  # of vectors, from each rank
    asked: float  # numbers of rows, from each rank of its group
    looked_up: float  # vectors and rows, to each rank of its group
    asked_by_group: float  # numbers of rows, to the same owner of each other group
    gradients_of_group: float  # of vectors and rows, to the same


def _owner_bytes(
    config: Config,
    spec: FeatureSpec,
    seen: FeatureSpec,
    plan: Sequence[TablePlan],
    hardware: Hardware,
) -> list[_OwnerBytes]:
    """Return the bytes of each owner of a group; `seen` is the spec with expanded ids."""
    group_size = hardware.table_ranks
    batch = config.train.batch_size // hardware.world_size
    requests = requests_of(config, seen, plan, hardware.world_size)
    # Columns of the vectors that each rank sends per sample, and the features whose ids it is sent; of row-wise tables all
    # ranks send a part of the sum.
    columns, arriving = [0.0] * group_size, [set[str]() for _ in range(group_size)]
    features = {table.name: table.feature_names for table in declared_tables(config.model, spec)}
    for table in not_requested(plan, requests):
        if table.sharding != "data_parallel":
            for rank in range(group_size) if table.is_row_wise else table.ranks:
                columns[rank] += table.num_vectors * table.columns_on(rank)
                arriving[rank].update(features[table.table])
    # Of each other rank's batch, with the lengths of ragged features; once per feature.
    sizes = {name: count.sent_size(batch) for name, count in id_counts(spec, batch).items()}
    is_bf16 = hardware.device_type == "cuda" and config.train.amp is Amp.bf16
    element = 2 if is_bf16 else FP32_BYTES
    sent = [asked for asked in requests if asked.is_sent or asked.groups > 1]
    owners = []
    for owner in range(group_size):
        vectors = batch * columns[owner]
        asked = [(rows.columns, rows.capacity[owner]) for rows in sent]
        of_group = [(rows.columns, (rows.merged or rows.capacity)[owner]) for rows in sent]
        owners.append(
            _OwnerBytes(
                ids=ID_BYTES * sum(sizes[name] for name in arriving[owner]),
                asked=ID_BYTES * sum(rows for _, rows in asked),
                looked_up=element * (vectors + sum(width * rows for width, rows in asked)),
                asked_by_group=ID_BYTES * sum(rows for _, rows in of_group),
                gradients_of_group=element
                * (group_size * vectors + sum(width * rows for width, rows in of_group)),
            )
        )
    return owners


def _ring(num_bytes: int, hardware: Hardware) -> tuple[float, float]:
    """Return what a rank sends within its node and to others in a ring all-reduce, as mean: nearly all bytes, twice."""
    world_size = hardware.world_size
    nodes = world_size // hardware.local_world_size
    sent = 2 * (world_size - 1) / world_size * num_bytes
    across = sent * nodes / world_size if nodes > 1 else 0.0
    return sent - across, across
