"""The rows that some batches need are read ahead from disk into host memory while the batches before train.

A batch is announced when its ids are known. The rows of a group of announced batches are read by a thread, each row once and in
ascending order. A batch waits until all its rows are read: nothing but speed depends on the groups.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from nn.distributed.errors import RankError
from nn.tiers.disk_store import DiskStore

READ_AHEAD_BATCHES = 16
"""Batches of a read-ahead group: their rows are read from disk together. Two groups of batches wait in host memory."""

Rows = Mapping[int, np.ndarray]
"""Group -> rows, distinct, ascending, int64."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Need:
    """Rows that a batch needs in host memory; `reading` is done, once its group is read."""

    rows: Rows
    reading: "Future[None] | None" = None


class ReadAhead:
    """Reader of the rows of read-ahead groups; `resident` returns those of a group that may return from the device."""

    def __init__(
        self, stores: Mapping[int, DiskStore], resident: Callable[[int], np.ndarray]
    ) -> None:
        self._stores = stores
        self._resident = resident
        self._pending: weakref.WeakSet[Need] = weakref.WeakSet()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._last: Future[None] | None = None
        self.wait_ms = 0.0

    def announce(self, rows: Rows) -> Need:
        """Return the need of a batch whose ids are known; its rows are not dropped before `ready` or its deletion."""
        stores = self._stores
        need = Need(
            {group: stores[group].host_rows.without_kept(some) for group, some in rows.items()}
        )
        self._pending.add(need)
        return need

    def start(self, needs: Sequence[Need]) -> None:
        """Start to read the rows of some batches, in their order, once those of the group before are read."""
        started = time.perf_counter()
        self.drain()
        self.wait_ms += (time.perf_counter() - started) * 1e3
        # Rows that reach the device from now on belong to batches that are pending now.
        staying = {
            group: [self._resident(group), *(need.rows[group] for need in self._pending)]
            for group in self._stores
        }
        self._last = self._thread.submit(self._read, [need.rows for need in needs], staying)
        for need in needs:
            need.reading = self._last

    def ready(self, need: Need) -> None:
        """Wait until a batch's rows are in host memory, where they stay while the device has them; RankError without room."""
        started = time.perf_counter()
        if need.reading is not None:
            need.reading.result()
        self._pending.discard(need)
        for group, rows in need.rows.items():
            store = self._stores[group]
            if store.host_rows.lacks(rows):
                self.drain()
                if not store.read(rows, [self._resident(group)]):
                    raise RankError(
                        f"a batch needs {len(rows):,} rows of tables with tier: disk, for which host memory has no room beside "
                        "those on the device; raise sharding.read_ahead_gib"
                    )
            store.tell_device()
        self.wait_ms += (time.perf_counter() - started) * 1e3

    def change(self, need: Need) -> None:
        for group, rows in need.rows.items():
            self._stores[group].host_rows.change(rows)

    def drain(self) -> None:
        """Wait until nothing is read; RankError if the disk is full."""
        if self._last is not None:
            self._last.result()
        self._last = None

    def _read(self, needs: Sequence[Rows], staying: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Read the rows of as many of the first batches as there is room for."""
        for group, store in self._stores.items():
            count = len(needs)
            while count:
                # numpy's `unique` uses a hash table, which takes ten times as long.
                rows = np.sort(np.concatenate([need[group] for need in needs[:count]]))
                rows = rows[np.diff(rows, prepend=-1) != 0]
                if store.read(rows, staying[group]):
                    break
                count //= 2
