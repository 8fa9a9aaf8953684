"""Ranges of the numerical features that a model is about to train on, for a note about those that nobody scaled."""

from collections.abc import Sequence

import numpy as np

from configs.messages import first_of, printable

LARGE_NUMERICAL = 20.0
"""Root mean square; above it preprocessing prints a note too. Criteo's counts are below it once their logarithm is taken."""
MAX_NAMES = 3


def range_note(names: Sequence[str], values: np.ndarray) -> str | None:
    """Return a line about the numerical features that are large for a model, or None.

    `values`: rows of a batch [B, len(names)].
    """
    if not values.size:
        return None
    large = np.flatnonzero(
        np.sqrt(np.square(values, dtype=np.float64).mean(axis=0)) > LARGE_NUMERICAL
    )
    if not len(large):
        return None
    ranges = [
        f"{printable(names[column])} is {values[:, column].min():g} to {values[:, column].max():g}"
        for column in large.tolist()
    ]
    return (
        f"numerical features are not scaled: {first_of(ranges, MAX_NAMES)} in the first {len(values):,} rows, which makes "
        "training unstable; preprocess with standardise, minmax or {log: 1} among their transforms"
    )
