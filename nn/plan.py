"""What the planner decided, as plain rows: the same rows are printed, written to plan.json and tested."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Where one table lives.

    Attributes:
        table: table name, the feature's name in the dataset's spec.
        num_embeddings: rows of the whole table.
        embedding_dim: columns of the whole table.
        hotness: mean ids a sample looks up in it.
        sharding: `table_wise`, `column_wise`, `row_wise` or `data_parallel`.
        kernel: `fused` (optimizer inside backward) or `dense` (stepped after backward).
        ranks: ranks that hold a part of it.
        bytes_per_rank: weight and optimizer bytes on each of `ranks`.
    """

    table: str
    num_embeddings: int
    embedding_dim: int
    hotness: float
    sharding: str
    kernel: str
    ranks: tuple[int, ...]
    bytes_per_rank: tuple[int, ...]
