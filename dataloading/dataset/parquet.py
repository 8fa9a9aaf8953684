"""Source of the rows of a Parquet dataset directory.

Parquet is read one row group at a time. A small split is decoded once and stays in memory. For a larger one,
rows are copied from decoded row groups. A shuffled epoch then reads complete row groups (`granule`). The last
few row groups are cached, so one that two batches share is decoded once.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock

import numpy as np

from dataloading.dataset.binary import BinarySource, SplitColumns
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.row_columns import LABEL_DTYPE
from dataloading.dataset.row_groups import RowGroup, SplitGroups
from dataloading.dataset.sequences import SequenceGroup, ages_of
from dataloading.dataset.source import BatchTarget, Columns, Keys, TimedSource
from dataloading.dataset.split_files import SplitFiles

KEPT_BYTES = 256 << 20
"""Bytes of decoded rows to keep: a complete split if it fits, else the latest row groups."""
LEAST_KEPT = 4


class ParquetSource(TimedSource):
    """Source of the rows of a dataset directory in Parquet.

    Ids, labels and missing values are checked when a row group is decoded. Safe to call from several threads.
    """

    def __init__(self, spec: FeatureSpec) -> None:
        self.spec = spec
        self._splits = {
            split: SplitGroups(files.parquet, files.absent) for split, files in spec.splits.items()
        }
        largest = max(split.granule for split in self._splits.values())
        ids = sum(feature.mean_hotness for feature in spec.categorical)
        means = {feature.name: feature.mean_hotness for feature in spec.categorical}
        events = sum(means[group.features[0]] * len(group.numbers) for group in spec.sequences)
        row_bytes = 4 * (len(spec.row_columns) + len(spec.numerical) + events)
        row_bytes += spec.ids_dtype.itemsize * ids
        self._num_kept = max(LEAST_KEPT, int(KEPT_BYTES / (largest * row_bytes)))
        self._groups = _GroupCache(self._num_kept)
        self._fits = {
            name: files.num_rows * row_bytes <= KEPT_BYTES for name, files in spec.splits.items()
        }
        self._in_memory: dict[str, BinarySource] = {}
        self._lock = Lock()

    def granule(self, split: str) -> int:
        """Return the rows of the largest row group, or 1 if the split stays in memory."""
        return 1 if self._fits[split] else self._splits[split].granule

    def before_fork(self, split: str, num_processes: int) -> None:
        """Decode a small split, which processes then share; for a larger one, divide the cache among the processes."""
        if self._fits[split]:
            self._whole(split)
        else:
            self._groups.keep(max(LEAST_KEPT, self._num_kept // num_processes))

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        if self._fits[split]:
            return self._whole(split).read(split, runs, into)
        pieces = self._pieces(split, runs)
        num_rows = int((runs[:, 1] - runs[:, 0]).sum())
        num_ids = [
            num_rows * f.hotness if f.hotness else sum(_num_ids(g, i, rows) for g, rows in pieces)
            for i, f in enumerate(self.spec.categorical)
        ]
        out = Columns.empty(self.spec, num_rows, num_ids, into)
        at = 0
        ids_at = [0] * len(num_ids)
        names = [feature.name for feature in self.spec.categorical]
        of_groups = [(names.index(g.features[0]), g) for g in self.spec.sequences]
        for group, rows in pieces:
            span = slice(at, at + rows.stop - rows.start)
            for (_, values), numbers in zip(out.row_columns(self.spec), group.columns, strict=True):
                values[span] = numbers[rows]
            for position, numbers in enumerate(group.numerical):
                out.numerical[span, position] = numbers[rows]
            for index, feature in enumerate(self.spec.categorical):
                ends = group.offsets[index]
                if ends is None:
                    assert feature.hotness is not None
                    items = slice(rows.start * feature.hotness, rows.stop * feature.hotness)
                else:
                    items = slice(ends[rows.start], ends[rows.stop])
                    out.lengths[index][span] = np.diff(ends[rows.start : rows.stop + 1])  # type: ignore[index]
                target = slice(ids_at[index], ids_at[index] + items.stop - items.start)
                if not feature.is_dynamic:
                    out.ids[index][target] = group.ids[index][items]
                ids_at[index] = target.stop
            of_events = iter(zip(out.events, group.events, strict=True))
            for index, sequence in of_groups:
                ends = group.offsets[index]
                for column in sequence.numbers:
                    events, of_group = next(of_events)
                    part = of_group[ends[rows.start] : ends[rows.stop]]  # type: ignore[index]
                    if column.name == sequence.time:
                        lengths = np.diff(ends[rows.start : rows.stop + 1])  # type: ignore[index]
                        part = ages_of(part, group.moments[sequence.name][rows], lengths)
                    events[ids_at[index] - len(part) : ids_at[index]] = part
            at = span.stop
        return out

    def event_counts(self, split: str, runs: np.ndarray) -> np.ndarray | None:
        # Else every rank would decode the row groups of all ranks.
        return self._whole(split).event_counts(split, runs) if self._fits[split] else None

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        if self._fits[split]:
            return self._whole(split).read_keys(split, runs, feature)
        values, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for group, rows in self._pieces(split, runs):
            ends, hotness = group.offsets[feature], self.spec.categorical[feature].hotness
            if ends is None:
                assert hotness is not None
                items = slice(rows.start * hotness, rows.stop * hotness)
            else:
                items = slice(ends[rows.start], ends[rows.stop])
                lengths.append(np.diff(ends[rows.start : rows.stop + 1]))
            values.append(group.ids[feature][items])
        is_ragged = self.spec.categorical[feature].hotness is None
        return Keys.of(
            np.concatenate(values).astype(np.int64, copy=False),
            np.concatenate(lengths) if is_ragged else None,
        )

    def read_times(
        self, split: str, runs: np.ndarray, group: SequenceGroup
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._fits[split]:
            return self._whole(split).read_times(split, runs, group)
        names = [feature.name for feature in self.spec.categorical]
        ends_at = names.index(group.features[0])
        time_at = [column.name for column in self.spec.event_columns].index(group.time or "")
        times, moments = [], []
        for rows_of_group, rows in self._pieces(split, runs):
            ends = rows_of_group.offsets[ends_at]
            assert ends is not None
            times.append(rows_of_group.events[time_at][ends[rows.start] : ends[rows.stop]])
            moments.append(rows_of_group.moments[group.name][rows])
        return np.concatenate(times), np.concatenate(moments)

    def _pieces(self, split: str, runs: np.ndarray) -> list[tuple[RowGroup, slice]]:
        files = self._splits[split]
        return [
            (self._groups.get((split, group), partial(files.decode, self.spec, group)), rows)
            for first, last in runs.tolist()
            for group, rows in files.cut(first, last)
        ]

    def _whole(self, split: str) -> BinarySource:
        """Return a split in memory, decoded on first use."""
        with self._lock:
            if split not in self._in_memory:
                files = self._splits[split]
                groups = [files.decode(self.spec, group) for group in range(files.num_groups)]
                columns = joined(self.spec, groups, self.spec.splits[split])
                self._in_memory[split] = BinarySource(self.spec, {split: columns})
            return self._in_memory[split]


def joined(spec: FeatureSpec, groups: list[RowGroup], files: SplitFiles) -> SplitColumns:
    numerical = None
    if spec.numerical:
        columns = [np.concatenate(c) for c in zip(*(g.numerical for g in groups), strict=True)]
        numerical = np.stack(columns, axis=1).astype(np.float32)
    ids, offsets = {}, {}
    for index, feature in enumerate(spec.categorical):
        dtype = feature.dtype if feature.is_dynamic else spec.ids_dtype
        flat = np.concatenate([group.ids[index] for group in groups]).astype(dtype)
        single = feature.hotness is None or feature.hotness == 1
        ids[feature.name] = flat if single else flat.reshape(-1, feature.hotness or 1)
        if feature.hotness is None:
            bounds = [group.offsets[index] for group in groups]
            lengths = np.concatenate([np.diff(ends) for ends in bounds if ends is not None])
            offsets[feature.name] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    slices = {
        group.name: np.stack([offsets[group.features[0]][:-1], offsets[group.features[0]][1:]], 1)
        for group in spec.sequences
    }
    names = [column.name for column in spec.event_columns]
    numbers = zip(*(group.events for group in groups), strict=True) if names else ()
    events = {name: np.concatenate(parts) for name, parts in zip(names, numbers, strict=True)}
    row_columns = {
        column.name: np.concatenate([group.columns[index] for group in groups]).astype(
            LABEL_DTYPE if column.is_binary else np.float32
        )
        for index, column in enumerate(spec.row_columns)
    }
    moments = {
        group.name: np.concatenate([rows.moments[group.name] for rows in groups])
        for group in spec.sequences
        if group.time is not None and group.name not in files.absent
    }
    return SplitColumns(row_columns, numerical, ids, offsets, files, slices, moments, events)


def _num_ids(group: RowGroup, index: int, rows: slice) -> int:
    ends = group.offsets[index]
    assert ends is not None
    return int(ends[rows.stop] - ends[rows.start])


class _GroupCache:
    """Cache of the latest row groups; concurrent requests decode a row group once."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._groups: OrderedDict[tuple[str, int], Future[RowGroup]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: tuple[str, int], decode: Callable[[], RowGroup]) -> RowGroup:
        with self._lock:
            kept = self._groups.pop(key, None)
            group = Future() if kept is None else kept
            self._groups[key] = group
            self._drop_oldest()
        if kept is None:
            try:
                group.set_result(decode())
            except BaseException as error:
                group.set_exception(error)
        return group.result()

    def keep(self, num_groups: int) -> None:
        with self._lock:
            self._num_groups = num_groups
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._groups) > self._num_groups:
            self._groups.popitem(last=False)
