"""Sharded lookup and update with known shapes: all-to-all of ids, lookup, all-to-all of embeddings and back, update.

Buffers are allocated once per batch size; the host reads nothing back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nn.embedding.local_tables import LocalTable, SortedIds
from nn.layers.distinct_rows import DistinctRows
from nn.layers.sequence_events import SequenceEvents
from nn.ops.table_rows import TableRows
from nn.sharding.arrived_ids import ArrivedIds, features_of
from nn.sharding.event_parts import PartRoom
from nn.sharding.id_all_to_all import IdAllToAll
from nn.sharding.local_ids import Capacity, LocalIds, RequestedIds
from nn.sharding.placement import Placement, RankTables, RequestedTables
from nn.sharding.pooled_rows import PooledRows
from nn.sharding.rank_group import GroupIds, gradients_of_all_groups
from nn.sharding.request_keys import RequestKeys
from nn.sharding.row_requests import RowRequests
from nn.sharding.vector_memory import VectorMemory
from nn.tiers.live_batches import Hold
from nn.tiers.read_ahead import Need
from nn.tiers.slot_ids import SlotIds

# B: rows of this rank, W: ranks, T: columns of the vectors that a rank looks up for the others


@dataclass(frozen=True, slots=True)
class SortedRequest:
    """Sorted ids of requested tables of one width.

    Attributes:
        asked: the rows asked of each memory of this rank.
        merged: the rows that this rank's group asks of it, if it merges them.
        pooled: this rank's own ids, if it pools the rows.
    """

    asked: list[SortedIds]
    merged: SortedIds | None
    pooled: SortedIds | None


@dataclass(frozen=True, slots=True)
class SortedBatch:
    """A batch's ids, sorted for the updates: of tables whose vectors are sent, of requested ones by width, of replicas."""

    vectors: SortedIds
    requested: list[SortedRequest]
    replicas: SortedIds


@dataclass(frozen=True, slots=True)
class LookupGradients:
    """Gradients of what a batch has looked up: of `ShardedLookup.memory`, and of `handed_out`."""

    vectors: Tensor
    rows: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ReturnedGradients:
    """Gradients on the ranks of their tables: of vectors, [B * W, T], and of rows of `requested` ones, None if replicated."""

    vectors: Tensor
    requested: list[Tensor | None]


@dataclass(frozen=True, slots=True)
class _Requested:
    """Requested tables of one width, for batches of one size; `pooled` is None if the dense component takes the rows."""

    tables: RequestedTables
    keys: RequestKeys
    exchange: RowRequests
    pooled: PooledRows | None

    @property
    def table(self) -> str:
        """Name of the first table, the only one of those whose rows the dense component takes."""
        return self.tables.names[0]


def _requested_tables(
    tables: RankTables, batch_size: int, capacity: Capacity, replicated_gradients: Sequence[Tensor]
) -> list[_Requested]:
    found = []
    for requested, rows, merged in zip(
        tables.placement.requested, capacity.requests, capacity.merged, strict=True
    ):
        keys = RequestKeys(tables, requested, batch_size, capacity.doublings)
        exchange = RowRequests(tables, requested, keys, rows, merged, replicated_gradients)
        pooled = None
        if not requested.hands_out:
            pooled = PooledRows(tables, keys, exchange.rows[:-1], batch_size)
        found.append(_Requested(requested, keys, exchange, pooled))
    return found


def _gradient_tables(placement: Placement, gradients: Sequence[Tensor]) -> list[LocalTable]:
    """Return the gradients of the replicated tables that are not requested, as tables with their lookups."""
    pairs = zip(placement.replicas, placement.replica_numbers, strict=True)
    return [LocalTable(table.lookups, gradients[number], {}) for table, number in pairs]


class ShardedLookup:
    """The tables, for batches of one size.

    `replicated_gradients` [rows, D] are zero at the start of a step. `prefix_columns` are those that the dense component puts
    before each sample's embeddings; they are left free, unless it takes a batch `in_chunks`. `look_up` fills `memory` and
    `handed_out`: of each table whose rows the dense component takes, those of the batch (`DistinctRows`).
    """

    def __init__(
        self,
        tables: RankTables,
        batch_size: int,
        capacity: Capacity,
        *,
        replicated_gradients: Sequence[Tensor],
        prefix_columns: int,
        in_chunks: bool,
    ) -> None:
        self.memory = VectorMemory(tables, batch_size, prefix_columns, in_chunks=in_chunks)
        tables = self.memory.placed(tables)
        placement, ranks, rank_group = tables.placement, tables.ranks, tables.rank_group
        self._ranks, self._rank_group, self._tier = ranks, rank_group, tables.tier
        self._channels, self._sequences = tables.channels, tables.sequences
        self._capacity, self._part_room = capacity, None
        if capacity.parts is not None:
            self._part_room = PartRoom(tables, batch_size, capacity.parts, capacity.doublings)
        counts = tables.counts(batch_size, capacity.doublings)
        self._exchange = IdAllToAll(
            [features_of(shards, counts) for shards in placement.owned_by_rank] * rank_group.count,
            features_of(placement.replicated, counts),
            counts,
            batch_size=batch_size,
            rank=ranks.rank,
            device=ranks.device,
            channel=tables.channels.ids,
        )
        self._prepare_owned = ArrivedIds(
            tables, features_of(placement.owned, counts), counts, ranks.world_size, batch_size
        )
        self._prepare_replicated = ArrivedIds(
            tables, features_of(placement.replicas, counts), counts, 1, batch_size
        )
        self._requested = _requested_tables(tables, batch_size, capacity, replicated_gradients)
        self.handed_out = {
            requested.table: requested.exchange.rows
            for requested in self._requested
            if requested.pooled is None
        }
        in_tier = [entry for requested in self._requested for entry in requested.exchange.in_tier]
        self._slots = SlotIds(placement.owned, self._prepare_owned.blocks, ranks.device, in_tier)
        self._update_bags = tables.bags(
            self._slots.tables, self._slots.blocks, batch_size * ranks.world_size
        )
        self._update_bags.touched = tables.touched
        # Lookup is for the samples of this rank's group of ranks, update for those of all groups; with one they are one object.
        self._lookup_bags, self._group_ids = self._update_bags, None
        if rank_group.count > 1:
            self._group_ids = GroupIds(self._slots.blocks, rank_group, ranks.device)
            self._lookup_bags = tables.bags(
                self._slots.tables, self._group_ids.blocks, batch_size * rank_group.size
            )
        self._replica_bags = tables.bags(
            placement.replicas, self._prepare_replicated.blocks, batch_size
        )
        self._replica_sums = tables.adding_bags(
            _gradient_tables(placement, replicated_gradients),
            self._prepare_replicated.blocks,
            batch_size,
        )
        self._sent = self.memory.of_group(tables)
        self._owned_sizes_by_rank = [batch_size * self._sent.shape[1]] * rank_group.size
        self._sends_vectors = rank_group.size > 1 and any(self.memory.block_sizes)

    def send_ids(self, ids: Tensor, num_valid: int | None = None) -> tuple[LocalIds, Tensor | None]:
        """Send this rank's ids to their tables, and expand them there.

        Ids are in the order of the features, each [B, hotness]. With `num_valid`, the valid rows of a global batch, the padding
        rows behind them get the ids of the first row: so the lookup, and the update with their zero gradients, touch no row that
        the batch does not use. Returns the ids, and whether any rank has more than fit, int32 [1]; None if it cannot have.
        """
        owned, replicated = self._exchange(ids)
        if num_valid is not None:
            self._prepare_owned.repeat_first_row(owned, num_valid)
        sent = [requested.exchange.send(ids, num_valid) for requested in self._requested]
        overflows = None
        if sent:
            lacks = [lacks for _, _, lacks in sent]
            if self._part_room is not None:
                lacks.append(self._part_room.is_exceeded(ids))
            lacking = torch.stack(lacks).any(0).int()
            overflows = self._ranks.all_reduce_max(lacking, self._channels.all_ranks)
        local = LocalIds(
            self._slots(
                self._prepare_owned(owned), [rows for _, in_tier, _ in sent for rows in in_tier]
            ),
            self._prepare_replicated(replicated),
            tuple(of_batch for of_batch, _, _ in sent),
            self._capacity,
        )
        return local, overflows

    def hold_rows(self, ids: LocalIds, need: Need | None = None) -> Hold | None:
        """Turn the ids of tables in host memory into slots, in place, and fetch their rows; nothing is captured here.

        `need` is the result of `needed_rows`, if it was called.
        """
        if self._tier is None:
            return None
        return self._tier.map(ids.owned, self._slots.tier_ids, need)

    def needed_rows(self, ids: LocalIds) -> Need | None:
        """Return the rows of this rank's tables on disk that a batch needs, before `hold_rows`."""
        return None if self._tier is None else self._tier.announce(ids.owned, self._slots.tier_ids)

    @cached_property
    def _returned(self) -> Tensor:
        """The buffer in which gradients of the group arrive; evaluation does not need it."""
        return torch.empty_like(self._sent)

    @property
    def part_events(self) -> dict[str, int]:
        """The events that the dense component takes at most, by feature; of others as many as there is room for."""
        return {} if self._part_room is None else self._part_room.events

    def look_up(self, ids: LocalIds) -> Tensor:
        """Look up the ids and send the embeddings to the ranks of their samples.

        They are in `memory`; the next call overwrites it.
        """
        self._lookup_bags.look_up(self._looked_up_ids(ids), self._sent)
        memory = self.memory
        self._replica_bags.look_up(ids.replicated, memory.replicated(memory.values))
        if self._sends_vectors:
            self._channels.embeddings(
                memory.blocks(memory.arrived),
                self._sent.view(-1),
                memory.block_sizes,
                self._owned_sizes_by_rank,
            )
            memory.add_partial()
        memory.join()
        for number, (requested, slots) in enumerate(self._requested_with_slots(ids)):
            requested.exchange.fetch(ids.requested[number], slots)
            if requested.pooled is not None:
                out = memory.requested(memory.values, number)
                requested.pooled.look_up(ids.requested[number], out)
        return memory.values

    def distinct_rows(self, ids: LocalIds, rows: Tensor, table: str, feature: str) -> DistinctRows:
        """Return `rows`, which are those of a table of `handed_out`, with the positions of a feature's ids."""
        number = self._number_of(table)
        local = ids.requested[number].local
        found = self._requested[number].keys.distinct_rows(rows, local, feature)
        return replace(found, max_length=self._sequences.max_length(feature))

    def vectors(self, ids: LocalIds, rows: Tensor, table: str) -> dict[str, Tensor]:
        """Return the row of each id of each feature, [C, D], of the same rows; the sort that found them adds up gradients."""
        number = self._number_of(table)
        requested, of_batch = self._requested[number], ids.requested[number]
        blocks = requested.keys.blocks
        positions = [
            of_batch.local.narrow(0, block.first, block.count) for block in blocks.values()
        ]
        found = _ById.apply(rows, requested.exchange, of_batch, *positions)
        of_block = dict(zip(blocks, found, strict=True))
        return {
            feature: of_block[block][: self.part_events.get(feature)]
            for feature, block in requested.keys.block_of.items()
        }

    def _number_of(self, table: str) -> int:
        return [requested.table for requested in self._requested].index(table)

    def sequence(
        self,
        ids: LocalIds,
        name: str,
        rows_of: Callable[[str, str], DistinctRows],
        numbers: Sequence[Tensor],
    ) -> SequenceEvents:
        """Return the events of a sequence group, of which a batch has the `numbers`; `rows_of` takes a table and a feature."""

        def samples_of(table: str, feature: str) -> Tensor:
            number = self._number_of(table)
            return self._requested[number].keys.samples(ids.requested[number].local, feature)

        return self._sequences.events(name, rows_of, samples_of, numbers)

    def _owned_ids(self, ids: LocalIds) -> Tensor:
        """View the ids of the tables on this rank, without the rows that are asked for behind them."""
        return ids.owned[: self._slots.num_ids]

    def _looked_up_ids(self, ids: LocalIds) -> Tensor:
        """Return those of the samples of this rank's group."""
        owned = self._owned_ids(ids)
        return owned if self._group_ids is None else self._group_ids(owned)

    def _requested_with_slots(self, ids: LocalIds) -> Iterator[tuple[_Requested, list[Tensor]]]:
        """Yield the requested tables, with the slots of the rows that are asked of tables in host memory."""
        slots = iter(self._slots.asked(ids.owned))
        for requested in self._requested:
            yield requested, [next(slots) for _ in requested.exchange.in_tier]

    def table_rows(self, ids: LocalIds) -> TableRows | None:
        """Return the rows of all ids; None unless this rank has all tables and each vector is one row, on a GPU."""
        is_here = (
            self._rank_group.size == 1 and not self._replica_bags.tables and not self._requested
        )
        return self._lookup_bags.table_rows(self._looked_up_ids(ids)) if is_here else None

    def sort(self, ids: LocalIds) -> SortedBatch:
        sorted_requests = [
            SortedRequest(
                requested.exchange.sort(of_batch, slots),
                requested.exchange.sort_merged(of_batch),
                None if requested.pooled is None else requested.pooled.sort(of_batch),
            )
            for (requested, slots), of_batch in zip(
                self._requested_with_slots(ids), ids.requested, strict=True
            )
        ]
        vectors = self._update_bags.sort(self._owned_ids(ids))
        return SortedBatch(vectors, sorted_requests, self._replica_sums.sort(ids.replicated))

    def send_back(self, ids: SortedBatch, gradients: LookupGradients) -> ReturnedGradients:
        """Send the gradients of vectors and rows to the ranks that own the tables."""
        of_rows = [
            None
            if requested.tables.replica is not None
            else requested.exchange.send_back(
                ids.requested[number].merged, self._row_gradients(number, ids, gradients)
            )
            for number, requested in enumerate(self._requested)
        ]
        vectors = self._send_vectors_back(gradients.vectors)
        return ReturnedGradients(gradients_of_all_groups(vectors, self._channels.owners), of_rows)

    def _row_gradients(self, number: int, ids: SortedBatch, gradients: LookupGradients) -> Tensor:
        """Return one gradient a row of requested tables, [R, D]: the dense component's, or a sum over its lookups."""
        requested, own = self._requested[number], ids.requested[number].pooled
        if requested.pooled is None or own is None:
            return gradients.rows[requested.table][:-1]
        return requested.pooled.sums(own, self.memory.requested(gradients.vectors, number))

    def _send_vectors_back(self, gradients: Tensor) -> Tensor:
        """Send the gradients of the vectors that were sent to the ranks of this group, [samples of the group, T]."""
        arrived = self.memory.take_apart(gradients)
        if self._rank_group.size == 1:
            return self.memory.owned(arrived)
        if not self._sends_vectors:
            return self._sent
        self.memory.spread_partial(arrived)
        self._channels.embeddings(
            self._returned.view(-1),
            self.memory.blocks(arrived),
            self._owned_sizes_by_rank,
            self.memory.block_sizes,
        )
        return self._returned

    def update(self, ids: SortedBatch, gradients: ReturnedGradients, is_good: Tensor) -> None:
        """Update this rank's tables with the gradients from `send_back`, unless `is_good` [1] is 0."""
        self._update_bags.update(ids.vectors, gradients.vectors, is_good)
        for requested, sorted_ids, returned in zip(
            self._requested, ids.requested, gradients.requested, strict=True
        ):
            if returned is not None:
                requested.exchange.update(sorted_ids.asked, returned, is_good)

    def accumulate_replicated(
        self, ids: SortedBatch, gradients: LookupGradients, is_good: Tensor
    ) -> None:
        """Add the gradients of this rank's embeddings to those of the replicated tables."""
        replicated = self.memory.replicated(gradients.vectors)
        self._replica_sums.update(ids.replicas, replicated, is_good)
        for number, requested in enumerate(self._requested):
            if requested.tables.replica is not None:
                of_rows = self._row_gradients(number, ids, gradients)
                requested.exchange.update(ids.requested[number].asked, of_rows, is_good)


class _ById(torch.autograd.Function):
    """The row of each id of each feature; the backward pass adds up the gradients of a row over all features, in one order."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, requests: RowRequests, ids: RequestedIds, *positions: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sums, ctx.ids, ctx.dtype = requests.sums_by_id, ids, rows.dtype
        sizes = [len(of_feature) for of_feature in positions]
        return requests.rows_of(torch.cat(positions)).split(sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sorted_ids = ctx.sums.take_sorted(ctx.ids.local, ctx.ids.keys, ctx.ids.order)
        total = ctx.sums(sorted_ids, torch.cat(gradients)).to(ctx.dtype)
        return total, None, None, *[None] * len(gradients)
