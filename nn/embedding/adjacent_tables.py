"""Adjacent tables in memory, joined into one: FBGEMM stores its tables so, and so does `GradientBucket` its vector.

Plain torch then makes one call for all of them. One call per table would take longer to launch than to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nn.embedding.local_tables import LocalTable


@dataclass(frozen=True, slots=True)
class AdjacentTables:
    """Consecutive local tables of one width and hotness, whose rows are adjacent in memory.

    Attributes:
        first: position of the first table in its group.
        end: position after the last table.
        joined: one table with the rows of all of them, and the feature of the first.
    """

    first: int
    end: int
    joined: LocalTable

    @property
    def num_tables(self) -> int:
        """Return the number of tables."""
        return self.end - self.first


def adjacent_tables(tables: Sequence[LocalTable]) -> list[AdjacentTables]:
    """Join the tables of a group into as few `AdjacentTables` as their memory allows, in the order of the group."""
    starts = [
        position
        for position, table in enumerate(tables)
        if position == 0 or not _follows(tables[position - 1], table)
    ]
    return [
        AdjacentTables(first, end, _joined(tables[first:end]))
        for first, end in zip(starts, [*starts[1:], len(tables)], strict=False)
    ]


def _follows(before: LocalTable, table: LocalTable) -> bool:
    """Return whether a table can be joined to the one before it; 16-bit tables cannot, since each has its own rounding."""
    return (
        table.weight.dtype is torch.float32
        and table.hotness == before.hotness
        and table.weight.shape[1] == before.weight.shape[1]
        and _are_adjacent(before.weight, table.weight)
        and all(_are_adjacent(before.state[name], table.state[name]) for name in table.state)
    )


def _are_adjacent(before: Tensor, after: Tensor) -> bool:
    is_one_memory = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    return is_one_memory and before.storage_offset() + before.numel() == after.storage_offset()


def _joined(tables: Sequence[LocalTable]) -> LocalTable:
    rows = sum(len(table.weight) for table in tables)

    def with_all_rows(tensor: Tensor) -> Tensor:
        return tensor.as_strided((rows, *tensor.shape[1:]), tensor.stride())

    first = tables[0]
    state = {name: with_all_rows(tensor) for name, tensor in first.state.items()}
    return replace(first, weight=with_all_rows(first.weight), state=state)
