"""Plot of a run's metrics.jsonl: loss, AUC, throughput and learning rate over steps."""

import logging
import sys
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dataloading.dataset.durable_files import replace_bytes
from nn.observability.records import FINAL, read_records

# More points than the picture has pixels would only slow down drawing.
MAX_POINTS = 1500
# A line with at least this many points is drawn faintly, with its moving mean on top.
SMOOTH_FROM = 20

INK = "#30343b"
FAINT = "#8a919c"
TRAIN = "#3b6fb6"
TEST = "#d1603d"
SPEED = "#3d8b6e"
RATE = "#7a5ba6"

# matplotlib warns where the home directory cannot be written, and takes a temporary one.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

# Any: matplotlib types its keys as a Literal of all their names.
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#c4c8ce",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "grid.color": "#e9ebee",
    "xtick.color": "#c4c8ce",
    "ytick.color": "#c4c8ce",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}

Series = tuple[np.ndarray, np.ndarray]  # steps [n], values [n]


def draw_curves(metrics_jsonl: Path, out_png: Path) -> None:
    """Plot the records of a run; a panel without data is labelled "no records".

    Args:
        metrics_jsonl: file written by `nn.observability.run_directory`. `teacher_auc` in its first line is drawn as a
            ceiling: the best AUC that synthetic labels allow.
        out_png: file to write, 1,560 x 1,020 pixels.

    Raises:
        ValueError: a line is no record.
        OSError: the picture cannot be written.
    """
    # Importing matplotlib takes most of a second, so only the end of a run pays for it.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    header, records = read_records(metrics_jsonl)
    loss, test_loss = series(records, "loss"), series(records, "test_log_loss")
    metric, name, larger_is_better = _main_metric(records)
    auc, test_auc = series(records, f"train_{metric}"), series(records, f"test_{metric}")
    speed, rate = series(records, "samples_per_s"), series(records, "lr")
    ceiling = np.array([header["teacher_auc"]] if _is_finite(header.get("teacher_auc")) else [])

    with rc_context(STYLE):
        figure = Figure(figsize=(12, 7.85), dpi=130)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04)
        figure.suptitle(_title(header, records), x=0.012, ha="left", size=13, weight="bold")
        panels = figure.subplots(2, 2, height_ratios=(1.7, 1), sharex=True)

        axes = panels[0, 0]
        axes.set_title("log loss" if metric == "auc" else "loss", loc="left")
        _draw_train(axes, loss, TRAIN, "train")
        _draw_test(axes, test_loss)
        _finish(axes, loss, test_loss)

        axes = panels[0, 1]
        axes.set_title("ROC AUC" if metric == "auc" else name, loc="left")
        _draw_train(axes, auc, TRAIN, "train, the latest rows")
        _draw_test(axes, test_auc)
        _mark_best(axes, test_auc, name, larger_is_better=larger_is_better)
        _mark_restored(axes, header, test_auc)
        _draw_ceiling(axes, ceiling)
        _finish(axes, auc, test_auc, (ceiling, ceiling))

        axes = panels[1, 0]
        axes.set_title("samples/s", loc="left")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        _draw_train(axes, speed, SPEED)
        _finish(axes, speed, from_zero=True)

        axes = panels[1, 1]
        axes.set_title("learning rate", loc="left")
        axes.plot(*thinned(rate), color=RATE, linewidth=1.8, **_points(rate))
        _finish(axes, rate, from_zero=True)

        for axes in panels[1]:
            axes.set_xlabel("step")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.get_major_locator().set_params(integer=True)
        _save(figure, out_png)


def _save(figure: Any, out_png: Path) -> None:
    """Write the picture, which is complete or absent."""
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_bytes(out_png, picture.getvalue(), out_png.with_name(f".{out_png.name}.tmp"))


def series(records: list[dict[str, Any]], name: str) -> Series:
    """Return steps and values of the records that contain a finite number under key `name`.

    A final evaluation is left out: it may be of other rows, and of a model of an earlier step.
    """
    points = [
        (record["step"], record[name])
        for record in records
        if _is_finite(record.get(name)) and FINAL not in record
    ]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, values


def _is_finite(value: object) -> bool:
    """Return whether a value of a record is a number that a plot can show."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the centred moving mean over 2 % of the points, at least 5; the window shrinks at both ends."""
    window = np.ones(max(5, len(values) // 50) | 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    return np.convolve(values, window, "same") / counts


def thinned(line: Series) -> Series:
    """Reduce a line to at most `MAX_POINTS` points: the minimum and maximum of every interval."""
    steps, values = line
    if len(values) <= MAX_POINTS:
        return line
    kept = set()
    for start, end in pairwise(np.linspace(0, len(values), MAX_POINTS // 2 + 1).astype(int)):
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


def _title(header: dict[str, Any], records: list[dict[str, Any]]) -> str:
    parts = [header.get("recipe", "run")]
    if records:
        parts.append(f"{max(record['step'] for record in records):,} steps")
    metric, name, _ = _main_metric(records)
    for key, text in ((f"test_{metric}", f"test {name}"), ("test_log_loss", "log loss")):
        _, values = series(records, key)
        parts += [f"{text} {value:.4f}" for value in values[-1:]]
    _, speeds = series(records, "samples_per_s")
    if len(speeds):
        parts.append(f"median {np.median(speeds):,.0f} samples/s")
    return "   ·   ".join(parts)


def _points(line: Series) -> dict[str, Any]:
    """Return plot options that show the single points of a short line."""
    return {"marker": "o", "markersize": 4} if len(line[0]) < SMOOTH_FROM else {}


def _draw_train(axes: Any, line: Series, color: str, label: str | None = None) -> None:
    steps, values = line
    if 0 < len(values) < SMOOTH_FROM:
        axes.plot(*line, color=color, linewidth=1.8, label=label, **_points(line))
    if len(values) < SMOOTH_FROM:
        return
    axes.plot(*thinned(line), color=color, alpha=0.25, linewidth=0.8)
    axes.plot(*thinned((steps, smoothed(values))), color=color, linewidth=1.8, label=label)


def _draw_test(axes: Any, line: Series) -> None:
    if len(line[0]):
        axes.plot(*line, color=TEST, linewidth=1.5, marker="o", markersize=4, label="test")


def _draw_ceiling(axes: Any, ceiling: np.ndarray) -> None:
    for value in ceiling:
        label = f"ceiling, the teacher's own AUC: {value:.4f}"
        axes.axhline(value, color=FAINT, linestyle=(0, (5, 3)), linewidth=1.3, label=label)


def _main_metric(records: list[dict[str, Any]]) -> tuple[str, str, bool]:
    """Return key, title and direction of the metric to plot: of several labels the first AUC, else the first RMSE."""
    keys = [key for record in records for key in record if key.startswith("test_")]
    for name, title, larger_is_better in (("auc", "AUC", True), ("rmse", "RMSE", False)):
        for key in keys:
            metric, dot, task = key.removeprefix("test_").partition(".")
            if metric == name:
                return f"{name}{dot}{task}", f"{task} {title}".strip(), larger_is_better
    return "auc", "AUC", True


def _mark_best(axes: Any, line: Series, name: str, *, larger_is_better: bool) -> None:
    steps, values = line
    if not len(values):
        return
    best = int(values.argmax() if larger_is_better else values.argmin())
    axes.plot(
        *(steps[best], values[best]),
        color=TEST,
        linestyle="none",
        marker="*",
        markersize=16,
        markeredgecolor="white",
        label=f"best test {name}: {values[best]:.4f} at step {steps[best]:,.0f}",
        zorder=4,
    )


def _mark_restored(axes: Any, header: dict[str, Any], line: Series) -> None:
    """Mark the evaluation before the first step of a run that started from a checkpoint."""
    steps, values = line
    if header.get("restored") is None or not len(steps) or steps[0] != header.get("start_step"):
        return
    label = f"restored model: {values[0]:.4f}"
    axes.plot(steps[0], values[0], color=INK, linestyle="none", marker="D", label=label, zorder=5)


def _finish(axes: Any, *lines: Series, from_zero: bool = False) -> None:
    """Set y range and legend, or label an empty panel."""
    value_range = limits(*lines)
    if value_range is None:
        axes.text(0.5, 0.5, "no records", transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_yticks([])
        return
    axes.set_ylim(*((0, 1.12 * value_range[1]) if from_zero else value_range))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")
