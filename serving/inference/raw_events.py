"""Events of a request: of rows of their own, or in lists."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from configs.messages import shown
from dataloading.dataset.sequences import SequenceGroup, ages_of, seen_events
from serving.inference.model_rows import RaggedIds
from serving.inference.raw_columns import RawColumns, Texts, number_of, split
from serving.inference.requests import InputError, refuse
from serving.raw_records import CONDITION, Key, RawCategorical, RawFeature, RawLists, RawSequence

Shapes = Mapping[Any, tuple[int, ...]]
"""Shapes of the inputs: [B], or [B, L] of lists."""


def seen_of_log(
    sequence: RawSequence,
    columns: RawColumns,
    encode: Callable[[RawCategorical, Texts], np.ndarray],
    inputs: Mapping[Key, Any],
    shapes: Shapes,
) -> tuple[dict[str, RaggedIds], dict[str, RaggedIds]]:
    """Return the ids by feature, and the numbers, of the events that rows see of those in `inputs`, by the rules of a log.

    An event has a time, a value of the first feature, and a filter that is true; others, and what fills the lists, are none.
    `columns`: of the events. `encode`: returns the ids of the values of a feature.
    """
    raw = sequence.events
    first, *others = sequence.columns.values()
    for name in others:
        if shapes[name] != shapes[first]:
            refuse(
                f"list {shown(name)} has shape {list(shapes[name])}, and {shown(first)} {list(shapes[first])}; want an item "
                "per event in each"
            )
    flat: dict[Key, Any] = {
        column: values if isinstance(values, list) else values.reshape(-1)
        for column, name in sequence.columns.items()
        for values in [inputs[name]]
    }
    try:
        flat = columns.with_expressions(flat)
        texts = [columns.values(feature, flat) for feature in raw.categorical]
        numbers = {f.name: columns.numbers(f, flat) for f in raw.numerical}
    except InputError as error:
        refuse(f"events of {shown(sequence.name)}, counted over all rows: {error}")
    (time,) = raw.times
    every = flat[(time,)]
    events = np.array(
        [
            event
            for event, (at, value) in enumerate(zip(every, texts[0], strict=True))
            if None not in (at, value) and (not raw.filter or flat[(CONDITION,)][event] == 1)
        ],
        np.int64,
    )
    times = np.array([every[event] for event in events], np.int64)
    never = np.iinfo(np.int64).min
    of_rows = inputs[(sequence.name,)]
    moments = np.array([never if moment is None else moment for moment in of_rows], np.int64)
    rows = events // max(shapes[first][1], 1)
    seen, lengths = seen_events(rows, times, moments, sequence.length)
    found = {name: of_events[events[seen]] for name, of_events in numbers.items()}
    found[time] = ages_of(times[seen], moments, lengths).astype(np.float32)
    ids = {
        feature.name: encode(feature, [values[event] for event in events[seen]])
        for feature, values in zip(raw.categorical, texts, strict=True)
    }
    counts = torch.from_numpy(lengths)

    def ragged(found: Mapping[str, np.ndarray]) -> dict[str, RaggedIds]:
        return {n: RaggedIds(torch.from_numpy(v), counts) for n, v in found.items()}

    return ragged(ids), ragged(found)


def cut_lists(
    lists: RawLists,
    group: SequenceGroup | None,
    columns: RawColumns,
    inputs: Mapping[Key, Any],
    shapes: Shapes,
    ids: dict[str, Any],
) -> dict[str, RaggedIds]:
    """Return the numbers of a group of lists; of these and of its features in `ids`, the last ones that a row sees.

    `group`: as the model reads it, if it does. Raises InputError: the lists of a row differ in their length, or a number is
    missing or none.
    """
    first, *others = lists.features
    counts = ids[first].lengths.numpy()

    def require_counts(name: str, own: Iterable[int]) -> None:
        for row, (got, wanted) in enumerate(zip(own, counts.tolist(), strict=True)):
            if got != wanted:
                refuse(
                    f"row {row}: {shown(name)} has {got} items, and {shown(first)} {wanted}; want equally many"
                )

    for name in others:
        require_counts(name, ids[name].lengths.tolist())
    ends = counts.cumsum()
    seen = np.arange(counts.sum()) >= np.repeat(ends - lists.length, counts)
    lengths = np.minimum(counts, lists.length)
    for name in lists.features:
        ids[name] = RaggedIds(ids[name].values[torch.from_numpy(seen)], torch.from_numpy(lengths))
    numbers = {}
    for number in lists.numbers:
        if lists.separator:
            texts = columns.texts(number.key, inputs[number.key])
            parted = [[] if text is None else split(text, lists.separator) for text in texts]
            rows = [
                [number_of(number.name, row, item) for item in items]
                for row, items in enumerate(parted)
            ]
        else:
            matrix = _matrix(number, inputs[number.key], shapes[number.column])
            rows = _without_padding(matrix, counts)
        require_counts(number.name, map(len, rows))
        for row, items in enumerate(rows):
            if None in items:
                refuse(f"row {row}: {shown(number.name)} lacks the number of an item")
        with np.errstate(over="ignore"):
            values = np.array([x for items in rows for x in items], np.float32)[seen]
        if group is not None:
            (column,) = (column for column in group.numbers if column.name == number.name)
            try:
                group.checked(column, values, lengths, None, lambda row: f"row {row}")
            except ValueError as error:
                refuse(str(error))
        numbers[number.name] = RaggedIds(torch.from_numpy(values), torch.from_numpy(lengths))
    return numbers


def _matrix(number: RawFeature, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of lists, NaN where one is missing."""
    if isinstance(values, list):
        width = shape[1]
        given = [number_of(number.name, n // width, x or None) for n, x in enumerate(values)]
        values = np.array([math.nan if x is None else x for x in given])
    return values.reshape(shape)


def _without_padding(matrix: np.ndarray, counts: np.ndarray) -> list[list[float | None]]:
    """Return the first numbers of every row; what fills a tensor behind them, missing or 0, is none."""
    rows = []
    for items, count in zip(matrix, counts.tolist(), strict=True):
        behind = items[count:]
        is_other = len(items) < count or ((behind != 0) & (behind == behind)).any()
        # One of another length is refused.
        own = items if is_other else items[:count]
        rows.append([None if x != x else x for x in own.tolist()])
    return rows
