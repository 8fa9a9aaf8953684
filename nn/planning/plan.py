"""The planner's input and result as plain values, which are printed, written to plan.json and tested."""

from collections.abc import Sequence
from dataclasses import dataclass

from nn.sharding.tables import ROWS_CUT


@dataclass(frozen=True, slots=True)
class TablePlan:
    table: str
    num_embeddings: int  # rows of the complete table
    embedding_dim: int  # columns of the complete table
    hotness: float  # mean number of ids per sample, of all features that look the table up
    sharding: str  # `table_wise`, `column_wise`, `row_wise`, `table_row_wise` or `data_parallel`
    kernel: str  # `fused` (updated within the backward pass), or `dense` (after it) of a replicated table
    ranks: tuple[int, ...]  # ranks that hold a shard of it
    bytes_per_rank: tuple[int, ...]  # weight and optimizer bytes on each of `ranks`
    # further bytes on each of `ranks` that the expansion of its ids (data.multi_hot) takes
    expansion_bytes: int = 0
    # mean number of vectors per sample: one per feature, or one per id without pooling
    num_vectors: float = 1.0
    # memory of all its rows: `device`, or `host` or `disk` with an arena of rows on the device, which `bytes_per_rank` counts
    tier: str = "device"
    cache_rows: int = 0  # rows of the arenas of all its ranks; 0 with tier `device`
    # weight and optimizer bytes in host memory of each of `ranks`, with tier `host`
    host_bytes_per_rank: tuple[int, ...] = ()
    fetched_rows: float = 0.0  # rows that are expected to be fetched per step, over all ranks
    # weight and optimizer bytes on disk of each of `ranks`, with tier `disk`
    disk_bytes_per_rank: tuple[int, ...] = ()
    # rows that are expected to be read from disk per read-ahead group, over all ranks; named as in plan.json
    staged_rows: float = 0.0
    # rows on disk that are expected to change between two saves, over all ranks; 0 if host memory has room for all
    journal_rows: float = 0.0
    # that a row is spread over in host memory: its weights, and each state of the optimizer
    memories: int = 1
    # what the ranks of the samples get of it: `vectors`, or the distinct `rows` of a batch
    exchange: str = "vectors"
    # distinct rows that measured batches of a rank ask of each owner (`most_expected`); empty where they are estimated
    batch_rows: tuple[int, ...] = ()
    # the same of all ranks of a group, where there are several groups of several ranks
    group_rows: tuple[int, ...] = ()
    # events that the dense component takes at most at once, of each group whose first feature it looks up; empty where that is
    # not measured
    part_events: tuple[int, ...] = ()

    @property
    def is_replicated(self) -> bool:
        return self.sharding == "data_parallel"

    @property
    def hands_out_rows(self) -> bool:
        """Return whether the dense component takes its distinct rows, in place of vectors."""
        return not self.num_vectors

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that are asked for its distinct rows, by number within a group; of a replicated table, each rank itself."""
        return (0,) if self.is_replicated else self.ranks

    @property
    def has_arena(self) -> bool:
        return self.tier != "device"

    @property
    def is_row_wise(self) -> bool:
        """Return whether several ranks have some of its rows each."""
        return self.sharding in ROWS_CUT and len(self.ranks) > 1

    def columns_on(self, rank: int) -> int:
        if self.sharding != "column_wise":
            return self.embedding_dim
        size = self.bytes_per_rank[self.ranks.index(rank)]
        return round(self.embedding_dim * size / sum(self.bytes_per_rank))


def replicated_tables(rows: Sequence[TablePlan]) -> list[str]:
    return [row.table for row in rows if row.is_replicated]


def replicated_weights(rows: Sequence[TablePlan]) -> int:
    return sum(row.num_embeddings * row.embedding_dim for row in rows if row.is_replicated)


def lookups_by_rank(rows: Sequence[TablePlan], world_size: int) -> list[float]:
    """Return the lookups per rank and sample of the global batch; a rank with some of a table's columns looks up all its ids."""
    lookups = [0.0] * world_size
    for row in rows:
        for rank, size in zip(row.ranks, row.bytes_per_rank, strict=True):
            share = 1 if row.sharding == "column_wise" else size / sum(row.bytes_per_rank)
            lookups[rank] += row.hotness * share
    return lookups


@dataclass(frozen=True, slots=True)
class Hardware:
    device_type: str
    world_size: int
    local_world_size: int
    hbm_bytes: int  # memory of one GPU; 0 on CPUs
    host_bytes: int
    # ranks that share the tables, whole nodes or equal parts of one; other groups of as many hold the same; None: all
    group_size: int | None = None
    two_hops: bool = False  # whether the ranks exchange within their node first

    @property
    def table_ranks(self) -> int:
        return self.group_size or self.world_size

    @property
    def groups(self) -> int:
        return self.world_size // self.table_ranks

    @property
    def local_table_ranks(self) -> int:
        """Ranks of a node that share the tables."""
        return min(self.table_ranks, self.local_world_size)

    @property
    def bytes_per_rank(self) -> int:
        if self.device_type == "cuda":
            return self.hbm_bytes
        return self.host_bytes // self.local_world_size
