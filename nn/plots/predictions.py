"""Picture of the predictions of an evaluation: calibration, gain and lift of each binary label."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.messages import shortened
from configs.palette import FAINT, INK, TEST, TRAIN
from nn.plots.style import legend_above, picture, plain, title_of

MOST_TASKS = 8


def draw_predictions(document: Mapping[str, Any], out_png: Path) -> None:
    """Plot calibration, gain and lift, one row per binary label.

    `out_png`: file to write, 1,560 pixels wide. Raises OSError: the picture cannot be written.
    """
    tasks = dict(list(document["tasks"].items())[:MOST_TASKS])
    num_rows = next(iter(tasks.values()))["rows"]
    title = f"{title_of(document)}   ·   predictions of split {document['split']} after step {document['step']:,}"
    facts = f"{num_rows:,} rows"
    if document["recipe"] != document.get("model"):
        facts = f"{document['recipe']}   ·   {facts}"
    if len(document["tasks"]) > MOST_TASKS:
        facts += f"   ·   the first {MOST_TASKS} of {len(document['tasks'])} labels"
    with picture(out_png, 0.7 + 5 * len(tasks), title, facts) as figure:
        rows = figure.subfigures(len(tasks), 1, squeeze=False)[:, 0]
        for (name, task), row in zip(tasks.items(), rows, strict=True):
            head = "" if len(tasks) == 1 else f"{plain(shortened(name, 24))}: "
            grid = row.add_gridspec(2, 3, height_ratios=(3, 1))
            calibration = row.add_subplot(grid[0, 0])
            _draw_calibration(calibration, task, head)
            _draw_scores(row.add_subplot(grid[1, 0], sharex=calibration), calibration, task)
            for column, (title, draw) in enumerate((("gain", _draw_gain), ("lift", _draw_lift)), 1):
                axes = row.add_subplot(grid[:, column])
                axes.set_title(title)
                if task["gain"] is None:
                    _no(axes, "undefined: no row is labelled 1")
                    continue
                draw(axes, task, task["gain"])
                axes.set(xlabel="% of the rows, highest scores first")
                legend_above(axes, columns=1, lines=3)


def _draw_calibration(axes: Any, task: Mapping[str, Any], head: str) -> None:
    """Draw the mean label over the mean prediction per bin, beside the diagonal of perfect calibration."""
    axes.set_title(f"{head}calibration")
    bins = task["calibration"]
    if not bins:
        _no(axes, "no row has a weight")
        return
    predictions, labels = (np.array([b[key] for b in bins]) for key in ("prediction", "label"))
    scores = task.get("scores") or {}  # of an earlier version: none
    low, high, is_log = _calibration_range(predictions, labels, bool(scores.get("logarithmic")))
    if is_log:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    axes.plot(
        (low, high), (low, high), color=FAINT, linestyle=(0, (5, 3)), linewidth=1.3, label="perfect"
    )
    if all(b["weight"] == b["rows"] for b in bins):
        least, most = _wilson_interval(labels, np.array([b["rows"] for b in bins]))
        axes.vlines(
            predictions,
            np.maximum(least, low),
            np.minimum(most, high),
            color=TRAIN,
            alpha=0.35,
            linewidth=3,
            label="95 % interval",
        )
    count = f"{len(bins)} bins of equally many rows" if len(bins) > 1 else "1 bin"
    inside = labels >= low
    axes.plot(predictions[inside], labels[inside], "o-", color=TRAIN, markersize=4.5, label=count)
    if not inside.all():
        axes.plot(
            predictions[~inside],
            np.full(int((~inside).sum()), 0.015),
            "v",
            color=TRAIN,
            transform=axes.get_xaxis_transform(),
            label="no row labelled 1",
        )
    axes.set(xlim=(low, high), ylim=(low, high), ylabel="mean label")
    axes.tick_params(labelbottom=False)
    means = f"mean prediction {task['mean_prediction']:.4g}, label {task['mean_label']:.4g}"
    legend_above(axes, title=means)


def _draw_scores(axes: Any, calibration: Any, task: Mapping[str, Any]) -> None:
    """Draw how many rows have which prediction, below the calibration and with its axis of predictions."""
    scores = task.get("scores")
    if not scores:
        axes.set_axis_off()
        return
    edges, weight = np.array(scores["edges"]), np.array(scores["weight"])
    percent = 100 / weight.sum()
    positives = np.array(scores["positives"])
    for part, color, label in ((weight, TRAIN, "all rows"), (positives, TEST, "labelled 1")):
        axes.stairs(percent * part, edges, fill=True, color=color, alpha=0.75, label=label)
    least, most = calibration.get_xlim()
    calibration.set_xlim(min(least, edges[0]), max(most, edges[-1]))
    axes.set(xlabel="prediction", ylabel="% of the rows")
    legend_above(axes)


def _wilson_interval(rates: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of rates that were measured on so many rows (Wilson 1927); it has a width at 0 and 1 too."""
    z = 1.96
    centre = (rates + z * z / (2 * rows)) / (1 + z * z / rows)
    spread = z / (1 + z * z / rows) * np.sqrt(rates * (1 - rates) / rows + (z / (2 * rows)) ** 2)
    return centre - spread, centre + spread


def _calibration_range(
    predictions: np.ndarray, labels: np.ndarray, are_logarithms: bool
) -> tuple[float, float, bool]:
    """Return the range of both axes, and whether they are logarithmic: where predictions are, and a label is 1."""
    smallest, largest = predictions.min(), max(predictions.max(), labels.max())
    shown = labels[labels > 0]
    if are_logarithms and len(shown):
        return min(smallest, shown.min()) / 1.4, min(1.0, largest * 1.4), True
    low, high = min(smallest, labels.min()), largest
    margin = 0.06 * (high - low) or 0.05
    return max(0.0, low - margin) - 1e-3, min(1.0, high + margin) + 1e-3, False


def _draw_gain(axes: Any, task: Mapping[str, Any], gain: Mapping[str, Sequence[float]]) -> None:
    """Draw the part of all positives among the rows of the highest scores."""
    rows, positives = [0.0, *gain["rows_percent"]], [0.0, *gain["positives_percent"]]
    rate = 100 * task["mean_label"]
    axes.fill_between(rows, rows, positives, color=TRAIN, alpha=0.1, linewidth=0)
    axes.plot(rows, positives, color=TRAIN, linewidth=1.8, label="this model")
    axes.plot((0, rate, 100), (0, 100, 100), color=FAINT, linewidth=1.1, label="perfect order")
    axes.plot(
        (0, 100), (0, 100), color=FAINT, linestyle=(0, (5, 3)), linewidth=1.3, label="random order"
    )
    _mark_percent(axes, gain, "positives_percent", (10, 50), "{:.1f} %", below=True)
    axes.set(xlim=(-1, 101), ylim=(-1, 104), ylabel="% of the rows labelled 1")


def _draw_lift(axes: Any, _: Mapping[str, Any], gain: Mapping[str, Sequence[float]]) -> None:
    """Draw the rate of positives among the rows of the highest scores over that of all rows."""
    axes.plot(gain["rows_percent"], gain["lift"], color=TEST, linewidth=1.8, label="this model")
    axes.axhline(1, color=FAINT, linestyle=(0, (5, 3)), linewidth=1.3, label="random order")
    _mark_percent(axes, gain, "lift", (1, 10, 50), "{:.2f}", below=False)
    most = 1.2 * max(*gain["lift"], 1.2)
    axes.set(xscale="log", xlim=(0.09, 110), ylim=(0, most), ylabel="rate of 1 / rate in all rows")
    axes.set_xticks((0.1, 1, 10, 100), ("0.1", "1", "10", "100"))


def _mark_percent(
    axes: Any,
    gain: Mapping[str, Sequence[float]],
    key: str,
    percentages: Sequence[int],
    form: str,
    *,
    below: bool,
) -> None:
    offset = (7, -10) if below else (6, 5)
    for percent in percentages:
        value = gain[key][gain["rows_percent"].index(percent)]
        axes.plot(percent, value, "o", color=INK, markersize=4, zorder=4)
        axes.annotate(
            form.format(value),
            (percent, value),
            offset,
            textcoords="offset points",
            size=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )


def _no(axes: Any, reason: str) -> None:
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", color=FAINT)
    axes.set(xticks=(), yticks=())
