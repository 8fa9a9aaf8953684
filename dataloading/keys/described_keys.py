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
    # Features of one hotness have the same runs.
    runs_of: dict[int, _Runs] = {}
    for table, features in columns.items():
        for feature in features:
            key = id(feature.keys.runs)
            if key not in runs_of:
                runs_of[key] = _Runs.of(feature.keys.runs)
                held += [feature.keys.runs, runs_of[key].array]
            runs = runs_of[key]
            keys = np.ascontiguousarray(feature.keys.column, np.int64)
            assert runs.least >= 0, "runs lie in the column"
            assert runs.most <= len(keys), "runs lie in the column"
            held += [keys, feature.rows]
            start = [table, address_of(keys), len(keys), address_of(runs.array), len(runs.array)]
            numbers.append([*start, *_rows(feature.rows), feature.first, sum(counts)])
            counts.append(runs.count)
    array = np.array(numbers, np.int64).reshape(-1, len(Column))
    return DescribedKeys(columns, array, counts, held)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of keys in a column, of one or several features."""

    array: np.ndarray  # int64 [K, 2]
    count: int  # keys
    least: int  # first position
    most: int  # end of the last one

    @classmethod
    def of(cls, runs: np.ndarray) -> "_Runs":
        array = np.ascontiguousarray(runs, np.int64)
        count = int((array[:, 1] - array[:, 0]).sum())
        return cls(array, count, int(array.min(initial=0)), int(array.max(initial=0)))


def _rows(rows: np.ndarray) -> list[int]:
    """Return addresses and lengths of int32 and of int64 rows, of which one are these and the other none."""
    assert rows.dtype in (np.int32, np.int64), rows.dtype
    own = [address_of(rows), len(rows)]
    return [*own, 0, 0] if rows.itemsize == 4 else [0, 0, *own]
