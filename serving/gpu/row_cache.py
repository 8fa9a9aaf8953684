"""Rows of host memory move to the GPU while requests ask for them, each in exchange for a row that is asked for less often.

A row lies at a place of its table; the places on the GPU come first. A move exchanges two rows and their places between two
batches, so every lookup finds what it asks for, with the same bits. Which rows move follows from samples of the requests, as in
GCLOCK (Smith, 1978, section 3): a hand goes round the places on the GPU, and what host memory has of a sample takes the places of
the rows near the hand that have been asked for less. Within a round all counts are halved.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from serving.gpu.tables import DeviceTable
from serving.inference.model import Sampled
from serving.inference.model_rows import Rows

SAMPLED_ROWS = 1024
"""Rows of a batch that are a sample, the first ones of each request, and ids of a ragged feature."""
REST = 49
"""Time between two samples, as a multiple of that for the first: moves take 2 % of the time at most."""
PLACES_PER_ROW = 8
"""Places near the hand, for each row that wants one."""
MOST_USES = 255


class RowCache:
    """The moves of all tables with rows in host memory; `columns` are those of each feature's ids, none of ragged ones."""

    def __init__(self, tables: Sequence[DeviceTable], columns: Mapping[str, slice]) -> None:
        self._tables = [_MovingRows(table) for table in tables if table.cold is not None]
        self._columns = columns
        self._next_s = 0.0
        self.sampled = Sampled()

    def learn(self, parts: Sequence[Rows]) -> None:
        """Take a sample of a batch whose scores are there, if it is time; move rows."""
        started = time.monotonic()
        if not self._tables or started < self._next_s:
            return
        of_each = max(1, SAMPLED_ROWS // len(parts))
        rows = Rows.joined([part.part(0, of_each) for part in parts])
        for table in self._tables:
            ids = [
                rows.ids[:, self._columns[name]].reshape(-1)
                if name in self._columns
                else rows.ragged[name].values[:SAMPLED_ROWS]
                for name in table.features
            ]
            lookups, hits = table.learn(torch.cat(ids).numpy())
            self.sampled.lookups += lookups
            self.sampled.hits += hits
        now = time.monotonic()
        self._next_s = now + REST * (now - started)


class _MovingRows:
    """A table with rows in host memory: where they are, and how often samples have had them."""

    def __init__(self, table: DeviceTable) -> None:
        self._table, self.features = table, table.declared.features
        num_rows = table.declared.rows
        self._place = np.arange(num_rows, dtype=np.int32)  # of each row
        self._row_at = np.arange(len(table.hot), dtype=np.int32)  # at each place on the GPU
        self._uses = np.zeros(num_rows, np.uint8)
        self._hand = 0

    def learn(self, ids: np.ndarray) -> tuple[int, int]:
        """Count ids and move rows; return how many ids the table has, and how many of their rows were on the GPU."""
        rows, counts = np.unique(ids[(ids >= 0) & (ids < len(self._place))], return_counts=True)
        self._uses[rows] = np.minimum(self._uses[rows] + counts, MOST_USES)
        is_cold = self._place[rows] >= len(self._row_at)
        self._move_near_hand(rows[is_cold])
        return int(counts.sum()), int(counts[~is_cold].sum())

    def _move_near_hand(self, wanted: np.ndarray) -> None:
        num_hot = len(self._row_at)
        end = min(self._hand + PLACES_PER_ROW * len(wanted), num_hot)
        near = self._row_at[self._hand : end]
        wanted = wanted[np.argsort(-self._uses[wanted].astype(int), kind="stable")][: len(near)]
        near = near[np.argsort(self._uses[near], kind="stable")][: len(wanted)]
        is_more = self._uses[wanted] > self._uses[near]
        if is_more.any():
            self._exchange(wanted[is_more], near[is_more])
        # As large a part of all rows as the hand has passed of the places.
        first, last = (len(self._uses) * at // num_hot for at in (self._hand, end))
        self._uses[first:last] >>= 1
        self._hand = end % num_hot

    def _exchange(self, cold_rows: np.ndarray, hot_rows: np.ndarray) -> None:
        """Exchange places, and what is there."""
        table, num_hot = self._table, len(self._row_at)
        assert table.cold is not None, "rows are in host memory"
        assert table.places is not None
        hot, cold = self._place[hot_rows], self._place[cold_rows]
        device = table.hot.device
        on_gpu = torch.from_numpy(hot).to(device)
        in_host = torch.from_numpy(cold - num_hot)
        rows = table.cold[in_host]
        table.cold[in_host] = table.hot[on_gpu].cpu()
        table.hot[on_gpu] = rows.to(device)
        places = torch.from_numpy(np.concatenate([hot, cold])).to(device)
        if table.scale is not None:
            table.scale[places] = table.scale[places.roll(len(hot))]
        moved = torch.from_numpy(np.concatenate([cold_rows, hot_rows])).to(device)
        table.places[moved] = places
        self._place[cold_rows], self._place[hot_rows] = hot, cold
        self._row_at[hot] = cold_rows
