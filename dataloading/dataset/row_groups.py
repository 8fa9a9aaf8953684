"""Row groups of Parquet files: decoding, with a check of every value."""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import local

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.messages import first_line, shortened
from dataloading.dataset.feature_spec import SPEC_NAME, CategoricalFeature, FeatureSpec
from dataloading.dataset.parquet_files import open_file, read_footer
from dataloading.dataset.sequences import SequenceGroup


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Decoded rows, one array per column."""

    # numbers [n] of each label, of the weight and of the keep rate, checked, in the spec's order
    columns: list[np.ndarray]
    numerical: list[np.ndarray]  # numbers [n], one array per feature
    ids: list[np.ndarray]  # integers, flat, one array per feature, checked against its table
    offsets: dict[str, np.ndarray]  # int [n + 1], by ragged feature
    # numbers of events, flat, in the order of `FeatureSpec.event_columns`: float32, but integers of times
    events: list[np.ndarray]
    moments: dict[str, np.ndarray]  # integers [n], by group with a time

    def items(self, feature: str, rows: slice, hotness: int | None = None) -> slice:
        """Return where the ids of rows lie, and the numbers of their events; `hotness`: None of a ragged feature."""
        if hotness is not None:
            return slice(rows.start * hotness, rows.stop * hotness)
        ends = self.offsets[feature]
        return slice(int(ends[rows.start]), int(ends[rows.stop]))

    def lengths(self, feature: str, rows: slice) -> np.ndarray:
        """Return the number of ids of each of the rows of a ragged feature."""
        return np.diff(self.offsets[feature][rows.start : rows.stop + 1])


class SplitGroups:
    """Row groups of one split, over all its files."""

    def __init__(self, paths: tuple[Path, ...], absent: Collection[str] = ()) -> None:
        self.paths = paths
        self._absent = absent
        self._metadata: list[pq.FileMetaData] = []
        self._first_group = [0]
        starts = [0]
        for path in paths:
            metadata = read_footer(path)
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            starts += (starts[-1] + np.cumsum(sizes)).tolist() if sizes else []
            self._metadata.append(metadata)
            self._first_group.append(self._first_group[-1] + len(sizes))
        self._starts = starts
        self.num_groups = len(starts) - 1
        self.granule = int(np.diff(starts).max(initial=0))
        self._opened = local()

    @property
    def num_rows(self) -> int:
        return self._starts[-1]

    def cut(self, first: int, last: int) -> list[tuple[int, slice]]:
        """Return (row group, rows inside it) for the rows [first, last)."""
        groups = []
        group = bisect_right(self._starts, first) - 1
        while first < last:
            begin, end = self._starts[group], self._starts[group + 1]
            stop = min(last, end)
            if stop > first:
                groups.append((group, slice(first - begin, stop - begin)))
            first = max(first, stop)
            group += 1
        return groups

    def decode(self, spec: FeatureSpec, group: int) -> RowGroup:
        """Read a row group.

        Raises ValueError: damaged Parquet data, a missing value, an id outside its table, or an invalid label, weight
        or keep rate; the message names row and file.
        """
        part, inside = self._locate(group)
        names = [name for name in spec.names if name not in self._absent]
        where = Where(self.paths[part], self._starts[group] - self._starts[group - inside])
        return decode(self.table(group, names), spec, where, self._absent)

    def table(self, group: int, names: Sequence[str]) -> pa.Table:
        """Read the columns `names` of a row group; ValueError if its data is damaged."""
        part, inside = self._locate(group)
        try:
            table = self._open(part).read_row_group(inside, columns=list(names), use_threads=False)
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise ValueError(
                f"{self.paths[part]}: row group {inside} cannot be read ({shortened(first_line(error))}); copy or write the file "
                "again"
            ) from None
        num_rows = self._starts[group + 1] - self._starts[group]
        if table.num_rows != num_rows:
            raise ValueError(
                f"{self.paths[part]}: row group {inside} has {table.num_rows} rows, and the footer says {num_rows}; copy or "
                "write the file again"
            )
        return table

    def _locate(self, group: int) -> tuple[int, int]:
        part = bisect_right(self._first_group, group) - 1
        return part, group - self._first_group[part]

    def _open(self, part: int) -> pq.ParquetFile:
        """Return this thread's reader of a file, since a reader is not thread-safe."""
        name = str(part)
        files = self._opened.__dict__
        if name not in files:
            files[name] = open_file(self.paths[part], self._metadata[part])
        return files[name]


def decode(
    table: pa.Table, spec: FeatureSpec, where: "Where", absent: Collection[str] = ()
) -> RowGroup:
    """Return the rows of a table whose columns have the right types, every value checked.

    Raises ValueError with row and file: a missing value, an id outside its table, or an invalid label, weight or keep rate.
    """
    columns = []
    for column in spec.row_columns:
        if column.name in absent:
            columns.append(np.full(len(table), column.default, column.stored))
            continue
        numbers = where.numbers(table, column.name)
        wrong = column.wrong(numbers)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{spec.title(column)} {numbers[row]} at {where.row(row)}; want {column.wanted}"
            )
        columns.append(numbers)
    numerical = [where.numbers(table, name) for name in spec.numerical]
    decoded = {feature.name: where.ids(table, feature) for feature in spec.categorical}
    offsets = {name: ends for name, (_, ends) in decoded.items() if ends is not None}
    lengths = {name: np.diff(ends) for name, ends in offsets.items()}
    events: list[np.ndarray] = []
    moments = {}
    for group in spec.sequences:
        if group.time is not None and group.name not in absent:
            moments[group.name] = where.whole(table, group.name).to_numpy()
        of_features = {name: lengths[name] for name in group.features}
        events += where.events(table, group, of_features, moments.get(group.name))
    ids = [of_feature for of_feature, _ in decoded.values()]
    return RowGroup(columns, numerical, ids, offsets, events, moments)


@dataclass(frozen=True, slots=True)
class Where:
    """The file of a row group, or the name of a table in memory, and its first row in it; for messages."""

    path: Path | str
    first_row: int = 0

    def row(self, index: int) -> str:
        return f"row {self.first_row + index} of {self.path}"

    def numbers(self, table: pa.Table, name: str) -> np.ndarray:
        """Return a column of numbers; ValueError if one is missing, not finite or too large."""
        values = self.whole(table, name).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(values.astype(np.float32, copy=False))
        if not is_finite.all():
            row = int(is_finite.argmin())
            want = "number that float32 can hold" if np.isfinite(values[row]) else "finite number"
            raise ValueError(f"'{name}' is {values[row]} at {self.row(row)}; want a {want}")
        return values

    def ids(
        self, table: pa.Table, feature: CategoricalFeature
    ) -> tuple[np.ndarray, np.ndarray | None]:
        if feature.hotness == 1:
            ids, offsets = self.whole(table, feature.name).to_numpy(), None
        else:
            ids, offsets = self._lists(table, feature)
        if feature.has_wrong(ids):
            at = int(feature.wrong(ids).argmax())
            row = (
                at // (feature.hotness or 1)
                if offsets is None
                else int(offsets.searchsorted(at, "right")) - 1
            )
            raise ValueError(feature.wrong_text(ids[at], self.row(row)))
        return ids, offsets

    def events(
        self,
        table: pa.Table,
        group: SequenceGroup,
        lengths: Mapping[str, np.ndarray],
        moments: np.ndarray | None,
    ) -> list[np.ndarray]:
        """Return the numbers of the events of a group, checked; `lengths`: of the rows, by its features."""
        numbers = {c.name: self.flat(table, c.name, "a number", "numbers") for c in group.numbers}
        counts = {**lengths, **{name: np.diff(ends) for name, (_, ends) in numbers.items()}}
        first = group.features[0]
        if (wrong := group.wrong_length(counts[first])) is not None:
            raise ValueError(
                f"feature '{first}': {counts[first][wrong]} events at {self.row(wrong)}; want at most "
                f"max_length={group.max_length}"
            )
        for name, own in counts.items():
            differs = own != counts[first]
            if differs.any():
                row = int(differs.argmax())
                raise ValueError(
                    f"feature '{name}': {own[row]} events at {self.row(row)}, and '{first}' has {counts[first][row]}; "
                    f"want equally many in all columns of group '{group.name}'"
                )
        found = []
        for column in group.numbers:
            values = numbers[column.name][0].to_numpy()
            checked = group.checked(column, values, counts[first], moments, self.row)
            is_time = column.name == group.time and moments is not None
            found.append(values if is_time else checked)
        return found

    def whole(self, table: pa.Table, name: str) -> pa.Array:
        """Return a column as one array; ValueError if a value is missing."""
        column = table.column(name)
        if column.null_count:
            row = int(np.asarray(column.is_null()).argmax())
            raise ValueError(f"'{name}' is missing at {self.row(row)}; want a value in every row")
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def flat(
        self, table: pa.Table, name: str, item: str = "an id", wanted: str = "integers"
    ) -> tuple[pa.Array, np.ndarray]:
        """Return the items of a column of lists, and the offsets of its rows."""
        column = self.whole(table, name)
        if pa.types.is_fixed_size_list(column.type):
            offsets = np.arange(len(column) + 1) * column.type.list_size
        else:
            offsets = column.offsets.to_numpy()
        values = column.flatten()
        offsets = offsets - offsets[0]
        if values.null_count:
            at = int(np.asarray(values.is_null()).argmax())
            row = int(offsets.searchsorted(at, "right")) - 1
            raise ValueError(f"'{name}' misses {item} at {self.row(row)}; want {wanted} only")
        return values, offsets

    def _lists(
        self, table: pa.Table, feature: CategoricalFeature
    ) -> tuple[np.ndarray, np.ndarray | None]:
        values, offsets = self.flat(table, feature.name)
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
