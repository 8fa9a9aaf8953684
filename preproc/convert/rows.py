"""Interface between inputs and the converter: features, splits, and chunks of rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.source import TimedSource, read_with_keys
from dataloading.dataset.split_files import expect

CHUNK_ROWS = 1 << 16
"""Rows that are in memory at a time."""
MOST_ROWS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows, in the form of the arguments of `SplitWriter.append`."""

    labels: np.ndarray  # numbers [n], or [n, labels] of several
    numerical: np.ndarray | None  # numbers [n, num_numerical]; None without numericals
    # integers by feature: [n], [n, hotness], or flat for a ragged feature
    ids: Mapping[str, np.ndarray]
    lengths: Mapping[str, np.ndarray]  # ids per row, [n], of each ragged feature
    weights: np.ndarray | None = None  # numbers [n]; None without such a column
    keep_rates: np.ndarray | None = None  # numbers [n]; None without such a column
    teachers: Mapping[str, np.ndarray] = field(default_factory=dict)  # numbers [n] by column
    # numbers of events by name, flat, as they are stored, and moments [n] by group; `lengths` has the groups'
    events: Mapping[str, np.ndarray] = field(default_factory=dict)
    moments: Mapping[str, np.ndarray] = field(default_factory=dict)


class Rows(Protocol):
    """A dataset that can be read once from start to end."""

    spec: FeatureSpec  # features and splits; the rows of the splits need not be counted
    kind: str  # name of the format, for messages
    left_out: Sequence[str]  # what lies there and is not converted, each with the reason

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the rows of `split` in order; ValueError at an invalid row."""


class SourceRows:
    def __init__(self, source: TimedSource, kind: str, left_out: Sequence[str] = ()) -> None:
        self.spec = source.spec
        self.kind = kind
        self.left_out = left_out
        self._source = source

    def chunks(self, split: str) -> Iterator[Chunk]:
        num_rows = self._source.num_rows(split)
        for start in range(0, num_rows, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, num_rows)
            columns = read_with_keys(self._source, split, np.array([[start, stop]]))
            ids, lengths = {}, {}
            for feature, values, counts in zip(
                self.spec.categorical, columns.ids, columns.lengths, strict=True
            ):
                if counts is None:
                    ids[feature.name] = values.reshape(stop - start, -1)
                else:
                    ids[feature.name], lengths[feature.name] = values, counts
            numerical = columns.numerical if self.spec.numerical else None
            names = [column.name for column in self.spec.event_columns]
            events, moments = dict(zip(names, columns.events, strict=True)), {}
            for group in self.spec.sequences:
                lengths[group.name] = lengths[group.features[0]]
                if group.time is not None:
                    runs = np.array([[start, stop]])
                    times, moments[group.name] = self._source.read_times(split, runs, group)
                    events[group.time] = times
            yield Chunk(
                columns.labels,
                numerical,
                ids,
                lengths,
                columns.weights,
                columns.keep_rates,
                {c.name: v for c, v in zip(self.spec.teachers, columns.teachers, strict=True)},
                events,
                moments,
            )


class Remainders:
    """Rows whose ids are written as remainders by `table_rows`, in the order of `spec.table_features`; ValueError for others."""

    def __init__(self, rows: Rows, table_rows: Sequence[int]) -> None:
        tables = list(rows.spec.table_features)
        few = f"one number per table: {', '.join(tables)}"
        expect(len(table_rows) == len(tables), "table_rows", list(table_rows), few)
        rows_of = dict(zip(tables, table_rows, strict=True))
        self.kind, self.left_out, self._rows = rows.kind, rows.left_out, rows
        self.spec = replace(
            rows.spec,
            categorical=tuple(
                CategoricalFeature.of(f.name, rows_of[f.table or f.name], f.hotness, f.table)
                for f in rows.spec.categorical
            ),
        )

    def chunks(self, split: str) -> Iterator[Chunk]:
        for chunk in self._rows.chunks(split):
            ids = {}
            for feature in self.spec.categorical:
                wide = chunk.ids[feature.name]
                wide = wide if wide.dtype == np.uint64 else wide.astype(np.int64, copy=False)
                ids[feature.name] = wide % wide.dtype.type(feature.cardinality)
            yield replace(chunk, ids=ids)


def input_feature(
    name: str, rows: int | None, hotness: int | None, table: str | None = None
) -> CategoricalFeature:
    """Return a feature; without `rows` its ids are any integers, without `hotness` it is ragged. ValueError: too many rows."""
    if rows is None:
        return CategoricalFeature.of_keys(name, 2, hotness, table)
    if rows > MOST_ROWS:
        raise ValueError(
            f"table '{table or name}': its largest id is {rows - 1}, a hash; set table_rows, one number per table, which "
            "writes each id as its remainder"
        )
    return CategoricalFeature.of(name, rows, hotness, table)


def natural_order(path: Path) -> tuple[list[int], str]:
    """Sort key of files that differ in a number, day_2 before day_10, or else in their names."""
    return [int(digits) for digits in re.findall(r"[0-9]+", path.name)], path.name
