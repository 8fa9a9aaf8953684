"""Picture of a run's records over steps: loss, the main metric of each task, throughput, and a learning rate that changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.messages import shortened
from configs.palette import FAINT, INK, RATE, SPEED, TEST, TRAIN
from nn.models.metric import AUC, Metric, metric_of_key
from nn.plots.series import (
    SMOOTH_FROM,
    Series,
    is_finite,
    like_the_last,
    limits,
    series,
    smoothed,
    thinned,
)
from nn.plots.style import label_point, legend_above, picture, plain, title_of

MOST_TASKS = 11
"""Tasks with a panel of their own."""
SMALLEST_EPOCH = 1e-9
TASKS_IN_TITLE = 3
LABELLED = 3
"""Lines of so few points have their values beside the points."""

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RunRecords:
    # environment of the run, and its constants: `recipe`, `model`, `data`, `batch_size`, `seed`, `split` (that is evaluated),
    # `trains_log_loss`, `start_step`, `restored`, `teacher_auc` (the best AUC that synthetic labels allow), all of them optional
    header: Mapping[str, Any]
    # of training and of evaluations, in their order. A final evaluation is none of them: it may be of other rows,
    # and of a model of an earlier step
    records: Records
    restarts: Sequence[int] = ()  # steps of the checkpoints that the run resumed from
    days: Sequence[int] = ()  # steps at which later days began

    @property
    def split(self) -> str:
        """Return the split that is evaluated; `test_` in the records' keys stands for it."""
        return str(self.header.get("split", "test"))

    @property
    def first_step(self) -> int:
        start = self.header.get("start_step")
        return min(self.last_step, int(start) if is_finite(start) else 0)

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def num_days(self) -> int:
        return 1 + max((record.get("day", 0) for record in self.records), default=0)

    @property
    def steps_per_epoch(self) -> float | None:
        """Return the steps of an epoch; None if no record tells, or if days have epochs of their own."""
        if self.num_days > 1:
            return None
        for record in reversed(self.records):
            epoch = record.get("epoch")
            if is_finite(epoch) and epoch > SMALLEST_EPOCH and record["step"] > 0:
                return record["step"] / epoch
        return None


def main_metrics(records: Records) -> list[Metric]:
    """Return the main metric of each task, in the order of the records; the AUC without any."""
    found: dict[str | None, Metric] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        metric = metric_of_key(f"test_{key.removeprefix('test_').removeprefix('train_')}")
        if metric is not None and metric.while_training:
            found.setdefault(metric.task, metric)
    return [*found.values()] or [AUC]


def _best_of_latest(metric: Metric, records: Records, values: np.ndarray) -> int:
    """Return the index in `values`, those of all evaluations, of the best one on the latest day and rows."""
    evaluations = [record for record in records if is_finite(record.get(metric.test_key))]
    is_like = {id(record) for record in like_the_last(evaluations)}
    indices = [index for index, record in enumerate(evaluations) if id(record) in is_like]
    latest = values[indices]
    return indices[int(latest.argmax() if metric.larger_is_better else latest.argmin())]


def draw_curves(run: RunRecords, out_png: Path) -> None:
    """Plot the records of a run; a panel without data says so.

    `out_png`: file to write, 1,560 pixels wide. Raises OSError: the picture cannot be written.
    """
    metrics = main_metrics(run.records)
    drawn = metrics[:MOST_TASKS]
    # At most three panels in a row, evenly filled.
    num_panels, num_rows = 1 + len(drawn), -(-(1 + len(drawn)) // 3)
    rows = [num_panels // num_rows + (r < num_panels % num_rows) for r in range(num_rows)]
    rate = series(run.records, "lr")
    lower = [_draw_speed, _draw_rate] if len(set(rate[1])) > 1 else [_draw_speed]
    height = 3.5 + 4.4 * (0.55 + 0.45 * len(rows))
    with picture(out_png, height, _title(run, metrics), _facts(run, metrics)) as figure:
        # Six columns hold rows of two and of three panels with common edges.
        columns = 6 if 3 in rows else 2
        grid = figure.add_gridspec(len(rows) + 1, columns, height_ratios=[1.7] * len(rows) + [1])
        panels: list[Any] = []
        for row, count in enumerate([*rows, len(lower)]):
            wide = columns // count
            for index in range(count):
                cell = grid[row, index * wide : (index + 1) * wide]
                panels.append(figure.add_subplot(cell, sharex=panels[0] if panels else None))
        _draw_loss(panels[0], run, is_sum=len(metrics) > 1)
        for axes, metric in zip(panels[1:], drawn, strict=False):
            _draw_metric(axes, run, metric)
        for axes, draw in zip(panels[-len(lower) :], lower, strict=True):
            draw(axes, run)
        for axes in panels:
            for step in {*run.restarts, *run.days}:
                axes.axvline(step, color=INK, linestyle=(0, (1, 2)), linewidth=1.1, zorder=1.5)
        _set_steps(panels, panels[-len(lower) :], run)


def _title(run: RunRecords, metrics: Sequence[Metric]) -> str:
    parts = [title_of(run.header)]
    for metric in metrics[:TASKS_IN_TITLE]:
        steps, values = series(run.records, metric.test_key)
        if not len(values):
            continue
        best = _best_of_latest(metric, run.records, values)
        text = f"{run.split} {shortened(metric.title.removeprefix('test '), 28)} {values[-1]:.4f}"
        if values[best] == values[-1]:
            text += ", the best"
        else:
            text += f", best {values[best]:.4f}"
            text += f" at step {steps[best]:,.0f}" if len(metrics) == 1 else ""
        parts.append(text)
    if len(metrics) > TASKS_IN_TITLE:
        parts.append(f"{len(metrics) - TASKS_IN_TITLE} more tasks")
    _, losses = series(run.records, "test_log_loss")
    parts += [f"log loss {value:.4f}" for value in losses[-1:]]
    return "   ·   ".join(parts)


def _facts(run: RunRecords, metrics: Sequence[Metric]) -> str:
    header, parts = run.header, []
    if len(metrics) > MOST_TASKS:
        parts.append(f"the first {MOST_TASKS} of {len(metrics)} tasks")
    if header.get("recipe") not in (None, header.get("model")):
        parts.append(str(header["recipe"]))
    if is_finite(header.get("batch_size")):
        parts.append(f"batch {header['batch_size']:,}")
    if is_finite(header.get("seed")):
        parts.append(f"seed {header['seed']}")
    _, rates = series(run.records, "lr")
    if len(set(rates)) == 1:
        parts.append(f"learning rate {rates[0]:g}")
    if header.get("gpu") is not None:
        parts.append(f"{header.get('world_size')} x {header['gpu']}")
    steps = f"{run.last_step:,} step{'s' * (run.last_step != 1)}"
    if run.steps_per_epoch is not None:
        epochs = f"{run.last_step / run.steps_per_epoch:.3g}"
        steps += f" ({epochs} epoch{'s' * (epochs != '1')})"
    elif run.num_days > 1:
        steps += f" on {run.num_days} days{' (dotted)' * bool(run.days)}"
    parts.append(steps)
    _, speeds = series(run.records, "samples_per_s")
    if len(speeds):
        parts.append(f"median {np.median(speeds):,.0f} samples/s")
    if run.restarts:
        count = len(run.restarts)
        parts.append(f"resumed {f'{count} times' if count > 1 else 'once'} (dotted)")
    return "   ·   ".join(parts)


def _draw_loss(axes: Any, run: RunRecords, *, is_sum: bool) -> None:
    loss, test = series(run.records, "loss"), series(run.records, "test_log_loss")
    title = "loss, the sum over tasks" if is_sum else "loss"
    if len(test[0]):
        is_same = run.header.get("trains_log_loss", True)
        title = "log loss" if is_same else f"loss of training, log loss of {run.split}"
    axes.set_title(title)
    _draw_train(axes, loss, TRAIN, "train")
    _draw_points(axes, test, TEST, run.split)
    _finish(axes, {TRAIN: loss, TEST: test})


def _draw_metric(axes: Any, run: RunRecords, metric: Metric) -> None:
    train = series(run.records, metric.train_key)
    test = series(run.records, metric.test_key)
    num_undefined = 0 if len(test[0]) else sum(metric.test_key in r for r in run.records)
    undefined = f", undefined in all {num_undefined} evaluations" if num_undefined else ""
    axes.set_title(
        plain("ROC AUC" if metric == AUC else metric.title.removeprefix("test ")) + undefined
    )
    _draw_train(axes, train, TRAIN, "train, latest rows")
    _draw_points(axes, test, TEST, run.split)
    _mark_best(axes, test, metric, run.records)
    _mark_restored(axes, run.header, test)
    ceiling = run.header.get("teacher_auc")
    has_ceiling = is_finite(ceiling) and metric.key == "auc"
    lines = [(np.zeros(1), np.array([ceiling]))] if has_ceiling else []
    for _, (value,) in lines:
        label = f"ceiling, the teacher's own AUC: {value:.4f}"
        axes.axhline(value, color=FAINT, linestyle=(0, (5, 3)), linewidth=1.3, label=label)
    _finish(axes, {TRAIN: train, TEST: test}, *lines)


def _draw_speed(axes: Any, run: RunRecords) -> None:
    speed = series(run.records, "samples_per_s")
    axes.set_title("samples/s")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _draw_train(axes, speed, SPEED)
    _finish(axes, {SPEED: speed}, from_zero=True)


def _draw_rate(axes: Any, run: RunRecords) -> None:
    rate = series(run.records, "lr")
    axes.set_title("learning rate")
    _draw_points(axes, rate, RATE)
    # The complete schedule: a short warm-up belongs to it.
    axes.set_ylim(min(0, rate[1].min()), 1.12 * rate[1].max())


def _draw_points(axes: Any, line: Series, color: str, label: str | None = None) -> None:
    """Draw a line, if it has points, which are seen and labelled if there are few of them."""
    if not len(line[0]):
        return
    points = {"marker": "o", "markersize": 4} if len(line[0]) < SMOOTH_FROM else {}
    axes.plot(*thinned(line), color=color, linewidth=1.8, label=label, **points)
    if len(line[0]) <= LABELLED:
        for step, value in zip(*line, strict=True):
            text = _short(value) if abs(value) >= 1 else f"{value:.4f}"
            label_point(axes, step, value, text, color)


def _draw_train(axes: Any, line: Series, color: str, label: str | None = None) -> None:
    steps, values = line
    if len(values) < SMOOTH_FROM:
        _draw_points(axes, line, color, label)
        return
    axes.plot(*thinned(line), color=color, alpha=0.25, linewidth=0.8)
    axes.plot(*thinned((steps, smoothed(values))), color=color, linewidth=1.8, label=label)


def _mark_best(axes: Any, line: Series, metric: Metric, records: Records) -> None:
    steps, values = line
    if not len(values):
        return
    best = _best_of_latest(metric, records, values)
    label = f"best: {values[best]:.4f} at step {steps[best]:,.0f}"
    axes.plot(
        *(steps[best], values[best]),
        color=TEST,
        linestyle="none",
        marker="*",
        markersize=16,
        markeredgecolor="white",
        label=label,
        zorder=4,
    )


def _mark_restored(axes: Any, header: Mapping[str, Any], line: Series) -> None:
    """Mark the evaluation before the first step of a run that started from a checkpoint."""
    steps, values = line
    if header.get("restored") is None or not len(steps) or steps[0] != header.get("start_step"):
        return
    label = f"restored model: {values[0]:.4f}"
    axes.plot(steps[0], values[0], color=INK, linestyle="none", marker="D", label=label, zorder=5)


def _finish(
    axes: Any, lines: Mapping[str, Series], *further: Series, from_zero: bool = False
) -> None:
    """Set y range and legend, mark points outside the frame, or label an empty panel.

    `from_zero`: whether the frame begins at zero.
    """
    value_range = limits(*lines.values())
    if value_range is not None:
        value_range = limits(*lines.values(), *further) or value_range
        low, high = (0, 1.12 * value_range[1]) if from_zero else value_range
        axes.set_ylim(low, high)
        _mark_outside(axes, lines, low, high)
    else:
        axes.text(0.5, 0.5, "no records", transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_yticks([])
    legend_above(axes)


def _mark_outside(axes: Any, lines: Mapping[str, Series], low: float, high: float) -> None:
    """Draw a triangle at the edge of the frame for points beyond it, and their range beside the panel's title."""
    extremes = []
    ends = ("^", 0.985, "▲ up to", max), ("v", 0.015, "▼ down to", min)
    for marker, height, text, extreme in ends:
        farthest = []
        for color, (steps, values) in lines.items():
            beyond = values > high if marker == "^" else values < low
            if not beyond.any():
                continue
            at = thinned((steps[beyond], values[beyond]), 60)[0]
            axes.plot(
                *(at, np.full(len(at), height)),
                transform=axes.get_xaxis_transform(),
                color=color,
                marker=marker,
                markersize=5.5,
                linestyle="none",
                zorder=5,
            )
            farthest.append(extreme(values[beyond]))
        extremes += [f"{text} {_short(extreme(farthest))}"] if farthest else []
    axes.set_title("   ".join(extremes), loc="right", size=8.5, color=FAINT)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _set_steps(panels: Sequence[Any], lowest: Sequence[Any], run: RunRecords) -> None:
    """Set the range of steps; label the lowest row with steps and, below them, epochs."""
    first, last = run.first_step, run.last_step
    margin = 0.04 * max(last - first, 1)
    panels[0].set_xlim(first - margin, max(last, first + 1) + margin)
    # Panels of other widths do not stand above the labels of the lowest one.
    if len(lowest) > 1:
        for axes in panels[: -len(lowest)]:
            axes.tick_params(labelbottom=False)
    for axes in panels:
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in lowest:
        axes.set_xlabel("step", labelpad=2)
        scale = run.steps_per_epoch
        if scale:
            epochs = axes.secondary_xaxis(
                -0.25, functions=(lambda step, s=scale: step / s, lambda epoch, s=scale: epoch * s)
            )
            epochs.set_xlabel("epoch", labelpad=2)
