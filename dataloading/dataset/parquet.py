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
            sum(_size(group.items(feature.name, rows, feature.hotness)) for group, rows in pieces)
            for feature in self.spec.categorical
        ]
        out = Columns.empty(self.spec, num_rows, num_ids, into)
        at = 0
        ids_at = {feature.name: 0 for feature in self.spec.categorical}
        for group, rows in pieces:
            span = slice(at, at + rows.stop - rows.start)
            for (_, values), numbers in zip(out.row_columns(self.spec), group.columns, strict=True):
                values[span] = numbers[rows]
            for position, numbers in enumerate(group.numerical):
                out.numerical[span, position] = numbers[rows]
            for index, feature in enumerate(self.spec.categorical):
                name, lengths = feature.name, out.lengths[index]
                items = group.items(name, rows, feature.hotness)
                if lengths is not None:
                    lengths[span] = group.lengths(name, rows)
                target = slice(ids_at[name], ids_at[name] + _size(items))
                if not feature.is_dynamic:
                    out.ids[index][target] = group.ids[index][items]
                ids_at[name] = target.stop
            of_events = iter(zip(out.events, group.events, strict=True))
            for sequence in self.spec.sequences:
                name = sequence.features[0]
                for column in sequence.numbers:
                    events, of_group = next(of_events)
                    part = of_group[group.items(name, rows)]
                    if column.name == sequence.time:
                        moments = group.moments[sequence.name][rows]
                        part = ages_of(part, moments, group.lengths(name, rows))
                    events[ids_at[name] - len(part) : ids_at[name]] = part
            at = span.stop
        return out

    def event_counts(self, split: str, runs: np.ndarray) -> np.ndarray | None:
        # Else every rank would decode the row groups of all ranks.
        return self._whole(split).event_counts(split, runs) if self._fits[split] else None

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        if self._fits[split]:
            return self._whole(split).read_keys(split, runs, feature)
        name, hotness = self.spec.categorical[feature].name, self.spec.categorical[feature].hotness
        values, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for group, rows in self._pieces(split, runs):
            values.append(group.ids[feature][group.items(name, rows, hotness)])
            if hotness is None:
                lengths.append(group.lengths(name, rows))
        return Keys.of(
            np.concatenate(values).astype(np.int64, copy=False),
            np.concatenate(lengths) if hotness is None else None,
        )

    def read_times(
        self, split: str, runs: np.ndarray, group: SequenceGroup
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._fits[split]:
            return self._whole(split).read_times(split, runs, group)
        time_at = [column.name for column in self.spec.event_columns].index(group.time or "")
        times, moments = [], []
        for rows_of_group, rows in self._pieces(split, runs):
            items = rows_of_group.items(group.features[0], rows)
            times.append(rows_of_group.events[time_at][items])
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
            lengths = np.concatenate([np.diff(group.offsets[feature.name]) for group in groups])
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


def _size(items: slice) -> int:
    return int(items.stop - items.start)


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
