"""Interface between inputs and the converter: features, splits, and chunks of rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.sequences import SequenceGroup
from dataloading.dataset.source import Columns, Source, TimedSource, read_with_keys
from dataloading.dataset.split_files import expect

CHUNK_ROWS = 1 << 16
"""Rows that are in memory at a time."""
MOST_ROWS = 2**63 - 1


class Chunk(NamedTuple):
    """Consecutive rows: the arguments of `SplitWriter.append`."""

    labels: np.ndarray | None  # numbers [n], or [n, labels] of several; None of a split without
    numerical: np.ndarray | None  # numbers [n, num_numerical]; None without numericals
    # integers by feature: [n], [n, hotness], or flat for a ragged feature
    ids: Mapping[str, np.ndarray]
    lengths: Mapping[str, np.ndarray]  # ids per row, [n], of each ragged feature, and of groups
    weights: np.ndarray | None = None  # numbers [n]
    keep_rates: np.ndarray | None = None  # numbers [n]
    teachers: Mapping[str, np.ndarray] | None = None  # numbers [n] by column
    events: Mapping[str, np.ndarray] | None = None  # by name, flat, as they are stored
    moments: Mapping[str, np.ndarray] | None = None  # [n] by group

    @property
    def num_rows(self) -> int:
        name = next(iter(self.ids))
        return len(self.lengths.get(name, self.ids[name]))


class Rows(Protocol):
    """A dataset that can be read once from start to end."""

    spec: FeatureSpec  # features and splits; the rows of the splits need not be counted
    kind: str  # name of the format, for messages
    left_out: Sequence[str]  # what lies there and is not converted, each with the reason

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the rows of `split` in order; ValueError at an invalid row."""


class SourceRows:
    def __init__(self, source: Source, kind: str, left_out: Sequence[str] = ()) -> None:
        self.spec = source.spec
        self.kind = kind
        self.left_out = left_out
        self._source = source

    def chunks(self, split: str) -> Iterator[Chunk]:
        return map(partial(self._chunk, split), self._starts(split))

    def _starts(self, split: str) -> range:
        return range(0, self._source.num_rows(split), CHUNK_ROWS)

    def _chunk(self, split: str, start: int) -> Chunk:
        runs = np.array([[start, min(start + CHUNK_ROWS, self._source.num_rows(split))]])
        columns, spec = read_with_keys(self._source, split, runs), self.spec
        ids, lengths = {}, {}
        for feature, values, counts in zip(
            spec.categorical, columns.ids, columns.lengths, strict=True
        ):
            if counts is None:
                ids[feature.name] = values.reshape(-1, feature.hotness or 1)
            else:
                ids[feature.name], lengths[feature.name] = values, counts
        names = [column.name for column in spec.event_columns]
        events, moments = dict(zip(names, columns.events, strict=True)), {}
        for group in spec.sequences:
            lengths[group.name] = lengths[group.features[0]]
            if group.time is not None:
                read = self._read_times(split, runs, group, columns)
                events[group.time], moments[group.name] = read
        held = {
            column.name: numbers
            for column, numbers in columns.row_columns(spec)
            if column.name not in spec.splits[split].absent
        }
        return Chunk(
            columns.labels if spec.labels[0].name in held else None,
            columns.numerical if spec.numerical else None,
            ids,
            lengths,
            held.get(spec.weight.name) if spec.weight else None,
            held.get(spec.keep_rate.name) if spec.keep_rate else None,
            {column.name: held[column.name] for column in spec.teachers if column.name in held},
            events,
            moments,
        )

    def _read_times(
        self, split: str, runs: np.ndarray, group: SequenceGroup, columns: Columns
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the times of the events of rows that are read, and the moments of the rows, as they are written."""
        assert isinstance(self._source, TimedSource)
        return self._source.read_times(split, runs, group)


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
            yield chunk._replace(ids=ids)


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
