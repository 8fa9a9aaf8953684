"""Rows in a table file, some of them in host memory, and an arena of slots on the device that holds some of those."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nn.tiers.host_rows import ABSENT, HostRows
from nn.tiers.row_items import row_items
from nn.tiers.row_store import Kinds, RowStore
from nn.tiers.slot_map import DeviceMoves
from nn.tiers.table_file import TableFile

BLOCK_ROWS = 2**16
"""Rows that are copied at once between the arena and the file."""


class DiskStore(RowStore):
    """Rows of a table file with buffer rows in host memory for all on the device but `kept` ones, ascending, which it keeps."""

    def __init__(
        self,
        file: TableFile,
        num_buffer_rows: int,
        num_slots: int,
        kinds: Kinds,
        kept: np.ndarray,
        device: torch.device,
    ) -> None:
        super().__init__(num_buffer_rows, num_slots, kinds, device)
        num_rows = len(next(iter(file.rows.values())))
        self._file = file
        self._is_initial, self._is_loaded = True, False
        self.host = file.rows
        self.host_rows = HostRows(file, num_rows, kept, self._memory)
        # What the device knows of the buffer rows; those of other rows may be out of date.
        self._buffer_row = torch.from_numpy(self.host_rows.buffer_row)
        self._moved: list[np.ndarray] = []
        if device.type == "cuda":
            self._buffer_row = self._buffer_row.to(device)

    def fill(self, rows: Tensor, values: Tensor) -> None:
        """Give rows other weights than the initial ones; see `TableFile.fill`."""
        self._is_initial = False
        self._file.fill(rows.numpy(), values)

    def num_bytes(self) -> tuple[int, int]:
        return self._file.num_bytes()

    def read(self, rows: np.ndarray, staying: Sequence[np.ndarray]) -> bool:
        is_read = self.host_rows.read(rows, staying)
        if is_read and self._device.type == "cuda":
            self._moved.append(rows)
        return is_read

    def tell_device(self) -> None:
        """Let the device know the buffer rows of the rows that were read, on the current stream."""
        moved, self._moved = self._moved, []
        for rows in moved:
            buffer_rows = torch.from_numpy(self.host_rows.buffer_row[rows]).to(self._device)
            self._buffer_row.index_copy_(0, torch.from_numpy(rows).to(self._device), buffer_rows)

    def _buffer_rows_of(self, rows: Tensor) -> Tensor:
        return self._buffer_row.index_select(0, rows).long()

    def _with_buffer_rows(self, moves: DeviceMoves) -> DeviceMoves:
        # Buffers have room for more rows than move, and hold any numbers there.
        last = len(self._buffer_row) - 1
        buffer_rows = self._buffer_row.index_select(0, moves.rows.clamp(0, last))
        returned = self._buffer_row.index_select(0, moves.returned.clamp(0, last))
        return moves._replace(rows=buffer_rows, returned=returned.where(moves.returned >= 0, -1))

    def save(self, rows: Tensor, slots: Tensor) -> None:
        """Make the file hold the current rows; the distinct `rows`, int64 [n], have changed in `slots` of the device."""
        is_in_memory = torch.from_numpy(self.host_rows.buffer_row[rows.cpu().numpy()] >= 0)
        chosen = is_in_memory.to(rows.device)
        self.write_back(rows[chosen], slots[chosen])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.host_rows.flush()
        for some_rows, some_slots in _blocks(rows[~chosen], slots[~chosen]):
            parts = [part.index_select(0, some_slots).cpu() for part in self.arena.values()]
            values = [row_items(part) for part in parts]
            self._file.store(some_rows, values, np.arange(len(some_rows)))

    def load(self, rows: Tensor, slots: Tensor) -> None:
        """Fill the arena from the file, which has changed; `rows`, int64 [n], are those of the arena, in `slots`.

        The first call finds a file that nothing but `fill` has written to.
        """
        is_initial, self._is_initial = self._is_initial, False
        if self._is_loaded:
            self._file.note_other_writes()
        self._is_loaded = True
        self.host_rows.forget()
        numbers = rows.cpu().numpy()
        are_absent = self.host_rows.buffer_row[numbers] == ABSENT
        resident = np.sort(numbers[are_absent])
        is_read = self.read(resident, [])
        assert is_read, "the planner refuses less host memory"
        self.tell_device()
        chosen = torch.from_numpy(are_absent).to(rows.device)
        self.fetch(rows[chosen], slots[chosen])
        for some_rows, some_slots in _blocks(rows[~chosen], slots[~chosen]):
            if is_initial:
                parts = self._file.initial(some_rows, self._device)
            else:
                parts = [
                    torch.empty_like(part[: len(some_rows)], device="cpu")
                    for part in self.arena.values()
                ]
                self._file.read(some_rows, [*map(row_items, parts)], np.arange(len(some_rows)))
            for part, values in zip(self.arena.values(), parts, strict=True):
                part.index_copy_(0, some_slots, values.to(self._device))


def _blocks(rows: Tensor, slots: Tensor) -> "list[tuple[np.ndarray, Tensor]]":
    ordered, order = rows.sort()
    pairs = zip(ordered.split(BLOCK_ROWS), slots[order].split(BLOCK_ROWS), strict=True)
    return [(some.cpu().numpy(), of_rows) for some, of_rows in pairs]
