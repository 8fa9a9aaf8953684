"""A source whose rows have id 0 instead of ids that a model has not learnt, as that of missing and unknown values."""

from collections.abc import Mapping

import numpy as np

from dataloading.dataset.source import BatchTarget, Columns, DerivedSource, Source


class KnownIdsSource(DerivedSource):
    """Rows of another source as a model of fewer ids sees them: new values are unknown to it.

    `known`: rows of the model's table per feature; larger ids become 0.
    """

    def __init__(self, source: Source, known: Mapping[str, int]) -> None:
        super().__init__(source)
        self._known = [known[feature.name] for feature in source.spec.categorical]

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        columns = self._source.read(split, runs, into)
        for ids, known in zip(columns.ids, self._known, strict=True):
            ids[ids >= known] = 0
        return columns
