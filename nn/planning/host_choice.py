"""Choice of the tables whose rows lie in host memory, and of the room for them on the device, if GPUs have too little memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from nn.sharding.tables import HostTable
from nn.tiers.host_tier import ring_slots
from nn.tiers.traffic import IdTraffic, expected_fetches, row_classes

CACHES = (0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
"""Fractions of rows on the device that are tried."""
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 18, 26, 50, 100, 1000)
"""Numbers of tables in host memory that are tried."""
USELESS_CACHE = 0.8
"""Fraction of rows on the device from which a table stays there with all its rows."""
ORDER_CACHE = 0.1
"""The fraction at which tables are compared."""


@dataclass(frozen=True)
class Movable:
    """A table that may lie in host memory."""

    rows: int
    live_rows: int  # ids of the live batches
    row_bytes: float  # of a row with its optimizer state
    ids: float  # of the table per step, before they are expanded
    traffic: IdTraffic  # how often its rows are looked up
    shard_rows: int  # at most the rows of its largest shard

    @property
    def num_bytes(self) -> float:
        return self.rows * self.row_bytes

    def cached(self, cache: float) -> HostTable | None:
        """Return the table with room for a fraction of its rows, at least those of the live batches; None if that is most."""
        least = math.ceil(1e4 * min(1, self.live_rows / self.shard_rows)) / 1e4
        cache = max(cache, least)
        return HostTable(cache, self.live_rows) if cache < USELESS_CACHE else None

    def fetched_bytes(self, cache: float) -> float:
        """Return the bytes that a step is expected to fetch if the table is one shard; row-wise shards fetch more."""
        slots = int(self.rows * cache)
        ring = min(max(ring_slots(slots), self.live_rows), slots)
        classes = row_classes(self.traffic, 0, self.rows, slots - ring, self.ids)
        return expected_fetches([classes], ring)[0] * self.row_bytes

    @cached_property
    def price(self) -> float:
        """Bytes fetched per byte that leaves the device."""
        return self.fetched_bytes(ORDER_CACHE) / self.num_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    tables: Mapping[str, HostTable]  # by name
    host_bytes: float  # that they take in host memory
    freed_bytes: float  # of the devices, at most
    fetched_bytes: float


def choices(movable: Mapping[str, Movable]) -> list[Choice]:
    """Return sets of the tables that cost least per byte, each with one fraction of rows on the device, least traffic first."""
    ordered = sorted(movable.items(), key=lambda item: (item[1].price, -item[1].num_bytes))
    return sorted(
        (choice for cache in CACHES for choice in _with_cache(dict(ordered), cache)),
        key=lambda choice: (choice.fetched_bytes, choice.freed_bytes),
    )


def _with_cache(ordered: Mapping[str, Movable], cache: float) -> Iterator[Choice]:
    cached = {name: table.cached(cache) for name, table in ordered.items()}
    kept = {name: host for name, host in cached.items() if host is not None}
    tables = [(ordered[name], host) for name, host in kept.items()]
    in_host = list(accumulate(table.num_bytes for table, _ in tables))
    freed = list(accumulate((1 - host.cache) * table.num_bytes for table, host in tables))
    fetched = list(accumulate(table.fetched_bytes(host.cache) for table, host in tables))
    for count in sorted({min(count, len(kept)) for count in COUNTS} - {0}):
        last = count - 1
        yield Choice(dict(list(kept.items())[:count]), in_host[last], freed[last], fetched[last])
