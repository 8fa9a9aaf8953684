"""Interface between inputs and the converter: features, splits, and chunks of rows."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.source import Source, read_with_keys

CHUNK_ROWS = 1 << 16
"""Rows that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows, in the form of the arguments of `SplitWriter.append`.

    Attributes:
        labels: numbers [n], or [n, labels] of several.
        numerical: numbers [n, num_numerical]; None without numericals.
        ids: integers by feature: [n], [n, hotness], or flat for a ragged feature.
        lengths: ids per row, [n], of each ragged feature.
        weights: numbers [n]; None without such a column.
        keep_rates: numbers [n]; None without such a column.
    """

    labels: np.ndarray
    numerical: np.ndarray | None
    ids: Mapping[str, np.ndarray]
    lengths: Mapping[str, np.ndarray]
    weights: np.ndarray | None = None
    keep_rates: np.ndarray | None = None


class Rows(Protocol):
    """A dataset that can be read once from start to end.

    Attributes:
        spec: features and splits; the rows of the splits need not be counted.
        kind: name of the format, for messages.
    """

    spec: FeatureSpec
    kind: str

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the rows of `split` in order; ValueError at an invalid row."""


class SourceRows:
    """Rows of a dataset directory, or of any other source with random access."""

    def __init__(self, source: Source, kind: str) -> None:
        self.spec = source.spec
        self.kind = kind
        self._source = source

    def chunks(self, split: str) -> Iterator[Chunk]:
        """Yield the rows of `split` in order."""
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
            yield Chunk(
                columns.labels, numerical, ids, lengths, columns.weights, columns.keep_rates
            )


def natural_order(path: Path) -> tuple[list[int], str]:
    """Sort key of files that differ in a number, day_2 before day_10, or else in their names."""
    return [int(digits) for digits in re.findall(r"[0-9]+", path.name)], path.name
