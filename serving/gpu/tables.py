"""Tables of a served model on a GPU: all rows there, or the most frequent ones with the others in pinned host memory.

Preprocessing numbers values by their frequency, so the first rows of a table are the hot ones at first; `serving.gpu.row_cache`
exchanges them. Every table gets the same number of hot rows, or all that it has: small tables are complete on the GPU, and a
row of a large one is as rare as a row of the same number in another.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nn.ops.pinned_memory import pinned_memory
from serving.inference.tables import MappedTable
from serving.manifest import Table

BLOCK_BYTES = 1 << 26
"""Of rows that are copied at a time."""
PLACE_BYTES = 4
"""Of a row's place."""


@dataclass(frozen=True, slots=True)
class DeviceTable:
    declared: Table
    hot: Tensor  # rows at the first places, on the device [C, D]; at least one
    cold: Tensor | None  # the others, pinned [rows - C, D]; None if there are none
    scale: Tensor | None  # of all places, float32 on the device [rows]; None unless rows are int8
    places: Tensor | None  # of each row, int32 on the device [rows]; None if all rows are there


def hot_rows(tables: Sequence[Table], dtype: str, budget: int) -> list[int]:
    """Return the rows of each table that are kept on the GPU.

    `budget`: bytes of all hot rows, and of what is complete on the GPU: scales, and places of tables with other rows. Raises
    ValueError: not even one row of each table fits, or they are int4.
    """
    if dtype == "int4":
        raise ValueError("device=cuda: tables of int4 are served on CPUs; export with dtype=int8")
    rows = [table.rows for table in tables]
    row_bytes = [table.row_bytes(dtype) for table in tables]
    left = budget - (4 * sum(rows) if dtype == "int8" else 0)

    def used(count: int) -> int:
        return sum(
            min(n, count) * size + (PLACE_BYTES * n if n > count else 0)
            for n, size in zip(rows, row_bytes, strict=True)
        )

    if left < used(1):
        raise ValueError(
            f"table_gib: the tables need more than {budget / 2**30:.2f} GiB of the GPU's memory even with one hot row each; "
            "set a larger table_gib, or device=cpu"
        )
    low, high = 1, max(rows)
    while low < high:
        count = (low + high + 1) // 2
        low, high = (count, high) if used(count) <= left else (low, count - 1)
    return [min(n, low) for n in rows]


def to_device(
    stored: Iterable[MappedTable], counts: Sequence[int], device: torch.device
) -> list[DeviceTable]:
    """Copy tables: the first rows to the device, the others to pinned memory.

    `device`: a GPU; or the CPU, on which Triton interprets.
    """
    tables, stored = [], list(stored)
    sizes = [table.declared.rows for table in stored]
    sizes = [n if count < n else 0 for n, count in zip(sizes, counts, strict=True)]
    places_of_all = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    for table, count, own in zip(stored, counts, places_of_all, strict=True):
        shape, dtype = (count, table.declared.columns), table.dtype
        hot = torch.empty(shape, dtype=dtype, device=device)
        _read(table, 0, hot)
        cold = places = None
        if count < table.declared.rows:
            shape = (table.declared.rows - count, table.declared.columns)
            cold = (
                pinned_memory(shape, dtype)
                if device.type == "cuda"
                else torch.empty(shape, dtype=dtype)
            )
            _read(table, count, cold)
            places = torch.arange(len(own), out=own)
        scale = None if table.scale is None else table.scale.to(device, copy=True)
        tables.append(DeviceTable(table.declared, hot, cold, scale, places))
    return tables


def _read(table: MappedTable, first: int, target: Tensor) -> None:
    rows = max(1, BLOCK_BYTES // (target.shape[1] * target.element_size()))
    for block in target.split(rows):
        table.read(first, block)
        first += len(block)


def all_places(tables: Sequence[DeviceTable]) -> Tensor:
    """View the places of all tables that have them, one table's after another's, [P]; empty if none has."""
    own = [table.places for table in tables if table.places is not None]
    if not own:
        return torch.empty(0, dtype=torch.int32, device=tables[0].hot.device)
    return own[0].as_strided((sum(map(len, own)),), (1,))
