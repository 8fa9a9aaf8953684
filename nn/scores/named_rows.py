"""Columns that name the rows beside their scores: row numbers, or columns that preprocessing has kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from configs.messages import printable, shortened, shown
from dataloading.dataset.kept_columns import KeptColumns
from dataloading.dataset.parquet_writer import as_arrow

ROW = "row"
"""Column of row numbers, from 0."""
ROW_FIELD = pa.field(ROW, pa.int64())


class NamedRows(Protocol):
    """Columns that name the rows; `read` returns those of the rows [start, stop), and follows their order."""

    fields: Sequence[pa.Field]

    def read(self, start: int, stop: int) -> list[pa.Array | pa.ChunkedArray]: ...


class RowNumbers:
    fields: Sequence[pa.Field] = (ROW_FIELD,)

    def read(self, start: int, stop: int) -> list[pa.Array | pa.ChunkedArray]:
        return [as_arrow(np.arange(start, stop))]


class KeptRows:
    """Columns that a dataset keeps of its raw data.

    `num_rows`: rows of the split, with which those of the columns are compared; None: not. `first`: row of the split that is
    the first one. Raises ValueError: the dataset does not keep one of them.
    """

    def __init__(
        self, root: Path, split: str, num_rows: int | None, names: Sequence[str], first: int = 0
    ) -> None:
        self._kept = KeptColumns(root, split, num_rows)
        self._first = first
        self._names = list(names)
        check_names(names, self._kept.names, f"{root}, split '{split}',")
        self.fields: Sequence[pa.Field] = tuple(self._kept.read(0, 0, names).schema)

    def read(self, start: int, stop: int) -> list[pa.Array | pa.ChunkedArray]:
        return self._kept.read(self._first + start, self._first + stop, self._names).columns


def check_names(names: Sequence[str], kept: Sequence[str], where: str) -> None:
    """Raise `ValueError` unless all `names` are among the columns that `where` keeps."""
    for name in names:
        if name not in kept:
            listed = shortened(", ".join(map(printable, kept)), 300) or "none"
            raise ValueError(
                f"predict.columns: {where} keeps no column {shown(name)}, only {listed}; name the column in table.keep when "
                "preprocessing, or leave predict.columns out for row numbers"
            )
