"""Lookups of tables: the feature whose ids they take, and what they do with the rows."""

from dataclasses import dataclass
from enum import StrEnum

Pooling = StrEnum("Pooling", "sum mean none rows")
"""Pooling of the rows of a sample's ids; of `rows`, the dense component takes the distinct rows of a batch instead."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup in a table by the ids of one feature.

    `hotness` is ids per sample, 0 if the feature is ragged. Pooling by `sum` and `mean` gives one vector per sample, `none` one
    per id, `rows` none at all. `column` is the first one of the vectors in a matrix of all tables'; None: they follow those of
    the lookup before.
    """

    feature: str
    hotness: int
    pooling: Pooling = Pooling.sum
    column: int | None = None

    @property
    def num_vectors(self) -> int:
        return {Pooling.none: self.hotness, Pooling.rows: 0}.get(self.pooling, 1)

    @property
    def ids_per_vector(self) -> int:
        """Ids whose rows are added to one vector."""
        return 1 if self.pooling is Pooling.none else self.hotness

    @property
    def factor(self) -> float:
        """The number by which a row is multiplied before it is added; of a ragged mean, the sample's length decides."""
        return 1 / self.hotness if self.pooling is Pooling.mean and self.hotness else 1.0

    @property
    def is_ragged(self) -> bool:
        """Return whether samples differ in their number of ids."""
        return not self.hotness
