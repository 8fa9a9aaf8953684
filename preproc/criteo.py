"""Raw Criteo logs to a dataset directory, one column at a time and out of core.

Raw lines are staged once in a DuckDB file; then each column is counted, encoded and written on its
own, so memory holds one column's vocabulary at most, and DuckDB spills even that to disk when it
passes its memory limit.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import duckdb
import numpy as np

from configs.preproc_schema import PreprocConfig, Split, VocabularyRows
from dataloading.dataset_directory import DatasetWriter, write_dataset
from dataloading.feature_spec import CategoricalFeature
from preproc.raw import create_staging, stage
from preproc.raw_files import RawFile, find_files
from preproc.report import (
    ColumnSummary,
    Progress,
    SplitSummary,
    print_columns,
    print_result,
    print_splits,
)
from preproc.sql import (
    CATEGORICAL,
    LABEL,
    NUMERICAL,
    count_values,
    encode,
    numerical,
    vocabulary,
)
from preproc.staging import staging_database

RAW = "raw"
# Rows that pass from DuckDB to the writer at once: about 50 MB of numericals.
CHUNK_ROWS = 1 << 20


def build_criteo(config: PreprocConfig, progress: Progress) -> None:
    """Write the dataset that `config` describes and print its summary.

    Raises:
        ValueError: bad sources, bad lines, a split without rows, an output that stands already.
    """
    assert config.output is not None
    output = Path(config.output).absolute()
    files = find_files(config.source, "source")
    test_files = find_files(config.test_source, "test_source") if config.test_source else []
    shared = {file.path.resolve() for file in files} & {file.path.resolve() for file in test_files}
    if shared:
        raise ValueError(f"source and test_source both name {min(shared)}; test on other rows")
    with staging_database(config, output) as connection:
        rows = _stage_all(connection, files + test_files, progress)
        splits = split_rows(config, rows[: len(files)], rows[len(files) :])
        counted = splits["train"] if config.vocabulary is VocabularyRows.train else range(sum(rows))
        columns = _build_vocabularies(connection, counted, config.frequency_limit, progress)
        with write_dataset(
            output,
            categorical=[
                CategoricalFeature.of(name, _table_rows(columns[name])) for name in CATEGORICAL
            ],
            numerical=NUMERICAL,
            label=LABEL,
            numerical_dtype=config.numerical_dtype.name,
            splits=tuple(splits),
            metadata={
                "frequency_limit": config.frequency_limit,
                "vocabulary_rows": config.vocabulary.name,
            },
            overwrite=config.overwrite,
        ) as dataset:
            summaries = _write(connection, dataset, splits, progress)
    print_columns(progress.console, columns, summaries, f"{config.vocabulary.name} rows")
    print_splits(progress.console, summaries)
    print_result(progress.console, progress, output, sum(rows))


def split_rows(
    config: PreprocConfig, source_rows: list[int], test_rows: list[int]
) -> dict[str, range]:
    """Return the rows of each split as a range over all staged rows.

    Args:
        config: says how to split.
        source_rows: lines of each file of `source`.
        test_rows: lines of each file of `test_source`; none if it is not set.

    Raises:
        ValueError: a split would have no rows.
    """
    num_rows = sum(source_rows)
    if test_rows:
        return {"train": range(num_rows), "test": range(num_rows, num_rows + sum(test_rows))}
    if config.split is Split.fraction:
        # As a decimal number: 0.29 of 100 rows is 29 of them, not the 28 of floating point.
        num_train = int(num_rows * Fraction(str(config.train_fraction)))
        splits = {"train": range(num_train), "test": range(num_train, num_rows)}
        way = f"train_fraction={config.train_fraction} of {num_rows} rows"
        remedy = "change train_fraction or give more rows"
    else:
        num_train = num_rows - source_rows[-1]
        half = num_train + source_rows[-1] // 2
        splits = {
            "train": range(num_train),
            "test": range(num_train, half),
            "validation": range(half, num_rows),
        }
        way = f"split=last_file over {len(source_rows)} files, the last of {source_rows[-1]} rows,"
        remedy = "give at least two files, or choose split=fraction"
    for name, rows in splits.items():
        if not rows:
            raise ValueError(f"{way} leaves no rows for {name}; {remedy}")
    return splits


def _stage_all(
    connection: duckdb.DuckDBPyConnection, files: list[RawFile], progress: Progress
) -> list[int]:
    """Stage all files in order; return the rows of each."""
    create_staging(connection, RAW)
    rows = []
    with progress.stage("read") as current:
        for file in files:
            current.update(str(file.path))
            rows.append(stage(connection, file, RAW))
        what = str(files[0].path) if len(files) == 1 else f"{len(files)} files"
        current.name = f"read {what}: {sum(rows):,} rows"
    return rows


def _build_vocabularies(
    connection: duckdb.DuckDBPyConnection, counted: range, frequency_limit: int, progress: Progress
) -> dict[str, ColumnSummary]:
    """Create a table `vocabulary_<name>` (value, id, count) for each categorical column.

    Returns:
        A description of every feature over the rows `counted`.
    """
    present = ", ".join(f"count({name})" for name in NUMERICAL)
    query = f"SELECT {present} FROM {RAW} WHERE {_within(counted)}"
    columns = {
        name: ColumnSummary(missing=1 - count / len(counted))
        for name, count in zip(NUMERICAL, connection.execute(query).fetchone(), strict=True)
    }
    with progress.stage("build vocabularies") as current:
        for name in CATEGORICAL:
            current.update(name)
            rows = f"(SELECT {name} FROM {RAW} WHERE {_within(counted)})"
            connection.execute(f"CREATE TEMP TABLE counts AS {count_values(name, rows)}")
            connection.execute(
                f"CREATE TABLE vocabulary_{name} AS {vocabulary('counts', frequency_limit)}"
            )
            distinct, seen = connection.execute(
                "SELECT count(*), coalesce(sum(count), 0) FROM counts"
            ).fetchone()
            (kept,) = connection.execute(f"SELECT count(*) FROM vocabulary_{name}").fetchone()
            connection.execute("DROP TABLE counts")
            columns[name] = ColumnSummary(1 - int(seen) / len(counted), distinct, kept)
    return columns


def _table_rows(column: ColumnSummary) -> int:
    """Return the cardinality of a categorical column: the kept values and id 0."""
    assert column.kept is not None
    return column.kept + 1


def _write(
    connection: duckdb.DuckDBPyConnection,
    dataset: DatasetWriter,
    splits: dict[str, range],
    progress: Progress,
) -> dict[str, SplitSummary]:
    """Write every column of every split, and the vocabularies beside them."""
    summaries = {name: SplitSummary(len(rows)) for name, rows in splits.items()}
    with progress.stage("write labels and numericals"):
        expressions = ", ".join(f"{numerical(name)} AS {name}" for name in NUMERICAL)
        for split, rows in splits.items():
            for chunk in _chunks(connection, f"{LABEL}, {expressions}", RAW, rows):
                labels = chunk.pop(LABEL)
                dataset[split].append(
                    labels=labels, numerical=np.stack(list(chunk.values()), axis=1)
                )
                summaries[split].clicks += int(labels.sum())
    with progress.stage("encode and write categoricals") as current:
        (dataset.directory / "vocabulary").mkdir()
        for name in CATEGORICAL:
            current.update(name)
            vocabulary_table = f"vocabulary_{name}"
            path = str(dataset.directory / "vocabulary" / f"{name}.parquet").replace("'", "''")
            connection.execute(
                f"COPY (FROM {vocabulary_table} ORDER BY id) TO '{path}' "
                "(FORMAT parquet, COMPRESSION zstd)"
            )
            connection.execute(
                f"CREATE TABLE encoded AS {encode(name, RAW, 'rowid', vocabulary_table)}"
            )
            for split, rows in splits.items():
                zeros = 0
                for chunk in _chunks(connection, "id", "encoded", rows):
                    dataset[split].append(ids={name: chunk["id"]})
                    zeros += len(chunk["id"]) - int(np.count_nonzero(chunk["id"]))
                summaries[split].zero_ids[name] = zeros
            connection.execute(f"DROP TABLE encoded; DROP TABLE {vocabulary_table}")
    return summaries


def _chunks(
    connection: duckdb.DuckDBPyConnection, columns: str, table: str, rows: range
) -> Iterator[dict[str, np.ndarray]]:
    """Yield `columns` of the rows `rows` of `table`, in order, some at a time.

    The order of a plain scan is the order of insertion (DuckDB's `preserve_insertion_order`), and
    the filter on rowid skips all other row groups.
    """
    for start in range(rows.start, rows.stop, CHUNK_ROWS):
        part = range(start, min(start + CHUNK_ROWS, rows.stop))
        chunk = connection.execute(
            f"SELECT {columns} FROM {table} WHERE {_within(part)}"
        ).fetchnumpy()
        assert all(len(values) == len(part) for values in chunk.values())
        yield chunk


def _within(rows: range) -> str:
    return f"rowid >= {rows.start} AND rowid < {rows.stop}"
