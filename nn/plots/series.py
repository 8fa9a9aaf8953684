"""Numbers of a run's records as lines: thinned, smoothed, and the range that shows them well."""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np

# More points than the picture has pixels would only slow down drawing.
MAX_POINTS = 1500
# A line with at least this many points is drawn faintly, with its moving mean on top.
SMOOTH_FROM = 20

Series = tuple[np.ndarray, np.ndarray]  # steps [n], values [n]


def series(records: Sequence[Mapping[str, Any]], name: str) -> Series:
    """Return steps and values of the records that contain a finite number under key `name`."""
    points = [(record["step"], record[name]) for record in records if is_finite(record.get(name))]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, values


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value of a record is a number that a plot can show."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def like_the_last(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the evaluations of the day of the last one, and of as many rows: the best is chosen among them alone."""
    names = ("day", "test_rows")
    return [r for r in records if all(r.get(name) == records[-1].get(name) for name in names)]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the centred moving mean over 2 % of the points, at least 5; the window shrinks at both ends."""
    window = np.ones(max(5, len(values) // 50) | 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    return np.convolve(values, window, "same") / counts


def thinned(line: Series, most: int = MAX_POINTS) -> Series:
    """Reduce a line to at most `most` points: the minimum and maximum of every interval."""
    steps, values = line
    if len(values) <= most:
        return line
    kept = set()
    for start, end in pairwise(np.linspace(0, len(values), most // 2 + 1).astype(int)):
        kept |= {start + int(values[start:end].argmin()), start + int(values[start:end].argmax())}
    order = np.array(sorted(kept))
    return steps[order], values[order]


def limits(*lines: Series) -> tuple[float, float] | None:
    """Return the y range of a panel, or None without values.

    The first 5 % of a line with at least ten points are left out: the steep start of training would flatten the rest.
    """
    values: list[float] = []
    for _, line in lines:
        settled = line[-(-len(line) // 20) if len(line) >= 10 else 0 :]
        if len(settled) >= SMOOTH_FROM:
            settled = np.percentile(settled, (1, 99))
        values.extend(settled)
    if not values:
        return None
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
