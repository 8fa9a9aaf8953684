"""Capacity for the distinct rows that a batch asks of their owners: measured, with a reserve for the batches that follow."""

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from nn.distributed.process_group import HostChannel
from nn.sharding.local_ids import Capacity
from nn.sharding.placement import RankTables
from nn.sharding.request_keys import RequestKeys

RESERVE = 1.125
"""Usual capacity, times the rows that the first batch asks for; `SPREAD` adds what small batches need."""
SPREAD = 6.0


def capacity_for(rows: float) -> int:
    """Return the usual capacity, where a batch asks for `rows`."""
    return max(math.ceil(RESERVE * rows + SPREAD * rows**0.5), 1)


class RequestCapacity:
    """Capacity for requested rows; all ranks must call the methods alike."""

    def __init__(self, tables: RankTables) -> None:
        self._tables = tables
        # All ranks must have the same capacity.
        self._channel = HostChannel() if tables.placement.requested else None
        self._usual: dict[int, Capacity] = {}

    def usual(self, batch_size: int, ids: Tensor) -> Capacity:
        """Return the capacity for full batches of one size: that of the first one, and a reserve."""
        if self._channel is None:
            return Capacity()
        if batch_size not in self._usual:
            needed = self._counts(self._channel, batch_size, ids, 0, None)
            with_reserve = tuple(tuple(map(capacity_for, group)) for group in needed)
            self._usual[batch_size] = Capacity(0, with_reserve)
        return self._usual[batch_size]

    def facts(self) -> dict[str, Any]:
        """Return the usual capacities as a checkpoint holds them: of every batch size so far, and for which shards."""
        rows = {str(size): capacity.requests for size, capacity in self._usual.items()}
        return {"shards": self._shards(), "rows": rows}

    def take(self, facts: Mapping[str, Any]) -> None:
        """Take over the capacities of `facts` if they are for the same shards, so that a resumed run has the same shapes."""
        if facts["shards"] == self._shards():
            for size, rows in facts["rows"].items():
                self._usual[int(size)] = Capacity(0, tuple(map(tuple, rows)))

    def _shards(self) -> list[Any]:
        return [[group.names, group.rows_by_rank] for group in self._tables.placement.requested]

    def exact(
        self, batch_size: int, ids: Tensor, doublings: int = 0, num_valid: int | None = None
    ) -> Capacity:
        """Return the capacity for one batch; the host waits for the device."""
        if self._channel is None:
            return Capacity(doublings, is_usual=not doublings)
        needed = self._counts(self._channel, batch_size, ids, doublings, num_valid)
        return Capacity(doublings, needed, is_usual=False)

    def _counts(
        self,
        channel: HostChannel,
        batch_size: int,
        ids: Tensor,
        doublings: int,
        num_valid: int | None,
    ) -> tuple[tuple[int, ...], ...]:
        """Return the rows, at least one, that a rank asks of each owner, the most over all ranks, per group."""
        counts: list[float] = []
        for group in self._tables.placement.requested:
            keys = RequestKeys(self._tables, group, batch_size, doublings)
            counts += keys.distinct(keys.prepare(ids, num_valid)).counts.tolist()
        most = iter([max(int(count), 1) for count in channel.maximum(counts)])
        groups = self._tables.placement.requested
        return tuple(tuple(islice(most, len(group.rows_by_rank))) for group in groups)
