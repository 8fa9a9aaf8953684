"""Lookup of embeddings in mapped tables: only the rows that are looked up are read, so tables may exceed memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from serving.manifest import Manifest, Table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
GATHERED = 1 << 22
"""Numbers of rows that are gathered at a time where a table is not float32."""

# B: rows, T: columns of all embeddings


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids of a feature for B rows.

    Attributes:
        values: int64, row after row.
        lengths: ids per row, int64 [B]; None for fixed hotness.
    """

    values: Tensor
    lengths: Tensor | None = None


class Lookup(Protocol):
    """Lookup of embeddings on some device."""

    def __call__(self, ids: Mapping[str, Ids], num_rows: int) -> Tensor:
        """Return the embeddings of B rows, float32 [B, T]; the ids are valid."""


class MappedTables:
    """Tables in mapped files, looked up on the CPU.

    Args:
        directory: of the model.
        manifest: of the model.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._hotness = {feature.name: feature.hotness for feature in manifest.categorical}
        self._tables = [MappedTable(directory, table, manifest.dtype) for table in manifest.tables]

    def __call__(self, ids: Mapping[str, Ids], num_rows: int) -> Tensor:
        """Return the embeddings: table after table, feature after feature."""
        vectors = []
        for table in self._tables:
            for name in table.declared.features:
                hotness = self._hotness[name]
                if hotness == 1 or table.declared.pooling == "none":
                    vectors.append(table.rows(ids[name].values).view(num_rows, -1))
                else:
                    vectors.append(table.pooled(_with_lengths(ids[name], hotness, num_rows)))
        return torch.cat(vectors, dim=1)


class MappedTable:
    """One table in a mapped file.

    Args:
        directory: of the model.
        declared: the table.
        dtype: of its file.

    Attributes:
        declared: the table.
    """

    def __init__(self, directory: Path, declared: Table, dtype: str) -> None:
        self.declared = declared
        size = declared.rows * declared.columns
        path = str(directory / declared.file)
        self._weight = torch.from_file(path, size=size, dtype=DTYPES[dtype])
        self._weight = self._weight.view(declared.rows, declared.columns)
        self._scale = None
        if dtype == "int8":
            path = str(directory / declared.scale_file)
            self._scale = torch.from_file(path, size=declared.rows, dtype=torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids [n], float32 [n, D]."""
        found = self._weight.index_select(0, ids).float()
        return found if self._scale is None else found * self._scale[ids][:, None]

    def pooled(self, ids: Ids) -> Tensor:
        """Return the sum or mean of the rows of each sample's ids, float32 [B, D]; 0 where a sample has none."""
        assert ids.lengths is not None
        if self._weight.dtype == torch.float32:
            offsets = ids.lengths.cumsum(0) - ids.lengths
            return embedding_bag(ids.values, self._weight, offsets, mode=self.declared.pooling)
        sums = torch.zeros(len(ids.lengths), self.declared.columns)
        samples = torch.repeat_interleave(ids.lengths)
        for places in torch.arange(len(samples)).split(max(1, GATHERED // self.declared.columns)):
            sums.index_add_(0, samples[places], self.rows(ids.values[places]))
        if self.declared.pooling == "mean":
            sums /= ids.lengths.clamp(min=1)[:, None]
        return sums


def _with_lengths(ids: Ids, hotness: int | None, num_rows: int) -> Ids:
    if ids.lengths is not None:
        return ids
    assert hotness is not None
    return Ids(ids.values, torch.full((num_rows,), hotness))
