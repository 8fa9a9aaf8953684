"""Rows of a dataset as columns in host memory, and the interface of their sources."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataloading.dataset.batch_layout import NO_ID, Allocate, BatchLayout, Column
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.sequences import SequenceGroup

EPOCH_ROWS = 1 << 44
"""Added to the rows of every later epoch, where a source draws them anew."""


def own_memory(num_bytes: int) -> np.ndarray:
    return np.empty(num_bytes, np.uint8)


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """One memory for a batch, laid out as a step reads it: its rows, padding included, and what returns so many bytes."""

    rows: int
    allocate: Allocate = own_memory


@dataclass(slots=True)
class Columns:
    """B rows as arrays. The last rows may be padding: all zero, without ids."""

    layout: BatchLayout
    numerical: np.ndarray  # float32 [B, num_numerical]; (B, 0) in a dataset without numericals
    labels: np.ndarray  # float32 [B]; [B, labels] with several
    # per feature, in the spec's order: flat [num_valid * hotness] or [sum of lengths], int32 (int64
    # if any table has 2**31 rows or more)
    ids: list[np.ndarray]
    # of the dtype of ids, [B], for ragged features, None where the hotness is fixed
    lengths: list[np.ndarray | None]
    weights: np.ndarray | None  # float32 [B], 0 of padding rows; None without such a column
    keep_rates: np.ndarray | None  # float32 [B], 1 of padding rows; None without such a column
    events: list[np.ndarray]  # float32 [events of the group], by `FeatureSpec.event_columns`
    teachers: list[np.ndarray]  # float32 [B] each, 0 of padding rows, by `FeatureSpec.teachers`
    # int32 [B], of `BatchLayout`: the loader knows them
    global_rows: np.ndarray | None = None

    @classmethod
    def empty(
        cls,
        spec: FeatureSpec,
        num_valid: int,
        num_ids: Sequence[int],
        into: BatchTarget | None = None,
    ) -> "Columns":
        """Return columns to fill: valid rows and ids are undefined, padding is set.

        Without a batch to lie in they lie one by one and have no padding.
        """
        if into is None:
            layout, memory = BatchLayout.exact(spec, num_valid, num_ids), None
        else:
            layout = BatchLayout.holding(spec, into.rows, num_ids)
            memory = into.allocate(layout.num_bytes)

        def view(column: Column) -> np.ndarray:
            return np.empty(column.shape, column.dtype) if memory is None else column.of(memory)

        def padded(column: Column, value: float = 0) -> np.ndarray:
            numbers = view(column)
            numbers[num_valid:] = value
            return numbers

        flat, ids, lengths = view(layout.ids), [], []
        for first, count, used in zip(
            layout.firsts.values(), layout.counts.values(), num_ids, strict=True
        ):
            end = first + count.capacity
            ids.append(flat[first : first + used])
            flat[first + used : end] = 0 if count.hotness else NO_ID
            of_rows = None if count.hotness else flat[end : end + layout.rows]
            if of_rows is not None:
                of_rows[num_valid:] = 0
            lengths.append(of_rows)
        used_of = dict(zip(layout.counts, num_ids, strict=True))
        used_events = [
            used_of[group.features[0]] for group in spec.sequences for _ in group.numbers
        ]
        events = []
        for column, used in zip(layout.events, used_events, strict=True):
            numbers = view(column)
            numbers[used:] = 0
            events.append(numbers[:used])
        return cls(
            layout,
            padded(layout.numerical),
            padded(layout.labels),
            ids,
            lengths,
            None if layout.weights is None else padded(layout.weights),
            None if layout.keep_rates is None else padded(layout.keep_rates, 1),
            events,
            [padded(column) for column in layout.teachers.values()],
            None if layout.global_rows is None else view(layout.global_rows),
        )

    def row_columns(self, spec: FeatureSpec) -> list[tuple[RowColumn, np.ndarray]]:
        """Return each of `spec.row_columns` with its numbers, a view [B] that may be filled."""
        labels = [self.labels] if self.labels.ndim == 1 else [*self.labels.T]
        single = [numbers for numbers in (self.weights, self.keep_rates) if numbers is not None]
        return list(zip(spec.row_columns, [*labels, *single, *self.teachers], strict=True))


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one feature with `vocabulary: dynamic` in some rows."""

    column: np.ndarray  # int64 [N], of which the keys are parts; 0 is no key
    runs: np.ndarray  # the parts, int64 [K, 2], half-open, in the order of the rows
    # keys per row, int64 [rows], of a ragged feature; None where the hotness is fixed
    lengths: np.ndarray | None

    @classmethod
    def of(cls, values: np.ndarray, lengths: np.ndarray | None = None) -> "Keys":
        """Return keys, int64 [N], that are all of the rows', row after row."""
        return cls(values, np.array([[0, len(values)]]), lengths)

    def values(self) -> np.ndarray:
        """Return the keys, row after row, int64 [keys]; not always a copy."""
        if len(self.runs) == 1:
            return self.column[self.runs[0, 0] : self.runs[0, 1]]
        parts = [self.column[first:last] for first, last in self.runs.tolist()]
        return np.concatenate([np.zeros(0, np.int64), *parts])


class Source(ABC):
    """Source of rows: a dataset directory, a synthetic stream, or another source with a difference."""

    spec: FeatureSpec  # of the dataset
    # whether a row differs by epoch: `read` is given rows with `EPOCH_ROWS` more per epoch
    draws_anew = False

    def num_rows(self, split: str) -> int:
        """Return the rows of `split`; ValueError if there is no such split."""
        return self.spec.rows_of(split)

    def granule(self, split: str) -> int:
        """Return the number of consecutive rows of `split` that are read together even if only one is needed.

        The loader rounds the blocks of a shuffle up to a multiple of it.
        """
        return 1

    def grows(self, split: str) -> bool:
        """Return whether rows are added to `split` while it is read."""
        return False

    def before_fork(self, split: str, num_processes: int) -> None:  # noqa: B027, most decode nothing
        """Decode the data of a split that `num_processes` processes, forked next, would otherwise each decode."""

    @abstractmethod
    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        """Return the rows of `runs`, in that order; safe to call from several threads.

        The ids of features with `vocabulary: dynamic` are undefined; `read_keys` returns their keys. `runs`: int64 [K, 2],
        half-open row ranges. `into`: as of `Columns.empty`. Raises ValueError: an id outside its table, a value that is missing
        or not finite, or an invalid label, weight or keep rate; the message names feature, value, row and file.
        """

    def event_counts(self, split: str, runs: np.ndarray) -> np.ndarray | None:
        """Return about how many events each row of `runs` has, int64 [rows]; None if all have as many, or it takes long to tell.

        Lengths that are damaged are returned as they are; `read` refuses them.
        """
        return None

    @abstractmethod
    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        """Return the keys of the rows of `runs`, in that order, of a feature with `vocabulary: dynamic`."""


class TimedSource(Source):
    """Source of rows whose times can be read as they are stored, to write them again."""

    @abstractmethod
    def read_times(
        self, split: str, runs: np.ndarray, group: SequenceGroup
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the times of the events of the rows of `runs`, flat, and the moments of the rows, of a group with a time."""


class DerivedSource(Source):
    """Rows of another source, which a subclass changes."""

    def __init__(self, source: Source) -> None:
        self.spec = source.spec
        self.draws_anew = source.draws_anew
        self._source = source

    def num_rows(self, split: str) -> int:
        return self._source.num_rows(split)

    def granule(self, split: str) -> int:
        return self._source.granule(split)

    def before_fork(self, split: str, num_processes: int) -> None:
        self._source.before_fork(split, num_processes)

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        return self._source.read(*self._stored(split, runs), into)

    def event_counts(self, split: str, runs: np.ndarray) -> np.ndarray | None:
        return self._source.event_counts(*self._stored(split, runs))

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        return self._source.read_keys(*self._stored(split, runs), feature)

    def _stored(self, split: str, runs: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the split and the runs of the other source that rows are read from."""
        return split, runs


def joined(
    spec: FeatureSpec, pieces: Sequence[Columns], into: BatchTarget | None = None
) -> Columns:
    """Return the rows of `pieces`, which have no padding, one piece after another; the rest as of `Columns.empty`."""
    num_ids = [sum(map(len, ids)) for ids in zip(*(piece.ids for piece in pieces), strict=True)]
    num_rows = sum(len(piece.labels) for piece in pieces)
    out = Columns.empty(spec, num_rows, num_ids, into)

    def arrays(columns: Columns) -> list[np.ndarray]:
        single = [numbers for _, numbers in columns.row_columns(spec)]
        lengths = [counts for counts in columns.lengths if counts is not None]
        return [columns.numerical, *single, *columns.ids, *lengths, *columns.events]

    for target, *own in zip(arrays(out), *map(arrays, pieces), strict=True):
        np.concatenate(own, out=target[: sum(map(len, own))])
    return out


def read_with_keys(source: Source, split: str, runs: np.ndarray) -> Columns:
    """Return the rows of `runs`; the ids of features with `vocabulary: dynamic` are their keys, int64."""
    columns = source.read(split, runs)
    for index, feature in enumerate(source.spec.categorical):
        if feature.is_dynamic:
            columns.ids[index] = source.read_keys(split, runs, index).values()
    return columns
