"""Bytes that a step sends from rank to rank, over the links within a node and those between nodes.

The bytes follow from the plan: which ranks look up which columns, which tables are replicated, and how many distinct rows are
expected to be asked for. Times are these bytes at the rates `sharding.within_gb_s` and `between_gb_s`, and the messages at
`within_us` and `between_us`. Nothing here is measured while training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from configs.schema import Amp, Config
from dataloading.dataset.batch_layout import id_counts
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.multi_hot import MultiHot
from nn.models.registry import build_meta, declared_tables
from nn.planning.plan import Hardware, TablePlan, replicated_weights
from nn.planning.plan_problem import BYTES_PER_MS
from nn.planning.row_requests import not_requested, requests_of
from nn.planning.table_sizes import FP32_BYTES, ID_BYTES

WITHIN, BETWEEN = "within a node", "between nodes"
TERMS = ("ids", "embeddings", "gradients", "dense gradients")


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes that a rank sends per training step over one kind of link, and their messages."""

    name: str
    rank: int
    sent: Mapping[str, float]  # bytes by what is sent
    gb_s: float
    messages: int  # of the all-to-alls
    us: float  # of a message

    @property
    def num_bytes(self) -> float:
        return sum(self.sent.values())

    @property
    def ms(self) -> float:
        """Milliseconds per step, if nothing else uses the link: of the bytes, and of the messages one after the other."""
        return self.num_bytes / (self.gb_s * BYTES_PER_MS) + self.messages * self.us / 1000


def busiest_links(exchange: Sequence[Sequence[Link]]) -> list[Link]:
    """Return the busiest link within a node, and the one between nodes; without those over which nothing is sent."""
    busiest = [max(links, key=lambda link: link.ms) for links in zip(*exchange, strict=True)]
    return [link for link in busiest if link.num_bytes]


def planned_exchange(
    config: Config, spec: FeatureSpec, plan: Sequence[TablePlan], hardware: Hardware
) -> list[list[Link]]:
    """Count what each rank sends within its node and to other nodes, per training step of a full batch.

    Counted: ids, embeddings and their gradients; requested rows, with their expected capacity; the all-reduce of the gradients
    of the dense component and of replicated tables, as a ring over all ranks (mean over ranks). Where groups of ranks have the
    same tables, an owner sends the distinct rows of its group and their gradients to those of the same shards, and so the
    gradients of vectors, whose ids go to all groups. In two hops, the rank that passes a message on sends it between nodes.
    Not counted: losses, flags, metrics, and the maxima of `train.fp8`.
    """
    seen = MultiHot(spec, config.data.multi_hot).expanded_spec(spec)
    all_to_alls = _all_to_alls(config, spec, seen, plan, hardware)
    reduced = build_meta(config.model, seen).num_parameters() + replicated_weights(plan)
    rates, in_node = config.sharding, hardware.local_world_size
    # A ring sends nearly all bytes twice, between nodes as mean over ranks.
    world_size, nodes = hardware.world_size, hardware.world_size // in_node
    of_ring = 2 * (world_size - 1) / world_size * FP32_BYTES * reduced
    to_others = of_ring * nodes / world_size if nodes > 1 else 0.0
    dense = of_ring - to_others, to_others
    kinds = [
        (WITHIN, rates.within_gb_s, rates.within_us),
        (BETWEEN, rates.between_gb_s, rates.between_us),
    ]
    exchanges: list[list[Link]] = []
    for first in range(0, hardware.world_size, in_node):
        senders = np.arange(first, first + in_node)
        sent = [{term: np.zeros(in_node) for term in TERMS} for _ in dense]
        counts = [np.zeros(in_node, dtype=np.int64) for _ in dense]
        for all_to_all in all_to_alls:
            sizes = all_to_all.sizes(senders, hardware)
            for link, messages in enumerate(_messages(sizes, senders, hardware)):
                sent[link][all_to_all.term] += messages.sum(1)
                counts[link] += np.count_nonzero(messages, axis=1)
        for of_link, num_bytes in zip(sent, dense, strict=True):
            of_link["dense gradients"] += num_bytes
        for rank in range(in_node):
            links = []
            for (name, gb_s, us), of_link, messages in zip(kinds, sent, counts, strict=True):
                of_rank = {term: float(sizes[rank]) for term, sizes in of_link.items()}
                links.append(Link(name, first + rank, of_rank, gb_s, int(messages[rank]), us))
            exchanges.append(links)
    return exchanges


def _messages(
    sizes: np.ndarray, senders: np.ndarray, hardware: Hardware
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of what each rank of a node sends within it, and to other nodes, of `sizes` [senders, all ranks]."""
    in_node = len(senders)
    number, node = np.arange(in_node), senders[0] // in_node
    if not hardware.two_hops:
        between = sizes.copy()
        between[:, senders] = 0
        return sizes[:, senders], between
    by_node = sizes.reshape(in_node, -1, in_node)
    # To the rank with the receiver's local number, which sends each node what all of its own have for it.
    within, between = by_node.sum(1), by_node.sum(0).T
    within[number, number] = between[:, node] = 0
    return within, between


class _Pairs(Enum):
    all_ranks = auto()
    of_group = auto()
    of_shard = auto()  # the owners of one shard in all groups


@dataclass(frozen=True, slots=True)
class _AllToAll:
    """An exchange of owners and the ranks of samples; `of_owners` are the bytes of a message, by the owner within its group."""

    term: str
    of_owners: np.ndarray
    pairs: _Pairs = _Pairs.of_group
    from_owners: bool = False

    def sizes(self, senders: np.ndarray, hardware: Hardware) -> np.ndarray:
        """Return the bytes of what some ranks send to all ranks, [senders, ranks]."""
        group_size = hardware.table_ranks
        rank, sender = np.arange(hardware.world_size), senders[:, None]
        sends = sender != rank
        if self.pairs is _Pairs.of_group:
            sends &= sender // group_size == rank // group_size
        elif self.pairs is _Pairs.of_shard:
            sends &= sender % group_size == rank % group_size
        owner = sender if self.from_owners else rank
        return np.where(sends, self.of_owners[owner % group_size], 0)


def _all_to_alls(
    config: Config,
    spec: FeatureSpec,
    seen: FeatureSpec,
    plan: Sequence[TablePlan],
    hardware: Hardware,
) -> list[_AllToAll]:
    """Return the exchanges of a step; `seen` is the spec with expanded ids."""
    group_size = hardware.table_ranks
    batch = config.train.batch_size // hardware.world_size
    requests = requests_of(config, seen, plan, hardware.world_size)
    # Columns of the vectors that each rank sends per sample, and the features whose ids it is sent; of row-wise tables all
    # ranks send a part of the sum.
    columns, arriving = np.zeros(group_size), [set[str]() for _ in range(group_size)]
    features = {table.name: table.feature_names for table in declared_tables(config.model, spec)}
    for table in not_requested(plan, requests):
        if not table.is_replicated:
            for rank in range(group_size) if table.is_row_wise else table.ranks:
                columns[rank] += table.num_vectors * table.columns_on(rank)
                arriving[rank].update(features[table.table])
    # Of each other rank's batch, with the lengths of ragged features; once per feature.
    counts = {name: count.sent_size(batch) for name, count in id_counts(spec, batch).items()}
    is_bf16 = hardware.device_type == "cuda" and config.train.amp is Amp.bf16
    element = 2 if is_bf16 else FP32_BYTES
    ids = np.array([sum(counts[name] for name in names) for names in arriving])
    vectors = element * batch * columns
    of_shard, has_groups = _Pairs.of_shard, hardware.groups > 1
    found = [
        _AllToAll("ids", ID_BYTES * ids, _Pairs.all_ranks),
        _AllToAll("embeddings", vectors, from_owners=True),
        _AllToAll("gradients", vectors),
        _AllToAll("gradients", group_size * vectors * has_groups, of_shard),
    ]
    for asked in requests:
        if asked.is_sent or asked.groups > 1:
            rows, of_group = np.array(asked.capacity), np.array(asked.merged or asked.capacity)
            row_bytes = element * asked.columns
            found += [
                _AllToAll("ids", ID_BYTES * rows),
                _AllToAll("embeddings", row_bytes * rows, from_owners=True),
                _AllToAll("gradients", row_bytes * rows),
                _AllToAll("ids", ID_BYTES * of_group, of_shard),
                _AllToAll("gradients", row_bytes * of_group, of_shard),
            ]
    return found
