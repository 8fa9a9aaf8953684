"""Lookup and update of row-wise tables by requests: a rank asks each owner for the distinct rows of its batch, once.

The rows travel, and not the vectors of every sample; so do the sums of their gradients. The rank of the samples pools them.
The capacity for the rows is fixed, so that no host reads how many there are before it sends; one batch ahead it is known whether
it sufficed.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.id_blocks import NO_ID, IdBlock
from nn.embedding.local_tables import LocalTable, SlotRows, SortedIds, addition_scalars
from nn.embedding.optimizer import ADDITION
from nn.sharding.local_ids import RequestedIds
from nn.sharding.placement import BLOCK, RankTables, RequestedTables
from nn.sharding.request_keys import RequestKeys, RowCapacity

# K: ids of all lookups of a rank's samples, W: ranks, R: rows that a rank has capacity for, of all owners, D: columns


class RowRequests:
    """Row-wise tables of one width, for batches of one size.

    `capacity` is the rows that a rank can ask of each owner; `in_tier` has this rank's tables in host memory, and the rows that
    all ranks can ask of them.
    """

    def __init__(
        self,
        tables: RankTables,
        group: RequestedTables,
        keys: RequestKeys,
        capacity: Sequence[int],
        batch_size: int,
    ) -> None:
        self._tables, self._group, self._keys = tables, group, keys
        self._capacity, self._batch_size = list(capacity), batch_size
        self._row_capacity = RowCapacity(capacity, tables.ranks.device)
        ranks = tables.ranks
        self._channels = tables.channels
        here = self._capacity[ranks.rank]
        self._from_each = [here] * ranks.world_size
        count = here * ranks.world_size
        self._owned = [
            LocalEmbeddingBags(
                [table],
                {BLOCK: IdBlock(0, count, count)},
                count,
                tables.config,
                tables.scalars,
                tables.dtype,
                ranks.device,
            )
            for table in group.owned
        ]
        for bags, touched in zip(self._owned, group.touched, strict=False):
            bags.touched = touched
        self._split = _RowsOfMemories(group, ranks.device)
        self.in_tier: list[tuple[SlotRows, int]] = [
            (table.slots, count) for table in group.owned if table.slots is not None
        ]
        columns = group.owned[0].weight.shape[1]
        self._sent = torch.empty(count, columns, dtype=tables.dtype, device=ranks.device)
        # The rows of one memory, if there are several.
        self._sent_part = torch.empty_like(self._sent) if len(self._owned) > 1 else None
        self._received = torch.empty(
            sum(self._capacity), columns, dtype=tables.dtype, device=ranks.device
        )
        self._local = self._bags(self._received)

    def _bags(self, rows: Tensor) -> LocalEmbeddingBags:
        """Return what looks up, or adds to, rows [R, D] by this rank's ids."""
        lookups = tuple(lookup for of_table in self._keys.lookups for lookup in of_table)
        return LocalEmbeddingBags(
            [LocalTable(lookups, rows, {}, first_row=0)],
            self._keys.blocks,
            self._batch_size,
            ADDITION,
            addition_scalars(self._tables.ranks.device),
            self._tables.dtype,
            self._tables.ranks.device,
        )

    def send(self, ids: Tensor, num_valid: int | None) -> tuple[RequestedIds, list[Tensor], Tensor]:
        """Ask for the rows of a batch.

        Returns the ids, the rows that are asked of the tables `in_tier`, and whether any owner is asked for more rows than
        fit, bool [1]: the lookup is then not valid.
        """
        keys = self._keys
        prepared = keys.prepare(ids, num_valid)
        rows = keys.distinct(prepared)
        asked, position = keys.requests(rows, self._row_capacity)
        arrived = asked.new_empty(sum(self._from_each))
        dist.all_to_all_single(
            arrived, asked, self._from_each, self._capacity, group=self._channels.ids
        )
        local = keys.with_row_positions(prepared, position, rows.order)
        overflows = (rows.counts > self._row_capacity.limits).any().view(1)
        on_device, in_tier = arrived.new_empty(0), []
        for bags, of_memory in zip(self._owned, self._split(arrived), strict=True):
            if bags.tables[0].slots is None:
                on_device = of_memory
            else:
                in_tier.append(of_memory)
        requested = RequestedIds(local, position.to(arrived.dtype), rows.order, on_device)
        return requested, in_tier, overflows

    def _asked(self, ids: RequestedIds, slots: Sequence[Tensor]) -> list[Tensor]:
        """Return what is asked of each of `_owned`: rows, or their slots."""
        in_tier = iter(slots)
        return [
            ids.asked if bags.tables[0].slots is None else next(in_tier) for bags in self._owned
        ]

    def look_up(self, ids: RequestedIds, slots: Sequence[Tensor], out: Tensor) -> None:
        """Look up the rows that are asked of this rank, exchange them, and pool those of this rank's samples.

        `slots` are those of the rows of the tables `in_tier`; `out` [B, columns of all lookups] is overwritten.
        """
        first, *others = zip(self._owned, self._asked(ids, slots), strict=True)
        bags, asked = first
        bags.look_up(asked, self._sent)
        for bags, asked in others:
            # A row lies in one memory, and is zeros in all others.
            assert self._sent_part is not None, "there are several"
            bags.look_up(asked, self._sent_part)
            self._sent.add_(self._sent_part)
        dist.all_to_all_single(
            self._received,
            self._sent,
            self._capacity,
            self._from_each,
            group=self._channels.embeddings,
        )
        self._local.look_up(ids.local, out)

    def sort(self, ids: RequestedIds, slots: Sequence[Tensor]) -> tuple[list[SortedIds], SortedIds]:
        """Sort the rows that are asked of this rank, for each memory; this rank's own ids are sorted already."""
        own = self._sums.take_sorted(ids.local, ids.keys, ids.order)
        asked = self._asked(ids, slots)
        return [bags.sort(rows) for bags, rows in zip(self._owned, asked, strict=True)], own

    def send_back(self, ids: SortedIds, gradients: Tensor) -> Tensor:
        """Add up the gradients of each row on this rank, and send the sums to the owners: [W * capacity here, D].

        `ids` are the second of `sort`, and `gradients` [B, columns of all lookups] those of this rank's embeddings.
        """
        self._row_sums.zero_()
        self._sums.update(ids, gradients, self._always)
        returned = torch.empty_like(self._sent)
        dist.all_to_all_single(
            returned,
            self._row_sums.to(self._tables.dtype),
            self._from_each,
            self._capacity,
            group=self._channels.embeddings,
        )
        return returned

    def update(self, ids: Sequence[SortedIds], gradients: Tensor, is_good: Tensor) -> None:
        """Update this rank's rows with the gradients from `send_back`, unless `is_good` [1] is 0."""
        for bags, of_memory in zip(self._owned, ids, strict=True):
            bags.update(of_memory, gradients, is_good)

    @cached_property
    def _row_sums(self) -> Tensor:
        """Sums of gradients, float32 [R, D]; evaluation does not need them."""
        return torch.empty(self._received.shape, device=self._received.device)

    @cached_property
    def _sums(self) -> LocalEmbeddingBags:
        return self._bags(self._row_sums)

    @cached_property
    def _always(self) -> Tensor:
        return torch.ones(1, dtype=torch.int32, device=self._received.device)


class _RowsOfMemories:
    """Splits the rows that are asked of a rank by the memory that they lie in."""

    def __init__(self, group: RequestedTables, device: torch.device) -> None:
        self._num_memories = len(group.owned)
        starts = list(accumulate(group.owned_rows, initial=0))
        ends_in_memory = [0] * self._num_memories
        shifts = []
        for start, rows, memory in zip(starts, group.owned_rows, group.memories, strict=False):
            shifts.append(ends_in_memory[memory] - start)
            ends_in_memory[memory] += rows
        self._ends = torch.tensor(starts[1:-1], dtype=torch.int64, device=device)
        self._shifts = torch.tensor(shifts, dtype=torch.int64, device=device)
        self._memories = torch.tensor(group.memories, dtype=torch.int64, device=device)

    def __call__(self, asked: Tensor) -> list[Tensor]:
        """Return the rows of each memory, numbered there, with `NO_ID` in the places of all others."""
        if self._num_memories == 1:
            return [asked]
        table = torch.bucketize(asked, self._ends, right=True)
        rows = asked + self._shifts.index_select(0, table).to(asked.dtype)
        memory = self._memories.index_select(0, table).masked_fill_(asked == NO_ID, NO_ID)
        return [torch.where(memory == number, rows, NO_ID) for number in range(self._num_memories)]
