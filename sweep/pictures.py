"""Pictures of a sweep: its trials as parallel coordinates, and the importance of each option."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import CategoricalDistribution

from compare.table import short_names
from configs.messages import shortened
from configs.palette import FAINT, INK, TRAIN
from nn.models.metric import Metric
from nn.plots.style import picture
from sweep.space import Space, Values

COORDINATES, IMPORTANCES = "parallel_coordinates.png", "importances.png"
MAX_LABEL_CHARS = 18
LEAST_SPREAD = 1e-12


def draw_coordinates(
    rows: Sequence[dict[str, Any]],
    space: Space,
    metric: Metric,
    split: str,
    about: str,
    out_png: Path,
) -> None:
    """Draw a line per trial through its value of each option to its value of the metric.

    `about`: recipe and data of the title. Complete trials have the colour of their metric; pruned ones, with their last
    evaluation, are dashed and grey.
    """
    from matplotlib import colormaps

    drawn = [row for row in rows if row["value"] is not None]
    values = np.array([row["value"] for row in drawn if row["state"] == "complete"])
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    shown_low = min([low, *(row["value"] for row in drawn)])
    shown_high = max([high, *(row["value"] for row in drawn)])
    names = [*short_names(list(space)), f"{split} {metric.key}"]
    states = Counter(row["state"] for row in rows)
    lines = {"pruned": " (dashed)", "failed": " (not drawn)"}
    counts = (f"{number} {state}{lines.get(state, '')}" for state, number in states.items())
    title = f"{about}   ·   {len(rows)} trial{'s' * (len(rows) != 1)}"
    with picture(out_png, 5.6, title, "   ·   ".join(counts)) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        # The worst first, so that the best lie on top.
        for row in reversed(drawn):
            heights = [_height(space[option], row[option]) for option in space]
            heights.append(_share(row["value"], shown_low, shown_high))
            share = _share(row["value"], low, high)
            share = share if metric.larger_is_better else 1 - share
            is_complete = row["state"] == "complete"
            style: dict[str, Any] = (
                {"color": colormaps["viridis_r"](0.05 + 0.9 * share), "linewidth": 1.6}
                if is_complete
                else {"color": FAINT, "linewidth": 1.0, "linestyle": (0, (4, 3)), "alpha": 0.8}
            )
            if row is drawn[0]:
                style |= {"linewidth": 3.2, "marker": "o", "markersize": 5}
            axes.plot(range(len(names)), heights, **style)
        _coordinate_axes(axes, space, names, (shown_low, shown_high))


def _share(value: float, low: float, high: float) -> float:
    """Return the position of a value between two others; the middle if these are equal."""
    return (value - low) / (high - low) if high - low > LEAST_SPREAD else 0.5


def _coordinate_axes(
    axes: Any, space: Space, names: Sequence[str], values: tuple[float, float]
) -> None:
    """Draw a vertical axis with its ticks per option, and one for the metric."""
    ticks = [_ticks(values_of) for values_of in space.values()]
    low, high = values
    shares = (0, 0.25, 0.5, 0.75, 1) if high - low > LEAST_SPREAD else (0.5,)
    ticks.append([(share, f"{low + share * (high - low):.4f}") for share in shares])
    for position, labelled in enumerate(ticks):
        axes.axvline(position, color=INK, linewidth=0.9, zorder=0)
        for height, text in labelled:
            axes.plot(
                [position - 0.012, position + 0.012], [height, height], color=INK, linewidth=0.9
            )
            axes.text(
                *(position - 0.03, height, text),
                **{"ha": "right", "va": "center", "fontsize": 8.5},
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
                zorder=6,
            )
    axes.set_xticks(range(len(names)), names, fontsize=10, weight="bold")
    axes.set_xlim(-0.45, len(names) - 0.9)
    axes.set_ylim(-0.06, 1.06)
    axes.set_yticks([])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def draw_importances(
    importances: Mapping[str, float], num_complete: int, about: str, out_png: Path
) -> None:
    """Draw a bar per option: its share of the variance of the metric over the complete trials (fANOVA).

    `importances` is empty if they are unknown; few complete trials tell little.
    """
    ordered = sorted(importances.items(), key=lambda item: item[1])
    facts = f"share of the variance over {num_complete} complete trial{'s' * (num_complete != 1)}"
    height = 1.5 + 0.45 * max(len(ordered), 2)
    with picture(out_png, height, f"{about}   ·   importance of options", facts) as figure:
        axes = figure.subplots()
        if not ordered:
            text = "unknown: it takes more than one complete trial, with different values"
            axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=FAINT)
            axes.set_axis_off()
        else:
            keys, shares = zip(*ordered, strict=True)
            bars = axes.barh(keys, shares, color=TRAIN, height=0.62)
            axes.bar_label(bars, fmt="{:.2f}", padding=4)
            axes.set_xlim(0, max(1.0, 1.1 * max(shares)))
            axes.grid(visible=False, axis="y")


def _height(values: Values, value: Any) -> float:
    """Return the position of a value on its axis, between 0 and 1; nan, which is not drawn, for one without an effect."""
    if value is None:
        return math.nan
    if isinstance(values, CategoricalDistribution):
        last = len(values.choices) - 1
        return values.choices.index(value) / last if last else 0.5
    low, high = float(values.low), float(values.high)
    if values.log:
        low, high, value = np.log(low), np.log(high), np.log(value)
    return float((value - low) / (high - low)) if high > low else 0.5


def _ticks(values: Values) -> list[tuple[float, str]]:
    if isinstance(values, CategoricalDistribution):
        return [
            (_height(values, text), shortened(str(text), MAX_LABEL_CHARS))
            for text in values.choices
        ]
    shares = (0, 0.25, 0.5, 0.75, 1)
    low, high = float(values.low), float(values.high)
    if values.log:
        return [(share, f"{low * (high / low) ** share:.3g}") for share in shares]
    return [(share, f"{low + share * (high - low):.4g}") for share in shares]
