"""Tables without the rounding of their files, of the rows that a proof looks up: the measure of an applied version."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from serving.inference.model_rows import RaggedIds, Rows
from serving.inference.tables import MappedTable
from serving.manifest import Manifest, Table


class UnroundedTable(MappedTable):
    """The rows of a table that some samples look up: as a base has them, until deltas bring others in float32.

    `numbers`: of the rows, ascending, int64; at least one.
    """

    def __init__(self, directory: Path, declared: Table, dtype: str, numbers: Tensor) -> None:
        super().__init__(directory, declared, dtype)
        self._numbers = numbers
        self._weight, self.dtype, self.scale = super().rows(numbers), torch.float32, None

    def update(self, ids: np.ndarray, values: np.ndarray) -> None:
        """Replace rows: numbers int64 [n], values float32 [n, D]."""
        numbers = self._numbers.numpy()
        positions = np.minimum(np.searchsorted(numbers, ids), len(numbers) - 1)
        is_kept = numbers[positions] == ids
        self._weight[torch.from_numpy(positions[is_kept])] = torch.from_numpy(values[is_kept])

    def rows(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        return super().rows(torch.searchsorted(self._numbers, ids), out)

    def pooled(self, ids: RaggedIds) -> Tensor:
        return super().pooled(RaggedIds(torch.searchsorted(self._numbers, ids.values), ids.lengths))


def unrounded_tables(directory: Path, manifest: Manifest, rows: Rows) -> dict[str, UnroundedTable]:
    """Return the tables of a model by name, with the rows that `rows` look up."""
    columns, tables = manifest.id_slices(), {}
    for table in manifest.tables:
        ids = [rows.ids_of(name, columns.get(name, slice(0))) for name in table.features]
        numbers = torch.cat([torch.zeros(1, dtype=torch.int64), *ids]).unique()
        tables[table.name] = UnroundedTable(directory, table, manifest.dtype, numbers)
    return tables
