"""Rows of a Parquet dataset directory.

Parquet is read a row group at a time. A split that is small when decoded is decoded once and stays in memory. Of a larger
one, runs of rows are cut out of decoded row groups: a shuffled epoch asks for whole ones (`granule`), and a row group
that two batches share is decoded once, since the last few are kept.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, local

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataloading.binary import LABEL_DTYPE, BinarySource, SplitColumns
from dataloading.columns import Allocate, Columns
from dataloading.feature_spec import SPEC_NAME, CategoricalFeature, FeatureSpec
from dataloading.parquet_files import open_file
from dataloading.split_files import SplitFiles

KEPT_BYTES = 256 << 20
"""Decoded rows that are kept: a whole split if it fits, else the row groups that were read last."""
LEAST_KEPT = 4


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Decoded rows, one array a column.

    Attributes:
        labels: numbers [n], each 0 or 1.
        numerical: numbers [n], one array a feature.
        ids: integers, flat, one array a feature, each inside its table.
        offsets: int [n + 1] of ragged features, None where the hotness is fixed.
    """

    labels: np.ndarray
    numerical: list[np.ndarray]
    ids: list[np.ndarray]
    offsets: list[np.ndarray | None]


class ParquetSource:
    """Reads rows of a dataset directory in Parquet.

    Ids, labels and missing values are checked when a row group is decoded. Safe to call from several threads.
    """

    def __init__(self, spec: FeatureSpec) -> None:
        self.spec = spec
        self._splits = {split: _Split(files.parquet) for split, files in spec.splits.items()}
        largest = max(split.granule for split in self._splits.values())
        ids = sum(feature.mean_hotness for feature in spec.categorical)
        row_bytes = 4 * (1 + len(spec.numerical)) + spec.ids_dtype.itemsize * ids
        self._groups = _GroupCache(max(LEAST_KEPT, int(KEPT_BYTES / (largest * row_bytes))))
        self._fits = {
            name: files.num_rows * row_bytes <= KEPT_BYTES for name, files in spec.splits.items()
        }
        self._in_memory: dict[str, BinarySource] = {}
        self._lock = Lock()

    def num_rows(self, split: str) -> int:
        """Return the rows of `split`; ValueError if there is no such split."""
        return self.spec.rows_of(split)

    def granule(self, split: str) -> int:
        """Return the rows of the largest row group, or 1 if the split stays in memory."""
        return 1 if self._fits[split] else self._splits[split].granule

    def read(
        self,
        split: str,
        runs: np.ndarray,
        padded_to: int | None = None,
        allocate: Allocate = np.empty,
    ) -> Columns:
        """Return the rows of `runs` (int64 [K, 2], half-open), padded with zero rows to `padded_to`.

        Raises:
            ValueError: a missing value, an id outside its table or a label that is neither 0 nor 1, with row and file.
        """
        if self._fits[split]:
            return self._whole(split).read(split, runs, padded_to, allocate)
        files = self._splits[split]
        pieces = [
            (self._groups.get((split, group), lambda g=group: self._decode(files, g)), rows)
            for first, last in runs.tolist()
            for group, rows in files.cut(first, last)
        ]
        num_rows = int((runs[:, 1] - runs[:, 0]).sum())
        num_ids = [
            num_rows * f.hotness if f.hotness else sum(_num_ids(g, i, rows) for g, rows in pieces)
            for i, f in enumerate(self.spec.categorical)
        ]
        out = Columns.empty(
            self.spec, num_rows, num_rows if padded_to is None else padded_to, num_ids, allocate
        )
        at = 0
        ids_at = [0] * len(num_ids)
        for group, rows in pieces:
            place = slice(at, at + rows.stop - rows.start)
            out.labels[place] = group.labels[rows]
            for column, values in enumerate(group.numerical):
                out.numerical[place, column] = values[rows]
            for index, feature in enumerate(self.spec.categorical):
                ends = group.offsets[index]
                if ends is None:
                    assert feature.hotness is not None
                    items = slice(rows.start * feature.hotness, rows.stop * feature.hotness)
                else:
                    items = slice(ends[rows.start], ends[rows.stop])
                    out.lengths[index][place] = np.diff(ends[rows.start : rows.stop + 1])  # type: ignore[index]
                target = slice(ids_at[index], ids_at[index] + items.stop - items.start)
                out.ids[index][target] = group.ids[index][items]
                ids_at[index] = target.stop
            at = place.stop
        return out

    def _whole(self, split: str) -> BinarySource:
        """Return a split in memory, decoded when it is first asked for."""
        with self._lock:
            if split not in self._in_memory:
                files = self._splits[split]
                groups = [self._decode(files, group) for group in range(files.num_groups)]
                columns = _joined(self.spec, groups, self.spec.splits[split])
                self._in_memory[split] = BinarySource(self.spec, {split: columns})
            return self._in_memory[split]

    def _decode(self, files: "_Split", group: int) -> RowGroup:
        part, inside = files.locate(group)
        spec = self.spec
        names = [spec.label, *spec.numerical, *(feature.name for feature in spec.categorical)]
        table = files.open(part).read_row_group(inside, columns=names, use_threads=False)
        where = _Place(files.paths[part], files.first_row_in_part(group))
        labels = where.numbers(table, spec.label)
        wrong = (labels != 0) & (labels != 1)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(f"label {labels[row]} at {where.row(row)}; want 0 or 1")
        numerical = [where.numbers(table, name) for name in spec.numerical]
        decoded = [where.ids(table, feature) for feature in spec.categorical]
        return RowGroup(labels, numerical, [d[0] for d in decoded], [d[1] for d in decoded])


def _joined(spec: FeatureSpec, groups: list[RowGroup], files: SplitFiles) -> SplitColumns:
    """Return row groups as the columns of one split."""
    numerical = None
    if spec.numerical:
        columns = [np.concatenate(c) for c in zip(*(g.numerical for g in groups), strict=True)]
        numerical = np.stack(columns, axis=1).astype(np.float32)
    ids, offsets = {}, {}
    for index, feature in enumerate(spec.categorical):
        flat = np.concatenate([group.ids[index] for group in groups]).astype(spec.ids_dtype)
        single = feature.hotness in (1, None)
        ids[feature.name] = flat if single else flat.reshape(-1, feature.hotness)
        if feature.hotness is None:
            lengths = np.concatenate([np.diff(g.offsets[index]) for g in groups])  # type: ignore[arg-type]
            offsets[feature.name] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    labels = np.concatenate([group.labels for group in groups]).astype(LABEL_DTYPE)
    return SplitColumns(labels, numerical, ids, offsets, files)


def _num_ids(group: RowGroup, index: int, rows: slice) -> int:
    ends = group.offsets[index]
    assert ends is not None
    return int(ends[rows.stop] - ends[rows.start])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row group stands, for messages: its file and the row of the file that it begins with."""

    path: Path
    first_row: int

    def row(self, index: int) -> str:
        return f"row {self.first_row + index} of {self.path}"

    def numbers(self, table: pa.Table, name: str) -> np.ndarray:
        """Return a column of numbers; ValueError if one is missing."""
        column = self._whole(table, name)
        return column.to_numpy(zero_copy_only=False)

    def ids(
        self, table: pa.Table, feature: CategoricalFeature
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the ids of a feature, flat, and its offsets if it is ragged."""
        column = self._whole(table, feature.name)
        if feature.hotness == 1:
            ids, offsets = column.to_numpy(), None
        else:
            ids, offsets = self._lists(column, feature)
        if int(ids.view(f"u{ids.itemsize}").max(initial=0)) >= feature.cardinality:
            at = int(((ids < 0) | (ids >= feature.cardinality)).argmax())
            row = (
                at // (feature.hotness or 1)
                if offsets is None
                else int(offsets.searchsorted(at, "right")) - 1
            )
            raise ValueError(
                f"feature '{feature.name}': id {ids[at]} at {self.row(row)} lies outside its table of "
                f"{feature.cardinality} rows; correct the file, or the cardinality in {SPEC_NAME}"
            )
        return ids, offsets

    def _whole(self, table: pa.Table, name: str) -> pa.Array:
        column = table.column(name)
        if column.null_count:
            row = int(np.asarray(column.is_null()).argmax())
            raise ValueError(f"'{name}' is missing at {self.row(row)}; want a value in every row")
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def _lists(
        self, column: pa.Array, feature: CategoricalFeature
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if pa.types.is_fixed_size_list(column.type):
            offsets = np.arange(len(column) + 1) * column.type.list_size
        else:
            offsets = column.offsets.to_numpy()
        values = column.flatten()
        offsets = offsets - offsets[0]
        if values.null_count:
            at = int(np.asarray(values.is_null()).argmax())
            row = int(offsets.searchsorted(at, "right")) - 1
            raise ValueError(
                f"'{feature.name}' misses an id at {self.row(row)}; want integers only"
            )
        if feature.hotness is None:
            return values.to_numpy(), offsets
        other = np.diff(offsets) != feature.hotness
        if other.any():
            row = int(other.argmax())
            raise ValueError(
                f"feature '{feature.name}': {offsets[row + 1] - offsets[row]} ids at {self.row(row)}, want "
                f"{feature.hotness}; correct the file, or write hotness: ragged in {SPEC_NAME}"
            )
        return values.to_numpy(), None


class _Split:
    """The row groups of one split, over all its files."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self._metadata: list[pq.FileMetaData] = []
        self._first_group = [0]
        starts = [0]
        for path in paths:
            with open_file(path) as file:
                metadata = file.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            starts += (starts[-1] + np.cumsum(sizes)).tolist() if sizes else []
            self._metadata.append(metadata)
            self._first_group.append(self._first_group[-1] + len(sizes))
        self._starts = starts
        self.num_groups = len(starts) - 1
        self.granule = int(np.diff(starts).max())
        self._opened = local()

    def cut(self, first: int, last: int) -> list[tuple[int, slice]]:
        """Return (row group, rows inside it) for the rows [first, last)."""
        found = []
        group = bisect_right(self._starts, first) - 1
        while first < last:
            begin, end = self._starts[group], self._starts[group + 1]
            stop = min(last, end)
            if stop > first:
                found.append((group, slice(first - begin, stop - begin)))
            first = max(first, stop)
            group += 1
        return found

    def locate(self, group: int) -> tuple[int, int]:
        """Return the file of a row group, and its number in there."""
        part = bisect_right(self._first_group, group) - 1
        return part, group - self._first_group[part]

    def first_row_in_part(self, group: int) -> int:
        """Return the row of its file that a row group begins with."""
        part, _ = self.locate(group)
        return self._starts[group] - self._starts[self._first_group[part]]

    def open(self, part: int) -> pq.ParquetFile:
        """Return this thread's own reader of a file: one reader serves one thread."""
        files = self._opened.__dict__
        if part not in files:
            files[part] = open_file(self.paths[part], self._metadata[part])
        return files[part]


class _GroupCache:
    """The row groups that were asked for last; one that is asked for twice at a time is decoded once."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._groups: OrderedDict[tuple[str, int], Future[RowGroup]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: tuple[str, int], decode: Callable[[], RowGroup]) -> RowGroup:
        with self._lock:
            found = self._groups.pop(key, None)
            group = Future() if found is None else found
            self._groups[key] = group
            while len(self._groups) > self._num_groups:
                self._groups.popitem(last=False)
        if found is None:
            try:
                group.set_result(decode())
            except BaseException as error:
                group.set_exception(error)
        return group.result()
