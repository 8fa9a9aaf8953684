"""A source whose rows have one feature's values of other rows, drawn by a seeded permutation."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dataloading.dataset.source import BatchTarget, Columns, DerivedSource, Keys, Source, joined
from dataloading.gather import expand

BLOCK_ROWS = 1 << 24
"""Splits of more rows are permuted within blocks of so many consecutive rows, whose permutation takes 128 MiB."""


class PermutedSource(DerivedSource):
    """Rows of another source in which one feature is permuted over the rows of a split.

    The permutation is a function of seed and row alone, so every rank sees the same rows. Events are permuted as wholes: a
    feature of a sequence group with all columns of the group, and ages are those of the row that they are from.
    """

    def __init__(
        self, source: Source, feature: str, seed: Sequence[int], block_rows: int = BLOCK_ROWS
    ) -> None:
        super().__init__(source)
        self._feature = feature
        group = source.spec.group_of(feature)
        self._permuted_with = {feature} if group is None else {*group.columns}
        self._seed = seed
        self._block_rows = block_rows
        # The latest blocks alone: rows are read in the order on disk.
        self._permutation = lru_cache(maxsize=2)(self._drawn)

    def granule(self, split: str) -> int:
        return 1  # any row is read by itself

    def before_fork(self, split: str, num_processes: int) -> None:
        pass  # threads read

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        rows = expand(runs)
        own = self._source.read(split, runs)
        starts = self._permuted(split, rows)
        other = self._source.read(split, np.stack([starts, starts + 1], axis=1))
        spec, feature = self.spec, self._feature
        permuted = [
            index for index, f in enumerate(spec.categorical) if f.name in self._permuted_with
        ]
        for index in permuted:
            own.ids[index], own.lengths[index] = other.ids[index], other.lengths[index]
        for index, number in enumerate(spec.event_columns):
            if number.name in self._permuted_with:
                own.events[index] = other.events[index]
        if not permuted:
            column = spec.numerical.index(feature)
            own.numerical[:, column] = other.numerical[:, column]
        return joined(spec, [own], into)

    def read_keys(self, split: str, runs: np.ndarray, feature: int) -> Keys:
        if self.spec.categorical[feature].name in self._permuted_with:
            starts = self._permuted(split, expand(runs))
            runs = np.stack([starts, starts + 1], axis=1)
        return self._source.read_keys(split, runs, feature)

    def _permuted(self, split: str, rows: np.ndarray) -> np.ndarray:
        permuted = np.empty_like(rows)
        blocks = rows // self._block_rows
        for block in np.unique(blocks):
            mine = blocks == block
            first = int(block) * self._block_rows
            permuted[mine] = first + self._permutation(split, int(block))[rows[mine] - first]
        return permuted

    def _drawn(self, split: str, block: int) -> np.ndarray:
        size = min(self._block_rows, self.num_rows(split) - block * self._block_rows)
        return np.random.default_rng([*self._seed, block]).permutation(size)
