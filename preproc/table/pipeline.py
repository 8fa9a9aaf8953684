"""Conversion of any table to a dataset directory: sources, SQL, and an engine that runs it.

stage: the rows of the query are numbered and written to Parquet. order: the splits are concatenated, training
rows first, shuffled with `shuffle=true`. histories: the earlier rows of its user that each row sees. fit: statistics
and vocabularies of the training rows, or those of an earlier run (`mode=transform`), or those of the day before with the
values of this one (`mode=extend`). encode: ids and numericals.
write: the files of the dataset. Every written relation is recorded, so a killed run resumes after the last one.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from configs.messages import printable, shown
from configs.preproc_schema import EngineName, Mode, OnBad, PreprocConfig, VocabularyRows
from configs.schema import require
from configs.table_schema import (
    Categorical,
    History,
    Numerical,
    Source,
    SplitRule,
    TableConfig,
    transform_of,
)
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.split_files import SPLITS
from dataloading.lineage import RARE, Lineage, vocabularies
from preproc.complete_dataset import WrittenColumns, complete_dataset, draw_report, row_columns
from preproc.fitted_state import (
    SOURCE,
    FittedState,
    load_fitted,
    rare_name,
    vocabulary_name,
    with_limits_of,
    with_missing_of,
    with_place,
)
from preproc.raw_files import RawFile, fingerprint, refuse_copies
from preproc.report.console import (
    COVERAGE_LIMITS,
    ColumnSummary,
    ListCounts,
    NumericalRange,
    Progress,
    RowCounts,
    SplitSummary,
    print_notes,
    print_result,
)
from preproc.report.plot import load_library
from preproc.table.duckdb_engine import DuckDBEngine, Engine, QueryError
from preproc.table.expressions import (
    double,
    extremes,
    fixed_point_sums,
    kept_values,
    mean_and_deviation,
    random_number,
    split_of,
    text,
    transformed,
)
from preproc.table.extension import (
    DAYS_COLUMNS,
    fitted_rows,
    kept_ids,
    live_values,
    new_ids,
    still_waiting,
    waiting,
)
from preproc.table.feature_values import CodedValues, FeatureValues, TextValues, rows_of
from preproc.table.history import first_items, items, slices, timeline
from preproc.table.known_values import note_of_new_values, note_of_twins, refuse_other_numbers
from preproc.table.mistakes import SMALLEST_OVERFLOW, bad_row, overflow
from preproc.table.output_files import TableFiles, WrittenIds
from preproc.table.source_files import Sources, find_source, find_sources, read_columns
from preproc.table.staging import Staging
from preproc.table.transformation import changed_values, length_columns, numerical_columns
from preproc.text_columns import TextColumns
from preproc.vocabulary_sql import coverage, merge_counts
from preproc.work_directory import (
    Work,
    check_disk,
    first_line,
    is_small,
    work_directory,
    work_directory_of,
)

REJECTED = "rejected.tsv"


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
        with progress.stage(f"compare the fit in {config.fitted} with its records"):
            fitted = load_fitted(Path(config.fitted or ""), table, progress.warn)
        table = with_missing_of(fitted, table)
        if config.mode is Mode.extend:
            config = with_limits_of(fitted, config, table)
            counted = _counted_files(config, table, sources)
            _refuse_same_day(fitted, sources, counted, config.source)
    identity = _identity(config, table, every, fitted)
    with work_directory(config, output, identity, progress) as work:
        if not work.has_progress:
            # Numbered rows, sorted rows and encoded columns are each about as large as the plain text.
            packed = sum(
                file.path.stat().st_size * (1 if file.compression == "none" else 3)
                for file in every
            )
            check_disk(work_directory_of(config, output).parent, 3.0 * packed, "the run")
        engine = _engine(config, work.directory)
        try:
            run = _Run(config, table, engine, work, progress, sources)
            rows = run.build(fitted)
        finally:
            engine.close()
    print_result(progress.console, progress, output, rows)


def _counted_files(
    config: PreprocConfig, table: TableConfig, sources: Sources
) -> dict[str, list[RawFile]]:
    """Return the files of each source whose values count: those that only test may train on a later day."""
    every = {name: files for name, (_, files) in sources.items()}
    if config.vocabulary is VocabularyRows.all:
        return every
    if table.split.by == "last_file" and len(sources) == 1:
        return {name: files[:-1] for name, files in every.items()}
    if config.test_source is None:
        return every
    return {name: find_source(name, source)[1] for name, (source, _) in sources.items()}


def _refuse_same_day(
    fitted: FittedState, sources: Sources, counted: dict[str, list[RawFile]], option: Any
) -> None:
    """Raise ValueError if the days before have read a file of the only source, or every file that the option source names.

    A table beside the log may stay from day to day, and may lie in its folder. `option`: the value of `source`; what it
    does not name is no log, unless it names nothing.
    """
    named = [n for n, (s, _) in sources.items() if SOURCE in str(with_place(s.files, option))]
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
    for history in table.history:
        require(
            history.rows == "all" or config.one_split == "train",
            f"table.history: {shown(history.name)} holds training rows only, and all rows become split "
            f"{config.one_split}; set split_name=null and a table.split with training rows",
        )
    return replace(table, split=SplitRule())


def _engine(config: PreprocConfig, directory: Path) -> Engine:
    if config.engine is EngineName.duckdb:
        return DuckDBEngine(config, directory)
    from preproc.table.spark_engine import SparkEngine

    return SparkEngine(config, directory)


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
        "format": 3,
        "files": [
            [str(file.path.resolve()), file.path.stat().st_size, file.path.stat().st_mtime_ns]
            for file in files
        ],
    }


@dataclass(slots=True)
class _EncodedFeature:
    """An encoded categorical feature: its summary, the rows of its table, and the relation of its vocabulary."""

    summary: ColumnSummary
    num_embeddings: int
    vocabulary: str | None
    has_days: bool = False  # whether the vocabulary has the columns of a later day
    rare: str | None = None  # relation of the counts of the values without an id, if they are kept
    is_dynamic: bool = False  # whether its values are keys

    def feature(self, name: str, hotness: int | None, table: str | None) -> CategoricalFeature:
        """Return the feature as the dataset has it."""
        make = CategoricalFeature.of_keys if self.is_dynamic else CategoricalFeature.of
        return make(name, self.num_embeddings, hotness, table)


@dataclass(frozen=True, slots=True)
class _Numericals:
    """Transformed numericals of the rows of the dataset."""

    relation: str  # of them, as columns `n<i>`
    columns: list[str]


class _Run:
    """One run; every relation is named like its directory."""

    def __init__(
        self,
        config: PreprocConfig,
        table: TableConfig,
        engine: Engine,
        work: Work,
        progress: Progress,
        sources: dict[str, tuple[Source, list[RawFile]]],
    ) -> None:
        self.config = config
        self.table = self.held = table
        self.engine = engine
        self.work = work
        self.progress = progress
        self.sources = sources
        self.splits: dict[str, range] = {}
        self.split = ""
        self.values: FeatureValues = (
            CodedValues(table, self._query, self._count_codes)
            if engine.codes_texts
            else TextValues(table, self._query, engine.exploded)
        )
        self.numericals = _Numericals("numerical_", [])  # as they are written
        self._fitted: FittedState | None = None
        self._recording = Lock()

    def build(self, fitted: FittedState | None) -> int:
        """Write everything, with the fit of an earlier run if there is one; return the number of rows."""
        config, table, dataset = self.config, self.table, self.work.dataset
        self._fitted = fitted
        with self.progress.stage(f"stage with {config.engine.name}") as stage:
            num_bad = self._stage()
            self._order()
            num_rows = max(rows.stop for rows in self.splits.values())
            stage.name += f": {num_rows:,} rows" + (
                f", {num_bad:,} bad ones left out" if num_bad else ""
            )
        # A fit that is only applied counts nothing, and its rows need no training split.
        of_train = config.vocabulary is VocabularyRows.train and "train" in self.splits
        counted = self.splits["train"] if of_train else range(num_rows)
        if table.history:
            with self.progress.stage("order histories"):
                self._slice_histories()
        with self.progress.stage("fit and transform numericals"):
            fits = fitted is None or config.refit
            statistics = {} if fits or fitted is None else fitted.statistics
            columns = self._numericals(statistics, counted, fit=fits)
        encoded = self._encode(counted)
        columns |= {name: column.summary for name, column in encoded.items()}
        categorical = [
            encoded[feature.name].feature(
                feature.name, feature.hotness if feature.is_list else 1, feature.vocabulary_of
            )
            for feature in table.categorical
        ]
        for number, history in enumerate(table.history):
            encoded[history.name] = self._history(number, history, encoded, counted)
            columns[history.name] = encoded[history.name].summary
            [of] = [feature for feature in table.categorical if feature.name == history.of]
            shared = of.vocabulary_of or of.name
            categorical.append(encoded[history.name].feature(history.name, history.length, shared))
        summaries, records = self._write(categorical, encoded, columns, statistics)
        if config.on_bad is OnBad.quarantine:
            self._write_bad(dataset)
        is_text = self.work.state["is_text"]
        written = WrittenColumns(
            categorical=categorical,
            files=records,
            columns=columns,
            splits=summaries,
            statistics=statistics,
            absent=self.absent,
            counted="the fitted run's" if config.mode is Mode.transform else config.vocabulary.name,
            rows=RowCounts(self._num_read, num_rows, num_bad, self._num_read - num_bad - num_rows),
            source_columns=self.work.state["columns"],
            lineage=self._lineage,
            read=self._read,
            five=self.work.state["five"],
            vocabularies={} if self._fitted is None else vocabularies(self._fitted.limits),
            text_columns=None
            if is_text is None
            else TextColumns.of(is_text, str(self.work.directory)),
        )
        complete_dataset(written, config, table, self.work, self.progress)
        return num_rows

    @property
    def _read(self) -> list[str]:
        """Fingerprints of the files of the run whose values count, and of those of the days before."""
        counted = _counted_files(self.config, self.table, self.sources)
        own = map(fingerprint, chain.from_iterable(counted.values()))
        before = self._fitted.read if self._fitted and self.config.mode is Mode.extend else ()
        return list(dict.fromkeys([*before, *own]))

    @property
    def _lineage(self) -> Lineage:
        """The day of the dataset, and the fit that it extends."""
        if self.config.mode is not Mode.extend:
            return Lineage()
        assert self._fitted is not None
        before = self._fitted.lineage
        return Lineage(before.day + 1, None, before.identity)

    def _encode(self, counted: range) -> dict[str, _EncodedFeature]:
        """Count, rank and encode all categorical features, several at a time if the engine supports that."""
        features = self.table.categorical
        # Numbers of the features of every vocabulary, the one that has its limits first.
        groups = {f.name: [i] for i, f in enumerate(features) if f.vocabulary_of is None}
        for number, feature in enumerate(features):
            if feature.vocabulary_of is not None:
                groups[feature.vocabulary_of].append(number)
        encoded: dict[str, _EncodedFeature] = {}
        with self.progress.stage("count, rank and encode categoricals") as stage:
            stage.total = len(features)
            with ThreadPoolExecutor(self.engine.columns_at_once) as pool:
                results = pool.map(
                    lambda numbers: self._categorical(numbers, counted), groups.values()
                )
                for name, result in zip(groups, results, strict=True):
                    encoded |= result
                    stage.detail = name
                    stage.update(len(encoded))
        return {feature.name: encoded[feature.name] for feature in features}

    def _write(
        self,
        categorical: list[CategoricalFeature],
        encoded: dict[str, _EncodedFeature],
        columns: dict[str, ColumnSummary],
        statistics: dict[str, Any],
    ) -> tuple[dict[str, SplitSummary], dict[str, dict[str, Any]]]:
        """Write the files of all splits and vocabularies; return summaries, and bytes and CRC-32 per file."""
        config, table, dataset = self.config, self.table, self.work.dataset
        for name in ("vocabulary", *self.splits):
            (dataset / name).mkdir(parents=True, exist_ok=True)
        with (
            self.progress.stage("write"),
            TableFiles(self.work, dataset, self.splits) as files,
            ThreadPoolExecutor(self._writers) as pool,
        ):
            numericals = pool.submit(self._write_numericals, files)
            named = dict(zip(self.held.row_numbers, row_columns(self.held), strict=True))
            labels = pool.submit(files.write_row_columns, named)
            kept = pool.submit(files.write_kept, table.keep)
            features = self._write_features(files, pool, categorical, encoded)
            ranges = numericals.result()
            summaries = {
                split: SplitSummary(len(rows), labels.result()[split])
                for split, rows in self.splits.items()
            }
            if self._writers == 1:
                wait(features.values())
            numerical_bin = dataset / next(iter(summaries)) / "numerical.bin"
            draw_report(dataset, numerical_bin, columns, summaries, config, table)
            kept.result()
            nonzeros: dict[str, dict[str, int]] = {split: {} for split in self.splits}
            for name, counts in features.items():
                for split, (num_nonzero, num_zero) in counts.result().items():
                    nonzeros[split][name] = num_nonzero
                    summaries[split].zero_ids[name] = num_zero
        # A fit that is only applied cannot be changed.
        if config.mode is Mode.fit or config.refit:
            # The length of a list or a history is left as it is.
            scaled = [feature.name for feature in table.numerical]
            print_notes(self.progress.console, {name: ranges[name] for name in scaled})
        self._count_unseen(summaries, nonzeros, files.present)
        self._count_changes(summaries, statistics)
        return summaries, files.records

    @property
    def _num_read(self) -> int:
        """Rows of the sources, or of the query's result, bad ones included."""
        ((rows,),) = self.engine.rows("SELECT count(*) FROM all_")
        return rows + self.work.state["rejected"]

    @property
    def _writers(self) -> int:
        """Threads that write files."""
        return min(self.config.threads or os.cpu_count() or 1, self.engine.columns_at_once)

    def _write_numericals(self, files: TableFiles) -> dict[str, NumericalRange]:
        names = self.table.numerical_names
        if not names:
            return {}
        relation = self.numericals.relation
        if relation != "numerical_":
            relation = self.work.state["rows_in"]
        dtype = self.config.numerical_dtype.name
        columns = self.numericals.columns
        return files.write_numericals(relation, columns, list(names), dtype, self._refuse_overflows)

    def _write_features(
        self,
        files: TableFiles,
        pool: ThreadPoolExecutor,
        categorical: list[CategoricalFeature],
        encoded: dict[str, _EncodedFeature],
    ) -> dict[str, Future[WrittenIds]]:
        """Begin to write ids and vocabularies; return the counts of the ids of every feature."""
        if any(column.rare for column in encoded.values()):
            (self.work.dataset / RARE).mkdir(exist_ok=True)

        def write(number: int) -> WrittenIds:
            feature = categorical[number]
            past = number - len(self.table.categorical)
            if past >= 0:
                counts = files.write_history(f"past_ids_{past}", f"slices_{past}", feature)
            else:
                counts = self.values.write_ids(files, number, feature)
            written = encoded[feature.name]
            if written.vocabulary:
                files.write_vocabulary(written.vocabulary, feature.name, has_days=written.has_days)
            if written.rare:
                files.write_rare(written.rare, feature.name)
            return counts

        return {
            feature.name: pool.submit(write, number) for number, feature in enumerate(categorical)
        }

    def _once(self, name: str, write: Callable[[Path], None]) -> None:
        """Write relation `name` unless it is recorded, then make it visible to queries."""
        done = self.work.state.setdefault("relations", [])
        path = self.work.directory / name
        if name not in done:
            write(path)
            records = self.work.synced_records(path)
            with self._recording:
                self.work.state["checked"] |= records
                done.append(name)
                self.work.save()
        self.engine.view(name, path)

    @property
    def absent(self) -> frozenset[str]:
        """Names of the labels, the weight and the keep rate that new rows lack."""
        held = self.held.row_numbers
        every = self.table.row_numbers
        return frozenset(number.name for name, (_, number) in every.items() if name not in held)

    def _count_codes(self, number: int, rows: range) -> str:
        """Return a relation of partial counts (value, count) of a categorical feature in some rows."""
        assert isinstance(self.engine, DuckDBEngine)
        directory = self.work.directory / self.work.state["rows_in"]
        is_list = self.table.categorical[number].is_list
        return self.engine.count_codes(directory, f"c{number}", rows, is_list)

    def _query(self, name: str, query: str) -> None:
        self._once(name, lambda path: self.engine.write(query, path))

    def _stage(self) -> int:
        """Write relation `staged_`, the numbered good rows; return the number of bad rows."""
        table = self.table
        self._once("all_", self._number_all)
        self.held = table.without(self.work.state["absent"])
        if not self.held.label:
            labels = ", ".join(printable(label.name) for label in table.label)
            self.progress.say(
                f"note: the sources lack the label ({labels}), so the dataset has no labels: its rows can be scored, but "
                "not trained or evaluated on"
            )
        ((num_bad,),) = self.engine.rows("SELECT count(bad_) FROM all_")
        if num_bad and self.config.on_bad is OnBad.fail:
            self._refuse_bad()
        if num_bad:
            more = ["split_"] if table.split.by == "column" else []
            for i, history in enumerate(table.history):
                more += [f"who{i}_", f"time{i}_", *([f"past{i}_"] if history.filter else [])]
            kept = self._columns(*more)
            query = f"SELECT {kept}, row_ AS all_row_ FROM all_ WHERE bad_ IS NULL"
            self._once("staged_", lambda path: self.engine.number(query, ["all_row_"], path))
        else:
            self.engine.view("staged_", self.work.directory / "all_")
        if self.engine.codes_texts:
            for i in range(len(table.categorical)):
                self.engine.view(f"texts_c{i}", self.work.directory / "all_" / f"texts_c{i}")
        return num_bad + self.work.state["rejected"]

    def _number_all(self, path: Path) -> None:
        """Write all rows with row numbers, and beside them the lines that the engine could not read."""
        sources = {name: read_columns(*source) for name, source in self.sources.items()}
        staging = Staging(
            self.engine,
            self.table,
            sources,
            may_lack_labels=self.config.mode is Mode.transform,
            fitted=None if self._fitted is None else self._fitted.text_columns,
        )
        staging.refuse_text_order(
            is_fit=self._fitted is None,
            is_its_query=self._fitted is not None
            and self._fitted.query in (None, self.table.query),
        )
        if self._fitted is None:
            staging.refuse_no_text()
        else:
            refuse_other_numbers(staging.five, self._fitted.five)
        self.work.state["five"] = staging.five
        for name, five in staging.five.items():
            if five != "5":
                kind = "floating-point numbers" if five == "5.0" else "decimals"
                self.progress.say(
                    f"note: the values of {shown(name)} are {kind}, so 5 is the text {five}, another value than the 5 "
                    "of an integer column; if other files have integers, set expression: CAST(... AS BIGINT)"
                )
        # What an earlier version fitted did not record its columns: those of these rows are not in its place.
        is_known = self._fitted is None or self._fitted.text_columns is not None
        self.work.state["is_text"] = staging.text_columns.as_json() if is_known else None
        self.work.state["columns"] = staging.column_roles
        self.work.state["absent"] = sorted({*self.table.row_numbers} - {*staging.table.row_numbers})
        try:
            self.engine.stage(staging.rows, path)
        except QueryError as error:
            staging.refuse(error)
        rejected = self.engine.rejected()
        if rejected and self.config.on_bad is OnBad.fail:
            (file, line, reason, _), *_ = rejected
            self.work.forget()
            raise ValueError(
                f"{file}, line {line}: {printable(reason)}; correct or remove it, or set on_bad=quarantine"
            )
        self.work.state["rejected"] = len(rejected)
        with (self.work.directory / REJECTED).open("w", encoding="utf-8") as stream:
            for file, line, reason, raw in rejected:
                raw_line = raw.rstrip("\r\n").replace("\r", "\\r").replace("\n", "\\n")
                stream.write(f"{file}\t{line}\t{printable(first_line(reason))}\t{raw_line}\n")
        self.work.state["checked"] |= self.work.synced_records(self.work.directory / REJECTED)

    def _columns(self, *more: str) -> str:
        numbers = [f"n{i}" for i in range(len(self.table.numerical))]
        values = [f"c{i}" for i in range(len(self.table.categorical))]
        kept = [f"keep{i}_" for i in range(len(self.table.keep))]
        return ", ".join(["file_", *self.held.row_numbers, *numbers, *values, *kept, *more])

    def _refuse_bad(self) -> None:
        (row, file, reason), *_ = self.engine.rows(
            "SELECT row_, file_, bad_ FROM all_ WHERE bad_ IS NOT NULL ORDER BY row_ LIMIT 1"
        )
        where = self._place(row, file)
        self.work.forget()
        raise bad_row(where, reason, self.table, is_fit=self.config.mode is not Mode.transform)

    def _place(self, row: int, file: int) -> str:
        """Return the file of a row of `all_`, and its number in the file, from 1."""
        if self.table.query:
            return f"the query's result, row {row + 1}"
        ((first,),) = self.engine.rows(f"SELECT min(row_) FROM all_ WHERE file_ = {file}")
        _, files = next(iter(self.sources.values()))
        return f"{files[file].path}, row {row - first + 1}"

    def _place_of_output(self, row: int) -> str:
        """Return the file and the number in it of a row of the dataset, `rows_`."""
        for relation, before in (("rows_", "before_"), ("staged_", "all_row_")):
            if relation in self.work.state["relations"]:
                ((row,),) = self.engine.rows(f"SELECT {before} FROM {relation} WHERE row_ = {row}")
        ((file,),) = self.engine.rows(f"SELECT file_ FROM all_ WHERE row_ = {row}")
        return self._place(row, file)

    def _write_bad(self, dataset: Path) -> None:
        rows = self.engine.rows(
            "SELECT file_, row_, bad_ FROM all_ WHERE bad_ IS NOT NULL ORDER BY row_"
        )
        _, files = next(iter(self.sources.values()))
        with (dataset / "bad_rows.tsv").open("w", encoding="utf-8") as stream:
            for file, row, reason in rows:
                where = "query" if self.table.query else files[file].path
                stream.write(f"{where}\t{row + 1}\t{printable(reason)}\n")
            stream.write((self.work.directory / REJECTED).read_text("utf-8"))

    def _order(self) -> None:
        """Write relation `rows_`, numbered so that each split is one range, training rows first."""
        rule, config = self.table.split, self.config
        ((rows,),) = self.engine.rows("SELECT count(*) FROM staged_")
        one = config.one_split
        last = self._last_file() if rule.by == "last_file" else (0, 0)
        expression = split_of(rule, rows, last, config.train_fraction, config.seed)
        expression = text(one) if one else expression
        self.split = expression
        rows_and_split = f"(SELECT *, {expression} AS name_ FROM staged_)"
        found = self.engine.rows(
            f"SELECT name_, count(*), min(row_), max(row_) FROM {rows_and_split} GROUP BY name_"
        )
        split_rows = {name: count for name, count, _, _ in found}
        unknown = sorted(set(split_rows) - {*SPLITS, None})
        problem = None
        if unknown:
            problem = f"got split {shown(unknown[0])}, want {', '.join(SPLITS)} or null"
        if not rows:
            problem = "the sources have no rows; give files that have some"
        wanted = () if config.mode is Mode.transform else ("train", "test")
        missing = [name for name in wanted if not split_rows.get(name)]
        if not set(split_rows) & set(SPLITS):
            missing = ["any split"]
        if missing:
            files = " by last_file, which wants two files or more" * (rule.by == "last_file")
            problem = (
                problem or f"no rows are left for {missing[0]} of {rows}{files}; change the split"
            )
        if problem:
            self.work.forget()
            raise ValueError(f"table.split: {problem}")
        start = 0
        for name in SPLITS:
            if split_rows.get(name):
                self.splits[name] = range(start, start + split_rows[name])
                start += split_rows[name]
        ranges = {name: range(first, last + 1) for name, _, first, last in found}
        if ranges == self.splits and not config.shuffle:
            # The rows are in this order already, as they are if they lie in the order of time.
            path = "staged_" if "staged_" in self.work.state["relations"] else "all_"
            self.engine.view("rows_", self.work.directory / path)
            self.work.state["rows_in"] = path
            return
        rank = " ".join(f"WHEN {text(name)} THEN {i}" for i, name in enumerate(SPLITS))
        number = random_number(config.seed, "row_ + 1000000007")
        place = f"CASE WHEN name_ = 'train' THEN {number} ELSE 0 END" if config.shuffle else "0"
        query = (
            f"SELECT {self._columns()}, CASE name_ {rank} END AS rank_, {place} AS place_, "
            f"row_ AS before_ FROM {rows_and_split} WHERE name_ IS NOT NULL"
        )
        self._once(
            "rows_", lambda path: self.engine.number(query, ["rank_", "place_", "before_"], path)
        )
        self.work.state["rows_in"] = "rows_"

    def _last_file(self) -> tuple[int, int]:
        """Return the number of the last file, and the first row of the second half of its rows."""
        files = max(len(files) for _, files in self.sources.values())
        last = files - 1
        if self.table.query and len(self.sources) > 1:  # the query says of which source
            ((last,),) = self.engine.rows("SELECT coalesce(max(file_), 0) FROM staged_")
        of_last = f"FROM staged_ WHERE file_ = {last}"
        ((rows,),) = self.engine.rows(f"SELECT count(*) {of_last}")
        middle = self.engine.rows(f"SELECT row_ {of_last} ORDER BY row_ LIMIT 1 OFFSET {rows // 2}")
        return last, middle[0][0] if middle else 0

    def _numericals(
        self, statistics: dict[str, Any], counted: range, fit: bool
    ) -> dict[str, ColumnSummary]:
        """Write relation `numerical_`; add the numbers fitted on training rows to `statistics`."""
        features, histories = self.table.numerical, self.table.history
        lengths_of: list[Categorical | History] = [*self.table.with_length, *histories]
        if not features and not lengths_of:
            return {}
        train = rows_of(self.splits.get("train", counted))
        if fit:
            for number, feature in enumerate(features):
                statistics[feature.name] = self._fit_all(feature, f"n{number}", train)
        expressions = numerical_columns(features, statistics)
        expressions += length_columns(self.table, self.engine.num_items)
        relation = "rows_"
        if histories:
            joins = (
                f"JOIN slices_{i} AS s{i} ON r.row_ = s{i}.row_" for i in range(len(histories))
            )
            lengths = ", ".join(f"s{i}.length_ AS length{i}_" for i in range(len(histories)))
            relation = f"(SELECT r.*, {lengths} FROM rows_ AS r {' '.join(joins)})"
            expressions += [
                f"CAST(length{i}_ AS FLOAT) AS n{len(expressions) + i}"
                for i in range(len(histories))
            ]
        query = f"SELECT row_, {', '.join(expressions)} FROM {relation}"
        if histories or not self.engine.codes_texts:
            self._query("numerical_", f"{query} ORDER BY row_")
            self.numericals = _Numericals("numerical_", [f"n{i}" for i in range(len(expressions))])
        else:
            # Computed twice in less time than it is stored.
            self.numericals = _Numericals(f"({query})", expressions)
        summaries = {
            feature.length_name: ColumnSummary(0.0, rows=len(counted)) for feature in lengths_of
        }
        if not features:
            return summaries
        present = ", ".join(f"count(n{i})" for i in range(len(features)))
        (counts,) = self.engine.rows(f"SELECT {present} FROM {rows_of(counted)}")
        return {
            feature.name: ColumnSummary(1 - count / len(counted), rows=len(counted))
            for feature, count in zip(features, counts, strict=True)
        } | summaries

    def _refuse_overflows(self) -> None:
        """Raise ValueError for the first feature with a value that the stored type cannot hold."""
        features, dtype = self.table.numerical, self.config.numerical_dtype.name
        values = ", ".join(f"max(n{i}), min(n{i})" for i in range(len(features)))
        (extremes_of,) = self.engine.rows(f"SELECT {values} FROM {self.numericals.relation}")
        for i, feature in enumerate(features):
            if max(extremes_of[2 * i], -extremes_of[2 * i + 1]) >= SMALLEST_OVERFLOW[dtype]:
                self._refuse_overflow(i, feature)

    def _refuse_overflow(self, number: int, feature: Numerical) -> None:
        """Raise ValueError that names the first value of a numerical that the stored type cannot hold."""
        dtype = self.config.numerical_dtype.name
        column = f"n{number}"
        ((row, stored, raw),) = self.engine.rows(
            f"SELECT x.row_, x.{column}, r.{column} FROM {self.numericals.relation} AS x JOIN rows_ AS r "
            f"ON x.row_ = r.row_ WHERE abs(x.{column}) >= {double(SMALLEST_OVERFLOW[dtype])} ORDER BY x.row_ LIMIT 1"
        )
        raise overflow(self._place_of_output(row), feature, raw, stored, dtype)

    def _fit_all(self, feature: Numerical, expression: str, train: str) -> list[list[float]]:
        """Return the fitted numbers of every transform of a numerical, each on the result of those before it."""
        fitted = []
        for transform in feature.transforms:
            fitted.append(self._fit(feature, transform, expression, train))
            expression = transformed(expression, transform, fitted[-1])
        return fitted

    def _fit(self, feature: Numerical, transform: Any, expression: str, train: str) -> list[float]:
        """Return the two numbers of a fitted transform, or an empty list for any other."""
        name, _ = transform_of(transform)
        if name not in ("minmax", "standardise"):
            return []
        ((count, low, high),) = self.engine.rows(extremes(expression, train))
        if not count:
            return [0.0, 1.0]
        if not math.isfinite(high - low):
            raise ValueError(
                f"table.numerical: {shown(feature.name)}: values from {low:g} to {high:g}, whose range is no finite "
                f"double; clip them before {name}"
            )
        if name == "minmax":
            return [low, high - low]
        ((first, second),) = self.engine.rows(fixed_point_sums(expression, low, high, train))
        return list(mean_and_deviation(count, low, high, (int(first), int(second))))

    def _categorical(self, numbers: list[int], counted: range) -> dict[str, _EncodedFeature]:
        """Write relation `vocabulary_<number>` of the first feature and find the ids of all, which share it."""
        features = [self.table.categorical[number] for number in numbers]
        first, owner = numbers[0], features[0]
        if owner.is_hashed:
            return {
                feature.name: self._hashed(number, feature, owner, counted)
                for feature, number in zip(features, numbers, strict=True)
            }
        name = f"vocabulary_{first}"
        counts = [self.values.counts(number, counted) for number in numbers]
        query = counts[0]
        if len(counts) > 1:
            query = merge_counts(f"({' UNION ALL '.join(counts)})")
        self._query(f"counts_{first}", query)
        rare = self._make_vocabulary(first, owner)
        self._note_values(first, owner)
        for number in numbers:
            self.values.find_ids(number, self._values_with_id(first, owner))
        covered_query = coverage(f"counts_{first}", COVERAGE_LIMITS)
        (sums,) = self.engine.rows(
            f"SELECT * FROM ({covered_query}) CROSS JOIN (SELECT count(*) FROM {name})"
        )
        distinct, seen, *covered, kept_rows = [int(value or 0) for value in sums]
        pairs = [list(pair) for pair in zip(covered[::2], covered[1::2], strict=True)]
        encoded = {}
        for number, feature in zip(numbers, features, strict=True):
            counts_rows = len(features) == 1 and not feature.is_list
            with_value = seen if counts_rows else self._rows_with_value(number, counted)
            missing = 1 - with_value / len(counted)
            # The coverage of a vocabulary is reported once, at the feature that has its limits.
            coverages = pairs if feature is owner else None
            summary = ColumnSummary(missing, distinct, kept_rows, coverages, len(counted))
            encoded[feature.name] = _EncodedFeature(
                summary,
                kept_rows + 1,
                name if feature is owner else None,
                self._has_days(owner),
                rare if feature is owner else None,
            )
        return encoded

    def _note_values(self, first: int, owner: Categorical) -> None:
        """Say which values are written in several ways; refuse those of a fit that are written in another way here."""
        counts, known = f"counts_{first}", f"vocabulary_{first}"
        note = None
        if self._fitted is not None:
            if self.config.mode is Mode.extend:
                known = f"{known}_old"
            note = note_of_new_values(self.engine.rows, counts, known, owner.name)
        if self.config.mode is not Mode.transform:
            note = note or note_of_twins(self.engine.rows, counts, owner.name)
        if note is not None:
            self.progress.say(note)

    def _limit(self, owner: Categorical) -> int:
        """Return the count from which on a value has an id."""
        limit = owner.frequency_limit
        return self.config.frequency_limit if limit is None else limit

    def _has_days(self, owner: Categorical) -> bool:
        """Tell whether the vocabulary of a feature has the columns of a later day."""
        if self.config.mode is Mode.extend:
            return True
        return self._fitted is not None and self._fitted.has_days(owner.name)

    def _values_with_id(self, first: int, owner: Categorical) -> str:
        """Return the relation (value, id) that values are looked up in."""
        name = f"vocabulary_{first}"
        return live_values(name) if self._has_days(owner) else name

    def _make_vocabulary(self, first: int, owner: Categorical) -> str | None:
        """Write relation `vocabulary_<first>`; return the relation of the counts of the values without an id, if kept."""
        name, counts, rare = f"vocabulary_{first}", f"counts_{first}", f"rare_{first}"
        if self.config.mode is Mode.extend:
            return self._extend_vocabulary(first, owner)
        if self._fitted is not None:
            self._once(name, lambda path: self._copy_vocabulary(owner.name, path))
            return None
        kept = kept_values(counts, self._limit(owner), owner.max_size)
        self._query(name, f"{kept} ORDER BY id")
        if not self.config.rare_counts:
            return None
        self._query(rare, still_waiting(counts, name))
        return rare

    def _extend_vocabulary(self, first: int, owner: Categorical) -> str:
        """Write relation `vocabulary_<first>` of the parent's values and those of this day; return that of the rare counts."""
        fitted, day = self._fitted, self._lineage.day
        assert fitted is not None
        name, counts, rare = f"vocabulary_{first}", f"counts_{first}", f"rare_{first}"
        before, parent, old, wait = (f"{name}_{part}" for part in ("read", "old", "kept", "wait"))
        limit = self._limit(owner)
        self._once(before, lambda path: self._copy_vocabulary(owner.name, path))
        self._query(parent, fitted_rows(before, fitted.has_days(owner.name)))
        self._query(old, kept_ids(parent, counts, day, limit, self.config.retire_after))
        rare_before = None
        if fitted.has_rare(owner.name):
            rare_before = f"{rare}_read"
            self._once(rare_before, lambda path: self._copy_rare(owner.name, path))
        self._query(wait, waiting(parent, rare_before, counts))
        ((num_old,),) = self.engine.rows(f"SELECT count(*) FROM {parent}")
        new = new_ids(wait, num_old + 1, day, limit, owner.max_size)
        columns = ", ".join(["value", "id", "count", *DAYS_COLUMNS])
        every = f"SELECT {columns} FROM {old} UNION ALL SELECT {columns} FROM ({new})"
        self._query(name, f"SELECT * FROM ({every}) ORDER BY id")
        self._query(rare, still_waiting(wait, name))
        return rare

    def _hashed(
        self, number: int, feature: Categorical, owner: Categorical, counted: range
    ) -> _EncodedFeature:
        """Find the hashes of the values."""
        self.values.hash_ids(number, owner)
        ((seen, distinct),) = self.engine.rows(
            f"SELECT CAST(sum(count) AS BIGINT), count(*) FROM ({self.values.counts(number, counted)})"
        )
        seen = self._rows_with_value(number, counted) if feature.is_list else int(seen or 0)
        kept = distinct if owner.buckets is None else owner.buckets
        if owner.capacity is not None:
            kept = owner.capacity - 1
            self._note_full_table(owner.name, distinct, kept)
        summary = ColumnSummary(1 - seen / len(counted), distinct, kept, rows=len(counted))
        rows = owner.capacity or kept + 1
        return _EncodedFeature(summary, rows, None, is_dynamic=owner.is_dynamic)

    def _note_full_table(self, name: str, distinct: int, rows: int) -> None:
        if distinct > rows:
            self.progress.warn(
                f"{shown(name)} has {distinct:,} values and rows for {rows:,} keys: training admits some "
                "(data.dynamic.admit_after) and evicts others (data.dynamic.evict); raise its capacity to keep all"
            )

    def _slice_histories(self) -> None:
        """Write relations `past_items_<number>`, the values that are in histories, and `slices_<number>`, those of every row."""
        # Rows keep their place in the sources as `before_` where they were reordered.
        source = "before_" if self.work.state["rows_in"] == "rows_" else "row_"
        rows = f"SELECT row_, {source} AS source_ FROM rows_"
        for i, history in enumerate(self.table.history):
            line, users = f"timeline_{i}", f"users_{i}"
            self._query(line, timeline(i, self.table, "staged_", self.split))
            self._query(users, first_items(line))
            self._query(f"past_items_{i}", f"{items(line, users)} ORDER BY row_")
            self._query(f"slices_{i}", f"{slices(line, users, rows, history.length)} ORDER BY row_")

    def _history(
        self, number: int, history: History, encoded: dict[str, _EncodedFeature], counted: range
    ) -> _EncodedFeature:
        """Write relation `past_ids_<number>`: the values in histories, with the ids of the feature that they are of."""
        features = {f.name: (i, f) for i, f in enumerate(self.table.categorical)}
        of_number, of = features[history.of]
        first, owner = features[of.vocabulary_of or of.name]
        vocabulary = "" if owner.is_hashed else self._values_with_id(first, owner)
        query = self.values.history_ids(f"past_items_{number}", of_number, vocabulary, owner)
        self._query(f"past_ids_{number}", f"{query} ORDER BY r.row_")
        ((empty,),) = self.engine.rows(
            f"SELECT count(*) FROM {rows_of(counted, f'slices_{number}')} WHERE length_ = 0"
        )
        whole = encoded[history.of].summary
        summary = ColumnSummary(empty / len(counted), whole.distinct, whole.kept, rows=len(counted))
        rows = encoded[history.of].num_embeddings
        return _EncodedFeature(summary, rows, None, is_dynamic=owner.is_dynamic)

    def _copy_vocabulary(self, name: str, path: Path) -> None:
        """Copy the vocabulary of feature `name`; ValueError if a value has two ids."""
        fitted = self._fitted
        assert fitted is not None
        fitted.copy_vocabulary(name, path)
        if self._of_copy(path, vocabulary_name(name), "count(*) - count(DISTINCT value)"):
            raise fitted.two_ids(name)

    def _copy_rare(self, name: str, path: Path) -> None:
        """Copy the counts of the values of feature `name` without an id; ValueError if they cannot be read."""
        assert self._fitted is not None
        self._fitted.copy_rare(name, path)
        self._of_copy(path, rare_name(name), "count(DISTINCT value) + max(count)")

    def _of_copy(self, path: Path, name: str, expression: str) -> int | None:
        """Return a number over all rows of the copy of file `name` of the fit; ValueError if it cannot be read."""
        assert self._fitted is not None
        copied = f"copied_{path.name}"
        try:
            self.engine.view(copied, path)
            ((number,),) = self.engine.rows(f"SELECT {expression} FROM {copied}")
        except QueryError as error:
            raise self._fitted.unreadable(name, error) from None
        return number

    def _rows_with_value(self, number: int, counted: range) -> int:
        """Return how many of the rows `counted` have a value of a categorical feature."""
        ((seen,),) = self.engine.rows(self.values.num_rows(number, counted))
        return seen

    def _count_changes(
        self, summaries: dict[str, SplitSummary], statistics: dict[str, list[list[float]]]
    ) -> None:
        """Count per split what became of the items of lists, and the values that transforms emptied or replaced."""
        lists = [(i, f) for i, f in enumerate(self.table.categorical) if f.is_list]
        changes = changed_values(self.table.numerical, statistics)
        drops = self.table.empty_items == "dropped"
        counts = []
        for number, feature in lists:
            every, whole = (
                self.engine.num_items(f"c{number}", whole=is_whole) for is_whole in (False, True)
            )
            items, most = whole if drops else every, feature.hotness
            counts += [f"sum({every} - {whole})"]
            counts += (
                ["0", "0", "0"]
                if most is None
                else [
                    f"sum(CASE WHEN {items} > {most} THEN 1 ELSE 0 END)",
                    f"sum(greatest({items} - {most}, 0))",
                    f"sum(CASE WHEN {items} < {most} THEN 1 ELSE 0 END)",
                ]
            )
        counts += [f"sum(CASE WHEN {condition} THEN 1 ELSE 0 END)" for *_, condition in changes]
        for split, rows in self.splits.items() if counts else ():
            selected = ", ".join(f"CAST({count} AS BIGINT)" for count in counts)
            ((*found,),) = self.engine.rows(f"SELECT {selected} FROM {rows_of(rows)}")
            summary = summaries[split]
            for place, (_, feature) in enumerate(lists):
                summary.lists[feature.name] = ListCounts(*found[4 * place : 4 * place + 4])
            for (name, kind, _), count in zip(changes, found[4 * len(lists) :], strict=True):
                of_kind = summary.emptied if kind == "emptied" else summary.clipped
                of_kind[name] = of_kind.get(name, 0) + count

    def _count_unseen(
        self,
        summaries: dict[str, SplitSummary],
        nonzeros: dict[str, dict[str, int]],
        counted: dict[tuple[str, str], int],
    ) -> None:
        """Count the values without an id per split; `counted` has values per split and feature, those known already."""
        for split, rows in self.splits.items():
            queries = {
                feature.name: self.values.num_values(number, rows)
                for number, feature in enumerate(self.table.categorical)
                if (split, feature.name) not in counted
            }
            for number, history in enumerate(self.table.history):
                slices_of = rows_of(rows, f"slices_{number}")
                queries[history.name] = f"SELECT CAST(sum(length_) AS BIGINT) FROM {slices_of}"
            for name, total in nonzeros[split].items():
                present = counted.get((split, name))
                if present is None:
                    ((present,),) = self.engine.rows(queries[name])
                summaries[split].unseen[name] = present - total
