"""All rows of some tables in host memory, and an arena of slots on the device that holds some of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from configs.messages import first_line
from nn.embedding.optimizer import StateField
from nn.ops.pinned_memory import pinned_memory
from nn.tiers.row_items import row_items
from nn.tiers.slot_map import DeviceMoves

WEIGHT = "weight"


Kinds = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Name -> columns and dtype of the parts of a row: its weight and its optimizer state."""


def kinds_of(width: int, dtype: torch.dtype, states: Sequence[StateField]) -> Kinds:
    of_states = {field.name: ([] if field.per_row else [width], torch.float32) for field in states}
    return {WEIGHT: ([width], dtype), **of_states}


def bytes_of_row(kinds: Kinds) -> int:
    return sum(torch.Size(columns).numel() * kind.itemsize for columns, kind in kinds.values())


class RowStore:
    """Rows with their optimizer state in host memory, and an arena with the same parts on the device.

    Weight and states have memories of their own, in the host too: checkpoints write them from there without a copy.

    For a GPU the host memory is pinned, and the GPU copies rows by itself. `host` has weight and states by name, [num_rows,
    width], or [num_rows] of a state per row; `arena` the same of the slots. A row with its state has `row_bytes`. Raises
    ValueError: the host has too little memory, or may not pin as much.
    """

    def __init__(self, num_rows: int, num_slots: int, kinds: Kinds, device: torch.device) -> None:
        self._device = device
        self.host = {
            name: _host_memory([num_rows, *columns], kind, device)
            for name, (columns, kind) in kinds.items()
        }
        self._memory = self.host  # that exchanges rows with the arena
        self.arena = {
            name: torch.empty(num_slots, *columns, dtype=kind, device=device)
            for name, (columns, kind) in kinds.items()
        }
        self.row_bytes = bytes_of_row(kinds)

    def fetch(self, rows: Tensor, slots: Tensor) -> None:
        """Copy rows from host memory to slots of the arena; both are distinct, int64 [n]."""
        buffer_rows = self._buffer_rows_of(rows)
        for name, memory in self._memory.items():
            self._copy(memory, buffer_rows, self.arena[name], slots)

    def write_back(self, rows: Tensor, slots: Tensor) -> None:
        """Copy slots of the arena to rows in host memory; see `fetch`."""
        buffer_rows = self._buffer_rows_of(rows)
        for name, memory in self._memory.items():
            self._copy(self.arena[name], slots, memory, buffer_rows)

    def exchange(self, moves: DeviceMoves) -> None:
        """Write rows back and fetch others into their slots; the host does not wait. Of a GPU only."""
        # Triton comes with torch's CUDA builds only.
        from nn.tiers.row_copy import exchange_rows

        host_moves = self._with_buffer_rows(moves)
        for name, memory in self._memory.items():
            arena = self.arena[name]
            exchange_rows(memory.view(len(memory), -1), arena.view(len(arena), -1), host_moves)

    def _buffer_rows_of(self, rows: Tensor) -> Tensor:
        """Return where rows are in the memory of the host, int64 [n]."""
        return rows

    def _with_buffer_rows(self, moves: DeviceMoves) -> DeviceMoves:
        return moves

    def save(self, rows: Tensor, slots: Tensor) -> None:
        """Make `host` hold the rows that have changed on the device; see `fetch`."""
        self.write_back(rows, slots)

    def load(self, rows: Tensor, slots: Tensor) -> None:
        """Fill the arena from `host`, which has changed; see `fetch`."""
        self.fetch(rows, slots)

    def _copy(
        self, source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor
    ) -> None:
        if self._device.type != "cuda":
            items = row_items(source).take(source_rows.numpy())
            row_items(target)[target_rows.numpy()] = items
            return
        # Triton comes with torch's CUDA builds only.
        from nn.tiers.row_copy import copy_rows

        num_rows = len(source), len(target)
        copy_rows(
            source.view(num_rows[0], -1), source_rows, target.view(num_rows[1], -1), target_rows
        )


def _host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        if device.type == "cuda":
            return pinned_memory(shape, dtype)
        return torch.zeros(*shape, dtype=dtype)
    except (OSError, RuntimeError) as error:
        size = torch.Size(shape).numel() * dtype.itemsize / 2**30
        how = "pinned" if device.type == "cuda" else "allocated"
        raise ValueError(
            f"{size:,.1f} GiB of host memory for tables with tier: host cannot be {how} ({first_line(error)}); raise "
            "the limit of locked memory (`ulimit -l`) or that of the container, or keep fewer tables in host memory"
        ) from None
