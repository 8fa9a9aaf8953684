"""Columns that name the rows beside their scores: row numbers, or columns that preprocessing has kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from configs.messages import printable, shortened, shown
from dataloading.dataset.kept_columns import KeptColumns
from dataloading.dataset.parquet_writer import as_arrow

ROW = "row"
"""Column of row numbers, from 0."""
ROW_FIELD = pa.field(ROW, pa.int64())


@dataclass(frozen=True, slots=True)
class NamedRows:
    """Columns that name the rows; `read` returns those of the rows [start, stop), and follows their order."""

    fields: Sequence[pa.Field]
    read: Callable[[int, int], Sequence[pa.Array | pa.ChunkedArray]]


ROW_NUMBERS = NamedRows((ROW_FIELD,), lambda start, stop: [as_arrow(np.arange(start, stop))])


def kept_rows(
    root: Path, split: str, num_rows: int | None, names: Sequence[str], first: int = 0
) -> NamedRows:
    """Return columns that a dataset keeps of its raw data.

    `num_rows`: rows of the split, with which those of the columns are compared; None: not. `first`: row of the split that is
    the first one. Raises ValueError: the dataset does not keep one of them.
    """
    kept = KeptColumns(root, split, num_rows)
    for name in names:
        if name not in kept.names:
            listed = shortened(", ".join(map(printable, kept.names)), 300) or "none"
            raise ValueError(
                f"predict.columns: {root}, split '{split}', keeps no column {shown(name)}, only {listed}; name the column in "
                "table.keep when preprocessing, or leave predict.columns out for row numbers"
            )
    return NamedRows(
        tuple(kept.read(0, 0, names).schema),
        lambda start, stop: kept.read(first + start, first + stop, names).columns,
    )
