"""Curves of many runs in one picture: the metric of each evaluation, and the training loss, over steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compare.run_record import RunRecord, State
from configs.palette import COLORS, FAINT
from nn.models.metric import Metric
from nn.observability.records import FINAL
from nn.plots.series import SMOOTH_FROM, limits, series, smoothed, thinned
from nn.plots.style import picture, title_of

MAX_LABEL_CHARS = 44


def draw_runs(
    runs: Sequence[RunRecord], names: Sequence[str], metric: Metric | None, out_png: Path
) -> None:
    """Draw the curves of runs, the best one first; 1,560 x 780 pixels.

    Those without a colour are grey and have no name, since nobody tells more lines apart. `metric` is of the evaluations;
    None if there are none yet.
    """
    if metric is not None:
        splits = {run.split for run in runs}
        metric = metric.on(splits.pop() if len(splits) == 1 else "evaluation")
    colors = COLORS[: len(runs)]
    unfinished = sum(run.state is not State.finished for run in runs)
    facts = f"{unfinished} not finished (x)" if unfinished else ""
    about = ", ".join(dict.fromkeys(title_of(run.header) for run in runs))
    title = f"{len(runs)} run{'s' * (len(runs) != 1)} of {about}"
    best, step = (None, None) if metric is None else runs[0].best(metric)
    if metric is not None and best is not None:
        title += f"   ·   best {metric.title} {best:.4f} at step {step:,}"
    with picture(out_png, 6, title, facts) as figure:
        left, right = figure.subplots(1, 2)
        left.set_title(
            "evaluation" if metric is None else f"{metric.title}, evaluations", loc="left"
        )
        right.set_title("training loss", loc="left")
        key = "" if metric is None else metric.test_key
        for axes, name, has_dots in ((left, key, True), (right, "loss", False)):
            curves = [[r for r in run.records if FINAL not in r] for run in runs]
            lines = [series(records, name) for records in curves]
            # The best one last, on top of the others.
            for index in reversed(range(len(runs))):
                style = _style(index, colors, names)
                _draw(axes, lines[index], runs[index], has_dots=has_dots, **style)
            _finish(axes, lines)
        handles, labels = left.get_legend_handles_labels()
        if not handles:
            handles, labels = right.get_legend_handles_labels()
        figure.legend(
            handles[::-1],
            labels[::-1],
            loc="outside lower left",
            ncols=min(len(colors) + 1, 3),
            fontsize=8.5,
        )


def _style(index: int, colors: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return colour, width, order and label of a run; of the runs without a name, the first has the common label."""
    if index < len(colors):
        text = names[index]
        text = text if len(text) <= MAX_LABEL_CHARS else f"...{text[3 - MAX_LABEL_CHARS :]}"
        width = 2.4 if index == 0 and len(names) > 1 else 1.5
        return {"color": colors[index], "linewidth": width, "zorder": 30 - index, "label": text}
    more = f"{len(names) - len(colors)} more" if index == len(colors) else None
    return {"color": FAINT, "linewidth": 0.8, "zorder": 2, "alpha": 0.6, "label": more}


def _draw(
    axes: Any, line: tuple[np.ndarray, np.ndarray], run: RunRecord, *, has_dots: bool, **style: Any
) -> None:
    steps, values = line
    if not len(values):
        # A run without values keeps its place in the legend.
        axes.plot([], [], **style)
        return
    if not has_dots and len(values) >= SMOOTH_FROM:
        steps, values = thinned((steps, smoothed(values)))
    is_named = style["label"] is not None and style["color"] is not FAINT
    dots = {"marker": "o", "markersize": 3.5} if (has_dots and is_named) or len(values) == 1 else {}
    axes.plot(steps, values, **style, **dots)
    if run.state not in (State.finished, State.running):
        mark = {"color": style["color"], "zorder": style["zorder"], "linestyle": "none"}
        axes.plot(steps[-1], values[-1], marker="x", markersize=7, markeredgewidth=1.8, **mark)


def _finish(axes: Any, lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    value_range = limits(*lines)
    if value_range is None:
        axes.text(0.5, 0.5, "no records", transform=axes.transAxes, ha="center", color=FAINT)
        axes.set_yticks([])
        return
    axes.set_ylim(*value_range)
