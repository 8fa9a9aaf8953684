"""Samples per second: since the last record, and over the run without its first window."""

import math
import time


class ThroughputMeter:
    """Counter of rows and time during training; paused during evaluation and profiling.

    The first window includes one-time costs (compilation, allocation, cold caches). The throughput of the run leaves it
    out unless it is the only window.
    """

    def __init__(self) -> None:
        self._windows: list[tuple[int, int, float]] = []
        self._rows = 0
        self._steps = 0
        self._seconds = 0.0
        self._since: float | None = time.perf_counter()

    def count(self, rows: int) -> None:
        """Count one step of `rows` rows over all ranks, unless paused."""
        if self._since is None:
            return
        self._rows += rows
        self._steps += 1

    def pause(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None

    def resume(self) -> None:
        self._since = time.perf_counter()

    def window(self) -> dict[str, float]:
        """Return the throughput since the last call and start a new window; nan if no step was counted."""
        is_running = self._since is not None
        self.pause()
        window = (self._rows, self._steps, self._seconds)
        self._windows.append(window)
        self._rows, self._steps, self._seconds = 0, 0, 0.0
        if is_running:
            self.resume()
        return _speed([window])

    def run(self) -> dict[str, float]:
        """Return the throughput over all windows except the first."""
        counted = [window for window in self._windows if window[1]]
        return _speed(counted[1:] or counted)


def _speed(windows: list[tuple[int, int, float]]) -> dict[str, float]:
    rows, steps, seconds = (sum(column) for column in zip((0, 0, 0.0), *windows, strict=True))
    if not steps:
        return {"samples_per_s": math.nan, "step_ms": math.nan}
    return {"samples_per_s": rows / seconds, "step_ms": seconds * 1e3 / steps}
