"""Last stages of every pipeline: draw the report, write fitted state and spec, then rename the dataset."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from configs.preproc_schema import Mode, PreprocConfig
from configs.table_schema import Label, TableConfig
from dataloading.dataset.dataset_directory import check_output
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.dataset.split_files import SplitFiles
from dataloading.lineage import DAY, OF_FIT, PARENT, Lineage
from preproc.dataset_writer import finish_dataset
from preproc.fitted_state import save_fitted
from preproc.report.console import (
    ColumnSummary,
    Progress,
    SplitSummary,
    print_columns,
    print_equal_labels,
    print_new_values,
    print_splits,
)
from preproc.report.distributions import read_distributions
from preproc.report.files import write_report
from preproc.report.plot import ReportFacts, draw
from preproc.text_columns import TextColumns
from preproc.work_directory import Work


@dataclass(frozen=True, slots=True)
class WrittenColumns:
    """Written columns of a dataset, and their statistics.

    Attributes:
        categorical: features in the model's order.
        files: bytes and CRC-32 per file.
        columns: summary per feature.
        splits: summary per split.
        statistics: fitted numbers per numerical feature.
        counted: rows that vocabularies are built on, in words.
        bad_rows: rows left out.
        absent: names of the labels, the weight and the keep rate that new rows lack.
        lineage: the day, and the fit that it extends.
        vocabularies: checksums of those of the fit that `mode=transform` takes, by feature.
        text_columns: which columns were text; None if the fit that is extended does not say.
    """

    categorical: list[CategoricalFeature]
    files: Mapping[str, dict[str, Any]]
    columns: dict[str, ColumnSummary]
    splits: dict[str, SplitSummary]
    statistics: dict[str, Any]
    counted: str
    bad_rows: int
    absent: frozenset[str] = frozenset()
    lineage: Lineage = field(default_factory=Lineage)
    vocabularies: Mapping[str, str] = field(default_factory=dict)
    text_columns: TextColumns | None = None


def row_columns(table: TableConfig) -> list[RowColumn]:
    """Return labels, weight and keep rate of a table, as they are stored."""
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
    """Draw report.png, with `plot`, and add the distributions of the written numericals to their summaries.

    Args:
        directory: of the dataset.
        numerical_bin: row-major numericals, those of the first split first.
        columns: summary per feature.
        splits: rows and clicks per split; ids that are 0 may be missing.
        config: options.
        table: description.
    """
    distributions = read_distributions(
        numerical_bin,
        list(table.numerical_names),
        config.numerical_dtype.name,
        next(iter(splits.values())).rows,
    )
    for name, distribution in distributions.items():
        columns[name].distribution = distribution
    if config.plot:
        draw(directory / "report.png", columns, _facts(config, table, splits))


def _facts(
    config: PreprocConfig, table: TableConfig, splits: Mapping[str, SplitSummary]
) -> ReportFacts:
    assert config.output is not None
    return ReportFacts(
        name=Path(config.output).name,
        splits=splits,
        frequency_limit=config.frequency_limit,
        has_clicks=any(column.is_binary for column in row_columns(table)),
    )


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
    save_fitted(
        directory,
        table,
        written.statistics,
        config.source,
        written.lineage.day,
        written.text_columns,
    )
    write_report(
        directory,
        written.columns,
        _facts(config, table, written.splits),
        counted=written.counted,
        bad_rows=written.bad_rows,
    )
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
        *(
            next((column for column in columns if column.channel is channel), None)
            for channel in (Channel.weight, Channel.keep_rate)
        ),
    )
    # Again, hours later: whatever lies there now is replaced.
    output = check_output(config.output, config.overwrite)
    finish_dataset(spec, written.files, output, partial(work.record_complete, config))
    print_columns(progress.console, written.columns, written.splits, f"{written.counted} rows")
    print_splits(progress.console, written.splits)
    if spec.rate_label.is_binary:
        print_equal_labels(progress.console, spec.title(spec.rate_label), written.splits)
    print_new_values(progress.console, written.splits)


def _metadata(config: PreprocConfig, written: WrittenColumns) -> dict[str, Any]:
    """Return what the spec tells about the way the dataset was made."""
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
