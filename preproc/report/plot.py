"""report.png: numerical features with their distribution, categorical ones with values kept per frequency limit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from threading import Thread
from typing import Any

import numpy as np

from configs.messages import printable, shortened
from configs.palette import FAINT, INK, STYLE, TRAIN
from preproc.report.console import COVERAGE_LIMITS, ColumnSummary, SplitSummary
from preproc.report.distributions import Distribution

LIGHT_BLUE = "#c9d8ec"
DENSE_STYLE = STYLE | {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.grid": False,
    "axes.spines.left": False,
    "ytick.left": False,
}
MOST_ROWS = 100
"""Features of a kind that are drawn; report.json has all."""
LINE_INCHES, BLOCK_INCHES, TITLE_INCHES = 0.215, 0.85, 0.55
HEAD_CHARS = 165
"""Of a line of the head."""

Columns = Mapping[str, ColumnSummary]


@dataclass(frozen=True, slots=True)
class ReportFacts:
    name: str  # of the dataset
    splits: Mapping[str, SplitSummary] = field(default_factory=dict)
    frequency_limit: int = 1  # limit of the run; a column may have its own


def load_library() -> None:
    """Import what `draw` needs in a thread, beside work that leaves a core or the interpreter's lock idle."""

    def load() -> None:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401

    Thread(target=load, daemon=True).start()


def draw(path: Path, columns: Columns, facts: ReportFacts) -> None:
    """Draw the summary of every column. `columns`: one entry per feature, in the order of the rows of the figure."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numerical = {name: c for name, c in columns.items() if c.distinct is None}
    categorical = {name: c for name, c in columns.items() if c.distinct is not None}
    blocks: list[tuple[Columns, Callable[..., None]]] = []
    for found, draw_block in ((numerical, _draw_numerical), (categorical, _draw_categorical)):
        if found:
            blocks.append((dict(list(found.items())[:MOST_ROWS]), draw_block))
    heights = [BLOCK_INCHES + LINE_INCHES * max(len(shown), 2) for shown, _ in blocks]
    left_out = len(columns) - sum(len(shown) for shown, _ in blocks)
    head = _head_lines(facts, left_out)
    with rc_context(DENSE_STYLE):
        head_inches = TITLE_INCHES + 0.2 * len(head)
        height = head_inches + sum(heights)
        figure = Figure(figsize=(13.5, height), dpi=110)
        figure.set_layout_engine(
            "constrained", w_pad=0.1, h_pad=0.08, rect=(0, 0, 1, 1 - head_inches / height)
        )
        kinds = f"{len(numerical):,} numerical and {len(categorical):,} categorical features"
        title = f"{shortened(printable(facts.name), 60)}   ·   {kinds}".replace("$", r"\$")
        figure.text(0.012, 1 - 0.22 / height, title, va="center", size=12, weight="bold")
        for number, line in enumerate(head):
            y = 1 - (0.48 + 0.2 * number) / height
            figure.text(0.012, y, line, va="center", size=9.5, color=FAINT)
        if blocks:
            parts = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)
            for (shown, draw_block), (part,) in zip(blocks, parts, strict=True):
                draw_block(part, shown, facts)
        FigureCanvasAgg(figure).print_png(path)  # savefig() draws twice


def _head_lines(facts: ReportFacts, left_out: int) -> list[str]:
    """Return the rows of every split and the rates of all labels, in lines."""
    rows = "   ·   ".join(
        ", ".join(
            [
                f"{name} {split.rows:,} rows",
                *(
                    f"{shortened(printable(label), 40)} {split.rate(label)}"
                    for label in split.labels
                ),
            ]
        )
        for name, split in facts.splits.items()
    )
    if left_out:
        rows += f"   ·   {left_out:,} features are not drawn; report.json has all"
    return [line.replace("$", r"\$") for line in wrap(rows, HEAD_CHARS)] or [""]


def _draw_numerical(figure: Any, columns: Columns, facts: ReportFacts) -> None:
    missing, shapes, numbers = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1.5, 2))
    _draw_missing(missing, columns)
    found = [column.distribution for column in columns.values() if column.distribution is not None]
    rows = f" ({found[0].rows:,} rows)" if found else ""
    shapes.set_title(f"values after transforms, 1 % to 99 %{rows}")
    heads = ("mean", "std. dev.", "smallest", "1 %", "median", "99 %", "largest")
    for y, column in enumerate(columns.values()):
        of = column.distribution
        if of is None:
            shapes.text(0.5, y, "not counted", ha="center", va="center", size=7.5, color=FAINT)
            continue
        _draw_shape(shapes, y, of)
        smallest, least, _, median, _, most, largest = of.quantiles
        values = (of.mean, of.deviation, smallest, least, median, most, largest)
        for x, value in enumerate(values):
            _cell(numbers, x + 0.4, y, f"{value:.4g}", ha="right", size=7.5)
    shapes.set(xlim=(-0.24, 1.24), xticks=())
    shapes.spines["bottom"].set_visible(False)
    numbers.set(xlim=(-0.6, len(heads) - 0.4))
    numbers.set_xticks([x + 0.4 for x in range(len(heads))], heads, ha="right")
    numbers.xaxis.tick_top()
    numbers.tick_params(axis="x", length=0)
    numbers.spines["bottom"].set_visible(False)


def _draw_shape(axes: Any, y: int, found: Distribution) -> None:
    """Draw a histogram in the line of a feature, with its ends beside it."""
    if found.high == found.low:
        axes.plot((0.5, 0.5), (y + 0.38, y - 0.38), color=TRAIN, linewidth=3)
        is_constant = found.quantiles[0] == found.quantiles[-1]
        text = f"{'always' if is_constant else '1 % to 99 %:'} {found.low:.4g}"
        _cell(axes, 0.56, y, text, size=7.5)
        return
    heights = np.repeat(np.array(found.counts) / max(found.counts), 2)
    x = np.linspace(0, 1, len(found.counts) + 1).repeat(2)[1:-1]
    axes.plot((0, 1), (y + 0.4, y + 0.4), color=LIGHT_BLUE, linewidth=0.8)
    axes.fill_between(x, y + 0.4, y + 0.4 - 0.8 * heights, color=TRAIN, alpha=0.75, linewidth=0)
    for at, value, side in ((-0.02, found.low, "right"), (1.02, found.high, "left")):
        _cell(axes, at, y, f"{value:.4g}", ha=side, size=7.5, color=FAINT)


def _draw_categorical(figure: Any, columns: Columns, facts: ReportFacts) -> None:
    has_coverage = any(column.coverage for column in columns.values())
    ratios = (1, 1.5, 2) if has_coverage else (1, 3.5)
    missing, sizes, *covered = figure.subplots(1, len(ratios), sharey=True, width_ratios=ratios)
    _draw_missing(missing, columns)
    _draw_sizes(sizes, columns, facts.frequency_limit)
    for axes in covered:
        _draw_coverage(figure, axes, columns, facts.frequency_limit)
    # The cells of the coverage have set the range of the lines.
    missing.set_ylim(max(len(columns), 2) - 0.4, -0.6)


def _draw_missing(axes: Any, columns: Columns) -> None:
    parts = [100 * column.missing for column in columns.values()]
    axes.barh(range(len(parts)), parts, color=FAINT, height=0.7)
    for y, part in enumerate(parts):
        text = "0" if not part else f"{part:.1f}" if part >= 0.1 else "< 0.1"
        _cell(axes, part + 1, y, text, size=7.5, color=INK if part else FAINT)
    axes.set(title="missing, % of rows", xlim=(0, 112), xticks=(0, 25, 50, 75, 100))
    axes.set_yticks(range(len(columns)), [_label(name) for name in columns])
    axes.set_ylim(max(len(columns), 2) - 0.4, -0.6)


def _draw_sizes(axes: Any, columns: Columns, frequency_limit: int) -> None:
    for y, column in enumerate(columns.values()):
        if column.distinct is None or column.kept is None:
            continue
        share = 100 * column.kept / max(column.distinct, 1)
        axes.barh(y, 100, color=LIGHT_BLUE, height=0.7)
        axes.barh(y, share, color=TRAIN, height=0.7)
        text = _short(column.kept)
        if column.kept != column.distinct:
            text += f" of {_short(column.distinct)}, {min(share, 99.9):.3g} %"
        _cell(axes, 102, y, text, size=7.5)
    # Space for the text after the bars.
    axes.set(
        title=f"values kept, % of those seen, limit {frequency_limit}",
        xlim=(0, 170),
        xticks=(0, 25, 50, 75, 100),
    )


def _draw_coverage(figure: Any, axes: Any, columns: Columns, frequency_limit: int) -> None:
    """Draw per limit the fraction of rows with a value whose value is kept."""
    cells = np.full((len(columns), len(COVERAGE_LIMITS)), np.nan)
    table_rows = np.zeros(len(COVERAGE_LIMITS), np.int64)
    for y, column in enumerate(columns.values()):
        if column.coverage:
            seen = max(column.coverage[0][1], 1)
            cells[y] = [100 * rows / seen for _, rows in column.coverage]
            table_rows += [values + 1 for values, _ in column.coverage]
    # Darker cells lose more rows.
    image = axes.imshow(cells, cmap="YlOrBr_r", vmin=40, vmax=100, aspect="auto", alpha=0.85)
    bar = figure.colorbar(image, ax=axes, extend="min", pad=0.01, aspect=max(len(columns), 10))
    bar.set_label("rows kept, %", color=FAINT)
    bar.outline.set_visible(False)
    for (y, x), part in np.ndenumerate(cells):
        if np.isfinite(part):
            text = "100" if part == 100 else f"{min(part, 99.9):.1f}"
            dark = part < 60
            _cell(axes, x, y, text, ha="center", size=7, color="white" if dark else INK)
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


def _cell(axes: Any, x: float, y: float, text: str, **options: Any) -> None:
    """Draw a text inside a panel. The layout, which would measure each of a thousand, leaves it out."""
    axes.text(x, y, text, va="center", **options).set_in_layout(False)


def _label(name: str) -> str:
    """Return a name as matplotlib draws it: without control characters, and without formulas."""
    return shortened(printable(name), 40).replace("$", r"\$")


def _short(number: int) -> str:
    """Format a number in three digits: 950, 24.1k, 1.07M."""
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)
