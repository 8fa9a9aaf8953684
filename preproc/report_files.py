"""The report of a run beside its dataset: report.json, and report.png to look at."""

import json
from dataclasses import asdict
from pathlib import Path

from preproc.report import COVERAGE_LIMITS, ColumnSummary, SplitSummary


def write_report(
    directory: Path,
    columns: dict[str, ColumnSummary],
    splits: dict[str, SplitSummary],
    *,
    counted: str,
    frequency_limit: int,
    bad_rows: int,
    plot: bool,
) -> None:
    """Write report.json and, if asked for, report.png below `directory`.

    The same data and options give the same bytes: no times are in it.
    """
    document = {
        "counted": counted,
        "frequency_limit": frequency_limit,
        "bad_rows": bad_rows,
        "splits": {name: asdict(split) for name, split in splits.items()},
        "coverage_limits": list(COVERAGE_LIMITS),
        "columns": {name: asdict(column) for name, column in columns.items()},
    }
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    if plot:
        draw(directory / "report.png", columns, splits, frequency_limit)


def draw(
    path: Path,
    columns: dict[str, ColumnSummary],
    splits: dict[str, SplitSummary],
    frequency_limit: int,
) -> None:
    """Draw what is missing, how large the tables are, and what a frequency limit would keep."""
    from matplotlib.figure import Figure

    tables = {name: column for name, column in columns.items() if column.coverage}
    figure = Figure(figsize=(13, 4 + 0.2 * max(len(columns), 10)), layout="constrained")
    rows = ", ".join(
        f"{name} {split.rows:,} rows, {100 * split.clicks / max(split.rows, 1):.2f} % clicks"
        for name, split in splits.items()
    )
    figure.suptitle(f"{rows}; frequency limit {frequency_limit}", fontsize=10)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1.2, 1.6])
    names = list(columns)[::-1]
    left.barh(names, [100 * columns[name].missing for name in names], color="#7a8ba6")
    left.set(title="missing, % of rows", xlim=(0, 100))
    left.tick_params(axis="y", labelsize=7)
    names = list(tables)[::-1]
    middle.barh(names, [max(tables[n].distinct or 0, 1) for n in names], color="#d9d9d9")
    middle.barh(names, [max(tables[n].kept or 0, 1) for n in names], color="#2b6cb0", height=0.5)
    middle.set(title="values seen (grey) and kept (blue)", xscale="log")
    middle.set_xlim(left=0.7)
    middle.tick_params(axis="y", labelsize=7)
    for bars in (left, middle):
        bars.margins(y=0.01)
    by_size = sorted(tables, key=lambda name: -(tables[name].distinct or 0))
    for rank, name in enumerate(by_size[:10]):
        column = tables[name]
        seen = max(round(column.rows * (1 - column.missing)), 1)
        covered = [100 * each[1] / seen for each in column.coverage or []]
        right.plot(COVERAGE_LIMITS, covered, marker=".", color=f"C{rank}", label=name)
    if frequency_limit > 0:
        right.axvline(frequency_limit, color="black", linewidth=0.8, linestyle=":")
    right.set(
        title="rows whose value is kept, % of those that have one",
        xlabel="frequency limit",
        xscale="log",
        xticks=COVERAGE_LIMITS,
        xticklabels=[str(limit) for limit in COVERAGE_LIMITS],
        ylim=(0, 102),
    )
    right.minorticks_off()
    right.grid(alpha=0.3)
    if by_size:
        right.legend(fontsize=7, title="largest tables", title_fontsize=7, loc="lower left")
    figure.savefig(path, dpi=110)
