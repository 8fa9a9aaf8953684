"""Reader of NVIDIA's split binary format.

Every file is a plain little-endian array without header, padding or index. Row i of each file is sample i:

    numerical   float16 or float32 [N, num_numerical], row-major
    label       one byte per row, 0 or 1 (numpy's bool); a regression label float16 or float32 [N]
    weight      float32 [N], and so is the keep rate
    ids         int8 ... int64, [N] or row-major [N, hotness]; one file per feature
    ragged      ids of all rows one after another, and a second file with int64 [N + 1] offsets into them
    events      ids and numbers of a sequence group, one file each, for all rows: int64 [N, 2] slices of them, of which
                a group with pools takes the last of each kind, and int64 [N] moments
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.sequences import MOMENT_DTYPE, SequenceGroup, row_of
from dataloading.dataset.source import BatchTarget, Columns, Keys, TimedSource
from dataloading.dataset.split_files import OFFSET_DTYPE, SplitFiles, mapped
from dataloading.gather import Selection

NO_LENGTHS = np.empty(0, np.int64)
Ragged = tuple[Selection, np.ndarray]
"""Where the ids of rows lie in their file, and their lengths, int64 [rows]."""


class BinarySource(TimedSource):
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

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        files, columns = self.spec.splits[split], self._columns[split]
        rows = Selection(runs)
        ragged = columns.ragged_ids(self.spec, rows)
        num_ids = [
            ragged[f.name][0].num_rows if f.hotness is None else rows.num_rows * f.hotness
            for f in self.spec.categorical
        ]
        out = Columns.empty(self.spec, rows.num_rows, num_ids, into)
        for column, values in out.row_columns(self.spec):
            if column.name in files.absent:
                values[: rows.num_rows] = column.default
                continue
            for span, piece in rows.pieces(columns.columns[column.name]):
                if column.has_wrong(piece):
                    at = int(column.wrong(piece).argmax())
                    row = rows.row_at(span.start + at)
                    raise ValueError(
                        f"{self.spec.title(column)} {piece[at]} at row {row} of {files.columns[column.name]}; "
                        f"want {column.wanted}"
                    )
                values[span] = piece
        if columns.numerical is not None:
            for span, piece in rows.pieces(columns.numerical):
                out.numerical[span] = piece
            # After the copy, when the numbers are float32 and in the cache: a NaN would pass through every layer.
            values = out.numerical[: rows.num_rows]
            if not np.isfinite(values).all():
                position, index = np.argwhere(~np.isfinite(values))[0]
                raise ValueError(
                    f"numerical feature '{self.spec.numerical[index]}': {values[position, index]} at row "
                    f"{rows.row_at(int(position))} of {files.numerical} is not finite; correct the file, or fill missing values "
                    "when preprocessing"
                )
        self._read_ids(split, rows, ragged, out)
        self._read_events(split, rows, ragged, out)
        return out

    def _read_ids(
        self, split: str, rows: Selection, ragged: Mapping[str, Ragged], out: Columns
    ) -> None:
        """Read the ids of `rows`; `ragged` tells where those of ragged features lie."""
        files, columns = self.spec.splits[split], self._columns[split]
        for index, feature in enumerate(self.spec.categorical):
            name = feature.name
            selection, lengths = ragged.get(name, (rows, NO_LENGTHS))
            if feature.hotness is None:
                out.lengths[index][: rows.num_rows] = lengths  # type: ignore[index]
            ids = (
                out.ids[index]
                if feature.hotness in (1, None)
                else out.ids[index].reshape(-1, feature.hotness)
            )
            for span, piece in selection.pieces(columns.ids[name]):
                if feature.has_wrong(piece):
                    at = int(feature.wrong(piece).argmax())
                    position = span.start * (feature.hotness or 1) + at
                    row = (
                        position // feature.hotness
                        if feature.hotness
                        else row_of(lengths, position)
                    )
                    where = f"row {rows.row_at(row)} of {files.ids[name]}"
                    raise ValueError(feature.wrong_text(piece.flat[at], where))
                if not feature.is_dynamic:
                    ids[span] = piece

    def _read_events(
        self, split: str, rows: Selection, ragged: Mapping[str, Ragged], out: Columns
    ) -> None:
        """Read the numbers of the events of `rows`, which lie where their ids do."""
        files, columns = self.spec.splits[split], self._columns[split]
        numbers = iter(out.events)
        for group in self.spec.sequences:
            selection, lengths = ragged[group.features[0]]
            moments = columns.moments.get(group.name)
            of_rows = None if moments is None else rows.rows_of(moments)
            for number in group.numbers:

                def where(row: int, name: str = number.name) -> str:
                    return f"row {rows.row_at(row)} of {files.events[name]}"

                read = selection.rows_of(columns.events[number.name])
                next(numbers)[:] = group.checked(number, read, lengths, of_rows, where)

    def event_counts(self, split: str, runs: np.ndarray) -> np.ndarray | None:
        slices, rows = self._columns[split].slices, Selection(runs)
        # Of a group with pools the kinds of all events in a slice would have to be read.
        read = [rows.rows_of(slices[g.name]) for g in self.spec.sequences if g.pools is None]
        if not read:
            return None
        return np.sum([ends - starts for starts, ends in (each.T for each in read)], axis=0)

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        columns, name = self._columns[split], self.spec.categorical[feature].name
        lengths = None
        if self.spec.categorical[feature].hotness is None:
            selection, lengths = columns.ragged_ids(self.spec, Selection(runs))[name]
            runs = selection.runs
        column = np.asarray(columns.ids[name]).reshape(-1)
        hotness = self.spec.categorical[feature].hotness or 1
        runs = runs if hotness == 1 else runs * hotness
        return Keys(column.astype(np.int64, copy=False), runs, lengths)

    def read_times(
        self, split: str, runs: np.ndarray, group: SequenceGroup
    ) -> tuple[np.ndarray, np.ndarray]:
        columns, rows = self._columns[split], Selection(runs)
        events, _ = columns.ragged_ids(self.spec, rows)[group.features[0]]
        return events.rows_of(columns.events[group.time or ""]), rows.rows_of(
            columns.moments[group.name]
        )


@dataclass(frozen=True, slots=True)
class SplitColumns:
    # labels, weight and keep rate that the split has, by name, [N]; uint8 for a binary label, else floats
    columns: dict[str, np.ndarray]
    numerical: np.ndarray | None  # floats [N, num_numerical]; None without numericals
    # integers by feature: [N], [N, hotness], or flat for a ragged feature
    ids: dict[str, np.ndarray]
    offsets: dict[str, np.ndarray]  # int64 [N + 1] per ragged feature that is in no sequence group
    files: SplitFiles  # files of the split, for messages
    # int64 [N, 2] per group, first event of each row and the one after its last
    slices: dict[str, np.ndarray] = field(default_factory=dict)
    # integers [N] per group with a time
    moments: dict[str, np.ndarray] = field(default_factory=dict)
    events: dict[str, np.ndarray] = field(default_factory=dict)  # numbers of events, by name

    @classmethod
    def of_files(cls, spec: FeatureSpec, files: SplitFiles) -> "SplitColumns":
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
            slices={name: column(path, OFFSET_DTYPE, 2) for name, path in files.slices.items()},
            moments={name: column(path, MOMENT_DTYPE) for name, path in files.moments.items()},
            events={c.name: column(files.events[c.name], c.dtype) for c in spec.event_columns},
        )

    def ragged_ids(self, spec: FeatureSpec, rows: Selection) -> dict[str, Ragged]:
        """Return the ids of `rows` in the files of ragged features, and their lengths, int64 [num_rows], by feature.

        Features of a group share both. Raises ValueError: a row begins before the file, ends behind it or before its
        begin, or has more events than a row of the group may have.
        """
        found: dict[str, Ragged] = {}
        for name in (f.name for f in spec.categorical if f.hotness is None):
            if name in found:
                continue
            group, num_ids = spec.group_of(name), len(self.ids[name])
            if group is None:
                path, most = self.files.offsets.get(name), np.iinfo(np.int64).max
                starts = rows.rows_of(self.offsets[name][:-1])
                ends = rows.rows_of(self.offsets[name][1:])
                want = f"offsets that do not decrease, up to {num_ids}"
            else:
                path = self.files.slices.get(group.name)
                most = num_ids if group.pools else group.max_length
                starts, ends = rows.rows_of(self.slices[group.name]).T
                want = f"at most max_length={most} of the {num_ids} events, first and end"
            lengths = ends - starts
            wrong = (lengths < 0) | (lengths > most) | (starts < 0) | (ends > num_ids)
            if wrong.any():
                at = int(wrong.argmax())
                raise ValueError(
                    f"feature '{name}': row {rows.row_at(at)} runs from {starts[at]} to {ends[at]} in {path}; want {want}"
                )
            if group is not None and group.pools is not None:
                kinds = self.events[group.pools.of]
                starts, lengths = group.pooled(kinds, starts, ends)
                ends = starts + 1
            else:
                held = lengths > 0
                starts, ends = starts[held], ends[held]
            breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
            first = np.concatenate([starts[:1], starts[breaks]])
            last = np.concatenate([ends[breaks - 1], ends[-1:]])
            selection = Selection(np.stack([first, last], axis=1))
            found |= dict.fromkeys(group.features if group else [name], (selection, lengths))
        return found
