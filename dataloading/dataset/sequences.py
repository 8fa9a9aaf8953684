"""Sequence groups of a dataset: events of a user before the moment of a row, oldest first."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dataloading.dataset.split_files import OFFSET_DTYPE, Lengths, SplitFiles, expect, mapped

EVENT_DTYPES = ("int8", "int16", "int32", "int64", "float16", "float32")
MOMENT_DTYPE = np.dtype("<i8")
MOST_EVENTS = 2**31 - 1
"""Lengths of rows are int32."""
POOLED_ROWS = 10_000
"""Most rows whose events in pools are counted for their mean."""
EVENTS = "events"
"""Directory of events that lie once, for all splits."""


@dataclass(frozen=True, slots=True)
class EventColumn:
    name: str
    dtype: np.dtype  # on disk: int8 to int64, float16 or float32; float32 in a batch

    @classmethod
    def of(cls, name: str, dtype: str) -> "EventColumn":
        """Return a column by the name of its dtype; ValueError if it is none of `EVENT_DTYPES`."""
        wanted = f"one of {', '.join(EVENT_DTYPES)}"
        expect(dtype in EVENT_DTYPES, f"feature_spec.{name}.dtype", dtype, wanted)
        return cls(name, np.dtype(dtype))


@dataclass(frozen=True, slots=True)
class EventPools:
    """Kinds of events; a row sees the last ones of each in its slice, and none of another kind."""

    of: str  # which of the group's numbers is the kind of an event
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Features and numbers of the same events, so a row has equally many of each."""

    name: str
    # names of ragged categorical features, the ids of an event; at least one
    features: tuple[str, ...]
    max_length: int  # no row has more events
    numbers: tuple[EventColumn, ...] = ()
    # which of `numbers` is the time of an event, in whole seconds on disk. A batch has its age before
    # the moment of the row instead, which is above 0: no event is of the row's moment or later
    time: str | None = None
    # each of them has an equal share of `max_length`; None: a row sees its whole slice of a log
    pools: EventPools | None = None
    # which of `numbers` a model weighs vectors by (`model.event_weights`): none may be below 0
    weight: str | None = None

    def __post_init__(self) -> None:
        where, most = f"sequence_spec.{self.name}", self.max_length
        expect(len(self.features) > 0, f"{where}.features", [], "at least one categorical feature")
        is_count = isinstance(most, int) and not isinstance(most, bool)
        good = is_count and 1 <= most <= MOST_EVENTS
        expect(good, f"{where}.max_length", most, f"an integer from 1 to {MOST_EVENTS}")
        dtypes = {column.name: column.dtype for column in self.numbers}
        expect(
            self.time is None or dtypes.get(self.time) == np.int64,
            f"{where}.time",
            self.time,
            f"an int64 column of its numbers ({', '.join(dtypes) or 'it has none'})",
        )
        if self.pools is not None:
            of, values = self.pools.of, self.pools.values
            kind = f"one of its numbers ({', '.join(dtypes) or 'it has none'})"
            expect(of in dtypes and of != self.time, f"{where}.pools.of", of, kind)
            few = f"1 to max_length={most} different integers"
            good = all(type(value) is int for value in values) and len({*values}) == len(values)
            expect(good and 1 <= len(values) <= most, f"{where}.pools.values", values, few)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.features, *(column.name for column in self.numbers))

    def pooled(
        self, kinds: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the events that rows see in their slices of a log, int64 [events], and how many each row does, int64 [rows].

        `kinds`: of all events of the log.
        """
        assert self.pools is not None
        most = self.max_length // len(self.pools.values)
        seen = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            of_slice = kinds[start:end]
            last = [np.flatnonzero(of_slice == kind)[-most:] for kind in self.pools.values]
            seen.append(np.sort(np.concatenate(last)) + start)
        lengths = np.array([len(events) for events in seen], np.int64)
        return np.concatenate([np.empty(0, np.int64), *seen]), lengths

    def mean_events(self, files: SplitFiles) -> float:
        """Return the mean events of a row, as `Lengths.mean`; with pools, that of evenly spread rows."""
        if self.pools is None:
            return files.mean_hotness(self.name)
        slices = mapped(files.slices[self.name], OFFSET_DTYPE).reshape(-1, 2)
        starts, ends = slices[:: len(slices) // POOLED_ROWS + 1].T
        [dtype] = [column.dtype for column in self.numbers if column.name == self.pools.of]
        kinds = mapped(files.events[self.pools.of], dtype)
        lengths = Lengths()
        lengths.add(self.pooled(kinds, starts, ends)[1])
        return lengths.mean

    def wrong_length(self, lengths: np.ndarray) -> int | None:
        """Return the first row with more than `max_length` events, or fewer than 0."""
        wrong = (lengths < 0) | (lengths > self.max_length)
        return int(wrong.argmax()) if wrong.any() else None

    def checked(
        self,
        column: EventColumn,
        values: np.ndarray,
        lengths: np.ndarray,
        moments: np.ndarray | None,
        where: Callable[[int], str],
    ) -> np.ndarray:
        """Return numbers of the events of rows for a batch, float32.

        `moments`: of the rows, int64 [rows], for the ages of times; None if `values` are ages. `where`: of a row, for messages.
        Raises ValueError: a number is not finite, a weight is negative, or an event is not earlier than its row and not later
        than the one before.
        """
        if column.name == self.time:
            ages = values if moments is None else ages_of(values, moments, lengths)
            kind = "age" if moments is None else "time"
            if (ages <= 0).any():
                at = int((ages <= 0).argmax())
                row = row_of(lengths, at)
                moment = "" if moments is None else f", whose moment is {moments[row]}"
                raise ValueError(
                    f"'{column.name}': an event of {kind} {values[at]} at {where(row)}{moment}; want only events before the "
                    "moment of their row"
                )
            later = np.diff(ages, prepend=np.inf) > 0
            later[(np.cumsum(lengths) - lengths)[lengths > 0]] = False  # the first event of a row
            if later.any():
                at = int(later.argmax())
                raise ValueError(
                    f"'{column.name}': an event of {kind} {values[at]} after one of {values[at - 1]} at "
                    f"{where(row_of(lengths, at))}; want the oldest event first"
                )
            values = ages
        with np.errstate(over="ignore"):
            numbers = values.astype(np.float32, copy=False)
        if not np.isfinite(numbers).all():
            at = int(np.isfinite(numbers).argmin())
            raise ValueError(
                f"'{column.name}': an event has {values[at]} at {where(row_of(lengths, at))}; "
                "want a finite number that float32 can hold"
            )
        if column.name == self.weight and (numbers < 0).any():
            at = int((numbers < 0).argmax())
            raise ValueError(
                f"'{column.name}': an event has {values[at]} at {where(row_of(lengths, at))}; want a weight that is not "
                "negative (model.event_weights)"
            )
        return numbers


def seen_events(
    rows: np.ndarray, times: np.ndarray, moments: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the events that rows see, row after row and oldest first, as preprocessing takes them from a log; and their numbers.

    `rows`, `times`: of each event, integers [E]. `moments`: int64 [B]. A row sees its latest `length` events of smaller times;
    events of one time keep their order.
    """
    order = np.lexsort((times, rows))
    order = order[times[order] < moments[rows[order]]]
    lengths = np.bincount(rows[order], minlength=len(moments))
    from_last = np.cumsum(lengths)[rows[order]] - np.arange(len(order))
    return order[from_last <= length], np.minimum(lengths, length)


def ages_of(times: np.ndarray, moments: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the seconds from events to the moments of their rows, in float64, where a difference of int64 keeps its sign."""
    return np.subtract(np.repeat(moments, lengths), times, dtype=np.float64)


def row_of(lengths: np.ndarray, index: int) -> int:
    """Return the row of an event (or id) of rows of these lengths."""
    return int(np.cumsum(lengths).searchsorted(index, "right"))
