"""The distinct rows that the ranks of a group ask of one owner, and the sum of each row's gradients.

The ranks of a group ask for the same frequent rows. So a row and its gradient go once from an owner to those of the same shard
in other groups, and not once for every rank that asks.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from dataloading.dataset.batch_layout import NO_ID
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.local_tables import LocalTable, SortedIds
from nn.sharding.placement import BY_NUMBER, RankTables, rows_block

# N: rows that the ranks of a group ask of this one, M: distinct ones that it has capacity for, D: columns


def distinct_keys(keys: Tensor, no_key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort keys [K] stably, with their order; also return how many distinct ones below `no_key` there are up to each."""
    keys, order = torch.sort(keys, stable=True)
    is_first = keys < no_key
    is_first[1:] &= keys[1:] != keys[:-1]
    return keys, order, is_first.cumsum(0, dtype=torch.int64)


class RowSums:
    """Sums of the gradients of each row: bags `bags_of(sums)` that add, with rate -1. Evaluation does not need their memory."""

    def __init__(
        self,
        bags_of: Callable[[Tensor], LocalEmbeddingBags],
        shape: torch.Size,
        device: torch.device,
    ) -> None:
        self._bags_of, self._shape, self._device = bags_of, shape, device
        self._always = torch.ones(1, dtype=torch.int32, device=device)

    @cached_property
    def _sums(self) -> Tensor:
        return torch.empty(self._shape, device=self._device)

    @cached_property
    def _bags(self) -> LocalEmbeddingBags:
        return self._bags_of(self._sums)

    def take_sorted(self, ids: Tensor, keys: Tensor, order: Tensor) -> SortedIds:
        return self._bags.take_sorted(ids, keys, order)

    def __call__(self, ids: SortedIds, gradients: Tensor) -> Tensor:
        """Return the sums, float32, which the next call overwrites; a row's gradients are added in their order."""
        self._sums.zero_()
        self._bags.update(ids, gradients, self._always)
        return self._sums


class MergedRows:
    """The distinct ones of the rows [N] that a group asks of this rank, which has `num_rows` of `columns`.

    `sums` adds the gradients [N, D] of each row, in the order of the ranks that asked: [M, D].
    """

    def __init__(
        self, tables: RankTables, num_asked: int, num_rows: int, capacity: int, columns: int
    ) -> None:
        self._no_row, self._capacity = num_rows, capacity

        def bags_of(sums: Tensor) -> LocalEmbeddingBags:
            table = LocalTable(BY_NUMBER, sums, {}, first_row=0)
            return tables.adding_bags([table], rows_block(num_asked), num_asked)

        self.sums = RowSums(bags_of, torch.Size((capacity, columns)), tables.ranks.device)

    def merge(self, asked: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the distinct rows [M], with `NO_ID` behind the last one, and the position of each asked one among them.

        Positions are sorted, [N], and M for `NO_ID` and a row that does not fit; then comes their order before sorting, and
        whether any row does not fit, bool.
        """
        keys, order, number = distinct_keys(
            asked.masked_fill(asked == NO_ID, self._no_row), self._no_row
        )
        fits = (keys < self._no_row) & (number <= self._capacity)
        position = torch.where(fits, number - 1, self._capacity)
        rows = asked.new_full((self._capacity + 1,), NO_ID)
        # Repetitions of a row write the same number.
        rows.scatter_(0, position, keys)
        return (
            rows[: self._capacity],
            position.to(asked.dtype),
            order,
            number[-1] > self._capacity,
        )


def of_asked(values: Tensor, position: Tensor, order: Tensor) -> Tensor:
    """Return those of values [M] that belong to the rows that were asked for, [N], or `NO_ID`."""
    unsorted = torch.empty_like(position).scatter_(0, order, position)
    return torch.cat([values, values.new_full((1,), NO_ID)]).index_select(0, unsorted)
