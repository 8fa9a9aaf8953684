"""Conversion of any table to a dataset directory: sources, SQL, and an engine that runs it.

The phases are the modules of `preproc/table/pipeline/`, in the order in which `_build` calls them: rows, order, histories,
numericals, categoricals, sequences, writing. Each is a function over a `Journal`, which records every written relation, so a
killed run resumes after the last one, and takes what the phases before it have returned.
"""

from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from configs.messages import shown
from configs.options import require
from configs.preproc_schema import EngineName, Mode, OnBad, PreprocConfig, VocabularyRows
from configs.table_schema import SplitRule, TableConfig
from dataloading.lineage import Lineage, vocabularies
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
from preproc.table.duckdb_engine import DuckDBEngine, Engine
from preproc.table.feature_values import CodedValues, FeatureValues, TextValues
from preproc.table.pipeline.categoricals import encode_features
from preproc.table.pipeline.histories import history_ids, slice_histories
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.numericals import transform_numericals
from preproc.table.pipeline.order import Ordered, order_rows
from preproc.table.pipeline.rows import stage_rows, write_bad
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
    fitted = None
    if config.mode in (Mode.transform, Mode.extend):
        with progress.phase(f"compare the fit in {config.fitted} with its records"):
            fitted = load_fitted(Path(config.fitted or ""), table)
        table = with_missing_of(fitted, table)
        if config.mode is Mode.extend:
            config = with_limits_of(fitted, config, table)
            _refuse_same_day(config, table, sources, fitted)
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
        journal = Journal(config, table, engine, work, progress, sources, fitted)
        with closing(engine), closing(journal):
            rows = _build(journal)
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
    config: PreprocConfig, table: TableConfig, sources: Sources, fitted: FittedState
) -> None:
    """Raise ValueError if the days before have read a file of the only source, or every file that the option source names.

    A table beside the log may stay from day to day, and may lie in its folder. What the option source does not name is no
    log, unless it names nothing.
    """
    for log in (log for log in table.logs if log.source):
        for file in sources[log.source][1]:
            if fingerprint(file) in fitted.read:
                raise ValueError(
                    f"{file.path}: its events were read already by {fitted.directory} or a day before it, which carries them "
                    "on, so they would count twice; give the events of the new day"
                )
    described = {
        name: with_placeholder(of.files, config.source) for name, (of, _) in sources.items()
    }
    named = [name for name, files in described.items() if SOURCE in str(files)]
    counted = _counted_files(config, table, sources)
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
        "format": 6,
        "files": [file.identity for file in files],
    }


def _build(journal: Journal) -> int:
    """Write everything, phase after phase; return the number of rows."""
    config, table, fitted = journal.config, journal.table, journal.fitted
    with journal.progress.phase(f"stage with {config.engine.name}") as phase:
        staged = stage_rows(journal)
        if config.plot and not is_small(config):
            # Not before, where the interpreter's lock is never idle.
            load_library()
        rows = order_rows(journal, staged)
        phase.name += f": {rows.num_rows:,} rows"
        if staged.num_bad:
            phase.name += f", {staged.num_bad:,} bad ones left out"
    transformed = _transform(journal, rows)
    summaries, records = write_splits(journal, rows, transformed)
    if config.on_bad is OnBad.quarantine:
        write_bad(journal)
    num_read, facts = staged.num_rows + staged.num_bad, staged.facts
    every, held = table.row_numbers, staged.held.row_numbers
    written = WrittenColumns(
        categorical=transformed.categorical,
        files=records,
        columns=transformed.columns,
        splits=summaries,
        statistics=transformed.numericals.statistics,
        absent=frozenset(number.name for name, (_, number) in every.items() if name not in held),
        counted="the new" if config.mode is Mode.transform else config.vocabulary.name,
        rows=RowCounts(num_read, rows.num_rows, staged.num_bad, staged.num_rows - rows.num_rows),
        source_columns=facts.columns,
        logs=transformed.logs,
        sequences=tuple(map(sequence_group, table.sequence)),
        lineage=journal.extended.next_day if journal.extended else Lineage(),
        read=_read(journal),
        five=facts.five,
        types=facts.types,
        vocabularies={} if fitted is None else vocabularies(fitted.limits),
        text_columns=TextColumns.of(facts.is_text, str(journal.work.directory)),
    )
    journal.close()
    journal.engine.close()
    complete_dataset(written, config, table, journal.work, journal.progress)
    return rows.num_rows


def _transform(journal: Journal, rows: Ordered) -> Transformed:
    """Slice the histories, transform the numericals, find the ids, and line up the events of logs."""
    config, table = journal.config, journal.table
    # A fit that is only applied counts nothing, and its rows need no training split.
    of_train = config.vocabulary is VocabularyRows.train and "train" in rows.splits
    counted = rows.splits["train"] if of_train else range(rows.num_rows)
    if table.history:
        with journal.progress.phase("order histories"):
            slice_histories(journal, rows)
    with journal.progress.phase("fit and transform numericals"):
        numericals = transform_numericals(journal, rows, counted)
    values = _feature_values(journal, rows)
    encoded = encode_features(journal, values, counted)
    columns = numericals.summaries | {name: of.summary for name, of in encoded.items()}
    for number, past in enumerate(table.history):
        columns[past.name] = history_ids(journal, values, number, encoded[past.of], counted)
    logs = {group.name: LogCounts(0, 0, 0, 0) for group in table.event_lists}
    if table.logs:
        with journal.progress.phase("order events"):
            for number, log in enumerate(table.logs):
                features = [encoded[of] for of in log.of]
                logs[log.name] = line_up(journal, rows, values, number, features)
    made = [
        encoded[f.name].feature(f.name, f.hotness if f.is_list else 1) for f in table.categorical
    ]
    made += [encoded[past.of].feature(past.name, past.length) for past in table.history]
    for log in table.logs:
        for of, name in zip(log.of, log.features, strict=True):
            made.append(encoded[of].feature(name, None))
    return Transformed(values, numericals, encoded, made, columns, logs)


def _feature_values(journal: Journal, rows: Ordered) -> FeatureValues:
    engine, features = journal.engine, journal.table.categorical
    if engine.codes_texts:
        assert isinstance(engine, DuckDBEngine)
        count = partial(engine.count_codes, journal.work.directory / rows.relation)
        return CodedValues(features, journal.query, count)
    spark: Any = engine  # which is imported only where it is used
    return TextValues(features, journal.query, spark.exploded)


def _read(journal: Journal) -> list[str]:
    """Return the fingerprints of the files of the run whose values count, and of those of the days before."""
    counted = _counted_files(journal.config, journal.table, journal.sources)
    own = map(fingerprint, chain.from_iterable(counted.values()))
    before = journal.extended.read if journal.extended else ()
    return list(dict.fromkeys([*before, *own]))
