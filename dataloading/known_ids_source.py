"""A source whose rows have id 0 instead of ids that a model has not learnt, as that of missing and unknown values."""

from collections.abc import Mapping

import numpy as np

from dataloading.dataset.source import Allocate, Columns, Keys, Source


class KnownIdsSource:
    """Rows of another source as a model of fewer ids sees them: new values are unknown to it.

    `known`: rows of the model's table per feature; larger ids become 0.
    """

    def __init__(self, source: Source, known: Mapping[str, int]) -> None:
        self.spec = source.spec
        self._source = source
        self._known = [known[feature.name] for feature in source.spec.categorical]

    def num_rows(self, split: str) -> int:
        """Return the rows of `split`; ValueError if there is no such split."""
        return self._source.num_rows(split)

    def granule(self, split: str) -> int:
        """Return the granule of the other source."""
        return self._source.granule(split)

    def before_fork(self, split: str, num_processes: int) -> None:
        """Do what the other source does."""
        self._source.before_fork(split, num_processes)

    def read(
        self,
        split: str,
        runs: np.ndarray,
        padded_to: int | None = None,
        allocate: Allocate = np.empty,
    ) -> Columns:
        """Return the rows of `runs` (int64 [K, 2], half-open), padded with zero rows to `padded_to`."""
        columns = self._source.read(split, runs, padded_to, allocate)
        for ids, known in zip(columns.ids, self._known, strict=True):
            ids[ids >= known] = 0
        return columns

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        """Return the keys of the other source."""
        return self._source.read_keys(split, runs, feature)
