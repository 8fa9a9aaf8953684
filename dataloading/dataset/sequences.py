"""Sequence groups of a dataset: events of a user before the moment of a row, oldest first."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dataloading.dataset.split_files import expect

EVENT_DTYPES = ("int8", "int16", "int32", "int64", "float16", "float32")
MOMENT_DTYPE = np.dtype("<i8")
MOST_EVENTS = 2**31 - 1
"""Lengths of rows are int32."""
EVENTS = "events"
"""Directory of events that lie once, for all splits."""


@dataclass(frozen=True, slots=True)
class EventColumn:
    """One number per event."""

    name: str
    # on disk: int8 to int64, float16 or float32; float32 in a batch
    dtype: np.dtype

    @classmethod
    def of(cls, name: str, dtype: str) -> "EventColumn":
        """Return a column by the name of its dtype; ValueError if it is none of `EVENT_DTYPES`."""
        wanted = f"one of {', '.join(EVENT_DTYPES)}"
        expect(dtype in EVENT_DTYPES, f"feature_spec.{name}.dtype", dtype, wanted)
        return cls(name, np.dtype(dtype))


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

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of features and numbers."""
        return (*self.features, *(column.name for column in self.numbers))

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
        Raises ValueError: a number is not finite, or an event is not earlier than its row and not later than the one before.
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
            later = out_of_order(ages, lengths)
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
        return numbers


def ages_of(times: np.ndarray, moments: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the seconds from events to the moments of their rows, in float64, where a difference of int64 keeps its sign."""
    return np.subtract(np.repeat(moments, lengths), times, dtype=np.float64)


def out_of_order(ages: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return which events are older than the one before in their row."""
    older = np.diff(ages, prepend=np.inf) > 0
    older[(np.cumsum(lengths) - lengths)[lengths > 0]] = False
    return older


def row_of(lengths: np.ndarray, index: int) -> int:
    """Return the row of an event (or id) of rows of these lengths."""
    return int(np.cumsum(lengths).searchsorted(index, "right"))
