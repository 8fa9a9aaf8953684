"""Tables as declared and planned, which all ranks know alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.modules.embedding_configs import EmbeddingBagConfig, data_type_to_dtype

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import lookups_of
from nn.embedding.lookups import Lookup
from nn.sharding.tables import HostTable, TieredPlan, asks_for_rows


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A table, its lookups, and its shards on all ranks.

    A replicated table has no shards. `first_vector` is the position of its first vector among those of all tables. `host` is set
    if rows lie in host memory or on disk. Rows of a row-wise table `is_requested` are asked of their owners.
    """

    declared: EmbeddingBagConfig
    lookups: tuple[Lookup, ...]
    first_vector: int
    shards: list[ShardMetadata]
    host: HostTable | None
    is_requested: bool

    @property
    def name(self) -> str:
        """Name that the model has declared."""
        return self.declared.name

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return torch.Size((self.declared.num_embeddings, self.declared.embedding_dim))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights; replicated tables stay float32."""
        return data_type_to_dtype(self.declared.data_type) if self.shards else torch.float32

    @property
    def num_vectors(self) -> int:
        """Vectors of all lookups of a sample."""
        return sum(lookup.num_vectors for lookup in self.lookups)

    @property
    def is_row_wise(self) -> bool:
        """Return whether ranks share the rows."""
        return _is_row_wise(self.declared, self.shards)


PlacedShard = tuple[PlannedTable, ShardMetadata]


def planned_tables(
    declared: Sequence[EmbeddingBagConfig], seen: FeatureSpec, plan: TieredPlan, world_size: int
) -> list[PlannedTable]:
    """Return the declared tables with their shards; `seen` is the feature spec after the expansion of ids."""
    lookups = lookups_of(declared, seen)
    hotness = {feature.name: feature.mean_hotness for feature in seen.categorical}
    num_vectors = [sum(lookup.num_vectors for lookup in lookups[table.name]) for table in declared]
    first_vectors = accumulate(num_vectors, initial=0)
    tables = []
    for table, first_vector in zip(declared, first_vectors, strict=False):
        sharding = plan.plan["embeddings"][table.name].sharding_spec
        shards = [] if sharding is None else list(sharding.shards)
        is_requested = _has_even_rows(table, shards) and asks_for_rows(table, hotness, world_size)
        host = plan.host_tables.get(table.name)
        tables.append(
            PlannedTable(table, lookups[table.name], first_vector, shards, host, is_requested)
        )
    return tables


def _is_row_wise(table: EmbeddingBagConfig, shards: Sequence[ShardMetadata]) -> bool:
    return any(shard.shard_sizes[0] < table.num_embeddings for shard in shards)


def _has_even_rows(table: EmbeddingBagConfig, shards: Sequence[ShardMetadata]) -> bool:
    """Return whether a table is row-wise, in shards of equally many rows: an id then tells its owner."""
    if not _is_row_wise(table, shards):
        return False
    filled = [shard for shard in shards if shard.shard_sizes[0]]
    rows = filled[0].shard_sizes[0]
    return all(shard.shard_offsets[0] == number * rows for number, shard in enumerate(filled))


def shards_by_rank(tables: Sequence[PlannedTable], world_size: int) -> list[list[PlacedShard]]:
    """Return the shards of every rank, in its order.

    A rank without rows of a row-wise table has an empty shard: every rank then sends vectors of the same row-wise tables.
    Row-wise tables come last, requested ones behind them, wide ones first, which aligns columns: so requested tables of one
    width are adjacent in each memory. Alone, a rank keeps the model's order: then embeddings are one matrix.
    """
    by_rank: list[list[PlacedShard]] = [[] for _ in range(world_size)]
    for table in tables:
        holders = set()
        for shard in table.shards:
            rank = rank_of(shard)
            holders.add(rank)
            by_rank[rank].append((table, shard))
        if table.is_row_wise:
            rows, columns = table.shape
            for rank in sorted(set(range(world_size)) - holders):
                by_rank[rank].append((table, ShardMetadata([rows, 0], [0, columns])))
    if world_size == 1:
        return by_rank
    return [
        sorted(
            shards,
            key=lambda placed: (
                placed[0].is_row_wise,
                placed[0].is_requested,
                -placed[1].shard_sizes[1],
            ),
        )
        for shards in by_rank
    ]


def rank_of(shard: ShardMetadata) -> int:
    """Return the rank that holds a shard of a plan."""
    rank = None if shard.placement is None else shard.placement.rank()
    assert rank is not None, "TorchRec places every shard on a rank"
    return rank
