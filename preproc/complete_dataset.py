"""Last phases of every pipeline: draw the report, write fitted state and spec, then rename the dataset."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from configs.preproc_schema import Mode, PreprocConfig
from configs.table_schema import Label, TableConfig
from dataloading.dataset.dataset_directory import check_output
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.dataset.sequences import SequenceGroup
from dataloading.dataset.split_files import SplitFiles
from dataloading.lineage import DAY, FITTED, OF_FIT, PARENT, Lineage
from preproc.dataset_writer import finish_dataset
from preproc.fitted_state import (
    FIVE,
    IS_TEXT,
    READ,
    ROWS_KEYS,
    SOURCE,
    TYPES,
    features_of,
    with_placeholder,
)
from preproc.report.console import (
    COVERAGE_LIMITS,
    ColumnSummary,
    LogCounts,
    Progress,
    RowCounts,
    SplitSummary,
    print_changes,
    print_columns,
    print_equal_labels,
    print_events,
    print_new_values,
    print_rows,
    print_splits,
)
from preproc.report.distributions import read_distributions
from preproc.report.plot import ReportFacts, draw
from preproc.text_columns import TextColumns
from preproc.work_directory import STATE, Work, clear

UNUSED = "unused"
"""What a column of a source is that no part of the dataset reads."""


@dataclass(frozen=True, slots=True)
class WrittenColumns:
    categorical: list[CategoricalFeature]  # features in the model's order
    files: Mapping[str, dict[str, Any]]  # bytes and CRC-32 per file
    columns: dict[str, ColumnSummary]  # summary per feature
    splits: dict[str, SplitSummary]  # summary per split
    statistics: dict[str, Any]  # fitted numbers per numerical feature
    counted: str  # rows of the statistics: train or all, if vocabularies are built on them
    rows: RowCounts  # what became of the rows that were read
    text_columns: TextColumns
    source_columns: Mapping[str, str]  # what every column of the sources became
    logs: Mapping[str, LogCounts] = field(default_factory=dict)  # counts per sequence group
    sequences: tuple[SequenceGroup, ...] = ()
    absent: frozenset[str] = frozenset()
    lineage: Lineage = field(default_factory=Lineage)  # the day, and the fit that it extends
    vocabularies: Mapping[str, str] = field(default_factory=dict)
    read: Sequence[str] = ()  # fingerprints of the files that were read, on the days before too
    five: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)  # SQL types in expressions, but text


def row_columns(table: TableConfig) -> list[RowColumn]:
    """Return labels, weight, keep rate and teachers of a table, as they are stored."""
    columns = []
    for key, number in table.row_numbers.values():
        binary = isinstance(number, Label) and number.kind == "binary"
        dtype = np.dtype(bool if binary else np.float32)
        columns.append(RowColumn(number.name, Channel(key), dtype))
    return columns


def draw_report(
    directory: Path,
    numerical_bin: Path,
    columns: dict[str, ColumnSummary],
    splits: dict[str, SplitSummary],
    config: PreprocConfig,
    table: TableConfig,
) -> None:
    """Draw report.png, with `plot`, and add the distributions of the written numericals to their summaries."""
    distributions = read_distributions(
        numerical_bin,
        list(table.numerical_names),
        config.numerical_dtype.name,
        next(iter(splits.values())).rows,
    )
    for name, distribution in distributions.items():
        columns[name].distribution = distribution
    if config.plot:
        assert config.output is not None
        facts = ReportFacts(Path(config.output).name, splits, config.frequency_limit)
        draw(directory / "report.png", columns, facts)


def complete_dataset(
    written: WrittenColumns,
    config: PreprocConfig,
    table: TableConfig,
    work: Work,
    progress: Progress,
) -> None:
    """Write fitted state, report.json and spec beside the columns, rename all to the output and print its summary."""
    directory = work.dataset
    assert config.output is not None
    save_fitted(directory, table, written, config.source)
    _write_report(directory, written, config.frequency_limit)
    columns = row_columns(table)
    spec = FeatureSpec(
        directory,
        tuple(table.numerical_names),
        np.dtype(config.numerical_dtype.name),
        tuple(column for column in columns if column.channel is Channel.label),
        tuple(written.categorical),
        {
            split: SplitFiles(summary.rows, absent=written.absent)
            for split, summary in written.splits.items()
        },
        _metadata(config, written),
        weight=next((c for c in columns if c.channel is Channel.weight), None),
        keep_rate=next((c for c in columns if c.channel is Channel.keep_rate), None),
        sequences=written.sequences,
        teachers=tuple(column for column in columns if column.channel is Channel.teacher),
    )
    # Again, hours later: whatever lies there now is replaced.
    output = check_output(config.output, config.overwrite)
    finish_dataset(spec, written.files, output, partial(work.record_complete, config))
    with ThreadPoolExecutor(1) as beside:
        # `work_directory` reports what cannot be removed.
        beside.submit(clear, work.directory, but=STATE)
        _print_summary(written, table, spec, progress.console)


def _print_summary(
    written: WrittenColumns, table: TableConfig, spec: FeatureSpec, console: Console
) -> None:
    print_columns(console, written.columns, written.splits, f"{written.counted} rows")
    print_splits(console, written.splits)
    unused = [name for name, role in written.source_columns.items() if role == UNUSED]
    print_rows(console, written.rows, unused)
    for label in spec.labels:
        if label.is_binary:
            print_equal_labels(console, label.name, spec.title(label), written.splits)
    print_changes(console, table, written.splits)
    print_events(console, written.logs)
    print_new_values(console, written.splits, is_ordered=bool(table.order_by))


def save_fitted(directory: Path, table: TableConfig, written: WrittenColumns, source: Any) -> None:
    whole = json.loads(json.dumps(asdict(table)))
    sources, day = whole["sources"], written.lineage.day
    for described in sources.values():
        files = described["files"]
        replaced = with_placeholder(files, source)
        is_the_source = len(sources) == 1 and (replaced == files or isinstance(files, list))
        described["files"] = SOURCE if is_the_source else replaced
    saved = {
        "features": features_of(table),
        "statistics": written.statistics,
        "rows": {key: whole[key] for key in ROWS_KEYS},
        **({DAY: day} if day else {}),
        IS_TEXT: written.text_columns.as_json(),
        READ: list(written.read),
        FIVE: dict(written.five),
        **({TYPES: dict(written.types)} if written.types else {}),
    }
    (directory / FITTED).write_text(json.dumps(saved, indent=1) + "\n")


def _write_report(directory: Path, written: WrittenColumns, frequency_limit: int) -> None:
    """Write report.json; the same data and options give the same bytes, since it holds no times."""
    document = {
        "counted": written.counted,
        "frequency_limit": frequency_limit,
        "rows": asdict(written.rows),
        "source_columns": written.source_columns,
        "splits": {name: split.document for name, split in written.splits.items()},
        "coverage_limits": list(COVERAGE_LIMITS),
        "columns": {name: asdict(column) for name, column in written.columns.items()},
    }
    if written.logs:
        document["sequences"] = {name: asdict(log) for name, log in written.logs.items()}
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")


def _metadata(config: PreprocConfig, written: WrittenColumns) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "frequency_limit": config.frequency_limit,
        "vocabulary_rows": config.vocabulary.name,
    }
    if config.mode is Mode.transform:
        metadata |= {"mode": config.mode.name, OF_FIT: dict(written.vocabularies)}
    if config.shuffle:
        metadata["shuffle_seed"] = config.seed
    if written.lineage.day:
        metadata |= {DAY: written.lineage.day, PARENT: written.lineage.parent}
    return metadata
