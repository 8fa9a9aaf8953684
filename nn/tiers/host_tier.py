"""Tables in host memory or on disk with an arena on the device, filled ahead of the step with the rows that its batch needs.

A batch is mapped while the batch before it trains: its ids become slots, missing rows are fetched, changed rows that no live
batch needs return to host memory. On a GPU this runs beside the step: the mapping on the stream of the prefetch, the copies on
one of their own, so that they follow each other without a gap. A batch keeps its rows from the mapping until its pass has run, so
that a step never misses a row.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nn.embedding.local_tables import LocalTable, SlotRows
from nn.embedding.optimizer import StateField
from nn.ops.exchange_queue import ExchangeQueue
from nn.ops.host_copy import HostCopy
from nn.ops.stream_waits import StreamWaits
from nn.tiers.disk_store import DiskStore
from nn.tiers.initial_rows import InitialRows
from nn.tiers.live_batches import Hold, LiveBatches
from nn.tiers.read_ahead import Need, ReadAhead
from nn.tiers.row_store import WEIGHT, RowStore, bytes_of_row, kinds_of
from nn.tiers.slot_map import SlotMap, TierIds, lacks_slots
from nn.tiers.table_file import ShardOfFile, TableFile, TierDirectory

if TYPE_CHECKING:
    from nn.tiers.slot_kernels import SlotKernels


@dataclass(frozen=True, slots=True)
class TieredShard:
    """A shard of a table in host memory, or partly on disk, with an arena of `slots` and at most `live_rows` at work.

    `initial` has the weights of rows on disk that are in no file.
    """

    rows: int
    width: int
    dtype: torch.dtype
    slots: int
    live_rows: int
    first_row: int = 0
    initial: InitialRows | None = None
    first_column: int = 0

    @property
    def is_on_disk(self) -> bool:
        return self.initial is not None


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """Directory of the files of tables on disk, and the host memory per rank for their rows."""

    path: Path
    read_ahead_bytes: int


@dataclass(slots=True)
class _Group:
    """Tables of one width and dtype, with one store and one arena; on a GPU with kernels that map."""

    store: RowStore
    map: SlotMap
    kernels: "SlotKernels | None" = None

    @property
    def disk_store(self) -> DiskStore | None:
        return self.store if isinstance(self.store, DiskStore) else None


TRAFFIC = (
    *("ids", "missing", "rows_in", "rows_out", "bytes_in", "bytes_out", "ms", "wait_ms"),
    *("disk_rows_in", "disk_rows_out", "disk_bytes_in", "disk_bytes_out", "disk_wait_ms"),
)
"""Names of the traffic of a rank.

`ids` were mapped to slots, those without a row here left out; of `missing` ones the row was not on the device. Rows come in
from host memory and go out to it. `ms` is the host's time to queue mapping and copies, on a CPU for both themselves; steps
waited `wait_ms` for their batch and its rows. Rows are read from disk and, but for those of a save, written to it; batches
waited `disk_wait_ms` for them.
"""


def _resident(groups: Sequence[_Group], exchanges: ExchangeQueue, number: int) -> np.ndarray:
    """Return the rows of a group that may return from the device."""
    # Rows that have left the device are in host memory then, from where they may go to disk.
    exchanges.wait()
    return groups[number].map.changing_rows().numpy()


class HostTier:
    """The tables of a rank whose rows lie in host memory or on disk; ValueError if these have too little room."""

    def __init__(
        self,
        shards: Sequence[TieredShard],
        states: Sequence[StateField],
        device: torch.device,
        disk: DiskSettings | None = None,
    ) -> None:
        self._device = device
        self._shards = list(shards)
        members: dict[tuple[int, torch.dtype, bool], list[int]] = {}  # shards of each group
        for index, shard in enumerate(shards):
            kind = shard.width, shard.dtype, shard.is_on_disk
            members.setdefault(kind, []).append(index)
        self._groups: list[_Group] = []
        self._group_and_row: dict[int, tuple[int, int]] = {}  # shard -> group, first row in it
        # Host memory has room for the same fraction of the rows on disk of all groups.
        total = sum(
            shard.rows * bytes_of_row(kinds_of(shard.width, shard.dtype, states))
            for shard in shards
            if shard.is_on_disk
        )
        share = 0.0 if disk is None else min(disk.read_ahead_bytes / max(total, 1), 1.0)
        self._directory = None if disk is None else TierDirectory(disk.path)
        with ExitStack() as undo:
            undo.callback(self.close)
            for number, indices in enumerate(members.values()):
                of_group, first = [shards[index] for index in indices], 0
                for index, shard in zip(indices, of_group, strict=True):
                    self._group_and_row[index] = number, first
                    first += shard.rows
                self._groups.append(_group_of(of_group, states, device, self._directory, share))
            undo.pop_all()
        # Of both turns and every group, where kernels map; see `DeviceMoves`.
        self._counted: Tensor | None = None
        if maps_by_kernels(device):
            self._counted = torch.zeros(2, len(members), 8, dtype=torch.int32, device=device)
            # Triton comes with torch's CUDA builds only.
            from nn.tiers.slot_kernels import SlotKernels

            for group, counts in zip(self._groups, self._counted.unbind(1), strict=True):
                group.kernels = SlotKernels(group.map, counts)
        self._exchanges = ExchangeQueue(device)
        self._counts = dict.fromkeys(TRAFFIC, 0.0)
        self._waits = StreamWaits(device) if device.type == "cuda" else None
        self._is_training = True
        self._live = LiveBatches(device)
        stores = {
            number: store
            for number, group in enumerate(self._groups)
            if (store := group.disk_store) is not None
        }
        resident = partial(_resident, self._groups, self._exchanges)
        self.read_ahead = ReadAhead(stores, resident) if stores else None
        self._needs: dict[int, Need] = {}  # of live batches, by their bits

    def host_rows(self, index: int) -> dict[str, Tensor]:
        """View all rows of a shard in host memory, weight and states by name; call `write_back` before reading."""
        group, first = self._group_and_row[index]
        end = first + self._shards[index].rows
        return {name: rows[first:end] for name, rows in self._groups[group].store.host.items()}

    def fill(self, index: int, rows: Tensor, values: Tensor) -> None:
        """Give ascending rows of a shard on disk other weights than the initial ones, [n, columns]; `reload` follows."""
        group, first = self._group_and_row[index]
        store = self._groups[group].disk_store
        assert store is not None, "it is on disk"
        store.fill(first + rows, values)

    def disk_bytes(self) -> tuple[int, int]:
        """Return the bytes that the files take on the disk, and what all rows would take."""
        stores = (group.disk_store for group in self._groups)
        sizes = [store.num_bytes() for store in stores if store is not None]
        return sum(stored for stored, _ in sizes), sum(full for _, full in sizes)

    def arena(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return the arena in which a shard's rows are trained, weight and states by name, and the slot of each row, -1 for none.

        Slots are int32 [rows of the shard], a view. All tables of one width and dtype share the arena.
        """
        group, first = self._group_and_row[index]
        slots = self._groups[group].map.slot_of_row[first : first + self._shards[index].rows]
        return dict(self._groups[group].store.arena), slots

    def local_table(self, index: int, table: LocalTable) -> LocalTable:
        """Return a table with all its rows as one with the arena as its memory; its ids are slots."""
        return self.joined_table([index], table, self._shards[index].first_row)

    def joined_table(
        self, indices: Sequence[int], table: LocalTable, first_row: int = 0
    ) -> LocalTable:
        """Return shards of one width and memory, one behind the other, as a table whose rows count on from `first_row`."""
        group, first = self._group_and_row[indices[0]]
        arena = self._groups[group].store.arena
        num_rows = 0
        for index in indices:
            assert self._group_and_row[index] == (group, first + num_rows), (
                "shards of one table adjoin"
            )
            num_rows += self._shards[index].rows
        slots = SlotRows(
            self._groups[group].map.row_of_slot, group, first_row, num_rows, first - first_row
        )
        return LocalTable(
            table.lookups,
            arena[WEIGHT],
            {name: state for name, state in arena.items() if name != WEIGHT},
            table.first_column,
            table.rounding_key,
            None if table.first_row is None else 0,
            slots,
        )

    def announce(self, ids: Tensor, groups: Sequence[TierIds]) -> Need | None:
        """Return the rows on disk that a batch needs, before it is mapped; None without tables on disk."""
        if self.read_ahead is None:
            return None
        rows = {}
        for of_group in groups:
            if self._groups[of_group.group].disk_store is not None:
                numbers = ids.index_select(0, of_group.positions)
                is_here = (numbers >= of_group.first) & (numbers < of_group.end)
                needed = torch.unique((numbers + of_group.offset)[is_here])
                rows[of_group.group] = needed.long().cpu().numpy()
        return self.read_ahead.announce(rows)

    def map(self, ids: Tensor, groups: Sequence[TierIds], need: Need | None = None) -> Hold:
        """Turn ids into slots in place, on the current stream, and fetch the rows that are missing.

        On a GPU the host waits for nothing. Whether all rows have slots is known to `Hold.check`; they come on another stream,
        for which `Hold.arrive` waits.

        `ids` at the positions of `groups` become slots. With tables on disk and without `need`, the result of `announce`, their
        rows are read now. Raises RankError: a batch with ragged features needs more rows than there is room for.
        """
        started = time.perf_counter()
        # The latest pass may still run, beside which this batch is mapped; those before it have ended, or are about to.
        ended = self._live.take_ended(all_but=1)
        self._note_trained(*ended)
        hold = self._live.begin()
        if self.read_ahead is not None:
            need = need or self.announce(ids, groups)
            assert need is not None, "there are tables on disk"
            self.read_ahead.ready(need)
            self._needs[hold.pin] = need
        if self._counted is not None:
            self._map_on_device(ids, groups, hold, ended)
        else:
            # In plain torch.
            self._release(*ended)
            for of_group in groups:
                group = self._groups[of_group.group]
                moves, missing, num_ids = group.map.map(ids, of_group, hold.pin)
                fetched = returned = 0
                if moves is not None:
                    group.store.write_back(moves.returned_rows, moves.returned_slots)
                    group.store.fetch(moves.fetched_rows, moves.fetched_slots)
                    fetched, returned = len(moves.fetched_rows), len(moves.returned_rows)
                self._count_moves(of_group, fetched, returned, missing, num_ids)
        self._count(ms=(time.perf_counter() - started) * 1e3)
        return hold

    def _map_on_device(
        self, ids: Tensor, groups: Sequence[TierIds], hold: Hold, ended: tuple[int, int]
    ) -> None:
        """Queue the mapping, the copy of what it counts, and behind it the copies of rows."""
        assert self._counted is not None, "on a GPU"
        turn = self._exchanges.next_turn()
        for group in self._groups:
            assert group.kernels is not None, "on a GPU"
            group.kernels.release(*ended, turn)
        queued = []
        for of_group in groups:
            group = self._groups[of_group.group]
            assert group.kernels is not None, "on a GPU"
            queued.append((group.store, group.kernels.map(ids, of_group, hold.pin, turn)))
        counted = HostCopy(self._counted[turn])
        with self._exchanges.behind_mapping():
            for store, moves in queued:
                store.exchange(moves)

        def check() -> None:
            counts = counted.read().tolist()
            for of_group in groups:
                fetched, returned, missing, lacking, num_ids, *_ = counts[of_group.group]
                if lacking:
                    raise lacks_slots(lacking)
                self._count_moves(of_group, fetched, returned, missing, num_ids)

        def arrive() -> None:
            if self._exchanges.stream is not None:
                self.wait_for(self._exchanges.stream)

        hold.expect(check, arrive)

    def _count_moves(
        self, of_group: TierIds, fetched: int, returned: int, missing: int, num_ids: int
    ) -> None:
        row_bytes = self._groups[of_group.group].store.row_bytes
        self._count(ids=num_ids, missing=missing, rows_in=fetched, rows_out=returned)
        self._count(bytes_in=row_bytes * fetched, bytes_out=row_bytes * returned)

    def _count(self, **traffic: float) -> None:
        if self._is_training:
            for name, value in traffic.items():
                self._counts[name] += value

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Let the current stream, which trains, wait for the one on which batches are mapped, or rows move."""
        if self._waits is not None and self._is_training:
            self._waits.wait_for(stream)
        else:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def train(self, mode: bool) -> None:
        """Switch between training, whose traffic is counted, and evaluation; all passes must be queued."""
        self._is_training = mode
        # Beside the training batch that waits, there is room for two of an evaluation.
        self._release_all()

    def write_back(self) -> None:
        """Make host memory, or the files, hold the current rows; all passes must be queued, and nobody reads the files."""
        self._release_all()
        if self.read_ahead is not None:
            self.read_ahead.drain()
        for group in self._groups:
            changed = group.map.changed()
            if changed is not None:
                group.store.save(*changed)
            elif group.disk_store is not None:
                group.disk_store.host_rows.flush()
        self._synchronize()

    def reload(self) -> None:
        """Copy the rows of the arena from host memory, which has changed."""
        self._synchronize()
        if self.read_ahead is not None:
            self.read_ahead.drain()
        for group in self._groups:
            group.store.load(*group.map.resident())
        self._synchronize()

    def close(self) -> None:
        """Remove the files of tables on disk; nothing is trained or saved afterwards."""
        if self._directory is not None:
            self._directory.close()

    def take_counts(self) -> dict[str, float]:
        """Return the `TRAFFIC` of this rank since the last call, without that of evaluations."""
        counts, self._counts = self._counts, dict.fromkeys(TRAFFIC, 0.0)
        # On a CPU nothing runs beside the step.
        counts["wait_ms"] = counts["ms"] if self._waits is None else self._waits.take_ms()
        if self.read_ahead is not None:
            counts["disk_wait_ms"], self.read_ahead.wait_ms = self.read_ahead.wait_ms, 0.0
        for group in self._groups:
            if group.disk_store is not None:
                read, written = group.disk_store.host_rows.take_counts()
                counts["disk_rows_in"] += read
                counts["disk_rows_out"] += written
                counts["disk_bytes_in"] += read * group.store.row_bytes
                counts["disk_bytes_out"] += written * group.store.row_bytes
        return counts

    def _note_trained(self, released: int, trained: int) -> None:
        """Note that the rows of some batches have changed, before they may leave the device."""
        for pin in [pin for pin in self._needs if pin & released]:
            need = self._needs.pop(pin)
            if pin & trained and self.read_ahead is not None:
                self.read_ahead.change(need)

    def _release(self, released: int, trained: int) -> None:
        """Let the rows of some batches leave; see `SlotMap.release`."""
        if released:
            for group in self._groups:
                group.map.release(released, trained)

    def _release_all(self) -> None:
        self._synchronize()
        ended = self._live.take_ended(all_but=0)
        self._note_trained(*ended)
        self._release(*ended)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def maps_by_kernels(device: torch.device) -> bool:
    """Return whether ids are mapped by Triton kernels, and not in plain torch."""
    return device.type == "cuda"


def _group_of(
    members: Sequence[TieredShard],
    states: Sequence[StateField],
    device: torch.device,
    directory: TierDirectory | None,
    share: float,
) -> _Group:
    """Return a group of tables; host memory has room for the `share` of the rows of tables on disk."""
    slots = [shard.slots for shard in members]
    needed = sum(min(shard.live_rows, shard.rows) for shard in members)
    assert needed <= sum(slots), "the planner refuses smaller arenas"
    rows = [shard.rows for shard in members]
    slot_map = SlotMap(rows, slots, max(needed, ring_slots(sum(slots))), device)
    kinds = kinds_of(members[0].width, members[0].dtype, states)
    if not members[0].is_on_disk:
        return _Group(RowStore(sum(rows), sum(slots), kinds, device), slot_map)
    assert directory is not None, "tables on disk have settings"
    name = f"{members[0].width}_{str(members[0].dtype).removeprefix('torch.')}"
    shards = [
        ShardOfFile(shard.rows, shard.initial, shard.first_row, shard.first_column)
        for shard in members
        if shard.initial is not None
    ]
    file = TableFile(directory, name, shards, kinds)
    kept = slot_map.kept_rows().numpy()
    least = min(sum(slots) - len(kept) + needed, sum(rows) - len(kept))
    buffer_rows = int(sum(rows) * share)
    assert buffer_rows >= least, "the planner refuses less host memory"
    buffer_rows = max(min(buffer_rows, sum(rows) - len(kept)), 1)
    return _Group(DiskStore(file, buffer_rows, sum(slots), kinds, kept, device), slot_map)


def ring_slots(slots: int) -> int:
    """Return the slots of an arena whose rows change: a quarter; the others keep the first, most frequent rows of tables."""
    return -(-slots // 4)
