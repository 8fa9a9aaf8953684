"""Expected number of distinct rows among skewed ids."""

import numpy as np

EXACT_ROWS = 1000
"""Most frequent rows of a range that are counted one by one; the others in blocks of rows about equally frequent."""
BLOCKS = 400


def expected_distinct(
    ids: float, num_rows: int, exponent: float, first: int = 0, end: int | None = None
) -> float:
    """Return how many rows of a range are among ids drawn by a power law, as `dataloading.randomness.power_law` draws them.

    Args:
        ids: number drawn, of all rows.
        num_rows: rows of the table; row i is about as frequent as (i + 1) ** -exponent.
        exponent: not negative; 0 is uniform.
        first: first row of the range.
        end: end of the range; None for that of the table.
    """
    end = num_rows if end is None else end
    if end <= first:
        return 0.0
    exact = np.arange(first, min(first + EXACT_ROWS, end) + 1)
    blocks = np.geomspace(exact[-1] + 1, end + 1, BLOCKS).round().astype(np.int64) - 1
    edges = np.unique(np.concatenate([exact, blocks]))
    bound = np.log1p(edges.astype(np.float64))
    gamma = 1.0 - exponent
    if gamma:
        before = np.expm1(gamma * bound) / np.expm1(gamma * np.log1p(num_rows))
    else:
        before = bound / np.log1p(num_rows)
    rows = np.diff(edges)
    return float((rows * -np.expm1(-ids * np.diff(before) / rows)).sum())
