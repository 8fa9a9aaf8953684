"""Categorical features of raw rows of which no value is known to the fit: their scores say nothing of those values."""

import pyarrow as pa
import pyarrow.compute as pc

from configs.messages import shown
from dataloading.dataset.feature_spec import FeatureSpec

FEWEST_ROWS = 10
"""Fewer rows may well have unknown values only."""


class UnknownValues:
    """Features whose every id so far is 0, as that of missing and unknown values."""

    def __init__(self, spec: FeatureSpec) -> None:
        self._num_rows = 0
        # A feature of one row has no known value, and one of keys none that is unknown before the model looks it up.
        self._names = [
            feature.name
            for feature in spec.categorical
            if feature.cardinality > 1 and not feature.is_dynamic
        ]

    def add(self, features: pa.RecordBatch | pa.Table) -> None:
        """Count rows; `features` has a column of ids, or of lists of ids, per feature."""
        self._num_rows += features.num_rows
        self._names = [name for name in self._names if not _has_id(features.column(name))]

    @property
    def note(self) -> str | None:
        """Name the features of which no row has a known value, and the likely cause; None if there are none."""
        if self._num_rows < FEWEST_ROWS or not self._names:
            return None
        listed = ", ".join(shown(name) for name in self._names[:4])
        if len(self._names) > 4:
            listed += f" and {len(self._names) - 4} more features"
        return (
            f"no row of {self._num_rows:,} has a known value of {listed}: all are missing, or were not in the rows "
            "of the fit; compare their values with those of the training data, such as 3.0 with 3"
        )


def _has_id(ids: pa.Array | pa.ChunkedArray) -> bool:
    while pa.types.is_nested(ids.type):
        ids = pc.list_flatten(ids)
    return bool((pc.max(ids).as_py() or 0) > 0)
