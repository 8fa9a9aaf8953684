"""report.png: one line per column, with its missing rows, distinct values, and values kept per frequency limit."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from configs.messages import printable, shortened
from preproc.report.console import COVERAGE_LIMITS, ColumnSummary, SplitSummary

# matplotlib warns where the home directory cannot be written, and takes a temporary one.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

INK, FAINT, GREY, BLUE, LIGHT_BLUE = "#20242b", "#69717d", "#8a94a3", "#2563a8", "#c3d7ee"
# Any: matplotlib types its keys as a Literal of all their names.
STYLE: dict[Any, Any] = {
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": "#c4c8ce",
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.color": "#c4c8ce",
    "xtick.labelcolor": INK,
    "ytick.left": False,
    "ytick.labelcolor": INK,
}


def draw(
    path: Path,
    columns: dict[str, ColumnSummary],
    splits: dict[str, SplitSummary],
    frequency_limit: int,
) -> None:
    """Draw the summary of every column.

    Args:
        path: of the image.
        columns: one entry per feature, in the order of the rows of the figure.
        splits: summaries of the written splits.
        frequency_limit: limit of the run; a column may have its own.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        height = 1.7 + 0.215 * max(len(columns), 6)
        figure = Figure(figsize=(13.5, height), dpi=110)
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
        rows = "    ".join(
            f"{name} {split.rows:,} rows"
            + f", {100 * split.clicks / max(split.rows, 1):.2f} % clicks" * split.has_labels
            for name, split in splits.items()
        )
        figure.suptitle(rows, x=0.012, ha="left", size=11, weight="bold")
        missing, sizes, covered = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1.5, 2))
        _draw_missing(missing, columns)
        _draw_sizes(sizes, columns, frequency_limit)
        _draw_coverage(covered, columns, frequency_limit)
        missing.set_yticks(range(len(columns)), [_label(name) for name in columns])
        missing.set_ylim(len(columns) - 0.4, -0.6)
        figure.savefig(path)


def _draw_missing(axes: Any, columns: dict[str, ColumnSummary]) -> None:
    parts = [100 * column.missing for column in columns.values()]
    axes.barh(range(len(parts)), parts, color=GREY, height=0.7)
    for y, part in enumerate(parts):
        if part:
            axes.text(part + 1, y, f"{part:.1f}" if part >= 0.1 else "< 0.1", va="center", size=7.5)
    axes.set(title="missing, % of rows", xlim=(0, 112), xticks=(0, 25, 50, 75, 100))


def _draw_sizes(axes: Any, columns: dict[str, ColumnSummary], frequency_limit: int) -> None:
    most = 10.0
    for y, column in enumerate(columns.values()):
        if column.distinct is None or column.kept is None:
            continue
        most = max(most, column.distinct)
        axes.barh(y, max(column.distinct, 1), color=LIGHT_BLUE, height=0.7)
        axes.barh(y, max(column.kept, 1), color=BLUE, height=0.7)
        text = _short(column.kept)
        if column.kept != column.distinct:
            text += f" of {_short(column.distinct)}"
        axes.text(1.2 * max(column.distinct, 1), y, text, va="center", size=7.5)
    # Space for the text after the longest bar.
    axes.set(
        title=f"values that are kept (dark) of those seen, limit {frequency_limit}",
        xscale="log",
        xlim=(0.8, most**1.35),
    )
    axes.minorticks_off()


def _draw_coverage(axes: Any, columns: dict[str, ColumnSummary], frequency_limit: int) -> None:
    """Draw per limit the fraction of rows with a value whose value is kept."""
    cells = np.full((len(columns), len(COVERAGE_LIMITS)), np.nan)
    table_rows = np.zeros(len(COVERAGE_LIMITS), np.int64)
    for y, column in enumerate(columns.values()):
        if column.coverage:
            seen = max(column.coverage[0][1], 1)
            cells[y] = [100 * rows / seen for _, rows in column.coverage]
            table_rows += [values + 1 for values, _ in column.coverage]
    # Darker cells lose more rows.
    axes.imshow(100 - cells, cmap="YlOrBr", vmin=0, vmax=60, aspect="auto", alpha=0.85)
    for (y, x), part in np.ndenumerate(cells):
        if np.isfinite(part):
            text = "100" if part == 100 else f"{min(part, 99.9):.1f}"
            dark = part < 60
            axes.text(x, y, text, ha="center", va="center", size=7, color="white" if dark else INK)
    heads = [
        f"{limit}\n{_short(int(total))}"
        for limit, total in zip(COVERAGE_LIMITS, table_rows, strict=True)
    ]
    axes.set_xticks(range(len(COVERAGE_LIMITS)), heads)
    axes.tick_params(axis="x", length=0)
    if frequency_limit in COVERAGE_LIMITS:
        axes.get_xticklabels()[COVERAGE_LIMITS.index(frequency_limit)].set_weight("bold")
    axes.set_title("rows whose value is kept, % of those that have one")
    axes.set_xlabel("frequency limit, and rows of all tables with it", color=FAINT)
    axes.spines["bottom"].set_visible(False)


def _label(name: str) -> str:
    """Return a name as matplotlib draws it: without control characters, and without formulas."""
    return shortened(printable(name), 40).replace("$", r"\$")


def _short(number: int) -> str:
    """Format a number in three digits: 950, 24.1k, 1.07M."""
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)
