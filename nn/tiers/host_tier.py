"""Tables in host memory with an arena on the device, filled ahead of the step with the rows that its batch needs.

A batch is mapped while the batch before it trains: its ids become slots, missing rows are fetched, changed rows that no live
batch needs return to host memory. On a GPU this runs on the stream of the prefetch, beside the step. A batch keeps its rows
from the mapping until its pass has run, so that a step never misses a row.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nn.embedding.local_tables import LocalTable, SlotRows
from nn.embedding.optimizer import StateField
from nn.tiers.row_store import WEIGHT, RowStore
from nn.tiers.slot_map import SlotMap

MOST_BATCHES = 8
"""Batches between mapping and the end of their pass; the slot map has a bit for each."""


@dataclass(frozen=True, slots=True)
class TieredShard:
    """A shard of a table whose rows lie in host memory.

    Attributes:
        rows: of the shard.
        width: columns.
        dtype: of the weights.
        slots: rows of it that the arena has room for.
        window: distinct rows of it that the live batches may need.
        first_row: of the shard in the table.
    """

    rows: int
    width: int
    dtype: torch.dtype
    slots: int
    window: int
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class TierIds:
    """Positions of the ids of one group of tables in the ids of a batch, [K] each.

    Attributes:
        group: position of the group.
        positions: in the ids, int64.
        first: first row of the table here, int32.
        end: row after the last one here, int32.
        offset: number of the table's row 0 in the group, int32.
    """

    group: int
    positions: Tensor
    first: Tensor
    end: Tensor
    offset: Tensor


class Hold:
    """The rows that a batch keeps in the arena; they are released when nothing refers to it any more."""

    def __init__(self, tier: "HostTier", pin: int) -> None:
        self._tier, self._pin = tier, pin

    def release(self, *, is_trained: bool) -> None:
        """Release the rows; the pass is queued on the current stream."""
        if self._pin:
            self._tier._end(self._pin, is_trained=is_trained)
        self._pin = 0

    def __del__(self) -> None:
        # A batch that was prefetched and never trained.
        if not sys.is_finalizing():
            self.release(is_trained=False)


@dataclass(frozen=True, slots=True)
class _Group:
    """Tables of one width and dtype, with one store and one arena."""

    store: RowStore
    map: SlotMap


@dataclass(slots=True)
class TierCounts:
    """Traffic of a rank.

    Attributes:
        ids: that were mapped to slots.
        missing: those whose row was not on the device.
        rows_in: rows that were fetched.
        rows_out: rows that returned to host memory.
        bytes_in: of the rows fetched.
        bytes_out: of the rows returned.
        ms: time of the host for mapping and for queueing the copies; on a CPU, for the copies themselves.
    """

    ids: float = 0
    missing: float = 0
    rows_in: float = 0
    rows_out: float = 0
    bytes_in: float = 0
    bytes_out: float = 0
    ms: float = 0.0


class HostTier:
    """The tables of a rank whose rows lie in host memory.

    Args:
        shards: in order.
        states: optimizer state of a row.
        device: of the arena.

    Raises:
        ValueError: the host has too little memory.
    """

    def __init__(
        self, shards: Sequence[TieredShard], states: Sequence[StateField], device: torch.device
    ) -> None:
        self._device = device
        self._shards = list(shards)
        kinds = list(dict.fromkeys((shard.width, shard.dtype) for shard in shards))
        self._groups: list[_Group] = []
        self._place: dict[int, tuple[int, int]] = {}  # shard -> group and first row in it
        for number, (width, dtype) in enumerate(kinds):
            first = 0
            members = []
            for index, shard in enumerate(shards):
                if (shard.width, shard.dtype) == (width, dtype):
                    self._place[index] = number, first
                    members.append(shard)
                    first += shard.rows
            self._groups.append(_group_of(members, states, device))
        self._counts = TierCounts()
        self._is_training = True
        self._free_pins = [1 << bit for bit in range(MOST_BATCHES)]
        self._ended: list[tuple[int, bool, torch.cuda.Event | None]] = []

    def host_rows(self, index: int) -> dict[str, Tensor]:
        """View all rows of a shard in host memory, weight and states by name; call `write_back` before reading."""
        group, first = self._place[index]
        host = self._groups[group].store.host
        return {name: rows[first : first + self._shards[index].rows] for name, rows in host.items()}

    def local_table(self, index: int, table: LocalTable) -> LocalTable:
        """Return a table with the arena as its memory; its ids are slots.

        Args:
            index: of the shard.
            table: the same with all its rows.
        """
        group, first = self._place[index]
        arena = self._groups[group].store.arena
        shard = self._shards[index]
        return LocalTable(
            table.lookups,
            arena[WEIGHT],
            {name: state for name, state in arena.items() if name != WEIGHT},
            table.first_column,
            table.rounding_key,
            None if table.first_row is None else 0,
            SlotRows(
                self._groups[group].map.row_of_slot,
                group,
                shard.first_row,
                shard.rows,
                first - shard.first_row,
            ),
        )

    def map(self, ids: Tensor, groups: Sequence[TierIds]) -> Hold:
        """Turn ids into slots in place, on the current stream, and fetch the rows that are missing.

        Args:
            ids: of a batch on this rank; those at `groups` become slots.
            groups: positions of the ids.

        Raises:
            RankError: a batch with ragged features needs more rows than there is room for.
        """
        started = time.perf_counter()
        # The latest pass may still run, beside which this batch is mapped; those before it have ended, or are about to.
        self._release_ended(all_but=1)
        pin = self._free_pins.pop()
        traffic = TierCounts()
        for of_group in groups:
            group = self._groups[of_group.group]
            numbers = ids.index_select(0, of_group.positions)
            is_here = (numbers >= of_group.first) & (numbers < of_group.end)
            rows = torch.where(is_here, numbers + of_group.offset, group.map.num_rows)
            slots, moves, missing = group.map.assign(rows.int(), pin)
            if moves is not None:
                group.store.write_back(moves.returned_rows, moves.returned_slots)
                group.store.fetch(moves.fetched_rows, moves.fetched_slots)
                traffic.rows_in += len(moves.fetched_rows)
                traffic.rows_out += len(moves.returned_rows)
                traffic.bytes_in += group.store.row_bytes * len(moves.fetched_rows)
                traffic.bytes_out += group.store.row_bytes * len(moves.returned_rows)
            ids.index_copy_(0, of_group.positions, slots.to(ids.dtype))
            traffic.ids += len(numbers)
            traffic.missing += missing
        traffic.ms = (time.perf_counter() - started) * 1e3
        if self._is_training:
            for field in fields(traffic):
                total = getattr(self._counts, field.name) + getattr(traffic, field.name)
                setattr(self._counts, field.name, total)
        return Hold(self, pin)

    def train(self, mode: bool) -> None:
        """Switch between training, whose traffic is counted, and evaluation; all passes must be queued."""
        self._is_training = mode
        # Beside the training batch that waits, there is room for two of an evaluation.
        self._release_all()

    def write_back(self) -> None:
        """Make host memory hold the current rows; all passes must be queued."""
        self._release_all()
        for group in self._groups:
            changed = group.map.changed()
            if changed is not None:
                group.store.write_back(*changed)
        self._synchronize()

    def reload(self) -> None:
        """Copy the rows of the arena from host memory, which has changed."""
        self._synchronize()
        for group in self._groups:
            group.store.fetch(*group.map.resident())
        self._synchronize()

    def take_counts(self) -> TierCounts:
        """Return the traffic of this rank since the last call, without that of evaluations."""
        counts, self._counts = self._counts, TierCounts()
        return counts

    def _end(self, pin: int, *, is_trained: bool) -> None:
        """Note that the pass of a batch is queued on the current stream."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._ended.append((pin, is_trained, event))

    def _release_ended(self, *, all_but: int) -> None:
        """Release the rows of the passes that are queued, and let the current stream wait for these passes.

        Args:
            all_but: number of the latest passes that keep their rows.
        """
        count = len(self._ended) - all_but
        for pin, is_trained, event in self._ended[: max(count, 0)]:
            if event is not None:
                event.wait()
            for group in self._groups:
                group.map.release(pin, is_trained=is_trained)
            self._free_pins.append(pin)
        del self._ended[: max(count, 0)]

    def _release_all(self) -> None:
        """Wait for all passes and copies, and release their rows."""
        self._synchronize()
        self._release_ended(all_but=0)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _group_of(
    members: Sequence[TieredShard], states: Sequence[StateField], device: torch.device
) -> _Group:
    slots = [shard.slots for shard in members]
    needed = sum(min(shard.window, shard.rows) for shard in members)
    assert needed <= sum(slots), "the planner refuses smaller arenas"
    rows = [shard.rows for shard in members]
    store = RowStore(sum(rows), sum(slots), members[0].width, members[0].dtype, states, device)
    return _Group(store, SlotMap(rows, slots, max(needed, ring_slots(sum(slots))), device))


def ring_slots(slots: int) -> int:
    """Return the slots of an arena whose rows change, if the window needs no more: a quarter.

    The others keep the first rows of their tables, which are the most frequent ones.
    """
    return -(-slots // 4)
