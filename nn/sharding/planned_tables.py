"""Tables as declared and planned, which all ranks know alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.modules.embedding_configs import EmbeddingBagConfig, data_type_to_dtype

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import lookups_of
from nn.embedding.lookups import Lookup, Pooling
from nn.sharding.tables import HostTable, TieredPlan


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """A table, its lookups, and its shards on all ranks.

    A replicated table has no shards. `first_vector` is the position of its first vector among those of all tables. `host` is set
    if rows lie in host memory or on disk. Of a table that `is_requested`, the ranks of the samples get the distinct rows.
    """

    declared: EmbeddingBagConfig
    lookups: tuple[Lookup, ...]
    first_vector: int
    shards: list[ShardMetadata]
    host: HostTable | None
    is_requested: bool

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.declared.num_embeddings, self.declared.embedding_dim))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights; replicated tables stay float32."""
        return data_type_to_dtype(self.declared.data_type) if self.shards else torch.float32

    @property
    def num_vectors(self) -> int:
        return sum(lookup.num_vectors for lookup in self.lookups)

    @property
    def hands_out_rows(self) -> bool:
        return self.lookups[0].pooling is Pooling.rows

    @property
    def is_row_wise(self) -> bool:
        rows = self.declared.num_embeddings
        return any(shard.shard_sizes[0] < rows for shard in self.shards)


PlannedShard = tuple[PlannedTable, ShardMetadata]


def planned_tables(
    declared: Sequence[EmbeddingBagConfig], seen: FeatureSpec, plan: TieredPlan
) -> list[PlannedTable]:
    """Return the declared tables with their shards; `seen` is the feature spec after the expansion of ids."""
    lookups = lookups_of(declared, seen)
    num_vectors = [sum(lookup.num_vectors for lookup in lookups[table.name]) for table in declared]
    first_vectors = accumulate(num_vectors, initial=0)
    tables = []
    for table, first_vector in zip(declared, first_vectors, strict=False):
        sharding = plan.plan["embeddings"][table.name].sharding_spec
        shards = [] if sharding is None else list(sharding.shards)
        is_requested = table.name in plan.row_tables
        host = plan.host_tables.get(table.name)
        tables.append(
            PlannedTable(table, lookups[table.name], first_vector, shards, host, is_requested)
        )
    return tables


def shards_by_rank(tables: Sequence[PlannedTable], world_size: int) -> list[list[PlannedShard]]:
    """Return the shards of every rank, in its order.

    A rank without rows of a row-wise or requested table has an empty shard: every rank then sends vectors, or rows, of the
    same tables. Row-wise tables come behind others, wide ones first, which aligns columns, and requested ones last: so those of
    one width are adjacent in each memory. Alone, a rank otherwise keeps the model's order: then embeddings are one matrix.
    """
    by_rank: list[list[PlannedShard]] = [[] for _ in range(world_size)]
    for table in tables:
        holders = set()
        for shard in table.shards:
            rank = rank_of(shard)
            holders.add(rank)
            by_rank[rank].append((table, shard))
        if table.is_row_wise or (table.is_requested and table.shards):
            rows, columns = table.shape
            for rank in sorted(set(range(world_size)) - holders):
                by_rank[rank].append((table, ShardMetadata([rows, 0], [0, columns])))

    def order(placed: PlannedShard) -> tuple[int, ...]:
        table, shard = placed
        last = (table.is_requested, table.hands_out_rows)
        return last if world_size == 1 else (*last, table.is_row_wise, -shard.shard_sizes[1])

    return [sorted(shards, key=order) for shards in by_rank]


def rank_of(shard: ShardMetadata) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    assert rank is not None, "TorchRec places every shard on a rank"
    return rank
