"""Lookup of embeddings in mapped tables: only the rows that are looked up are read, so tables may exceed memory."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import SCALED, Manifest, Table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
NUMPY_DTYPES = {torch.float32: "<f4", torch.bfloat16: "<i2", torch.int8: "i1", torch.uint8: "u1"}
GATHERED = 1 << 22
"""Numbers of rows that are gathered at a time where a table is not float32."""

# B: rows, T: columns of all embeddings


Lookup = Callable[[Rows], list[Tensor]]
"""Returns what the dense component takes of B rows beside the numericals: first the embeddings, float32 [B, T]."""


class MappedTables:
    """Tables in mapped files, looked up on the CPU.

    `instead`: tables to look up in place of the files, by name.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        instead: "Mapping[str, MappedTable] | None" = None,
    ) -> None:
        id_columns = manifest.id_slices()
        self._ragged = manifest.handed_out_ragged
        handed_out = {declared.name for declared, _ in manifest.handed_out}
        self._handed_out: list[tuple[MappedTable, str, slice]] = []
        self._lookups: list[tuple[MappedTable, str, slice]] = []
        self._widths: list[int] = []
        tables = instead or {
            table.name: MappedTable(directory, table, manifest.dtype) for table in manifest.tables
        }
        for declared in manifest.tables:
            table = tables[declared.name]
            for name in declared.features:
                # A ragged feature has no columns among the ids.
                own_ids = id_columns.get(name, slice(0, 0))
                if declared.name in handed_out:
                    self._handed_out.append((table, name, own_ids))
                    continue
                self._lookups.append((table, name, own_ids))
                count = own_ids.stop - own_ids.start if declared.pooling == "none" else 1
                self._widths.append(declared.columns * count)

    def __call__(self, rows: Rows) -> list[Tensor]:
        """Return the embeddings, table after table, feature after feature; and what `FromRows` takes behind them."""
        found = torch.empty(len(rows), sum(self._widths))
        # Few calls of torch: each is a moment in which the event loop may take the interpreter away.
        ids = rows.ids.t().contiguous()
        columns = ids.unbind()
        targets = found.split(self._widths, dim=1)
        for (table, name, own_ids), target in zip(self._lookups, targets, strict=True):
            if name in rows.ragged:
                target.copy_(table.pooled(rows.ragged[name]))
            elif own_ids.stop - own_ids.start == 1:
                table.rows(columns[own_ids.start], out=target)
            elif table.declared.pooling == "none":
                target.copy_(table.rows(ids[own_ids].t().reshape(-1)).view(len(rows), -1))
            else:
                lengths = torch.full((len(rows),), own_ids.stop - own_ids.start)
                target.copy_(table.pooled(RaggedIds(ids[own_ids].t().reshape(-1), lengths)))
        looked_up = [
            table.rows(rows.ids_of(name, own_ids)) for table, name, own_ids in self._handed_out
        ]
        lengths_of = [rows.ragged[name].lengths for name in self._ragged]
        return [found, *looked_up, *lengths_of, *(each.values for each in rows.numbers.values())]


class MappedTable:
    """One table in a mapped file.

    `scale`: by which each row is multiplied, float32 [rows]; None unless rows are integers.
    """

    def __init__(self, directory: Path, declared: Table, dtype: str) -> None:
        self.declared, self.dtype = declared, DTYPES[dtype]
        shape = (declared.rows, declared.row_bytes(dtype) // self.dtype.itemsize)
        self._weight = _mapped(directory / declared.file, self.dtype, shape)
        self.scale = None
        if dtype in SCALED:
            path = directory / declared.scale_file
            self.scale = _mapped(path, torch.float32, (declared.rows,))

    def read(self, first: int, target: Tensor) -> None:
        """Copy the rows from `first` on to `target`, [rows, D] on any device."""
        target.copy_(self._weight[first : first + len(target)])

    def rows(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the rows of ids [n], float32 [n, D], written to `out` if it is given."""
        if self.dtype == torch.float32:
            return torch.index_select(self._weight, 0, ids, out=out)
        found = self._weight.index_select(0, ids)
        if self.scale is not None:
            return dequantized(found, self.scale.index_select(0, ids), self.declared.columns, out)
        return found.float() if out is None else out.copy_(found)

    def pooled(self, ids: RaggedIds) -> Tensor:
        """Return the sum or mean of the rows of each sample's ids, float32 [B, D]; 0 where a sample has none."""
        if self._weight.dtype == torch.float32:
            offsets = (ids.lengths.cumsum(0) - ids.lengths).to(ids.values.dtype)
            return embedding_bag(ids.values, self._weight, offsets, mode=self.declared.pooling)
        sums = torch.zeros(len(ids.lengths), self.declared.columns)
        samples = torch.repeat_interleave(ids.lengths)
        for some in torch.arange(len(samples)).split(max(1, GATHERED // self.declared.columns)):
            sums.index_add_(0, samples[some], self.rows(ids.values[some]))
        if self.declared.pooling == "mean":
            sums /= ids.lengths.clamp(min=1)[:, None]
        return sums


def dequantized(
    integers: Tensor, scales: Tensor, columns: int, out: Tensor | None = None
) -> Tensor:
    """Return rows [R, D] of integers times their scales [R]: int8, or two int4 a byte, 8 more each, the first in the low bits."""
    if integers.dtype == torch.uint8:
        both = torch.stack([integers & 15, integers >> 4], dim=2).flatten(1)
        integers = both[:, :columns].to(torch.int8) - 8
    return torch.mul(integers, scales[:, None], out=out)


def _mapped(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of a file, which is mapped for reading.

    torch.from_file maps it for writing: the system then counts it as memory, and refuses what exceeds that. Raises OSError:
    the file cannot be opened. Raises ValueError: it is too short.
    """
    numbers = np.memmap(path, NUMPY_DTYPES[dtype], "r", shape=shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(numbers).view(dtype)
