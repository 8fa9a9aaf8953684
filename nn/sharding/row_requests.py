"""The distinct rows of a batch: a rank asks each owner for those that it needs, once, and sends one gradient a row back.

The rows travel, and not the vectors of every sample. The rank of the samples pools them (`nn.sharding.pooled_rows`), or
hands them to the dense component. A whole table has one owner, a row-wise one several; of a replicated table, and alone, a
rank has all rows itself, and nothing is sent. Where groups of ranks hold the same tables, a rank asks the owners of its own,
and the owners of one shard exchange the distinct rows that they were asked for, and the sums of their gradients.

The capacity for the rows is fixed, so that no host reads how many there are before it sends; one batch ahead it is known
whether it sufficed.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dataloading.dataset.batch_layout import NO_ID
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.local_tables import LocalTable, SlotRows, SortedIds
from nn.sharding.local_ids import RequestedIds
from nn.sharding.merged_rows import MergedRows, RowSums, of_asked
from nn.sharding.placement import BY_NUMBER, RankTables, RequestedTables, rows_block
from nn.sharding.rank_group import gradients_of_all_groups
from nn.sharding.request_keys import RequestKeys, RowCapacity

# K: ids of all lookups of a rank's samples, W: ranks of a group, R: rows that a rank has capacity for, of all owners, G: groups,
# M: distinct rows that a group can ask of this rank, D: columns


class RowRequests:
    """The distinct rows of a group of tables, for batches of one size.

    `capacity` is the rows that a rank can ask of each owner, `merged` the distinct ones that a group can, empty if owners do not
    merge them; `in_tier` has this rank's tables in host memory, and the rows that all groups can ask of them. `rows` [R + 1, D]
    are those of the batch, with zeros where an owner has no more, and in the last one, at which ids without a row point.
    `replicated_gradients` are those of all replicated tables.
    """

    def __init__(
        self,
        tables: RankTables,
        requested: RequestedTables,
        keys: RequestKeys,
        capacity: Sequence[int],
        merged: Sequence[int],
        replicated_gradients: Sequence[Tensor],
    ) -> None:
        self._dtype, self._keys, self._capacity = tables.dtype, keys, list(capacity)
        ranks, self._channels = tables.ranks, tables.channels
        self._row_capacity = RowCapacity(capacity, ranks.device)
        self._is_local = len(self._capacity) == 1
        here = self._capacity[0 if self._is_local else tables.rank_group.rank]
        self._from_each = [here] * len(self._capacity)
        count = sum(self._from_each)
        columns, self._merged = requested.owned[0].weight.shape[1], None
        # Rows that a group asks of this rank, and those of all groups.
        asked = merged[tables.rank_group.rank] if merged else count
        if merged:
            num_rows = requested.rows_by_rank[tables.rank_group.rank]
            self._merged = MergedRows(tables, count, num_rows, asked, columns)
        self._rank_group = tables.rank_group
        self._has_groups = requested.replica is None and self._rank_group.count > 1
        self._own_asked = slice(0, asked)
        if self._has_groups:
            first = asked * self._rank_group.number
            self._own_asked = slice(first, first + asked)
        all_asked = asked * (self._rank_group.count if self._has_groups else 1)
        self._lookup_bags = [
            tables.bags([table], rows_block(count), count) for table in requested.owned
        ]
        # The gradients of a replicated table are summed over ranks, and its optimizer has them all.
        self._update_bags = self._lookup_bags
        if self._has_groups:
            self._update_bags = [
                tables.bags([table], rows_block(all_asked), all_asked) for table in requested.owned
            ]
        elif requested.replica is not None:
            gradient = replicated_gradients[requested.replica]
            sums = LocalTable(BY_NUMBER, gradient, {}, first_row=0)
            self._update_bags = [tables.adding_bags([sums], rows_block(count), count)]
        # Empty if nobody notes rows, and of a replicated table.
        for updated, touched in zip(self._update_bags, requested.touched, strict=False):
            updated.touched = touched
        self._split = _RowsOfMemories(requested, ranks.device)
        self.in_tier: list[tuple[SlotRows, int]] = [
            (table.slots, all_asked) for table in requested.owned if table.slots is not None
        ]
        self.rows = torch.zeros(
            self._row_capacity.total + 1, columns, dtype=tables.dtype, device=ranks.device
        )
        self._sent = self.rows[:-1] if self._is_local else self.rows.new_empty(count, columns)
        num_keys = sum(block.count for block in keys.blocks.values())

        def bags_of(sums: Tensor) -> LocalEmbeddingBags:
            # Without the last row, which is that of ids without one.
            table = LocalTable(BY_NUMBER, sums[:-1], {}, first_row=0)
            return tables.adding_bags([table], rows_block(num_keys), num_keys)

        # torch's index_select takes a block of threads a row, however narrow.
        self._by_id = bags_of(self.rows)
        # Sums of the gradients of each of `rows`, of one per id.
        self.sums_by_id = RowSums(bags_of, self.rows.shape, ranks.device)
        # The rows of one memory, if there are several.
        self._sent_part = torch.empty_like(self._sent) if len(self._lookup_bags) > 1 else None

    def send(self, ids: Tensor, num_valid: int | None) -> tuple[RequestedIds, list[Tensor], Tensor]:
        """Ask for the rows of a batch.

        Returns the ids, the rows that are asked of the tables `in_tier`, and whether any owner is asked for more rows than
        fit, bool [1]: the lookup is then not valid.
        """
        keys = self._keys
        prepared = keys.prepare(ids, num_valid)
        rows = keys.distinct(prepared)
        asked, position = keys.requests(rows, self._row_capacity)
        overflows = (rows.counts > self._row_capacity.limits).any().view(1)
        arrived = asked
        if not self._is_local:
            arrived = self._rank_group.send_within(asked, self._capacity, self._channels.ids)
        merged_keys, merged_order = asked.new_empty(0), rows.order.new_empty(0)
        if self._merged is not None:
            arrived, merged_keys, merged_order, lacks = self._merged.merge(arrived)
            overflows |= lacks
        if self._has_groups:
            arrived = self._rank_group.numbers_of_all_groups(arrived, self._channels.ids)
        local = keys.with_row_positions(prepared, position, rows.order)
        on_device, in_tier = arrived.new_empty(0), []
        for bags, of_memory in zip(self._lookup_bags, self._split(arrived), strict=True):
            if bags.tables[0].slots is None:
                on_device = of_memory
            else:
                in_tier.append(of_memory)
        requested = RequestedIds(
            local, position.to(arrived.dtype), rows.order, on_device, merged_keys, merged_order
        )
        return requested, in_tier, overflows

    def _asked(self, ids: RequestedIds, slots: Sequence[Tensor]) -> list[Tensor]:
        """Return what is asked of each of `_lookup_bags`: rows, or their slots."""
        in_tier = iter(slots)
        return [
            ids.asked if bags.tables[0].slots is None else next(in_tier)
            for bags in self._lookup_bags
        ]

    def fetch(self, ids: RequestedIds, slots: Sequence[Tensor]) -> None:
        """Look up the rows that its group asks of this rank, and exchange them: `rows` are then those of this rank's batch.

        `slots` are those of the rows of the tables `in_tier`.
        """
        asked_here = [asked[self._own_asked] for asked in self._asked(ids, slots)]
        if self._merged is not None:
            asked_here = [of_asked(rows, ids.merged_keys, ids.merged_order) for rows in asked_here]
        first, *others = zip(self._lookup_bags, asked_here, strict=True)
        bags, asked = first
        bags.look_up(asked, self._sent)
        for bags, asked in others:
            # A row lies in one memory, and is zeros in all others.
            assert self._sent_part is not None, "there are several"
            bags.look_up(asked, self._sent_part)
            self._sent.add_(self._sent_part)
        if not self._is_local:
            self._channels.embeddings(self.rows[:-1], self._sent, self._capacity, self._from_each)

    def rows_of(self, positions: Tensor) -> Tensor:
        """Return those of `rows` at the positions of all ids, [K, D]."""
        out = self.rows.new_empty(len(positions), self.rows.shape[1])
        self._by_id.look_up(positions, out)
        return out

    def sort(self, ids: RequestedIds, slots: Sequence[Tensor]) -> list[SortedIds]:
        """Sort the rows that are asked of this rank, for each memory."""
        asked = self._asked(ids, slots)
        return [bags.sort(rows) for bags, rows in zip(self._update_bags, asked, strict=True)]

    def sort_merged(self, ids: RequestedIds) -> SortedIds | None:
        """Return the rows that this group asks of this rank for `send_back`; None if they are not merged."""
        if self._merged is None:
            return None
        return self._merged.sums.take_sorted(ids.merged_keys, ids.merged_keys, ids.merged_order)

    def send_back(self, merged: SortedIds | None, gradients: Tensor) -> Tensor:
        """Send the gradients of `rows`, [R, D], to the owners: [W * capacity here, D], or [G * M, D] of several groups.

        `merged` is the result of `sort_merged`.
        """
        sent = returned = gradients
        if not self._is_local:
            sent, returned = gradients.to(self._dtype), torch.empty_like(self._sent)
            self._channels.embeddings(returned, sent, self._from_each, self._capacity)
        if self._merged is not None and merged is not None:
            returned = self._merged.sums(merged, returned)
        if not self._has_groups:
            return returned
        return gradients_of_all_groups(returned.to(self._dtype), self._channels.owners)

    def update(self, ids: Sequence[SortedIds], gradients: Tensor, is_good: Tensor) -> None:
        """Update this rank's rows with the gradients from `send_back`, unless `is_good` [1] is 0.

        Those of a replicated table are added to its gradient.
        """
        for bags, of_memory in zip(self._update_bags, ids, strict=True):
            bags.update(of_memory, gradients, is_good)


class _RowsOfMemories:
    """Splits the rows that are asked of a rank by the memory that they lie in."""

    def __init__(self, requested: RequestedTables, device: torch.device) -> None:
        self._num_memories = len(requested.owned)
        starts = list(accumulate(requested.owned_rows, initial=0))
        ends_in_memory = [0] * self._num_memories
        shifts = []
        # The last start is the number of all rows.
        for start, rows, memory in zip(
            starts[:-1], requested.owned_rows, requested.memories, strict=True
        ):
            shifts.append(ends_in_memory[memory] - start)
            ends_in_memory[memory] += rows
        self._ends = torch.tensor(starts[1:-1], dtype=torch.int64, device=device)
        self._shifts = torch.tensor(shifts, dtype=torch.int64, device=device)
        self._memories = torch.tensor(requested.memories, dtype=torch.int64, device=device)

    def __call__(self, asked: Tensor) -> list[Tensor]:
        """Return the rows of each memory, numbered there, with `NO_ID` in place of all others."""
        if self._num_memories == 1:
            return [asked]
        table = torch.bucketize(asked, self._ends, right=True)
        rows = asked + self._shifts.index_select(0, table).to(asked.dtype)
        memory = self._memories.index_select(0, table).masked_fill_(asked == NO_ID, NO_ID)
        return [torch.where(memory == number, rows, NO_ID) for number in range(self._num_memories)]
