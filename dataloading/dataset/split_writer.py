"""Writer of the rows of one split in NVIDIA's split binary format, which `dataloading.dataset.binary` describes."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataloading.dataset.column_files import (
    EventWriter,
    GrowingFile,
    checked_ids,
    checked_lengths,
    column_file_name,
    file_name,
    given_numbers,
    group_file_name,
)
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.dataset.sequences import MOMENT_DTYPE, SequenceGroup
from dataloading.dataset.split_files import OFFSET_DTYPE, Lengths, SplitFiles


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
        self._group_of = {name: g.name for g in spec.sequences for name in g.features}
        alone = [f for f in spec.categorical if f.name not in self._group_of]
        ids = {f.name: file_name(f.name) for f in alone}
        offsets = {f.name: f"{ids[f.name][:-4]}.offsets.bin" for f in alone if f.hotness is None}
        columns = {c.name: column_file_name(spec.labels, c) for c in spec.row_columns}
        slices = {g.name: group_file_name(g.name, "slices") for g in spec.sequences}
        moments = {
            g.name: group_file_name(g.name, "moments") for g in spec.sequences if g.time is not None
        }
        names = [*ids.values(), *offsets.values(), *columns.values()]
        names += [*slices.values(), *moments.values()]
        names += [file_name(name) for group in spec.sequences for name in group.columns]
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
        self._slices, self._moments = made(slices), made(moments)
        self._lengths = {name: Lengths() for name in (*offsets, *slices)}
        self._path_of = lambda name: directory / split / name
        # Events that lie once, for all splits, by group; `DatasetWriter.append_events` fills them.
        self.logs: dict[str, EventWriter] = {}
        # Events of the rows by group: their own ones, or a log.
        self._events: dict[str, EventWriter] = {}

    def append(
        self,
        *,
        numerical: np.ndarray | None = None,
        labels: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        keep_rates: np.ndarray | None = None,
        teachers: Mapping[str, np.ndarray] | None = None,
        ids: Mapping[str, np.ndarray] | None = None,
        lengths: Mapping[str, np.ndarray] | None = None,
        events: Mapping[str, np.ndarray] | None = None,
        moments: Mapping[str, np.ndarray] | None = None,
        slices: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Append rows to any of the columns; to those of a sequence group at once.

        `numerical`: numbers [n, num_numerical]. `labels`: [n], or [n, labels] of several; bool, or 0 and 1, of a binary
        label. `weights`: numbers [n], not negative. `keep_rates`: numbers [n] above 0, at most 1. `teachers`: numbers [n]
        from 0 to 1, by column. `ids`: integers by feature: [n], [n, hotness], or flat for a ragged feature. `lengths`:
        ids per row, [n], for each ragged feature in `ids`, and events per row for each group. `events`: numbers of events
        by column, flat as the ids of a group. `moments`: by group with a time, in whole seconds, int64 [n]. `slices`: by
        group whose events `DatasetWriter.append_events` has taken, first event of each row and the one after its last,
        int64 [n, 2]. Raises ValueError: a value that the file cannot hold; the message names feature, value and row.
        """
        ids, lengths, events = ids or {}, lengths or {}, events or {}
        moments, slices = moments or {}, slices or {}
        of_groups = [name for group in self.spec.sequences for name in (group.name, *group.columns)]
        known = {*self._features, *of_groups, *(column.name for column in self.spec.teachers)}
        if unknown := {*events, *lengths, *moments, *slices, *(teachers or {})} - known:
            raise ValueError(f"no column or group {sorted(unknown)}; want some of {sorted(known)}")
        if numerical is not None:
            self._append_numerical(given_numbers("numerical", numerical))
        if labels is not None:
            self._append_labels(given_numbers("labels", labels))
        for column in self.spec.teachers:
            if column.name in (teachers or {}):
                scores = (teachers or {})[column.name]
                self._append_column(column, given_numbers(self.spec.title(column), scores))
        for channel, numbers in ((Channel.weight, weights), (Channel.keep_rate, keep_rates)):
            if numbers is not None:
                self._append_single(channel, given_numbers(f"{channel}s", numbers))
        for group in self.spec.sequences:
            if (name := group.name) in lengths or name in slices:
                of_rows = [
                    given_numbers(f"{what} of '{name}'", of[name], whole=True)
                    if name in of
                    else None
                    for what, of in (("lengths", lengths), ("slices", slices), ("moments", moments))
                ]
                self._append_group(group, ids, events, *of_rows)
        for name, values in ids.items():
            if name not in self._features:
                raise ValueError(
                    f"no categorical feature '{name}', only {', '.join(self._features)}"
                )
            group_name = self._group_of.get(name)
            if group_name is None:
                numbers = given_numbers(f"feature '{name}'", values)
                self._append_ids(self._features[name], numbers, lengths.get(name))
            elif group_name not in lengths:
                raise ValueError(
                    f"feature '{name}' is of group '{group_name}': want lengths of the group beside its ids"
                )

    def close(self) -> SplitFiles:
        """Close all files and return them; ValueError unless every column holds the same rows."""
        for file in (*self._files(), *self._event_files()):
            if not file.closed:
                file.sync()
                file.close()
        num_rows = self._checked_rows()
        events = {name: file for of in self._events.values() for name, file in of.files.items()}
        ids = self._ids | {name: events.pop(name) for name in self._group_of}
        return SplitFiles(
            num_rows,
            self._numerical.path if self._numerical else None,
            {name: file.path for name, file in self._columns.items()},
            {name: file.path for name, file in ids.items()},
            {name: file.path for name, file in self._offsets.items()},
            absent=self.absent,
            slices={name: file.path for name, file in self._slices.items()},
            moments={name: file.path for name, file in self._moments.items()},
            events={name: file.path for name, file in events.items()},
        )

    def mean_hotness(self, name: str, files: SplitFiles) -> float:
        """Return the mean ids per row of ragged feature `name`, as `Lengths.mean`. `files`: of the split, closed."""
        group = self.spec.group_of(name)
        if group is not None and group.pools is not None:
            return group.mean_events(files)
        return self._lengths[self._group_of.get(name, name)].mean

    def abandon(self) -> None:
        """Close all files without a check."""
        for file in (*self._files(), *self._event_files()):
            file.close()

    def checksums(self, root: Path) -> dict[str, dict[str, Any]]:
        """Return bytes and CRC-32 of each file, by its path below `root`."""
        files = (*self._files(), *self._event_files())
        return {file.path.relative_to(root).as_posix(): file.record for file in files}

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
        of_groups = *self._slices.values(), *self._moments.values()
        return [*columns, *numerical, *self._ids.values(), *self._offsets.values(), *of_groups]

    def _event_files(self) -> list[GrowingFile]:
        """Return the files of the split's own events, whose items are no rows."""
        return [
            file
            for name, events in self._events.items()
            if events is not self.logs.get(name)
            for file in events.files.values()
        ]

    def _append_group(
        self,
        group: SequenceGroup,
        ids: Mapping[str, np.ndarray],
        events: Mapping[str, np.ndarray],
        lengths: np.ndarray | None,
        slices: np.ndarray | None,
        moments: np.ndarray | None,
    ) -> None:
        """Append rows with events of their own, of `lengths`, or `slices` of a log."""
        name, log = group.name, self.logs.get(group.name)
        first_row = self._slices[name].num_rows

        def where(row: int) -> str:
            return f"row {first_row + row} of split '{self.split}'"

        if slices is None:
            assert group.pools is None, "pools are of a log"
            if name not in self._events:
                self._events[name] = EventWriter(
                    group, self._features, self._path_of, self.file_type
                )
            if lengths is None or lengths.ndim != 1:
                raise ValueError(f"group '{name}': want one length per row")
            ends = self._events[name].num_events + np.cumsum(lengths, dtype=np.int64)
            slices = np.stack([ends - lengths, ends], axis=1)
        else:
            if log is None or slices.shape[1:] != (2,):
                raise ValueError(
                    f"group '{name}': slices of shape {slices.shape}; want int64 [rows, 2], after append_events of the dataset"
                )
            self._events.setdefault(name, log)
            wrong = (slices[:, 0] < 0) | (slices[:, 1] > log.num_events)
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(
                    f"group '{name}': slice {slices[row].tolist()} at {where(row)} lies outside the {log.num_events} "
                    "events appended so far"
                )
        if (log is self._events[name]) != (lengths is None):
            raise ValueError(
                f"group '{name}': lengths and slices in split '{self.split}'; want one of the two"
            )
        counts = slices[:, 1] - slices[:, 0]
        if not group.pools and (long := group.wrong_length(counts)) is not None:
            raise ValueError(
                f"group '{name}': {counts[long]} events at {where(long)}; want 0 to max_length={group.max_length}"
            )
        if group.time is not None:
            if moments is None or moments.shape != counts.shape:
                got = "no moments" if moments is None else f"moments of shape {moments.shape}"
                raise ValueError(
                    f"group '{name}': {got}; want whole seconds, int64 [{len(counts)}]"
                )
            self._moments[name].append(moments.astype(MOMENT_DTYPE), len(counts))
        if lengths is not None:
            own = moments if group.time is not None else None
            self._events[name].append(ids, events, counts, own, where)
        self._slices[name].append(slices.astype(OFFSET_DTYPE), len(counts))
        self._lengths[name].add(counts)

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
                f"numerical feature '{names[column]}': {values[row, column]} at row {self._numerical.num_rows + row} of split "
                f"'{self.split}' is not finite as {dtype.name}; fill or scale it, or write float32"
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
        if feature.hotness is None:
            lengths = checked_lengths(name, values, lengths)
        elif lengths is not None:
            raise ValueError(
                f"feature '{name}' has {feature.hotness} ids in every row; leave its lengths out"
            )
        elif values.shape != (values.size // feature.hotness, feature.hotness) and (
            feature.hotness > 1 or values.ndim != 1
        ):
            raise ValueError(
                f"feature '{name}': got ids of shape {values.shape}, want [rows, {feature.hotness}]"
            )
        stored = checked_ids(
            feature,
            values,
            lengths,
            lambda row: f"row {file.num_rows + row} of split '{self.split}'",
        )
        num_before = file.tell() // feature.dtype.itemsize
        num_rows = len(values) if lengths is None else len(lengths)
        file.append(stored, num_rows)
        if lengths is not None:
            ends = num_before + np.cumsum(lengths, dtype=np.int64)
            self._offsets[name].append(ends.astype(OFFSET_DTYPE), num_rows)
            self._lengths[name].add(lengths)
