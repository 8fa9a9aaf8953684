"""Histories of the synthetic click stream: sessions of events before the moment of a row, a sequence group `history`.

Lengths are exponential, cut at `history_max_length`. From the latest event back, a session ends with probability
`SESSION_END`; within one, events repeat one id with probability `REPEATED`, else ids are drawn by the power law.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.schema import SyntheticConfig
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from dataloading.randomness import power_law, uniform

SESSION_END = 0.25
REPEATED = 0.5
GAP = 600
"""Most seconds between events of a session."""
SESSION_GAP = 86_400


@dataclass(frozen=True, slots=True)
class Events:
    """Events of rows, oldest first."""

    lengths: np.ndarray  # int64 [rows]
    ids: list[np.ndarray]  # flat, one array per feature of the group
    ages: np.ndarray  # whole seconds, float32, flat

    def of_rows(self, first: int, stop: int) -> "Events":
        begin, length = int(self.lengths[:first].sum()), int(self.lengths[first:stop].sum())
        part = slice(begin, begin + length)
        return Events(self.lengths[first:stop], [ids[part] for ids in self.ids], self.ages[part])


class SyntheticHistory:
    """Draws histories as functions of split and row.

    `liked`: features whose tables the ids of events are of. `key`: of a random stream, by its names.
    """

    def __init__(
        self, liked: Sequence[CategoricalFeature], stream: SyntheticConfig, key: Callable[..., int]
    ) -> None:
        self.features = tuple(
            replace(
                CategoricalFeature.of(
                    f"hist_{feature.name}", feature.cardinality, None, feature.name
                ),
                mean_hotness=stream.history_length,
            )
            for feature in liked
        )
        names = tuple(feature.name for feature in self.features)
        time = EventColumn("hist_time", np.dtype(np.int64))
        self.group = SequenceGroup("history", names, stream.history_max_length, (time,), time.name)
        self._exponent, self._key = stream.exponent, key
        low, high = 1e-3, 1e9
        for _ in range(100):
            self._scale = (low * high) ** 0.5
            mean = np.exp(-np.arange(1, self.group.max_length + 1) / self._scale).sum()
            too_long = mean > stream.history_length
            low, high = (low, self._scale) if too_long else (self._scale, high)

    def lengths(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Return the events of rows (uint64 [n]), int64 [n]."""
        numbers = -self._scale * np.log1p(-uniform(self._key(split, "history", "length"), rows))
        return np.minimum(numbers, self.group.max_length).astype(np.int64)

    def fill(self, split: str, rows: np.ndarray, events: Events) -> None:
        """Draw the ids and ages of the events of rows, uint64 [n]."""
        lengths = events.lengths
        total, ends = int(lengths.sum()), np.cumsum(lengths)
        later = np.repeat(ends, lengths) - 1 - np.arange(total)  # events of the row after it
        counters = np.repeat(rows, lengths) * np.uint64(self.group.max_length)
        counters += later.astype(np.uint64)

        def drawn(*names: object) -> np.ndarray:
            return uniform(self._key(split, "history", *names), counters)

        is_last = (drawn("session") < SESSION_END) | (later == 0)  # of its session
        # The nearest such event at or after each.
        last = np.where(is_last, np.arange(total), total)
        session = np.minimum.accumulate(last[::-1])[::-1]
        for index, (feature, ids) in enumerate(zip(self.features, events.ids, strict=True)):
            numbers = drawn("ids", index)
            shared = drawn("session", index)[session]
            np.copyto(numbers, shared, where=drawn("repeated", index) < REPEATED)
            ids[:] = power_law(numbers, feature.cardinality, self._exponent)
        gaps = (drawn("gap") * np.where(is_last, SESSION_GAP, GAP)).astype(np.int64) + 1
        since = np.append(np.cumsum(gaps[::-1])[::-1], 0)  # seconds to the moment of the last row
        events.ages[:] = since[:-1] - np.repeat(since[ends], lengths)
