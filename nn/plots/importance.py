"""Picture of the importance of features: how much worse the first metric gets when a feature is permuted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.palette import INK, TRAIN
from nn.models.metric import Metric
from nn.plots.style import picture, plain, title_of

MOST_FEATURES = 40


def draw_importance(
    importance: Mapping[str, Any], metric: Metric, facts: Mapping[str, Any], out_png: Path
) -> None:
    """Draw a bar per feature, the most important ones first, with the deviation over its repeats.

    `importance`: of `measure_importance`. `facts`: model and data of the title. Raises OSError: the picture cannot be written.
    """
    metric = metric.on(importance["split"])
    features = dict(list(importance["features"].items())[:MOST_FEATURES])
    sign = -1 if metric.larger_is_better else 1
    worse = [sign * found[metric.key]["mean"] for found in features.values()]
    deviations = [found[metric.key]["deviation"] for found in features.values()]
    repeats = importance["repeats"]
    title = f"{title_of(facts)}   ·   importance of features"
    known = f"split {importance['split']}   ·   {metric.title} {importance['unpermuted'][metric.key]:.4f} unpermuted"
    known += f"   ·   {repeats} permutation{'s' * (repeats != 1)} a feature"
    if len(importance["features"]) > MOST_FEATURES:
        known += f"   ·   the first {MOST_FEATURES} of {len(importance['features']):,} features"
    with picture(out_png, 1.6 + 0.24 * len(features), title, known) as figure:
        axes = figure.subplots()
        bars = axes.barh(
            [plain(name) for name in features],
            worse,
            # One permutation has no deviation.
            xerr=deviations if repeats > 1 else None,
            color=TRAIN,
            height=0.66,
            error_kw={"ecolor": INK, "elinewidth": 1.1},
        )
        axes.bar_label(bars, fmt="{:.5f}", padding=4, size=8.5)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.margins(x=0.12, y=0.01)
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
        axes.set_xlabel(f"how much worse {metric.title} gets")
