"""Phase of the rows: those of the query are numbered and stored, without the bad ones, which are refused or kept apart."""

from pathlib import Path

from configs.messages import printable, shown
from configs.preproc_schema import EngineName, Mode, OnBad
from preproc.table.duckdb_engine import QueryError
from preproc.table.known_values import refuse_other_numbers
from preproc.table.mistakes import bad_row
from preproc.table.pipeline.journal import Journal
from preproc.table.source_files import read_columns
from preproc.table.staging import Staging
from preproc.work_directory import first_line

REJECTED = "rejected.tsv"


def stage_rows(journal: Journal) -> int:
    """Write relation `staged_`, the numbered good rows; return the number of bad rows."""
    table = journal.table
    journal.once("all_", lambda path: _number_all(journal, path))
    if not journal.held.label:
        labels = ", ".join(printable(label.name) for label in table.label)
        journal.progress.say(
            f"note: the sources lack the label ({labels}), so the dataset has no labels: its rows can be scored, but "
            "not trained or evaluated on"
        )
    ((num_bad,),) = journal.engine.rows("SELECT count(bad_) FROM all_")
    if num_bad and journal.config.on_bad is OnBad.fail:
        (row, file, reason), *_ = journal.engine.rows(
            "SELECT row_, file_, bad_ FROM all_ WHERE bad_ IS NOT NULL ORDER BY row_ LIMIT 1"
        )
        where = _where(journal, row, file)
        journal.work.forget()
        is_fit = journal.config.mode is not Mode.transform
        raise bad_row(where, reason, table, is_fit=is_fit)
    if num_bad:
        more = ["split_"] if table.split.by == "column" else []
        for i in range(len(table.pasts)):
            more += table.past_columns(i)
        kept = stored_columns(journal, *more)
        query = f"SELECT {kept}, row_ AS all_row_ FROM all_ WHERE bad_ IS NULL"
        journal.once("staged_", lambda path: journal.engine.number(query, ["all_row_"], path))
    else:
        journal.engine.view("staged_", journal.work.directory / "all_")
    if journal.engine.codes_texts:
        for i in range(len(table.categorical)):
            journal.engine.view(f"texts_c{i}", journal.work.directory / "all_" / f"texts_c{i}")
    return num_bad + journal.work.state["rejected"]


def _number_all(journal: Journal, path: Path) -> None:
    """Write all rows with row numbers, and beside them the lines that the engine could not read."""
    fitted = journal.fitted
    sources = {name: read_columns(*source) for name, source in journal.sources.items()}
    staging = Staging(
        journal.engine,
        journal.table,
        sources,
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
    journal.work.state["five"] = staging.five
    for name, five in staging.five.items():
        if five != "5":
            kind = "floating-point numbers" if five == "5.0" else "decimals"
            journal.progress.say(
                f"note: the values of {shown(name)} are {kind}, so 5 is the text {five}, another value than the 5 "
                "of an integer column; if other files have integers, set expression: CAST(... AS BIGINT)"
            )
    types, unserved = staging.types_of_served()
    # Spark has other types.
    is_duckdb = journal.config.engine is EngineName.duckdb
    journal.work.state["types"] = types if is_duckdb else {}
    if journal.config.mode is Mode.fit:
        unserved = [f"raw values cannot be served: {why}" for why in unserved]
        for note in unserved + staging.notes_of_query():
            journal.progress.say(f"note: {note}")
    journal.work.state["is_text"] = staging.text_columns.as_json()
    journal.work.state["columns"] = staging.column_roles
    journal.work.state["absent"] = sorted(
        {*journal.table.row_numbers} - {*staging.table.row_numbers}
    )
    try:
        journal.engine.stage(staging.rows, path)
    except QueryError as error:
        staging.refuse(error)
    if journal.engine.num_ties:
        journal.progress.say(
            f"note: {journal.engine.num_ties:,} rows have the same table.order_by as the row before, so their order is by "
            "chance; add an expression that tells them apart"
        )
    rejected = journal.engine.rejected()
    if rejected and journal.config.on_bad is OnBad.fail:
        (file, line, reason, _), *_ = rejected
        journal.work.forget()
        raise ValueError(
            f"{file}, line {line}: {printable(reason)}; correct or remove it, or set on_bad=quarantine"
        )
    journal.work.state["rejected"] = len(rejected)
    with (journal.work.directory / REJECTED).open("w", encoding="utf-8") as stream:
        for file, line, reason, raw in rejected:
            raw_line = raw.rstrip("\r\n").replace("\r", "\\r").replace("\n", "\\n")
            stream.write(f"{file}\t{line}\t{printable(first_line(reason))}\t{raw_line}\n")
    journal.work.state["checked"] |= journal.work.synced_records(journal.work.directory / REJECTED)


def stored_columns(journal: Journal, *more: str) -> str:
    """Return the columns of good rows, and `more` of them, for a query."""
    numbers = [f"n{i}" for i in range(len(journal.table.numerical))]
    values = [f"c{i}" for i in range(len(journal.table.categorical))]
    kept = [f"keep{i}_" for i in range(len(journal.table.keep))]
    for i, lists in enumerate(journal.table.event_lists):
        kept += lists.columns(i)
    return ", ".join(["file_", *journal.held.row_numbers, *numbers, *values, *kept, *more])


def _where(journal: Journal, row: int, file: int) -> str:
    if journal.table.query:
        return f"row {row + 1} in the order of table.order_by"
    return where_in_source(journal, "all_", next(iter(journal.sources)), row, file)


def where_in_source(journal: Journal, relation: str, source: str, row: int, file: int) -> str:
    """Return the file and the number in it of a row of a source, by the relation of its rows."""
    ((first,),) = journal.engine.rows(f"SELECT min(row_) FROM {relation} WHERE file_ = {file}")
    _, files = journal.sources[source]
    return f"{files[file].path}, row {row - first + 1}"


def where_in_output(journal: Journal, row: int) -> str:
    """Return the file and the number in it of a row of the dataset, `rows_`."""
    for relation, before in (("rows_", "before_"), ("staged_", "all_row_")):
        if relation in journal.work.state["relations"]:
            ((row,),) = journal.engine.rows(f"SELECT {before} FROM {relation} WHERE row_ = {row}")
    ((file,),) = journal.engine.rows(f"SELECT file_ FROM all_ WHERE row_ = {row}")
    return _where(journal, row, file)


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


def num_read(journal: Journal) -> int:
    """Rows of the sources, or of the query's result, bad ones included."""
    ((rows,),) = journal.engine.rows("SELECT count(*) FROM all_")
    return rows + journal.work.state["rejected"]
