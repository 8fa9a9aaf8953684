"""Raw Criteo lines into a staging table, each line checked; a bad one is named by file and number.

A line has 40 tab-separated columns: the label (0 or 1), 13 integers and 26 categories; a missing
value is an empty field. Nothing is quoted. Blank lines are skipped. The staging table keeps the
order of the lines, so that DuckDB's `rowid` is the number of the row.
"""

import glob
import re

import duckdb

from preproc.raw_files import RawFile, cut_short
from preproc.sql import CATEGORICAL, COLUMNS, LABEL, NUM_CATEGORICAL, NUM_NUMERICAL, NUMERICAL

# 18 digits always fit 64 bits.
INTEGER = "[+-]?[0-9]{1,18}"
LINE = rf"[01](\t({INTEGER})?){{{NUM_NUMERICAL}}}(\t[^\t]*){{{NUM_CATEGORICAL}}}"
TAB = "\t"
# Stands in no text file; one column then holds the whole line.
NO_DELIMITER = "\x01"


def create_staging(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    """Create the table of raw lines: label bool, numericals int64, categories text."""
    types = ["BOOLEAN", *["BIGINT"] * NUM_NUMERICAL, *["VARCHAR"] * NUM_CATEGORICAL]
    columns = ", ".join(f"{name} {kind}" for name, kind in zip(COLUMNS, types, strict=True))
    connection.execute(f"CREATE TABLE {table} ({columns})")


def stage(connection: duckdb.DuckDBPyConnection, file: RawFile, table: str) -> int:
    """Append the lines of `file` to the staging table in their order; return how many there were.

    Raises:
        ValueError: a line that is not as described above, a file that is cut short, no line at all.
    """
    label = f"CASE WHEN {LABEL} IN ('0', '1') THEN {LABEL} = '1' ELSE error('label') END"
    integers = [
        f"CASE WHEN {name} IS NULL THEN NULL WHEN regexp_full_match({name}, '{INTEGER}') "
        f"THEN CAST({name} AS BIGINT) ELSE error('integer') END"
        for name in NUMERICAL
    ]
    values = ", ".join([label, *integers, *CATEGORICAL])
    try:
        rows = connection.execute(
            f"INSERT INTO {table} SELECT {values} FROM {_read(file, COLUMNS, TAB)}"
        ).fetchone()[0]
    except (duckdb.InvalidInputException, duckdb.IOException) as error:
        raise _explain(connection, file, error) from None
    if rows == 0:
        raise ValueError(f"{file.path}: no line in it; drop it from the sources, or fetch it again")
    return rows


def _read(file: RawFile, columns: tuple[str, ...], delimiter: str) -> str:
    """Return a table function that reads every column as text, an empty field as NULL."""
    # DuckDB expands globs itself, and a quote in a path ends the literal.
    path = glob.escape(str(file.path)).replace("'", "''")
    types = ", ".join(f"'{name}': 'VARCHAR'" for name in columns)
    return (
        f"read_csv('{path}', compression = '{file.compression}', columns = {{{types}}}, "
        f"delim = '{delimiter}', quote = '', escape = '', comment = '', nullstr = '', "
        "header = false, auto_detect = false, strict_mode = true)"
    )


def _explain(
    connection: duckdb.DuckDBPyConnection, file: RawFile, error: duckdb.Error
) -> Exception:
    """Return the error to raise, naming the first wrong line: the file is read once more for it."""
    if "GZIP" in str(error):
        return ValueError(cut_short(file.path))
    if isinstance(error, duckdb.IOException):
        return error
    lines = (
        f"SELECT row_number() OVER () AS number, line FROM {_read(file, ('line',), NO_DELIMITER)}"
    )
    wrong = f"line IS NOT NULL AND NOT regexp_full_match(line, '{LINE}')"
    try:
        found = connection.execute(
            f"SELECT number, line FROM ({lines}) WHERE {wrong} ORDER BY number LIMIT 1"
        ).fetchone()
    except duckdb.Error as second:
        error, found = second, None
    if found is not None:
        number, line = found
        return ValueError(f"{file.path}, line {number}: {_what_is_wrong(line)}")
    number = re.search(r"Error on Line: (\d+)", str(error))
    where = f"{file.path}, line {number[1]}" if number else f"{file.path}"
    if "unicode" in str(error):
        return ValueError(f"{where}: not UTF-8 text; correct or remove the line")
    return ValueError(f"{where}: not tab-separated text: {str(error).splitlines()[0]}")


def _what_is_wrong(line: str) -> str:
    """Return what is wrong with a line that `LINE` does not match, and what to do."""
    fields = line.split("\t")
    if len(fields) != len(COLUMNS):
        unlabelled = ", or give a file that has labels" if len(fields) == len(COLUMNS) - 1 else ""
        return (
            f"{len(fields)} columns, wanted {len(COLUMNS)} (label, {NUM_NUMERICAL} integers, "
            f"{NUM_CATEGORICAL} categories, separated by tabs); correct or remove the line"
            f"{unlabelled}"
        )
    if fields[0] not in ("0", "1"):
        return f"column 1 (label) is {fields[0]!r}, wanted 0 or 1; correct or remove the line"
    for column, name in enumerate(NUMERICAL, start=1):
        if fields[column] and not re.fullmatch(INTEGER, fields[column]):
            return (
                f"column {column + 1} ({name}) is {fields[column]!r}, wanted an integer of at most "
                "18 digits; correct it or leave the field empty"
            )
    raise AssertionError(f"nothing is wrong with {line!r}")
