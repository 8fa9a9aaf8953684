"""Selection of runs of rows from many columns, without a Python loop over rows."""

from collections.abc import Iterator

import numpy as np

FEW_RUNS = 2
"""Up to this many runs are yielded as views, one by one; more runs are copied in one numpy call."""
LONG_RUN = 128
"""From so many units per run on, runs are copied one by one, which costs 0.7 us a run on a loaded machine."""


class Selection:
    """Half-open row ranges to select from any number of columns.

    A shuffled batch is tens of blocks or thousands of single rows. Columns are then viewed as blocks of `unit` rows,
    the largest number that divides every bound, and one `take` per column copies all of them; or, where units are short
    and runs are long, one `concatenate`. `runs`: int64 [K, 2].
    """

    def __init__(self, runs: np.ndarray) -> None:
        self.runs = runs
        self.lengths = runs[:, 1] - runs[:, 0]
        self.num_rows = int(self.lengths.sum())
        self._units: np.ndarray | None = None
        if len(runs) > FEW_RUNS:
            self._unit = int(np.gcd.reduce(runs, axis=None))
            if self.num_rows < LONG_RUN * self._unit * len(runs):
                self._units = expand(runs // self._unit)

    def pieces(self, column: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (slice of the selection, rows of `column`) for all selected rows.

        `column`: [N] or [N, k], C-contiguous.
        """
        if self._units is not None:
            whole = column[: len(column) // self._unit * self._unit]
            wide = whole.reshape(-1, self._unit, *column.shape[1:])
            yield (
                slice(0, self.num_rows),
                wide.take(self._units, axis=0).reshape(-1, *column.shape[1:]),
            )
            return
        if len(self.runs) > FEW_RUNS:
            views = [column[first:last] for first, last in self.runs.tolist()]
            yield slice(0, self.num_rows), np.concatenate(views)
            return
        start = 0
        for first, last in self.runs.tolist():
            yield slice(start, start + last - first), column[first:last]
            start += last - first

    def rows_of(self, column: np.ndarray) -> np.ndarray:
        """Return all selected rows of `column`; not always a copy."""
        parts = [piece for _, piece in self.pieces(column)]
        return parts[0] if len(parts) == 1 else np.concatenate([column[:0], *parts])

    def row_at(self, position: int) -> int:
        ends = np.cumsum(self.lengths)
        run = int(np.searchsorted(ends, position, side="right"))
        return int(self.runs[run, 1] - (ends[run] - position))


def expand(runs: np.ndarray) -> np.ndarray:
    """Return the int64 numbers in `runs`, int64 [K, 2] half-open ranges, one after another."""
    runs = runs[runs[:, 1] > runs[:, 0]]
    if not len(runs):
        return np.zeros(0, np.int64)
    ends = np.cumsum(runs[:, 1] - runs[:, 0])
    # A sum of steps is several times as fast as np.repeat.
    steps = np.ones(ends[-1], np.int64)
    steps[0] = runs[0, 0]
    steps[ends[:-1]] = runs[1:, 0] - runs[:-1, 1] + 1
    return np.cumsum(steps, out=steps)


def runs_of(rows: np.ndarray) -> np.ndarray:
    """Return numbers, int64 [n], as half-open ranges, one after another; the inverse of `expand`."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return np.stack([rows[np.r_[0, breaks]], rows[np.r_[breaks - 1, len(rows) - 1]] + 1], axis=1)
