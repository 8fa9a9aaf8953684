"""Plot of speed over GPUs: strong scaling (65,536 rows per step) and weak scaling (65,536 rows per GPU) of DLRM T15.

    python -m benchmarks.scaling --results DIR --out scaling.png

DIR holds the JSON files of `benchmarks.train`, rows `dlrm_t15_1`, `dlrm_t15_2`, `dlrm_t15_4`, `dlrm_t15_2_weak` and
`dlrm_t15_4_weak`. Missing rows are left out.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nn.plots.style import FAINT, INK, STYLE, TRAIN

PANELS = {
    "strong": ("Strong scaling: global batch 65,536", ("dlrm_t15_1", "dlrm_t15_2", "dlrm_t15_4")),
    "weak": (
        "Weak scaling: 65,536 rows per GPU",
        ("dlrm_t15_1", "dlrm_t15_2_weak", "dlrm_t15_4_weak"),
    ),
}
# Million samples/s on H200, measured by us with the peers' own code and ids on the device: benchmarks/README.md.
PEERS: dict[str, dict[str, dict[int, float]]] = {
    "torchrec_dlrm as shipped": {"strong": {1: 3.41, 4: 8.96}, "weak": {1: 3.41, 4: 9.96}},
    "NVIDIA's PyTorch DLRM, AMP": {"strong": {1: 8.74}, "weak": {1: 8.74}},
    "TorchRec DMP and pipeline, compiled": {
        "strong": {1: 13.9, 4: 9.4},
        "weak": {1: 13.9, 4: 30.7},
    },
}
PEER_STYLES = (("#d1603d", "s"), ("#3d8b6e", "^"), ("#7a5ba6", "D"))
GPUS = (1, 2, 4)


def main() -> None:
    """Draw the rows in --results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="--out of benchmarks.train")
    parser.add_argument("--out", type=Path, required=True, help="plot to write")
    args = parser.parse_args()
    results = read_results(args.results)
    if not results:
        parser.error(f"--results={args.results} holds none of the rows that are drawn")
    draw_scaling(results, args.out)


def read_results(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the results of the rows that are drawn, by name."""
    names = {name for _, rows in PANELS.values() for name in rows}
    paths = {name: directory / f"{name}.json" for name in sorted(names)}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def draw_scaling(results: dict[str, dict[str, Any]], out_png: Path) -> None:
    """Draw both panels on one scale.

    Args:
        results: results of `benchmarks.train` by row.
        out_png: plot to write, 1,560 x 832 pixels.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(12, 6.4), dpi=130, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03)
        figure.suptitle(
            "DLRM, Criteo 1TB tables (T15), on H200", x=0.012, ha="left", size=13, weight="bold"
        )
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (kind, (title, names)) in zip(panels, PANELS.items(), strict=True):
            axes.set_title(title, loc="left")
            _draw_ours(axes, [results[name] for name in names if name in results])
            _draw_peers(axes, kind)
            axes.set_xlabel("GPUs")
            axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
            axes.set_xlim(0.6, 5.2)
        panels[0].set_ylabel("million samples/s")
        panels[0].set_ylim(bottom=0)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2)
        figure.savefig(out_png)


def _draw_ours(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw medians with their range and share of the ideal, and the ideal: the first point times the GPUs."""
    if not rows:
        return
    gpus = [row["world_size"] for row in rows]
    low, speed, high = (
        [row["samples_per_s"][key] / 1e6 for row in rows] for key in ("min", "median", "max")
    )
    if gpus[0] == 1:
        axes.plot(
            *(GPUS, [speed[0] * count for count in GPUS]),
            color=FAINT,
            linestyle=(0, (5, 3)),
            linewidth=1.3,
            label="ideal: one GPU of this recipe, times the number of GPUs",
            zorder=2,
        )
    below = [middle - minimum for middle, minimum in zip(speed, low, strict=True)]
    above = [maximum - middle for middle, maximum in zip(speed, high, strict=True)]
    axes.errorbar(
        *(gpus, speed),
        yerr=[below, above],
        color=TRAIN,
        linewidth=2.2,
        marker="o",
        markersize=7,
        capsize=3,
        label="this recipe: median, min and max of the records",
        zorder=4,
    )
    for number, value in zip(gpus, speed, strict=True):
        text = f"{value:.1f}"
        if number > 1 and gpus[0] == 1:
            text += f"\n{value / speed[0] / number:.0%} of ideal"
        axes.annotate(
            *(text, (number, value)),
            xytext=(9, -5),
            textcoords="offset points",
            va="top",
            color=INK,
            weight="bold" if number == gpus[-1] else "normal",
        )


def _draw_peers(axes: Axes, kind: str) -> None:
    for (name, speeds), (color, marker) in zip(PEERS.items(), PEER_STYLES, strict=True):
        points = speeds[kind]
        axes.plot(
            *(list(points), list(points.values())),
            color=color,
            linestyle="none",
            marker=marker,
            markersize=7,
            alpha=0.9,
            label=f"{name}, uniform ids on the device",
            zorder=3,
        )


if __name__ == "__main__":
    main()
