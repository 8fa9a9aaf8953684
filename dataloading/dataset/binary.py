"""Writer and reader of NVIDIA's split binary format.

Every file is a plain little-endian array without header, padding or index. Row i of each file is sample i:

    numerical   float16 or float32 [N, num_numerical], row-major
    label       one byte per row, 0 or 1 (numpy's bool); a regression label float16 or float32 [N]
    weight      float32 [N], and so is the keep rate
    ids         int8 ... int64, [N] or row-major [N, hotness]; one file per feature
    ragged      ids of all rows one after another, and a second file with int64 [N + 1] offsets into them
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.messages import shown
from dataloading.dataset.counted_file import CountedFile
from dataloading.dataset.feature_spec import SPEC_NAME, CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.dataset.source import Allocate, Columns, Keys, Source
from dataloading.dataset.split_files import OFFSET_DTYPE, Lengths, SplitFiles, mapped
from dataloading.gather import Selection


class GrowingFile(CountedFile):
    """A column that is being written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        super().__init__(path)
        self.num_rows = 0

    def append(self, values: np.ndarray, num_rows: int) -> None:
        """Append the items of `num_rows` rows, which are checked and cast already."""
        self.write(np.ascontiguousarray(values).data if values.size else b"")
        self.num_rows += num_rows


class SplitWriter:
    """Appends chunks of columns to the files of one split.

    Columns grow independently: chunk by chunk over all columns, or one complete column after another. Threads
    may append to different columns at the same time.
    """

    file_type: type[GrowingFile] = GrowingFile

    def __init__(
        self, directory: Path, split: str, spec: FeatureSpec, absent: Collection[str] = ()
    ) -> None:
        self.split = split
        self.spec = spec
        self.absent = frozenset(absent)
        self._features = {feature.name: feature for feature in spec.categorical}
        ids = {name: file_name(name) for name in self._features}
        offsets = {
            f.name: f"{ids[f.name][:-4]}.offsets.bin" for f in spec.categorical if f.hotness is None
        }
        columns = {c.name: column_file_name(spec.labels, c) for c in spec.row_columns}
        names = [*ids.values(), *offsets.values(), *columns.values()]
        names += ["numerical.bin"] * bool(spec.numerical)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two features would share the file {twice[0]}; rename one of them")

        def made(names: Mapping[str, str]) -> dict[str, GrowingFile]:
            return {key: self.file_type(directory / split / name) for key, name in names.items()}

        self._columns = made({key: n for key, n in columns.items() if key not in self.absent})
        self._numerical = made({"": "numerical.bin"})[""] if spec.numerical else None
        self._ids, self._offsets = made(ids), made(offsets)
        for file in self._offsets.values():
            file.append(np.zeros(1, OFFSET_DTYPE), 0)
        self._lengths = {name: Lengths() for name in offsets}

    def append(
        self,
        *,
        numerical: np.ndarray | None = None,
        labels: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        keep_rates: np.ndarray | None = None,
        ids: Mapping[str, np.ndarray] | None = None,
        lengths: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Append rows to any of the columns.

        `numerical`: numbers [n, num_numerical]. `labels`: [n], or [n, labels] of several; bool, or 0 and 1, of a binary
        label. `weights`: numbers [n], not negative. `keep_rates`: numbers [n] above 0, at most 1. `ids`: integers by
        feature: [n], [n, hotness], or flat for a ragged feature. `lengths`: ids per row, [n], for each ragged feature
        in `ids`. Raises ValueError: a value that the file cannot hold; the message names feature, value and row.
        """
        if numerical is not None:
            self._append_numerical(np.asarray(numerical))
        if labels is not None:
            self._append_labels(np.asarray(labels))
        for channel, numbers in ((Channel.weight, weights), (Channel.keep_rate, keep_rates)):
            if numbers is not None:
                self._append_single(channel, np.asarray(numbers))
        for name, values in (ids or {}).items():
            if name not in self._features:
                raise ValueError(
                    f"no categorical feature '{name}', only {', '.join(self._features)}"
                )
            self._append_ids(self._features[name], np.asarray(values), (lengths or {}).get(name))

    def close(self) -> SplitFiles:
        """Close all files and return them; ValueError unless every column holds the same rows."""
        for file in self._files():
            if not file.closed:
                file.sync()
                file.close()
        return SplitFiles(
            self._checked_rows(),
            self._numerical.path if self._numerical else None,
            {name: file.path for name, file in self._columns.items()},
            {name: file.path for name, file in self._ids.items()},
            {name: file.path for name, file in self._offsets.items()},
            absent=self.absent,
        )

    def mean_hotness(self, name: str) -> float:
        """Return the mean ids per row of ragged feature `name` so far, as `Lengths.mean`."""
        return self._lengths[name].mean

    def abandon(self) -> None:
        """Close all files without a check."""
        for file in self._files():
            file.close()

    def checksums(self, root: Path) -> dict[str, dict[str, Any]]:
        """Return bytes and CRC-32 of each file, by its path below `root`."""
        return {file.path.relative_to(root).as_posix(): file.record for file in self._files()}

    def _checked_rows(self) -> int:
        """Return the rows that every column holds; ValueError if they disagree or there are none."""
        first, *_ = self._files()
        num_rows = first.num_rows
        for file in self._files():
            if file.num_rows != num_rows:
                raise ValueError(
                    f"split '{self.split}': {file.path.name} holds {file.num_rows} rows and {first.path.name} {num_rows}; "
                    "append the same rows to every column"
                )
        if not num_rows:
            raise ValueError(f"split '{self.split}' has no rows; append some before the end")
        return num_rows

    def _files(self) -> list[GrowingFile]:
        numerical = [self._numerical] if self._numerical else []
        columns = self._columns.values()
        return [*columns, *numerical, *self._ids.values(), *self._offsets.values()]

    def _append_numerical(self, values: np.ndarray) -> None:
        names = self.spec.numerical
        if values.ndim != 2 or values.shape[1] != len(names) or self._numerical is None:
            raise ValueError(f"numerical: got shape {values.shape}, want [rows, {len(names)}]")
        dtype = self.spec.numerical_dtype
        with np.errstate(over="ignore"):
            stored = values.astype(dtype.newbyteorder("<"), casting="unsafe")
        if not np.isfinite(stored).all():
            row, column = np.argwhere(~np.isfinite(stored))[0]
            raise ValueError(
                f"numerical feature '{names[column]}': {values[row, column]} at row "
                f"{self._numerical.num_rows + row} of split '{self.split}' is not finite as {dtype.name}; "
                "fill or scale it, or write float32"
            )
        self._numerical.append(stored, len(stored))

    def _append_labels(self, values: np.ndarray) -> None:
        labels = self.spec.labels
        several = len(labels) > 1
        if values.ndim != 1 + several or (several and values.shape[1] != len(labels)):
            want = f"[rows, {len(labels)}]" if several else "[rows]"
            raise ValueError(f"labels: got shape {values.shape}, want {want}")
        for index, label in enumerate(labels):
            self._append_column(label, values[:, index] if several else values)

    def _append_single(self, channel: Channel, values: np.ndarray) -> None:
        column = next((c for c in self.spec.row_columns if c.channel is channel), None)
        if column is None:
            raise ValueError(f"{channel}s: the dataset has no {channel} column; name one")
        if values.ndim != 1:
            raise ValueError(f"{channel}s: got shape {values.shape}, want [rows]")
        self._append_column(column, values)

    def _append_column(self, column: RowColumn, values: np.ndarray) -> None:
        file = self._columns.get(column.name)
        if file is None:
            raise ValueError(
                f"{self.spec.title(column)}: split '{self.split}' has been declared without it; leave it out"
            )
        wrong = column.wrong(values)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{self.spec.title(column)}: {values[row]} at row {file.num_rows + row} of split '{self.split}'; "
                f"want {column.wanted}"
            )
        file.append(values.astype(column.stored, casting="unsafe"), len(values))

    def _append_ids(
        self, feature: CategoricalFeature, values: np.ndarray, lengths: np.ndarray | None
    ) -> None:
        name, file = feature.name, self._ids[feature.name]
        if values.dtype.kind not in "iu":
            raise ValueError(f"feature '{name}': got ids of dtype {values.dtype}, want integers")
        if feature.hotness is None:
            lengths = _checked_lengths(name, values, lengths)
        elif values.shape != (values.size // feature.hotness, feature.hotness) and (
            feature.hotness > 1 or values.ndim != 1
        ):
            raise ValueError(
                f"feature '{name}': got ids of shape {values.shape}, want [rows, {feature.hotness}]"
            )
        outside = ((values < 0) | (values >= feature.cardinality)).reshape(-1)
        if not feature.is_dynamic and outside.any():
            at = int(outside.argmax())
            row = (
                at // (feature.hotness or 1)
                if lengths is None
                else int(np.cumsum(lengths).searchsorted(at, "right"))
            )
            raise ValueError(
                f"feature '{name}': id {values.flat[at]} at row {file.num_rows + row} of split "
                f"'{self.split}' lies outside its table of {feature.cardinality} rows"
            )
        num_before = file.tell() // feature.dtype.itemsize
        num_rows = len(values) if lengths is None else len(lengths)
        file.append(values.astype(feature.dtype.newbyteorder("<"), casting="unsafe"), num_rows)
        if lengths is not None:
            ends = num_before + np.cumsum(lengths, dtype=np.int64)
            self._offsets[name].append(ends.astype(OFFSET_DTYPE), num_rows)
            self._lengths[name].add(lengths)


def _checked_lengths(name: str, values: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    if lengths is None:
        raise ValueError(f"feature '{name}' is ragged: want lengths beside its ids")
    lengths = np.asarray(lengths)
    if values.ndim != 1 or lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != len(values):
        raise ValueError(
            f"feature '{name}': got ids of shape {values.shape} for {lengths.size} lengths that sum to "
            f"{lengths.sum()}; want flat ids and one length per row that add up to them"
        )
    return lengths


def file_name(name: str) -> str:
    """Return the file name of a feature; NVIDIA's feature names end in `.bin` already."""
    if "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(f"feature name {shown(name)} cannot name a file: no slash, no leading dot")
    return name if name.endswith(".bin") else f"{name}.bin"


def column_file_name(labels: Sequence[RowColumn], column: RowColumn) -> str:
    """Return the file name of a label, of the weight or of the keep rate; NVIDIA's recipes have one label, `label.bin`."""
    return "label.bin" if list(labels) == [column] else file_name(column.name)


class BinarySource(Source):
    """Source of the rows of a dataset directory, read through memory maps without a copy of its own.

    Ids are checked on every read: one maximum over an unsigned view, in which negative ids are too large as well.
    `columns`: columns per split, if they are in memory; None: the files are mapped.
    """

    def __init__(
        self, spec: FeatureSpec, columns: Mapping[str, "SplitColumns"] | None = None
    ) -> None:
        self.spec = spec
        self._columns = columns or {
            split: SplitColumns.of_files(spec, files) for split, files in spec.splits.items()
        }

    def read(
        self,
        split: str,
        runs: np.ndarray,
        padded_to: int | None = None,
        allocate: Allocate = np.empty,
    ) -> Columns:
        files, columns = self.spec.splits[split], self._columns[split]
        rows = Selection(runs)
        id_runs = {name: columns.id_runs(name, rows) for name in columns.offsets}
        selections = {name: Selection(runs) for name, (runs, _) in id_runs.items()}
        num_ids = [
            selections[f.name].num_rows if f.hotness is None else rows.num_rows * f.hotness
            for f in self.spec.categorical
        ]
        padded_to = rows.num_rows if padded_to is None else padded_to
        out = Columns.empty(self.spec, rows.num_rows, padded_to, num_ids, allocate)
        for column, values in out.row_columns(self.spec):
            if column.name in files.absent:
                values[: rows.num_rows] = column.default
                continue
            for place, piece in rows.pieces(columns.columns[column.name]):
                if column.has_wrong(piece):
                    at = int(column.wrong(piece).argmax())
                    row = rows.row_at(place.start + at)
                    raise ValueError(
                        f"{self.spec.title(column)} {piece[at]} at row {row} of {files.columns[column.name]}; "
                        f"want {column.wanted}"
                    )
                values[place] = piece
        if columns.numerical is not None:
            for place, piece in rows.pieces(columns.numerical):
                out.numerical[place] = piece
            # After the copy, when the numbers are float32 and in the cache: a NaN would pass through every layer.
            values = out.numerical[: rows.num_rows]
            if not np.isfinite(values).all():
                position, index = np.argwhere(~np.isfinite(values))[0]
                raise ValueError(
                    f"numerical feature '{self.spec.numerical[index]}': {values[position, index]} at row "
                    f"{rows.row_at(int(position))} of {files.numerical} is not finite; correct the file, or fill missing values "
                    "when preprocessing"
                )
        for index, feature in enumerate(self.spec.categorical):
            name = feature.name
            if feature.hotness is None:
                out.lengths[index][: rows.num_rows] = id_runs[name][1]  # type: ignore[index]
            if feature.is_dynamic:
                continue
            selection = selections.get(name, rows)
            ids = (
                out.ids[index]
                if feature.hotness in (1, None)
                else out.ids[index].reshape(-1, feature.hotness)
            )
            for place, piece in selection.pieces(columns.ids[name]):
                if self.out_of_range(piece, feature.cardinality):
                    raise self._id_error(split, feature, selection, place.start, piece)
                ids[place] = piece
        return out

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        columns, name = self._columns[split], self.spec.categorical[feature].name
        lengths = None
        if name in columns.offsets:
            runs, lengths = columns.id_runs(name, Selection(runs))
        column = np.asarray(columns.ids[name]).reshape(-1)
        hotness = self.spec.categorical[feature].hotness or 1
        runs = runs if hotness == 1 else runs * hotness
        return Keys(column.astype(np.int64, copy=False), runs, lengths)

    @staticmethod
    def out_of_range(ids: np.ndarray, cardinality: int) -> bool:
        unsigned = ids.view(f"<u{ids.itemsize}")
        return int(unsigned.max(initial=0)) >= cardinality

    def _id_error(
        self,
        split: str,
        feature: CategoricalFeature,
        selection: Selection,
        start: int,
        piece: np.ndarray,
    ) -> ValueError:
        flat = piece.reshape(-1)
        at = int(((flat < 0) | (flat >= feature.cardinality)).argmax())
        row = selection.row_at(start + at // (feature.hotness or 1))
        if feature.hotness is None:  # `row` was the index of the id in the file
            row = int(self._columns[split].offsets[feature.name].searchsorted(row, "right")) - 1
        return ValueError(
            f"feature '{feature.name}': id {flat[at]} at row {row} of {self.spec.splits[split].ids[feature.name]} lies "
            f"outside its table of {feature.cardinality} rows; correct the file, or the cardinality in {SPEC_NAME}"
        )


@dataclass(frozen=True, slots=True)
class SplitColumns:
    """Columns of one split as arrays."""

    # labels, weight and keep rate that the split has, by name, [N]; uint8 for a binary label, else
    # floats
    columns: dict[str, np.ndarray]
    numerical: np.ndarray | None  # floats [N, num_numerical]; None without numericals
    # integers by feature: [N], [N, hotness], or flat for a ragged feature
    ids: dict[str, np.ndarray]
    offsets: dict[str, np.ndarray]  # int64 [N + 1] per ragged feature
    files: SplitFiles  # files of the split, for messages

    @classmethod
    def of_files(cls, spec: FeatureSpec, files: SplitFiles) -> "SplitColumns":
        """Return memory maps of the files of a split."""

        def column(path: Path, dtype: np.dtype, width: int | None = None) -> np.ndarray:
            numbers = mapped(path, dtype)
            return numbers if width is None else numbers.reshape(-1, width)

        width = len(spec.numerical)
        return cls(
            columns={
                c.name: column(files.columns[c.name], c.stored)
                for c in spec.row_columns
                if c.name not in files.absent
            },
            numerical=None
            if files.numerical is None
            else column(files.numerical, spec.numerical_dtype, width),
            ids={
                f.name: column(
                    files.ids[f.name], f.dtype, None if f.hotness in (1, None) else f.hotness
                )
                for f in spec.categorical
            },
            offsets={name: column(path, OFFSET_DTYPE) for name, path in files.offsets.items()},
            files=files,
        )

    def id_runs(self, name: str, rows: Selection) -> tuple[np.ndarray, np.ndarray]:
        """Return the runs of ids (int64 [K, 2]) and the lengths (int64 [num_rows]) of `rows` in a ragged feature."""
        offsets = self.offsets[name]
        starts = np.empty(rows.num_rows, np.int64)
        ends = np.empty(rows.num_rows, np.int64)
        for place, piece in rows.pieces(offsets[:-1]):
            starts[place] = piece
        for place, piece in rows.pieces(offsets[1:]):
            ends[place] = piece
        lengths = ends - starts
        wrong = (lengths < 0) | (starts < 0) | (ends > len(self.ids[name]))
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"feature '{name}': row {rows.row_at(at)} runs from {starts[at]} to {ends[at]} in "
                f"{self.files.offsets[name]}; want offsets that do not decrease, up to {len(self.ids[name])}"
            )
        breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        first = np.concatenate([starts[:1], starts[breaks]])
        last = np.concatenate([ends[breaks - 1], ends[-1:]])
        return np.stack([first, last], axis=1), lengths
