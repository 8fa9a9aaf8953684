"""Batches from the rows of a source: in memory of their own, or in slots that reader processes fill."""

from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from dataloading.batch import Batch
from dataloading.batch_memory import Slots
from dataloading.dataset.batch_layout import KEPT_LAYOUTS, Allocate, BatchLayout
from dataloading.dataset.source import BatchTarget, Columns, Source
from dataloading.partition import RankRows

TOO_LARGE = -1
"""Doublings of a batch that has no room in a slot."""
SLOT_DOUBLINGS = 1
"""Slots have room for twice the usual ids of ragged features."""


class SlotFullError(Exception):
    """A slot has no room for a batch."""


class BatchReader:
    """Reads rows of one split straight into the memory of a batch; the rows of raw keys stay undefined."""

    def __init__(self, source: Source, split: str, *, pin: bool) -> None:
        self._source, self._split, self._pin = source, split, pin
        self.num_ragged = sum(feature.hotness is None for feature in source.spec.categorical)
        self._layout = lru_cache(KEPT_LAYOUTS)(partial(BatchLayout.of, source.spec))

    def read(self, rows: RankRows) -> Batch:
        """Return a batch in memory of its own."""
        made: list[Tensor] = []

        def allocate(num_bytes: int) -> np.ndarray:
            made.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin))
            return made[0].numpy()

        columns = self._columns(rows, allocate)
        (memory,) = made
        return Batch(memory, columns.layout, rows.num_valid, rows.global_valid)

    def _columns(self, rows: RankRows, allocate: Allocate) -> Columns:
        into = BatchTarget(rows.padded_to, allocate)
        columns = self._source.read(self._split, rows.runs, into)
        if columns.global_rows is not None:
            columns.global_rows[:] = rows.global_rows
        return columns

    def read_into(self, slots: Slots, slot: int, rows: RankRows) -> None:
        """Read a batch into a slot, if it has room there."""
        memory = slots.memory(slot).numpy()

        def allocate(num_bytes: int) -> np.ndarray:
            if num_bytes > len(memory):
                raise SlotFullError
            return memory[:num_bytes]

        try:
            columns = self._columns(rows, allocate)
            slots.doublings[slot] = columns.layout.doublings or 0
        except SlotFullError:
            slots.doublings[slot] = TOO_LARGE

    def batch_in(self, slots: Slots, slot: int, rows: RankRows) -> Batch | None:
        """Return the batch that `read_into` has written to a slot; None if it had no room there."""
        doublings = tuple(slots.doublings[slot].tolist())
        if TOO_LARGE in doublings:
            return None
        key = (rows.num_valid, rows.padded_to, rows.global_valid)
        batches = slots.batches[slot]
        if key in batches and not any(doublings):
            return batches[key]
        layout = self._layout(rows.padded_to, doublings)
        batch = Batch(
            slots.memory(slot)[: layout.num_bytes], layout, rows.num_valid, rows.global_valid
        )
        if not layout.doublings:  # others are rare, and of many kinds
            batches[key] = batch
        return batch

    def slot_bytes(self, num_rows: int) -> int:
        """Return the size of a slot for batches of up to that many rows."""
        return self._layout(num_rows, (SLOT_DOUBLINGS,) * self.num_ragged).num_bytes
