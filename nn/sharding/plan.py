"""What the planner is told and what it decided, as plain values that are printed, written to plan.json and tested."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Where one table lives.

    Attributes:
        table: table name, the feature's name in the dataset's spec.
        num_embeddings: rows of the whole table.
        embedding_dim: columns of the whole table.
        hotness: mean ids a sample looks up in it.
        sharding: `table_wise`, `column_wise`, `row_wise`, `table_row_wise` or `data_parallel`.
        kernel: `fused` (optimizer inside backward) or `dense` (stepped after backward).
        ranks: ranks that hold a part of it.
        bytes_per_rank: weight and optimizer bytes on each of `ranks`.
        expansion_bytes: what expands its ids (data.multi_hot) takes on each of `ranks` besides.
    """

    table: str
    num_embeddings: int
    embedding_dim: int
    hotness: float
    sharding: str
    kernel: str
    ranks: tuple[int, ...]
    bytes_per_rank: tuple[int, ...]
    expansion_bytes: int = 0


def lookups_by_rank(rows: Sequence[TablePlan], world_size: int) -> list[float]:
    """Return the rows that a rank looks up and updates for one sample of the global batch, by its part of their bytes.

    Half a row, of a table cut in two, is half a lookup; a replicated table is looked up by the rank that has the sample.
    """
    lookups = [0.0] * world_size
    for row in rows:
        for rank, size in zip(row.ranks, row.bytes_per_rank, strict=True):
            lookups[rank] += row.hotness * size / sum(row.bytes_per_rank)
    return lookups


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the plan is made for.

    Attributes:
        device_type: `cpu` or `cuda`.
        world_size: ranks in all.
        local_world_size: ranks a node.
        hbm_bytes: memory of one GPU; 0 on CPUs.
        host_bytes: memory of one node.
    """

    device_type: str
    world_size: int
    local_world_size: int
    hbm_bytes: int
    host_bytes: int

    @property
    def bytes_per_rank(self) -> int:
        """Memory that tables of one rank live in."""
        if self.device_type == "cuda":
            return self.hbm_bytes
        return self.host_bytes // self.local_world_size
