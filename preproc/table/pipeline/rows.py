"""Phase of the rows: those of the query are numbered and stored, without the bad ones, which are refused or kept apart."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from os.path import normpath
from pathlib import Path
from typing import Any

from configs.messages import first_line, printable, shown
from configs.preproc_schema import EngineName, Mode, OnBad
from configs.table_schema import TableConfig
from preproc.table.duckdb_engine import QueryError
from preproc.table.known_values import refuse_other_numbers
from preproc.table.mistakes import bad_row
from preproc.table.pipeline.journal import Journal
from preproc.table.source_files import read_columns
from preproc.table.staging import Staging

REJECTED = "rejected.tsv"
NOT_LEFT_OUT = " (on_bad leaves out rows whose expression fails, by DuckDB and not within table.query; try_cast gives null)"


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts of the sources beside their rows. The fields are keys of the record, from which a resumed run has them."""

    five: dict[str, str]  # by feature of numbers, as `text_of_five`
    types: dict[str, str]  # SQL types in expressions, but text; Spark, which has others: none
    is_text: dict[str, Any]  # as `TextColumns.as_json`
    columns: dict[str, str]  # what every column becomes
    absent: list[str]  # columns of the labels, the weight and the keep rate that new rows lack
    rejected: int  # lines that the engine could not read, which are in file `REJECTED`


@dataclass(frozen=True, slots=True)
class Staged:
    """The good rows in the order of the sources, as relation `staged_`, beside `all_` with the bad ones."""

    facts: SourceFacts
    held: TableConfig  # the description without what new rows lack
    relation: str  # whose files have the rows: `staged_`, where `all_row_` is the row in `all_`, or `all_`, if all are good
    num_rows: int
    num_bad: int  # rows and lines that are left out


def stage_rows(journal: Journal) -> Staged:
    """Write `all_` and `staged_`; ValueError at a bad row with `on_bad=fail`."""

    def write(path: Path) -> None:
        journal.work.state |= asdict(_number_all(journal, path))

    journal.once("all_", write)
    recorded = journal.work.state
    facts = SourceFacts(**{field.name: recorded[field.name] for field in fields(SourceFacts)})
    table, held = journal.table, journal.table.without(facts.absent)
    if not held.label:
        labels = ", ".join(printable(label.name) for label in table.label)
        journal.progress.say(
            f"note: the sources lack the label ({labels}), so the dataset has no labels: its rows can be scored, but "
            "not trained or evaluated on"
        )
    ((num_all, num_bad),) = journal.engine.rows("SELECT count(*), count(bad_) FROM all_")
    if num_bad and journal.config.on_bad is OnBad.fail:
        ((row, reason),) = journal.engine.rows(
            "SELECT row_, bad_ FROM all_ WHERE bad_ IS NOT NULL ORDER BY row_ LIMIT 1"
        )
        is_fit = journal.config.mode is not Mode.transform
        journal.refuse(bad_row(where_in_all(journal, row), reason, table, is_fit=is_fit))
    relation = "staged_" if num_bad else "all_"
    if num_bad:
        more = [column for i in range(len(table.pasts)) for column in table.past_columns(i)]
        more += ["split_"] if table.split.by == "column" else []
        query = (
            f"SELECT {stored_columns(held, *more)}, row_ AS all_row_ FROM all_ WHERE bad_ IS NULL"
        )
        journal.number("staged_", query, ["all_row_"])
    else:
        journal.engine.view("staged_", journal.work.directory / "all_")
    if journal.engine.codes_texts:
        for i in range(len(table.categorical)):
            journal.engine.view(f"texts_c{i}", journal.work.directory / "all_" / f"texts_c{i}")
    return Staged(facts, held, relation, num_all - num_bad, num_bad + facts.rejected)


def _number_all(journal: Journal, path: Path) -> SourceFacts:
    """Write all rows with row numbers, and beside them the lines that the engine could not read."""
    staging = _checked_sources(journal)
    types, unserved = staging.types_of_served()
    if journal.config.mode is Mode.fit:
        notes = [f"raw values cannot be served: {why}" for why in unserved]
        for note in notes + staging.notes_of_query():
            journal.progress.say(f"note: {note}")
    without_failing(journal, staging, lambda: journal.engine.stage(staging.rows, path))
    if journal.engine.num_ties:
        journal.progress.say(
            f"note: {journal.engine.num_ties:,} rows have the same table.order_by as the row before, so their order is by "
            "chance; add an expression that tells them apart"
        )
    return SourceFacts(
        five=staging.five,
        types=types if journal.config.engine is EngineName.duckdb else {},
        is_text=staging.text_columns.as_json(),
        columns=staging.column_roles,
        absent=sorted({*journal.table.row_numbers} - {*staging.table.row_numbers}),
        rejected=_write_rejected(journal),
    )


def without_failing(journal: Journal, staging: Staging, write: Callable[[], None]) -> None:
    """Write rows; where some fail and `on_bad` is not fail, again with those as bad ones. ValueError: that cannot be."""
    is_lenient = journal.config.on_bad is not OnBad.fail
    try:
        write()
    except QueryError as error:
        try:
            if not is_lenient:
                raise
            staging.leave_out_failing()
            write()
        except QueryError:
            staging.refuse(error, NOT_LEFT_OUT * is_lenient)


def _checked_sources(journal: Journal) -> Staging:
    """Open the sources; ValueError if they cannot be read as the description, or the fit, wants them."""
    fitted = journal.fitted
    staging = Staging(
        journal.engine,
        journal.table,
        {name: read_columns(*source) for name, source in journal.sources.items()},
        may_lack_labels=journal.config.mode is Mode.transform,
        fitted=None if fitted is None else fitted.text_columns,
    )
    staging.refuse_text_order(
        is_fit=fitted is None,
        is_its_query=fitted is not None and fitted.table.query == journal.table.query,
    )
    staging.refuse_no_text()
    staging.refuse_other_rows()
    if fitted is not None:
        refuse_other_numbers(staging.five, fitted.five)
    for name, five in staging.five.items():
        if five != "5":
            kind = "floating-point numbers" if five == "5.0" else "decimals"
            journal.progress.say(
                f"note: the values of {shown(name)} are {kind}, so 5 is the text {five}, another value than the 5 "
                "of an integer column; if other files have integers, set expression: CAST(... AS BIGINT)"
            )
    return staging


def _write_rejected(journal: Journal) -> int:
    """Write the lines that the engine could not read, and return how many there are; ValueError with `on_bad=fail`."""
    # The engine reads the sources of a query side by side, and may shorten a/../b.csv.
    files = [normpath(file.path) for _, files in journal.sources.values() for file in files]
    order = {path: number for number, path in enumerate(files)}
    rejected = sorted(
        set(journal.engine.rejected()), key=lambda line: (order.get(normpath(line[0]), -1), *line)
    )
    if rejected and journal.config.on_bad is OnBad.fail:
        (file, line, reason, _), *_ = rejected
        remedy = "correct or remove it, or set on_bad=quarantine"
        journal.refuse(ValueError(f"{file}, line {line}: {printable(reason)}; {remedy}"))
    path = journal.work.directory / REJECTED
    with path.open("w", encoding="utf-8") as stream:
        for file, line, reason, raw in rejected:
            raw_line = raw.rstrip("\r\n").replace("\r", "\\r").replace("\n", "\\n")
            stream.write(f"{file}\t{line}\t{printable(first_line(reason))}\t{raw_line}\n")
    journal.work.state["checked"] |= journal.work.synced_records(path)
    return len(rejected)


def stored_columns(held: TableConfig, *more: str) -> str:
    """Return the columns of good rows, and `more` of them, for a query."""
    numbers = [f"n{i}" for i in range(len(held.numerical))]
    values = [f"c{i}" for i in range(len(held.categorical))]
    kept = [f"keep{i}_" for i in range(len(held.keep))]
    for i, lists in enumerate(held.event_lists):
        kept += lists.columns(i)
    return ", ".join(["file_", *held.row_numbers, *numbers, *values, *kept, *more])


def where_in_all(journal: Journal, row: int) -> str:
    """Return the file and the number in it of a row of `all_`, or its place in the result of the query."""
    if journal.table.query:
        return f"row {row + 1} in the order of table.order_by"
    return where_in_source(journal, "all_", next(iter(journal.sources)), row)


def where_in_source(journal: Journal, relation: str, source: str, row: int) -> str:
    """Return the file and the number in it of a row of a source, by the relation of its rows."""
    of_row = f"(SELECT file_ FROM {relation} WHERE row_ = {row})"
    ((file, first),) = journal.engine.rows(
        f"SELECT file_, min(row_) FROM {relation} WHERE file_ = {of_row} GROUP BY file_"
    )
    _, files = journal.sources[source]
    return f"{files[file].path}, row {row - first + 1}"


def write_bad(journal: Journal) -> None:
    """Write the bad rows, and the lines that the engine could not read, beside the dataset."""
    rows = journal.engine.rows(
        "SELECT file_, row_, bad_ FROM all_ WHERE bad_ IS NOT NULL ORDER BY row_"
    )
    _, files = next(iter(journal.sources.values()))
    with (journal.work.dataset / "bad_rows.tsv").open("w", encoding="utf-8") as stream:
        for file, row, reason in rows:
            where = "query" if journal.table.query else files[file].path
            stream.write(f"{where}\t{row + 1}\t{printable(reason)}\n")
        stream.write((journal.work.directory / REJECTED).read_text("utf-8"))
