"""Conversion of any table to a dataset directory: sources, SQL, and an engine that runs it.

stage: the rows of the query are numbered and written to Parquet. order: the splits are concatenated, training
rows first, shuffled with `shuffle=true`. histories: the earlier rows of its user that each row sees. fit: statistics
and vocabularies of the training rows, or those of an earlier run (`mode=transform`), or those of the day before with the
values of this one (`mode=extend`). encode: ids and numericals.
write: the files of the dataset. Each is a function of `preproc/table/pipeline/` over a `Journal`, which records every written
relation, so a killed run resumes after the last one.
"""

from contextlib import closing
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from configs.messages import shown
from configs.options import require
from configs.preproc_schema import EngineName, Mode, OnBad, PreprocConfig, VocabularyRows
from configs.table_schema import SplitRule, TableConfig
from dataloading.lineage import vocabularies
from preproc.complete_dataset import WrittenColumns, complete_dataset
from preproc.fitted_state import (
    SOURCE,
    FittedState,
    load_fitted,
    with_limits_of,
    with_missing_of,
    with_placeholder,
)
from preproc.raw_files import RawFile, fingerprint, refuse_copies
from preproc.report.console import LogCounts, Progress, RowCounts, print_result
from preproc.report.plot import load_library
from preproc.table.duckdb_engine import DuckDBEngine, Engine, TextEngine
from preproc.table.feature_values import CodedValues, FeatureValues, TextValues
from preproc.table.pipeline.categoricals import encode_features
from preproc.table.pipeline.histories import history_ids, slice_histories
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.numericals import transform_numericals
from preproc.table.pipeline.order import order_rows
from preproc.table.pipeline.rows import num_read, stage_rows, write_bad
from preproc.table.pipeline.sequences import line_up, sequence_group
from preproc.table.pipeline.writing import Transformed, write_splits
from preproc.table.source_files import Sources, find_source, find_sources
from preproc.text_columns import TextColumns
from preproc.work_directory import check_disk, is_small, work_directory, work_directory_of


def build_table(config: PreprocConfig, table: TableConfig, progress: Progress) -> None:
    """Write the dataset that `table` describes and print its summary.

    Raises ValueError: sources, columns or rows that differ from their description; SQL that the engine rejects; a split
    without rows; too little disk space or memory.
    """
    assert config.output is not None
    output = Path(config.output).resolve()
    table, sources = find_sources(config, _of_new_rows(config, table))
    for _, paths in sources.values():
        refuse_copies(paths)
    every = [file for _, paths in sources.values() for file in paths]
    if config.plot and not is_small(config):
        load_library()
    fitted = None
    if config.mode in (Mode.transform, Mode.extend):
        with progress.phase(f"compare the fit in {config.fitted} with its records"):
            fitted = load_fitted(Path(config.fitted or ""), table)
        table = with_missing_of(fitted, table)
        if config.mode is Mode.extend:
            config = with_limits_of(fitted, config, table)
            counted = _counted_files(config, table, sources)
            logs = [log.source for log in table.logs if log.source]
            _refuse_same_day(fitted, sources, counted, config.source, logs)
    identity = _identity(config, table, every, fitted)
    with work_directory(config, output, identity, progress) as work:
        if not work.has_progress:
            # Numbered rows, sorted rows and encoded columns are each about as large as the plain text.
            needed = 3.0 * sum(file.plain_bytes for file in every)
            check_disk(work_directory_of(config, output).parent, needed, "the run")
        engine: Engine
        if config.engine is EngineName.duckdb:
            engine = DuckDBEngine(config, work.directory)
        else:
            from preproc.table.spark_engine import SparkEngine

            engine = SparkEngine(config, work.directory)
        with closing(engine):
            rows = _build(Journal(config, table, engine, work, progress, sources, fitted))
    print_result(progress, output, rows)


def _counted_files(
    config: PreprocConfig, table: TableConfig, sources: Sources
) -> dict[str, list[RawFile]]:
    """Return the files of each source whose values or events count: those that only test may train on a later day."""
    every = {name: files for name, (_, files) in sources.items()}
    if config.vocabulary is VocabularyRows.all or any(log.rows == "all" for log in table.logs):
        return every
    if table.split.by == "last_file" and len(sources) == 1:
        return {name: files[:-1] for name, files in every.items()}
    if config.test_source is None:
        return every
    return {name: find_source(name, source)[1] for name, (source, _) in sources.items()}


def _refuse_same_day(
    fitted: FittedState,
    sources: Sources,
    counted: dict[str, list[RawFile]],
    option: Any,
    logs: list[str],
) -> None:
    """Raise ValueError if the days before have read a file of the only source, or every file that the option source names.

    A table beside the log may stay from day to day, and may lie in its folder. `option`: the value of `source`; what it
    does not name is no log, unless it names nothing. `logs`: names of the sources of events.
    """
    for name in logs:
        for file in sources[name][1]:
            if fingerprint(file) in fitted.read:
                raise ValueError(
                    f"{file.path}: its events were read already by {fitted.directory} or a day before it, which carries them "
                    "on, so they would count twice; give the events of the new day"
                )
    named = [n for n, (s, _) in sources.items() if SOURCE in str(with_placeholder(s.files, option))]
    files = [file for name in named or sources for file in counted[name]]
    known = [file for file in files if fingerprint(file) in fitted.read]
    if known and (len(sources) == 1 or len(known) == len(files)):
        were = "and other files were" if known[1:] else "was"
        raise ValueError(
            f"{known[0].path} {were} read already by {fitted.directory} or a day before it, so their rows would count twice; "
            "give the files of the new day"
        )


def _of_new_rows(config: PreprocConfig, table: TableConfig) -> TableConfig:
    """Return the description of rows that all become one split, if they do: what divides others may be missing."""
    if config.one_split is None:
        return table
    for past in table.pasts:
        key = "history" if past in table.history else "sequence"
        require(
            past.rows == "all" or config.one_split == "train",
            f"table.{key}: {shown(past.name)} holds training rows only, and all rows become split "
            f"{config.one_split}; set split_name=null and a table.split with training rows",
        )
    return replace(table, split=SplitRule())


def _identity(
    config: PreprocConfig, table: TableConfig, files: list[RawFile], fitted: FittedState | None
) -> dict[str, Any]:
    keys = ["train_fraction", "frequency_limit", "vocabulary", "numerical_dtype", "shuffle"]
    keys += ["on_bad", "seed", "mode", "fitted", "one_split"]
    keys += ["rare_counts", "refit", "retire_after"]
    options = {key: getattr(config, key) for key in keys}
    return {
        "options": {key: getattr(value, "name", value) for key, value in options.items()},
        "fitted": fitted.files if fitted else None,
        "table": asdict(table),
        "engine": config.engine.name,
        "format": 5,
        "files": [file.identity for file in files],
    }


def _build(journal: Journal) -> int:
    """Write everything, phase after phase; return the number of rows."""
    config, table, fitted = journal.config, journal.table, journal.fitted
    with journal.progress.phase(f"stage with {config.engine.name}") as phase:
        num_bad = stage_rows(journal)
        splits, split_of_row = order_rows(journal)
        num_rows = max(rows.stop for rows in splits.values())
        phase.name += f": {num_rows:,} rows" + (
            f", {num_bad:,} bad ones left out" if num_bad else ""
        )
    # A fit that is only applied counts nothing, and its rows need no training split.
    of_train = config.vocabulary is VocabularyRows.train and "train" in splits
    counted = splits["train"] if of_train else range(num_rows)
    transformed = _transform(journal, splits, split_of_row, counted)
    summaries, records = write_splits(journal, transformed)
    if config.on_bad is OnBad.quarantine:
        write_bad(journal)
    rows_read = num_read(journal)
    written = WrittenColumns(
        categorical=transformed.categorical,
        files=records,
        columns=transformed.columns,
        splits=summaries,
        statistics=transformed.statistics,
        absent=journal.absent,
        counted="the new" if config.mode is Mode.transform else config.vocabulary.name,
        rows=RowCounts(rows_read, num_rows, num_bad, rows_read - num_bad - num_rows),
        source_columns=journal.work.state["columns"],
        logs=transformed.logs,
        sequences=tuple(map(sequence_group, table.sequence)),
        lineage=journal.lineage,
        read=_read(journal),
        five=journal.work.state["five"],
        types=journal.work.state["types"],
        vocabularies={} if fitted is None else vocabularies(fitted.limits),
        text_columns=TextColumns.of(journal.work.state["is_text"], str(journal.work.directory)),
    )
    complete_dataset(written, config, table, journal.work, journal.progress)
    return num_rows


def _transform(
    journal: Journal, splits: dict[str, range], split_of_row: str, counted: range
) -> Transformed:
    """Slice the histories, transform the numericals, and find the ids; `counted` are the rows whose values count."""
    config, table, fitted = journal.config, journal.table, journal.fitted
    if table.history:
        with journal.progress.phase("order histories"):
            slice_histories(journal, split_of_row)
    with journal.progress.phase("fit and transform numericals"):
        fits = fitted is None or config.refit
        statistics = {} if fits or fitted is None else fitted.statistics
        train = splits.get("train", counted)
        numericals, columns = transform_numericals(journal, train, counted, statistics, fit=fits)
    values = _feature_values(journal)
    encoded = encode_features(journal, values, counted)
    columns |= {name: column.summary for name, column in encoded.items()}
    categorical = [
        encoded[feature.name].feature(
            feature.name, feature.hotness if feature.is_list else 1, feature.vocabulary_of
        )
        for feature in table.categorical
    ]
    for number, history in enumerate(table.history):
        encoded[history.name] = history_ids(journal, values, number, history, encoded, counted)
        columns[history.name] = encoded[history.name].summary
        [of] = [feature for feature in table.categorical if feature.name == history.of]
        shared = of.vocabulary_of or of.name
        categorical.append(encoded[history.name].feature(history.name, history.length, shared))
    logs = {group.name: LogCounts(0, 0, 0, 0) for group in table.event_lists}
    if table.logs:
        with journal.progress.phase("order events"):
            for number, log in enumerate(table.logs):
                logs[log.name] = line_up(journal, values, number, split_of_row)
    by_name = {feature.name: feature for feature in table.categorical}
    categorical += [
        encoded[of].feature(name, None, by_name[of].vocabulary_of or of)
        for log in table.logs
        for of, name in zip(log.of, log.features, strict=True)
    ]
    return Transformed(splits, values, numericals, statistics, categorical, encoded, columns, logs)


def _feature_values(journal: Journal) -> FeatureValues:
    engine, features = journal.engine, journal.table.categorical
    if not engine.codes_texts:
        return TextValues(features, journal.query, cast("TextEngine", engine).exploded)
    assert isinstance(engine, DuckDBEngine)
    directory = journal.work.directory / journal.work.state["rows_in"]

    def count_codes(number: int, rows: range) -> str:
        return engine.count_codes(directory, f"c{number}", rows, features[number].is_list)

    return CodedValues(features, journal.query, count_codes)


def _read(journal: Journal) -> list[str]:
    """Return the fingerprints of the files of the run whose values count, and of those of the days before."""
    counted = _counted_files(journal.config, journal.table, journal.sources)
    own = map(fingerprint, chain.from_iterable(counted.values()))
    extends = journal.fitted is not None and journal.config.mode is Mode.extend
    before = journal.fitted.read if journal.fitted is not None and extends else ()
    return list(dict.fromkeys([*before, *own]))
