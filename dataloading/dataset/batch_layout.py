"""Shapes of a batch, which are those of the training step: all columns in one memory, with a capacity for ragged features."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from dataloading.dataset.feature_spec import FeatureSpec

# B: rows of a rank

ALIGNMENT = 256
"""Alignment of columns in one memory, in bytes."""
NO_ID = -1
CAPACITY = 1.125
"""Capacity for the ids of a ragged feature in a batch, over their expected number; `SPREAD` adds what small batches need."""
SPREAD = 6.0


@dataclass(frozen=True, slots=True)
class IdCount:
    """Ids of a feature in a batch of one rank."""

    hotness: int  # ids per row, 0 if the feature is ragged
    capacity: int  # ids for which a batch has room

    def sent_size(self, batch_size: int) -> int:
        """Return the numbers that a rank sends: the ids, and the length of each row of a ragged feature."""
        return self.capacity + (0 if self.hotness else batch_size)


KEPT_LAYOUTS = 64
"""Layouts and counts of ids that are kept; those of batches above the usual capacity are rare, but of many kinds."""
Doublings = tuple[int, ...]
"""How often the usual capacity of each ragged feature is doubled, in the spec's order; empty if none is."""


def id_counts(spec: FeatureSpec, batch_size: int, doublings: Doublings = ()) -> dict[str, IdCount]:
    """Return the ids of each feature in a batch of one rank.

    A ragged feature has room for its mean number of ids per row, an eighth more, and six standard deviations of a sum of
    `batch_size` rows whose lengths are spread as their mean; `doublings` doubles that.
    """
    counts, each = {}, iter(doublings)
    for feature in spec.categorical:
        if feature.hotness:
            counts[feature.name] = IdCount(feature.hotness, batch_size * feature.hotness)
        else:
            mean = feature.mean_hotness
            capacity = CAPACITY * mean * batch_size + SPREAD * (mean + 1) * batch_size**0.5
            counts[feature.name] = IdCount(0, max(math.ceil(capacity), 1) << next(each, 0))
    return counts


def first_ids(counts: Mapping[str, IdCount], batch_size: int) -> dict[str, int]:
    """Return where each feature's ids begin among those of a batch; lengths of the rows of a ragged one lie behind its ids."""
    sizes = (count.sent_size(batch_size) for count in counts.values())
    return dict(zip(counts, accumulate(sizes, initial=0), strict=False))


@dataclass(frozen=True, slots=True)
class Column:
    first: int  # byte
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.first + math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: np.ndarray) -> np.ndarray:
        """View the column in a memory, uint8."""
        return memory[self.first : self.end].view(self.dtype).reshape(self.shape)


class BatchLayout:
    """Columns of a batch of `rows` rows, and the ids of each feature in `ids`: they begin at `firsts`.

    A feature of fixed hotness has [B, hotness] ids, those of padding rows 0, which every table has. A ragged one has as many as
    its capacity, `NO_ID` behind those of the rows, and then the ids of each row, [B]. The numbers of events of a sequence group
    have the capacity of its features, with zeros behind the events.
    """

    def __init__(
        self, spec: FeatureSpec, rows: int, counts: Mapping[str, IdCount], doublings: Doublings = ()
    ) -> None:
        self.spec, self.rows, self.counts, self.doublings = spec, rows, counts, doublings
        self.firsts = first_ids(counts, rows)
        size = sum(count.sent_size(rows) for count in counts.values())
        self.num_bytes, self.columns = 0, list[Column]()
        several = (len(spec.labels),) if len(spec.labels) > 1 else ()
        self.numerical = self._add(rows, len(spec.numerical))
        self.labels = self._add(rows, *several)
        self.ids = self._add(size, dtype=spec.ids_dtype)
        self.weights = None if spec.weight is None else self._add(rows)
        self.keep_rates = None if spec.keep_rate is None else self._add(rows)
        self.teachers = {column.name: self._add(rows) for column in spec.teachers}
        # Ranks have other rows than consecutive ones only where rows have events.
        dtype = np.dtype(np.int32)
        self.global_rows = self._add(rows, dtype=dtype) if spec.sequences else None
        self.events = [
            self._add(counts[group.features[0]].capacity)
            for group in spec.sequences
            for _ in group.numbers
        ]

    def _add(self, *shape: int, dtype: np.dtype = np.dtype(np.float32)) -> Column:  # noqa: B008
        column = Column(self.num_bytes, shape, dtype)
        self.columns.append(column)
        self.num_bytes = -(-column.end // ALIGNMENT) * ALIGNMENT
        return column

    @classmethod
    def of(cls, spec: FeatureSpec, rows: int, doublings: Doublings = ()) -> "BatchLayout":
        """Return the layout that a step expects, with capacities doubled that often."""
        return cls(
            spec, rows, id_counts(spec, rows, doublings), doublings if any(doublings) else ()
        )

    @classmethod
    def holding(cls, spec: FeatureSpec, rows: int, num_ids: Sequence[int]) -> "BatchLayout":
        """Return the smallest of those that have room for so many ids of each feature."""
        usual = zip(num_ids, id_counts(spec, rows).values(), strict=True)
        times = [-(-used // count.capacity) for used, count in usual if not count.hotness]
        return cls.of(spec, rows, tuple(max(each - 1, 0).bit_length() for each in times))

    @classmethod
    def exact(cls, spec: FeatureSpec, rows: int, num_ids: Sequence[int]) -> "BatchLayout":
        """Return the layout of rows without padding, for no step."""
        counts = {
            feature.name: IdCount(feature.hotness or 0, used)
            for feature, used in zip(spec.categorical, num_ids, strict=True)
        }
        return cls(spec, rows, counts)


Allocate = Callable[[int], np.ndarray]
"""Number of bytes -> memory of a batch, uint8, not necessarily zeroed. The loader passes a function that returns pinned
memory, or memory shared with a reader process."""
