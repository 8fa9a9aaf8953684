"""Report of a run, stored in its dataset: report.json, and report.png as a figure."""

import json
from dataclasses import asdict
from pathlib import Path

from preproc.report.console import COVERAGE_LIMITS, ColumnSummary
from preproc.report.plot import ReportFacts, draw


def write_report(
    directory: Path,
    columns: dict[str, ColumnSummary],
    facts: ReportFacts,
    *,
    counted: str,
    bad_rows: int,
    plot: bool,
) -> None:
    """Write report.json and, with `plot`, report.png below `directory`.

    The same data and options give the same bytes, since the report holds no times.
    """
    document = {
        "counted": counted,
        "frequency_limit": facts.frequency_limit,
        "bad_rows": bad_rows,
        "splits": {name: split.document for name, split in facts.splits.items()},
        "coverage_limits": list(COVERAGE_LIMITS),
        "columns": {name: asdict(column) for name, column in columns.items()},
    }
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    if plot:
        draw(directory / "report.png", columns, facts)
