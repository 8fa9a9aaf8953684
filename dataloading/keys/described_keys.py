"""Keys of a batch as kernels see them: the arrays of each feature by their addresses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.kernels.layouts import Column, address_of

Columns = Mapping[int, Sequence[BatchKeys]]
"""Keys of the features of each table, by its index; tables in ascending order."""


@dataclass(frozen=True, slots=True)
class DescribedKeys:
    """Keys of a batch, feature after feature."""

    keys: Columns  # of the features of each table
    columns: np.ndarray  # int64 [columns, Column]
    counts: list[int]  # keys of the columns
    held: list[np.ndarray]  # arrays whose addresses the columns have

    @property
    def count(self) -> int:
        return sum(self.counts)


def described(columns: Columns) -> DescribedKeys:
    """Return the description of the keys of a batch; it holds the arrays that kernels read."""
    held: list[np.ndarray] = []
    numbers: list[list[int]] = []
    counts: list[int] = []
    # Features of one hotness have the same runs, int64 [K, 2]: with the number of their keys, first position, and last end.
    runs_of: dict[int, tuple[np.ndarray, int, int, int]] = {}
    for table, features in columns.items():
        for feature in features:
            key = id(feature.keys.runs)
            if key not in runs_of:
                runs = np.ascontiguousarray(feature.keys.runs, np.int64)
                count = int((runs[:, 1] - runs[:, 0]).sum())
                runs_of[key] = runs, count, int(runs.min(initial=0)), int(runs.max(initial=0))
                held += [feature.keys.runs, runs]
            runs, count, least, most = runs_of[key]
            keys = np.ascontiguousarray(feature.keys.column, np.int64)
            assert least >= 0, "runs lie in the column"
            assert most <= len(keys), "runs lie in the column"
            held += [keys, feature.rows]
            start = [table, address_of(keys), len(keys), address_of(runs), len(runs)]
            numbers.append([*start, *_rows(feature.rows), feature.first, sum(counts)])
            counts.append(count)
    array = np.array(numbers, np.int64).reshape(-1, len(Column))
    return DescribedKeys(columns, array, counts, held)


def _rows(rows: np.ndarray) -> list[int]:
    """Return addresses and lengths of int32 and of int64 rows, of which one are these and the other none."""
    assert rows.dtype in (np.int32, np.int64), rows.dtype
    own = [address_of(rows), len(rows)]
    return [*own, 0, 0] if rows.itemsize == 4 else [0, 0, *own]
