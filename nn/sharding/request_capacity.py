"""Capacity for the distinct rows that a batch asks of their owners: measured, with a reserve for the batches that follow."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dataloading.dataset.batch_layout import NO_ID, Doublings
from nn.distributed.process_group import HostChannel
from nn.sharding.event_parts import EventParts
from nn.sharding.local_ids import Capacity, PartCapacity
from nn.sharding.placement import RankTables
from nn.sharding.request_keys import RequestKeys, RowCapacity, SortedKeys

Rows = tuple[tuple[int, ...], ...]
"""Numbers of rows of each owner, per group of requested tables."""
RESERVE = 1.125
"""Usual capacity, times the rows that a measured batch asks for; `SPREAD` adds what small batches need."""
SPREAD = 6.0
EVENT_RESERVE = 1.03125
"""Usual capacity for events, over those that hardly a batch or part exceeds; `SPREAD` adds what small ones need."""
DEVIATIONS = 2.0
"""Standard deviations of measured batches by which others may ask for more than the largest of them."""


def capacity_for(rows: float) -> int:
    return max(math.ceil(RESERVE * rows + SPREAD * rows**0.5), 1)


def event_capacity(batches: Sequence[int]) -> int:
    """Return the usual capacity for the events of batches or parts, where the largest parts of several batches have so many."""
    most = most_expected(batches)
    return max(math.ceil(EVENT_RESERVE * most + SPREAD * most**0.5), 1)


def most_expected(rows: Sequence[int]) -> int:
    """Return the rows that hardly a batch exceeds, where some ask for `rows`; those of a single one."""
    return max(rows) + math.ceil(DEVIATIONS * statistics.pstdev(rows))


class RequestCapacity:
    """Capacity for requested rows, and for events; all ranks must call the methods alike.

    `part_rows`: samples of a rank that the dense component takes at once; None: all. Of a single measured batch the capacity for
    events is not known.
    """

    def __init__(self, tables: RankTables, part_rows: int | None = None) -> None:
        self._tables = tables
        self._part_rows = part_rows
        # All ranks must have the same capacity.
        self._channel = HostChannel() if tables.placement.requested else None
        self._usual: dict[int, Capacity] = {}

    def usual(self, batch_size: int, ids: Tensor) -> Capacity:
        """Return the capacity for full batches of one size: as measured, or else by the ids of the first one."""
        self.measure(batch_size, [ids])
        return Capacity() if self._channel is None else self._usual[batch_size]

    def measure(self, batch_size: int, batches: Iterable[Tensor]) -> None:
        """Set the capacity for full batches of one size from the ids of some, unless it is set."""
        if self._channel is None or batch_size in self._usual:
            return
        counts: list[tuple[Rows, Rows]] = []
        events: list[list[float]] = []
        parts = EventParts(self._tables, batch_size, self._part_rows or batch_size)
        for ids in batches:
            counts.append(self._counts(self._channel, batch_size, ids, (), None))
            if self._tables.sequences.groups:
                events.append(self._channel.maximum(parts.most(ids).tolist()))
        if counts:
            requests, merged = map(_most_expected, zip(*counts, strict=True))
            most = [event_capacity(list(map(int, group))) for group in zip(*events, strict=True)]
            room = self._of_parts(batch_size, most if len(counts) > 1 else [])
            self._usual[batch_size] = Capacity(
                (), _with_reserve(requests), _with_reserve(merged), room
            )

    def facts(self) -> dict[str, Any]:
        """Return the usual capacities as a checkpoint holds them: of every batch size so far, and for which shards."""
        rows = {str(size): capacity.requests for size, capacity in self._usual.items()}
        facts: dict[str, Any] = {"shards": self._shards(), "rows": rows}
        if self._merges:
            facts["merged"] = {str(size): usual.merged for size, usual in self._usual.items()}
        if self._tables.sequences.groups:
            facts["part_rows"] = self._part_rows or 0
            facts["parts"] = {
                str(size): [usual.parts.most] for size, usual in self._usual.items() if usual.parts
            }
        return facts

    def take(self, facts: Mapping[str, Any]) -> None:
        """Take over the capacities of `facts` if they are for the same shards, so that a resumed run has the same shapes."""
        if facts["shards"] != self._shards() or ("merged" in facts) != self._merges:
            return
        part_rows = self._part_rows or 0
        if facts.get("part_rows", part_rows) != part_rows:
            return
        for size, rows in facts["rows"].items():
            merged = facts["merged"][size] if self._merges else [[]] * len(rows)
            [most] = facts.get("parts", {}).get(size) or [[]]
            self._usual[int(size)] = Capacity(
                (),
                tuple(map(tuple, rows)),
                tuple(map(tuple, merged)),
                self._of_parts(int(size), most),
            )

    def _of_parts(self, batch_size: int, most: Sequence[int]) -> PartCapacity | None:
        return PartCapacity(self._part_rows or batch_size, tuple(most)) if most else None

    @property
    def _merges(self) -> bool:
        """Return whether owners merge the rows that the ranks of a group ask for."""
        return min(self._tables.rank_group.size, self._tables.rank_group.count) > 1

    def _shards(self) -> list[Any]:
        requested = self._tables.placement.requested
        return [[tables.names, tables.rows_by_rank] for tables in requested]

    def exact(
        self, batch_size: int, ids: Tensor, doublings: Doublings = (), num_valid: int | None = None
    ) -> Capacity:
        """Return the capacity for one batch; the host waits for the device."""
        if self._channel is None:
            return Capacity(doublings, is_usual=not doublings)
        requests, merged = self._counts(self._channel, batch_size, ids, doublings, num_valid)
        return Capacity(doublings, requests, merged, is_usual=False)

    def _counts(
        self,
        channel: HostChannel,
        batch_size: int,
        ids: Tensor,
        doublings: Doublings,
        num_valid: int | None,
    ) -> tuple[Rows, Rows]:
        """Return the rows, at least one, that a rank asks of each owner, the most over all ranks, per group of tables.

        Behind them come the distinct ones that a group of ranks asks of each owner, the most over all groups.
        """
        groups, asked = self._tables.placement.requested, []
        for requested in groups:
            keys = RequestKeys(self._tables, requested, batch_size, doublings)
            asked.append((keys, keys.distinct(keys.prepare(ids, num_valid))))
        sizes = [len(requested.rows_by_rank) for requested in groups]
        requests = _most(channel, [rows.counts.tolist() for _, rows in asked], sizes)
        if not self._merges:
            return requests, ((),) * len(groups)
        merges = [requested.replica is None for requested in groups]
        here = [
            self._merged_count(keys, rows, capacity) if is_merged else []
            for (keys, rows), capacity, is_merged in zip(asked, requests, merges, strict=True)
        ]
        return requests, _most(channel, here, list(map(len, here)))

    def _merged_count(
        self, keys: RequestKeys, rows: SortedKeys, capacity: Sequence[int]
    ) -> list[int]:
        """Return the distinct rows that this rank's group asks of it, and 0 of the group's other ranks."""
        rank_group, ranks = self._tables.rank_group, self._tables.ranks
        asked, _ = keys.requests(rows, RowCapacity(capacity, ranks.device))
        arrived = rank_group.send_within(asked, capacity, self._tables.channels.ids)
        count = len(torch.unique(arrived[arrived != NO_ID]))
        return [count * (rank == rank_group.rank) for rank in range(rank_group.size)]


def _most(channel: HostChannel, counts: Sequence[Sequence[int]], sizes: Sequence[int]) -> Rows:
    """Return the largest counts over all ranks, at least 1, in parts of such sizes."""
    most = channel.maximum([count for part in counts for count in part])
    rows = iter([max(int(count), 1) for count in most])
    return tuple(tuple(islice(rows, size)) for size in sizes)


def _most_expected(batches: Sequence[Rows]) -> Rows:
    return tuple(
        tuple(map(most_expected, zip(*of_group, strict=True)))
        for of_group in zip(*batches, strict=True)
    )


def _with_reserve(rows: Rows) -> Rows:
    return tuple(tuple(map(capacity_for, of_tables)) for of_tables in rows)
