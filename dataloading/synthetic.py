"""Synthetic click stream: power-law ids, and labels drawn from a hidden teacher model.

Every value is a function of (seed, split, column, row). Any rank can therefore make any row, in any order, and nothing is stored.
"""

from dataclasses import replace

import numpy as np

from configs.schema import SyntheticConfig
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.source import BatchTarget, Columns, Keys, Source
from dataloading.dataset.split_files import SplitFiles
from dataloading.gather import expand
from dataloading.randomness import power_law, stream_key, uniform
from dataloading.synthetic_history import Events, SyntheticHistory
from dataloading.teacher import Teacher

CHUNK_ROWS = 8192
"""Rows made at a time, so that the temporary arrays of a column stay in the cache."""
CALIBRATION_ROWS = 16384


class SyntheticSource(Source):
    """Source of synthetic clicks, made on demand; names of tables change no value."""

    def __init__(self, stream: SyntheticConfig, seed: int) -> None:
        self._exponent = stream.exponent
        self._seed = seed
        self._hotness = stream.hotness or [1] * len(stream.cardinalities)
        features = {
            name: CategoricalFeature.of(name, rows, count)
            for (name, rows), count in zip(stream.tables.items(), self._hotness, strict=True)
        }
        self.spec = FeatureSpec(
            root=None,
            numerical=tuple(f"num_{i}" for i in range(stream.num_numerical)),
            numerical_dtype=np.dtype(np.float32),
            labels=(RowColumn("label"),),
            categorical=tuple(features.values()),
            splits={"train": SplitFiles(stream.train_rows), "test": SplitFiles(stream.test_rows)},
            metadata={},
        )
        self._history: SyntheticHistory | None = None
        if stream.history:
            liked = [features[name] for name in stream.history]
            self._history = SyntheticHistory(liked, stream, self._key)
            self.spec = replace(
                self.spec,
                categorical=self.spec.categorical + self._history.features,
                sequences=(self._history.group,),
            )
        self._teacher = Teacher(self.spec, seed)
        sample, _ = self._make("calibration", np.arange(CALIBRATION_ROWS, dtype=np.uint64))
        self._teacher.calibrate(sample.numerical, self._bags(sample), self._events(sample))

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        raise AssertionError("synthetic clicks have no raw keys")

    def event_counts(self, split: str, runs: np.ndarray) -> np.ndarray | None:
        if self._history is None:
            return None
        return self._history.lengths(split, expand(runs).astype(np.uint64))

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        return self._make(split, expand(runs).astype(np.uint64), into)[0]

    def teacher_auc(self, split: str = "test") -> float:
        """Return the AUC of the teacher's own logits on `split`, an upper bound for models."""
        columns, logits = self._make(split, np.arange(self.num_rows(split), dtype=np.uint64))
        positive = np.sort(logits[columns.labels == 1])
        negative = np.sort(logits[columns.labels == 0])
        below = negative.searchsorted(positive, "left") + negative.searchsorted(positive, "right")
        return float(below.sum() / 2 / len(positive) / len(negative))

    def _make(
        self, split: str, rows: np.ndarray, into: BatchTarget | None = None
    ) -> tuple[Columns, np.ndarray]:
        """Return the rows (uint64 [n]) of `split`, and the teacher's logits of them, float32 [n]."""
        num_rows = len(rows)
        num_ids = [num_rows * hotness for hotness in self._hotness]
        if self._history is not None:
            lengths = self._history.lengths(split, rows)
            num_ids += [int(lengths.sum())] * len(self._history.features)
        columns = Columns.empty(self.spec, num_rows, num_ids, into)
        bags = self._bags(columns)
        for of_feature in columns.lengths:
            if of_feature is not None:
                of_feature[:num_rows] = lengths
        events = self._events(columns)
        logits = np.empty(num_rows, np.float32)
        for start in range(0, num_rows, CHUNK_ROWS):
            chunk = slice(start, min(start + CHUNK_ROWS, num_rows))
            numerical, ids = columns.numerical[chunk], [bag[chunk] for bag in bags]
            self._fill(split, rows[chunk], numerical, ids)
            part = None
            if self._history is not None and events is not None:
                part = events.of_rows(chunk.start, chunk.stop)
                self._history.fill(split, rows[chunk], part)
            logits[chunk] = self._teacher.logits(numerical, ids, part)
            drawn = uniform(self._key(split, "label"), rows[chunk])
            columns.labels[chunk] = drawn < 1 / (1 + np.exp(-logits[chunk]))
        return columns, logits

    def _fill(
        self, split: str, rows: np.ndarray, numerical: np.ndarray, ids: list[np.ndarray]
    ) -> None:
        """Draw the features of `rows` into `numerical` [n, num_numerical] and `ids`, [n, hotness] each."""
        for column in range(numerical.shape[1]):
            numbers = uniform(self._key(split, "numerical", column), rows)
            numbers -= 0.5
            numbers *= np.sqrt(12)
            numerical[:, column] = numbers
        for index, (feature, bag) in enumerate(zip(self.spec.categorical, ids, strict=False)):
            for column in range(bag.shape[1]):
                numbers = uniform(self._key(split, "ids", index, column), rows)
                bag[:, column] = power_law(numbers, feature.cardinality, self._exponent)

    def _bags(self, columns: Columns) -> list[np.ndarray]:
        return [
            ids.reshape(-1, hotness)
            for ids, hotness in zip(columns.ids, self._hotness, strict=False)
        ]

    def _events(self, columns: Columns) -> Events | None:
        first = len(self._hotness)
        lengths = columns.lengths[first] if self._history else None
        if lengths is None:
            return None
        return Events(lengths.astype(np.int64), columns.ids[first:], columns.events[0])

    def _key(self, *names: object) -> int:
        return stream_key(self._seed, *names)
