"""Picture of the results of loads: latency and throughput, over what was varied."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.palette import COLORS
from serving.client.results import LoadResult

FEWEST_OF_P99 = 1000
"""Requests of which a hundredth tells the 99th percentile; of fewer ones the point is hollow."""
MARGIN, ABOVE = 1.12, 1.3
"""Of an axis around its values, and above them, as a factor."""


NAMES = {
    "batch": "rows per request",
    "concurrency": "requests at a time",
    "rate": "requests per second",
}


def draw(results: Sequence[LoadResult], title: str, facts: str, path: Path) -> None:
    """Draw latency and throughput; loads at a rate have panels of their own below the others.

    Raises OSError: the picture cannot be written.
    """
    from nn.plots.style import picture

    at_a_time = [result for result in results if result.rate is None]
    at_a_rate = [result for result in results if result.rate is not None]
    rows = [row for row in ((at_a_time, "concurrency"), (at_a_rate, "rate")) if row[0]]
    counts = sorted(result.requests for result in results)
    facts += f"   ·   {counts[0]:,} to {counts[-1]:,} requests per load"
    with picture(path, 0.9 + 3.7 * len(rows), title, facts) as figure:
        panels = figure.subplots(len(rows), 2, squeeze=False)
        for (shown, load), (latency, speed) in zip(rows, panels, strict=True):
            _draw_row(shown, load, latency, speed)


def _draw_row(results: Sequence[LoadResult], load: str, latency: Any, speed: Any) -> None:
    """Draw over the loads if several rates are asked, or one number of rows alone; else over the rows."""
    from nn.plots.style import label_point, legend_above

    loads = {getattr(result, load) for result in results}
    batches = {result.batch for result in results}
    over, common = "batch", load
    if len(loads) > 1 and (load == "rate" or len(batches) == 1):
        over, common = load, "batch"
    lines = list(dict.fromkeys(getattr(result, common) for result in results))
    for number, value in enumerate(lines):
        color = COLORS[number % len(COLORS)]
        found = [result for result in results if getattr(result, common) == value]
        found.sort(key=lambda result: getattr(result, over))
        xs = [getattr(result, over) for result in found]
        label = f"{value:,g} {NAMES[common]}"
        if value == 1:
            label = label.replace("s ", " ", 1)  # 1 request at a time
        latency.plot(xs, [r.p99_ms for r in found], color=color, label=label)
        latency.plot(xs, [r.p50_ms for r in found], color=color, marker=".", linestyle=":")
        speed.plot(xs, [r.rows_per_s for r in found], color=color, marker="o")
        for result, x in zip(found, xs, strict=True):
            is_known = result.requests >= FEWEST_OF_P99
            face = color if is_known else "white"
            latency.plot(x, result.p99_ms, "o", color=color, markerfacecolor=face, zorder=4)
            label_point(latency, x, result.p99_ms, f"{result.p99_ms:.3g}", color)
            label_point(speed, x, result.rows_per_s, _number(round(result.rows_per_s)), color)
    xs = sorted({getattr(result, over) for result in results})
    few = any(result.requests < FEWEST_OF_P99 for result in results)
    hollow = f"; hollow: of fewer than {FEWEST_OF_P99:,} requests" if few else ""
    latency.set(title=f"latency: p99{hollow}; p50 dotted", ylabel="ms")
    speed.set(
        title="throughput", ylabel="rows/s", ylim=(0, 1.15 * max(r.rows_per_s for r in results))
    )
    speed.yaxis.set_major_formatter("{x:,.0f}")
    _set_log(latency.yaxis, [v for r in results for v in (r.p50_ms, r.p99_ms)])
    for axes in (latency, speed):
        axes.set_xlabel(NAMES[over])
        _set_log(axes.xaxis, xs, at=xs)
    legend_above(latency, columns=3)


def _set_log(axis: Any, values: Sequence[float], at: Sequence[float] | None = None) -> None:
    """Make an axis logarithmic, with plain numbers as ticks: matplotlib writes powers of ten alone, often none."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    low, high = min(values), max(values)
    # A single value, or nearly equal ones, are drawn in the middle, not blown up.
    room = max(MARGIN, math.sqrt(2.0 / (high / low)))
    name = axis.axis_name
    # Numbers stand above the points.
    above = room if name == "x" else room * ABOVE
    axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (low / room, high * above)})
    locator = LogLocator(subs=(1, 2, 5)) if high > 20 * low else MaxNLocator(6)
    axis.set_major_locator(locator if at is None else FixedLocator(at))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: _number(value))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
