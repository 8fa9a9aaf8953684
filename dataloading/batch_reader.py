"""Batches from the rows of a source: in memory of their own, or in slots that reader processes fill."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataloading.batch import Batch, aligned, fixed_layout, jagged
from dataloading.batch_memory import BatchMemory, OwnMemory, Slot, SlotFullError, Slots
from dataloading.dataset.source import Allocate, Columns, Source
from dataloading.partition import RankRows

ROOM = 1.5
"""Room of a slot for the ids of a ragged feature, times their expected number; `SPREAD` adds what small batches need."""
SPREAD = 8.0
"""Room in addition, times (mean ids per row + 1) and the square root of the rows."""
TOO_LARGE = -1
"""Number of ids that a reader process writes if its batch does not fit in a slot."""


class BatchReader:
    """Reads rows of one split straight into the tensors of a batch; the rows of raw keys stay undefined."""

    def __init__(self, source: Source, split: str, *, pin: bool) -> None:
        self._source, self._split, self._pin = source, split, pin
        self.is_ragged = any(feature.hotness is None for feature in source.spec.categorical)

    def read(self, rows: RankRows) -> Batch:
        """Return a batch in memory of its own."""
        memory = OwnMemory(pin=self._pin)
        columns = self._source.read(self._split, rows.runs, rows.padded_to, memory.allocate)
        lengths = None
        if self.is_ragged:
            shape = (len(columns.ids) * rows.padded_to,)
            lengths = memory.allocate(shape, columns.values.dtype)
            _fill_lengths(lengths, columns, rows.num_valid)
        return self._as_batch(columns, lengths, rows, memory)

    def read_into(self, memory: Slot, rows: RankRows) -> None:
        """Read a batch into a slot, if it has room there."""
        if not self.is_ragged:
            self._source.read(self._split, rows.runs, rows.padded_to, memory.allocate)
            return
        head = self._ragged_head(rows, memory.allocate)
        size = np.array([rows.num_valid, rows.padded_to])
        # Those of fixed hotness stay in the slot from batch to batch, if their sizes are alike.
        only_ragged = bool((head.size == size).all())
        head.size[:] = 0
        try:
            columns = self._source.read(self._split, rows.runs, rows.padded_to, memory.allocate)
        except SlotFullError:
            head.num_ids[:] = TOO_LARGE
            return
        head.num_ids[:] = [len(ids) for ids in columns.ids]
        _fill_lengths(head.lengths, columns, rows.num_valid, only_ragged=only_ragged)
        head.size[:] = size

    def batch_in(self, slots: Slots, slot: int, rows: RankRows) -> Batch | None:
        """Return the batch that `read_into` has written to a slot; None if it had no room there."""
        if self.is_ragged:
            memory = slots.memory(slot)
            head = self._ragged_head(rows, memory.allocate)
            if TOO_LARGE in head.num_ids:
                return None
            columns = self._columns(rows, head.num_ids.tolist(), memory.allocate)
            return self._as_batch(columns, head.lengths, rows, memory)
        key = (rows.num_valid, rows.padded_to, rows.global_valid)
        batches = slots.batches[slot]
        if key not in batches:
            memory = slots.memory(slot)
            num_ids = [rows.num_valid * (f.hotness or 0) for f in self._source.spec.categorical]
            columns = self._columns(rows, num_ids, memory.allocate)
            batch = self._as_batch(columns, None, rows, memory)
            batches[key] = replace(batch, memory=memory.taken)
        return batches[key]

    def slot_bytes(self, rows: RankRows) -> int:
        """Return the size of a slot for the largest batch, with room for the ids of ragged features."""
        size = rows.num_valid
        num_ids = [
            size * f.hotness
            if f.hotness is not None
            else math.ceil(ROOM * f.mean_hotness * size + SPREAD * (f.mean_hotness + 1) * size**0.5)
            for f in self._source.spec.categorical
        ]
        sizes: list[int] = []

        def count_bytes(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            array = np.empty(shape, dtype)
            sizes.append(aligned(array.nbytes))
            return array

        if self.is_ragged:
            self._ragged_head(rows, count_bytes)
        self._columns(rows, num_ids, count_bytes)
        return sum(sizes)

    def _ragged_head(self, rows: RankRows, allocate: Allocate) -> "_RaggedHead":
        spec = self._source.spec
        size = allocate((2,), np.dtype(np.int64))
        num_ids = allocate((len(spec.categorical),), np.dtype(np.int64))
        lengths = allocate((len(spec.categorical) * rows.padded_to,), spec.ids_dtype)
        return _RaggedHead(size, num_ids, lengths)

    def _columns(self, rows: RankRows, num_ids: Sequence[int], allocate: Allocate) -> Columns:
        """Return columns with the memory layout of those that the source fills."""
        return Columns.empty(self._source.spec, rows.num_valid, rows.padded_to, num_ids, allocate)

    def _as_batch(
        self, columns: Columns, lengths: np.ndarray | None, rows: RankRows, memory: BatchMemory
    ) -> Batch:
        """Return the batch of columns in `memory`, and of `lengths` if a feature is ragged."""
        features = self._source.spec.categorical
        keys = tuple(feature.name for feature in features)
        values = memory.tensor(columns.values)
        shared = None
        if lengths is not None:
            counts = [len(feature_ids) for feature_ids in columns.ids]
            ids = jagged(keys, values, memory.tensor(lengths), None, counts)
        else:
            fixed = tuple(feature.hotness or 0 for feature in features)
            shared = fixed_layout(keys, fixed, rows.num_valid, rows.padded_to, values.dtype)
            ids = shared.jagged(values)
        return Batch(
            memory.tensor(columns.numerical),
            memory.tensor(columns.labels),
            ids,
            rows.num_valid,
            rows.global_valid,
            shared,
            None if columns.weights is None else memory.tensor(columns.weights),
            None if columns.keep_rates is None else memory.tensor(columns.keep_rates),
            tuple(memory.tensor(numbers) for numbers in columns.events),
        )


@dataclass(frozen=True, slots=True)
class _RaggedHead:
    """Head of a slot with ragged features."""

    size: np.ndarray  # valid rows and rows of the batch before, int64 [2]
    num_ids: np.ndarray  # ids of each feature, int64 [F]
    lengths: np.ndarray  # ids of each row, feature after feature, [F * B]


def _fill_lengths(
    lengths: np.ndarray, columns: Columns, num_valid: int, *, only_ragged: bool = False
) -> None:
    """Write the number of ids of every row, feature after feature, [F * B], in the dtype of the ids."""
    for row, ids, ragged in zip(
        lengths.reshape(len(columns.ids), -1), columns.ids, columns.lengths, strict=True
    ):
        if ragged is not None:
            row[:] = ragged
        elif not only_ragged:
            row[:num_valid] = len(ids) // max(1, num_valid)
            row[num_valid:] = 0
