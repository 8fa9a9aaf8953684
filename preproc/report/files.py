"""Report of a run, stored in its dataset: report.json; `preproc/report/plot.py` draws report.png."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from preproc.report.console import COVERAGE_LIMITS, ColumnSummary, LogCounts, RowCounts
from preproc.report.plot import ReportFacts


def write_report(
    directory: Path,
    columns: dict[str, ColumnSummary],
    facts: ReportFacts,
    *,
    counted: str,
    rows: RowCounts,
    source_columns: Mapping[str, str],
    logs: Mapping[str, LogCounts],
) -> None:
    """Write report.json below `directory`.

    The same data and options give the same bytes, since the report holds no times. `source_columns` has what every column of
    the sources became: label, weight, keep rate, feature, history, split, order, kept, query or unused.
    """
    document = {
        "counted": counted,
        "frequency_limit": facts.frequency_limit,
        "rows": asdict(rows),
        "source_columns": source_columns,
        "splits": {name: split.document for name, split in facts.splits.items()},
        "coverage_limits": list(COVERAGE_LIMITS),
        "columns": {name: asdict(column) for name, column in columns.items()},
        **({"sequences": {name: asdict(log) for name, log in logs.items()}} if logs else {}),
    }
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")
