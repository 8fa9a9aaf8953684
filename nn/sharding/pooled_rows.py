"""Pooled lookups in the distinct rows of a batch, on the rank of the samples."""

from torch import Tensor

from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.local_tables import LocalTable, SortedIds
from nn.sharding.local_ids import RequestedIds
from nn.sharding.merged_rows import RowSums
from nn.sharding.placement import RankTables
from nn.sharding.request_keys import RequestKeys

# B: rows of this rank, R: distinct rows that it has capacity for, D: columns


class PooledRows:
    """The lookups of a group of requested tables, in `rows` [R, D], for batches of one size.

    `sums` adds up each row's gradients [R, D], of those of the vectors [B, columns of all lookups].
    """

    def __init__(
        self, tables: RankTables, keys: RequestKeys, rows: Tensor, batch_size: int
    ) -> None:
        lookups = tuple(lookup for of_table in keys.lookups for lookup in of_table)

        def bags_of(rows: Tensor) -> LocalEmbeddingBags:
            """Return what looks up, or adds to, rows [R, D] by the positions of this rank's ids."""
            table = LocalTable(lookups, rows, {}, first_row=0)
            return tables.adding_bags([table], keys.blocks, batch_size)

        self._bags = bags_of(rows)
        self.sums = RowSums(bags_of, rows.shape, rows.device)

    def look_up(self, ids: RequestedIds, out: Tensor) -> None:
        """Pool the rows of each sample; their columns of `out`, [B, columns], are overwritten."""
        self._bags.look_up(ids.local, out)

    def sort(self, ids: RequestedIds) -> SortedIds:
        """Return the ids for `sums`; they were sorted when the rows were asked for."""
        return self.sums.take_sorted(ids.local, ids.keys, ids.order)
