"""Lookup and update of row-wise tables by requests: a rank asks each owner for the distinct rows of its batch, once.

The rows travel, and not the vectors of every sample; so do the sums of their gradients. The rank of the samples pools them. Room
for the rows is fixed, so that no host reads how many there are before it sends; whether it sufficed is known one batch ahead.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.id_blocks import IdBlock
from nn.embedding.local_tables import LocalTable, SortedIds, addition_scalars
from nn.embedding.optimizer import ADDITION
from nn.sharding.local_ids import RequestedIds
from nn.sharding.placement import RankTables, RequestedTables
from nn.sharding.request_keys import RequestKeys, RowRoom

# K: ids of all lookups of a rank's samples, W: ranks, R: rows that a rank has room for, of all owners, D: columns

BLOCK = "rows"


class RowRequests:
    """Row-wise tables of one width, for batches of one size.

    Args:
        tables: of this rank.
        group: the row-wise tables.
        keys: of this rank's ids.
        room: rows that a rank can ask of each owner.
        batch_size: B.
    """

    def __init__(
        self,
        tables: RankTables,
        group: RequestedTables,
        keys: RequestKeys,
        room: Sequence[int],
        batch_size: int,
    ) -> None:
        self._tables, self._group, self._keys = tables, group, keys
        self._room, self._batch_size = list(room), batch_size
        self._row_room = RowRoom(room, tables.ranks.device)
        ranks = tables.ranks
        self._channels = tables.channels
        here = self._room[ranks.rank]
        self._from_each = [here] * ranks.world_size
        count = here * ranks.world_size
        self._owned = LocalEmbeddingBags(
            [group.owned],
            {BLOCK: IdBlock(0, count, count)},
            count,
            tables.config,
            tables.scalars,
            tables.dtype,
            ranks.device,
        )
        self._owned.touched = group.touched
        columns = group.owned.weight.shape[1]
        self._sent = torch.empty(count, columns, dtype=tables.dtype, device=ranks.device)
        self._received = torch.empty(
            sum(self._room), columns, dtype=tables.dtype, device=ranks.device
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

    def send(self, ids: Tensor, num_valid: int | None) -> tuple[RequestedIds, Tensor]:
        """Ask for the rows of a batch.

        Returns:
            The ids, and whether any owner is asked for more rows than there is room for, bool [1]. The lookup is then not valid.
        """
        keys = self._keys
        prepared = keys.prepare(ids, num_valid)
        rows = keys.distinct(prepared)
        asked, position = keys.requests(rows, self._row_room)
        arrived = asked.new_empty(sum(self._from_each))
        dist.all_to_all_single(
            arrived, asked, self._from_each, self._room, group=self._channels.ids
        )
        local = keys.with_row_positions(prepared, position, rows.order)
        lacks_room = (rows.counts > self._row_room.limits).any().view(1)
        return RequestedIds(local, position.to(arrived.dtype), rows.order, arrived), lacks_room

    def look_up(self, ids: RequestedIds, out: Tensor) -> None:
        """Look up the rows that are asked of this rank, exchange them, and pool those of this rank's samples.

        Args:
            ids: from `send`.
            out: [B, columns of all lookups]; overwritten.
        """
        self._owned.look_up(ids.asked, self._sent)
        dist.all_to_all_single(
            self._received, self._sent, self._room, self._from_each, group=self._channels.embeddings
        )
        self._local.look_up(ids.local, out)

    def sort(self, ids: RequestedIds) -> tuple[SortedIds, SortedIds]:
        """Sort the rows that are asked of this rank; this rank's own ids are sorted already."""
        own = self._sums.take_sorted(ids.local, ids.keys, ids.order)
        return self._owned.sort(ids.asked), own

    def send_back(self, ids: SortedIds, gradients: Tensor) -> Tensor:
        """Add up the gradients of each row on this rank, and send the sums to the owners: [W * room here, D].

        Args:
            ids: of this rank, the second of `sort`.
            gradients: of this rank's embeddings, [B, columns of all lookups].
        """
        self._row_sums.zero_()
        self._sums.update(ids, gradients, self._always)
        returned = torch.empty_like(self._sent)
        dist.all_to_all_single(
            returned,
            self._row_sums.to(self._tables.dtype),
            self._from_each,
            self._room,
            group=self._channels.embeddings,
        )
        return returned

    def update(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Update this rank's rows with the gradients from `send_back`, unless `is_good` [1] is 0."""
        self._owned.update(ids, gradients, is_good)

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
