"""Sequence groups of a dataset: events of a user before the moment of a row, oldest first."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class EventColumn:
    """One number per event."""

    name: str
    # on disk: int8 to int64, float16 or float32; float32 in a batch
    dtype: np.dtype


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
