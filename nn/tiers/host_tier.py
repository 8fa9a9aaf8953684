"""Tables in host memory with an arena on the device, filled ahead of the step with the rows that its batch needs.

A batch is mapped while the batch before it trains: its ids become slots, missing rows are fetched, changed rows that no live
batch needs return to host memory. On a GPU this runs on the stream of the prefetch, beside the step. A batch keeps its rows
from the mapping until its pass has run, so that a step never misses a row.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nn.embedding.local_tables import LocalTable, SlotRows
from nn.embedding.optimizer import StateField
from nn.tiers.live_batches import Hold, LiveBatches
from nn.tiers.row_store import WEIGHT, RowStore
from nn.tiers.slot_map import SlotMap, TierIds


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
        self._live = LiveBatches(device)

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
        hold = self._live.begin()
        traffic = TierCounts()
        for of_group in groups:
            group = self._groups[of_group.group]
            moves, missing = group.map.map(ids, of_group, hold.pin)
            if moves is not None:
                group.store.write_back(moves.returned_rows, moves.returned_slots)
                group.store.fetch(moves.fetched_rows, moves.fetched_slots)
                traffic.rows_in += len(moves.fetched_rows)
                traffic.rows_out += len(moves.returned_rows)
                traffic.bytes_in += group.store.row_bytes * len(moves.fetched_rows)
                traffic.bytes_out += group.store.row_bytes * len(moves.returned_rows)
            traffic.ids += len(of_group.positions)
            traffic.missing += missing
        traffic.ms = (time.perf_counter() - started) * 1e3
        if self._is_training:
            for field in fields(traffic):
                total = getattr(self._counts, field.name) + getattr(traffic, field.name)
                setattr(self._counts, field.name, total)
        return hold

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

    def _release_ended(self, *, all_but: int) -> None:
        """Release the rows of the passes that are queued, but those of the latest ones."""
        released, trained = self._live.take_ended(all_but=all_but)
        if released:
            for group in self._groups:
                group.map.release(released, trained)

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
