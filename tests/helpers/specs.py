"""Feature specs of datasets that have no files."""

import numpy as np

from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import RowColumn


def feature(
    name: str, rows: int = 50, hotness: int | None = 1, table: str | None = None
) -> CategoricalFeature:
    return CategoricalFeature.of(name, rows, hotness, table)


def spec_of(
    *features: CategoricalFeature,
    numerical: tuple[str, ...] = ("age", "history_length"),
    labels: tuple[str, ...] = ("label",),
) -> FeatureSpec:
    return FeatureSpec(
        None, numerical, np.dtype(np.float32), tuple(map(RowColumn, labels)), features, {}, {}
    )


def sized_spec(num_numerical: int, num_categorical: int, num_labels: int = 1) -> FeatureSpec:
    """Return features I0, I1, ... and C0, C1, ..., and labels y0, y1, ..."""
    return spec_of(
        *(feature(f"C{number}") for number in range(num_categorical)),
        numerical=tuple(f"I{number}" for number in range(num_numerical)),
        labels=tuple(f"y{number}" for number in range(num_labels)),
    )
