"""Distribution of each numerical feature, from evenly spaced rows of a written split."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCKS = 64
BLOCK_ROWS = 4096
"""Rows of a larger split are read in so many blocks, which a disk reads in some seconds whatever its size."""
NUM_BINS = 40
QUANTILES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values of a numerical feature, as they are stored."""

    rows: int  # rows that were read
    mean: float  # of the values
    deviation: float  # standard deviation
    # at `QUANTILES`: smallest, 1 %, quarter, median, three quarters, 99 %, largest
    quantiles: list[float]
    low: float  # lower end of the histogram, the 1 % quantile
    high: float  # its upper end, the 99 % quantile
    # values per bin; at most `NUM_BINS` of equal width, values outside are in the first and the
    # last. A bin of whole numbers has equally many of them.
    counts: list[int]


def read_distributions(
    numerical_bin: Path, names: list[str], dtype: str, num_rows: int
) -> dict[str, Distribution]:
    """Return the distribution of each feature, named in the order of the columns; nothing without rows."""
    if not names or not num_rows:
        return {}
    stored: np.ndarray = np.memmap(numerical_bin, dtype, "r", shape=(num_rows, len(names)))
    if num_rows > BLOCKS * BLOCK_ROWS:
        starts = np.linspace(0, num_rows - BLOCK_ROWS, BLOCKS).astype(int)
        stored = np.concatenate([stored[start : start + BLOCK_ROWS] for start in starts])
    return {
        # + 0: a store of raw logs has -0.0.
        name: _distribution(column.astype(np.float64) + 0.0)
        for name, column in zip(names, np.asarray(stored).T, strict=True)
    }


def _distribution(values: np.ndarray) -> Distribution:
    quantiles = np.quantile(values, QUANTILES)
    low, high = float(quantiles[1]), float(quantiles[-2])
    # numpy makes no bins between equal ends.
    span, num_bins = (low, high) if high > low else (low - 0.5, low + 0.5), NUM_BINS
    if high > low and (values == np.floor(values)).all():
        start, whole = math.floor(low), math.ceil(high) - math.floor(low) + 1
        width = math.ceil(whole / NUM_BINS)
        num_bins = math.ceil(whole / width)
        span = (start - 0.5, start + num_bins * width - 0.5)
    # From the lower end on: beyond 2**53 numpy refuses bins that are narrower than the distance of two numbers.
    first, last = span
    counts, _ = np.histogram(values.clip(first, last) - first, num_bins, (0.0, last - first))
    return Distribution(
        rows=len(values),
        mean=_rounded(values.mean()),
        deviation=_rounded(values.std()),
        quantiles=[_rounded(value) for value in quantiles],
        low=_rounded(low),
        high=_rounded(high),
        counts=counts.tolist(),
    )


def _rounded(value: float) -> float:
    """Round to 6 digits: the last ones of a sum depend on the processor."""
    return float(f"{value:.6g}")
