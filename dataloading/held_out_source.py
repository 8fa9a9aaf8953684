"""A source whose last training rows are a split of their own, `validation`, to choose a model by."""

import numpy as np

from dataloading.dataset.source import DerivedSource, Source

TRAIN, VALIDATION = "train", "validation"


class HeldOutSource(DerivedSource):
    """Rows of another source, of which the last training rows are held out.

    Rows keep their order, so that of logs in the order of time the latest are held out, as a test split has still later
    ones. The border lies between two row groups of Parquet. Raises ValueError: the dataset has a split `validation`, or
    too few rows for one.
    """

    def __init__(self, source: Source, fraction: float) -> None:
        super().__init__(source)
        if VALIDATION in self.spec.splits:
            raise ValueError(
                f"data.validation_fraction={fraction:g}: the dataset has a split '{VALIDATION}' already; leave it out, and "
                f"set eval.split={VALIDATION}"
            )
        self._num_rows, granule = source.num_rows(TRAIN), source.granule(TRAIN)
        held = max(1, round(self._num_rows * fraction))
        self._border = (self._num_rows - held) // granule * granule
        if self._border <= 0:
            groups = f" in row groups of {granule:,}" if granule > 1 else ""
            raise ValueError(
                f"data.validation_fraction={fraction:g} of {self._num_rows:,} training rows{groups} leaves none to train on; "
                "lower it"
            )

    def num_rows(self, split: str) -> int:
        if split == TRAIN:
            return self._border
        return (
            self._num_rows - self._border if split == VALIDATION else self._source.num_rows(split)
        )

    def granule(self, split: str) -> int:
        return self._source.granule(TRAIN if split == VALIDATION else split)

    def before_fork(self, split: str, num_processes: int) -> None:
        self._source.before_fork(TRAIN if split == VALIDATION else split, num_processes)

    def _stored(self, split: str, runs: np.ndarray) -> tuple[str, np.ndarray]:
        return (TRAIN, runs + self._border) if split == VALIDATION else (split, runs)
