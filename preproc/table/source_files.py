"""Files of a source as an engine reads them: their format, the split that they are, and names that engines understand."""

import csv
import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from configs.messages import printable, shortened, shown
from configs.options import require
from configs.preproc_schema import Layout, PreprocConfig
from configs.table_schema import LINE_FORMATS, Source, SplitRule, TableConfig
from preproc.fitted_state import SOURCE, with_placeholder
from preproc.line_blocks import blocks
from preproc.raw_files import RawFile, find_files, refuse_shared
from preproc.table.line_formats import line_columns
from preproc.work_directory import small_database

# Columns that every source has beside its own.
RESERVED = ("file_", "order_")
# DuckDB calls the row number of a Parquet file so.
RESERVED_IN_PARQUET = (*RESERVED, "file_row_number")
Sources = dict[str, tuple[Source, list[RawFile]]]


@dataclass(frozen=True, slots=True)
class SourceFiles:
    source: Source  # its description, with a format
    files: list[RawFile]  # its files, in order
    columns: list[str]  # names of the columns, in the order of the first file
    columns_of: list[list[str]]  # names of the columns per file, in the order of the file
    lists: frozenset[str] = frozenset()  # columns of JSON lines that are lists


def find_source(name: str, source: Source, option: str = "source") -> tuple[Source, list[RawFile]]:
    """Return the files of a source, which `option` names, and its description with the format that they have.

    Raises ValueError: a file is missing or of another format; starts with its path.
    """
    files = find_files(source.files, option, tables=True)
    kinds = {file.is_parquet: file for file in files}
    where = f"table.sources.{printable(name)}"
    if len(kinds) == 2:
        raise ValueError(
            f"{kinds[True].path}: a Parquet file, and {kinds[False].path} is none; give the files of each "
            f"format a source of their own beside {where}, and a query over both"
        )
    (is_parquet,) = kinds
    if source.format == "parquet" and not is_parquet:
        is_text = files[0].compression == "none"
        kind = "text, not Parquet" if is_text else f"{files[0].compression} data, not Parquet"
        remedy = f"set {where}.format to that of the text" + ("" if is_text else ", or unpack it")
        raise ValueError(f"{files[0].path}: its first bytes are those of {kind}; {remedy}")
    if source.format not in (None, "parquet") and is_parquet:
        raise ValueError(
            f"{files[0].path}: a Parquet file; set {where}.format to parquet instead of {source.format}, or drop it"
        )
    return replace(source, format=source.format or ("parquet" if is_parquet else "csv")), files


def read_columns(source: Source, files: list[RawFile]) -> SourceFiles:
    """Return the source with the names of its columns.

    Raises ValueError: a file has no readable header, two columns of one name, or other columns than the first file.
    """
    lists: set[str] = set()
    if source.format == "parquet":
        with small_database() as connection:
            columns_of = [_parquet_columns(connection, file) for file in files]
    elif source.format in LINE_FORMATS:
        with small_database() as connection:
            columns_of = [line_columns(connection, source, file, lists) for file in files]
    else:
        columns_of = [list(source.columns or []) or _header(source, file) for file in files]
    for file, names in zip(files, columns_of, strict=True):
        _check_names(file, names)
    first = columns_of[0]
    wanted = {name.lower() for name in first}
    for file, names in zip(files, columns_of, strict=True):
        has = {name.lower() for name in names}
        for less, more, lacking in ((has, first, file), (wanted, names, files[0])):
            absent = [name for name in more if name.lower() not in less]
            if absent:
                other = files[0] if lacking is file else file
                raise ValueError(
                    f"{lacking.path}: no column {shown(absent[0])}, which {other.path} has; the files of a source "
                    "have the same columns: write them so, or give each kind a source of its own and a query"
                )
    return SourceFiles(source, files, first, columns_of, frozenset(lists))


def listed(names: list[str]) -> str:
    """Return column names as a message lists them: in quotes if they have blanks or commas, which would not be seen."""
    return shortened(
        ", ".join(shown(name) if re.search(r"[\s,]", name) else printable(name) for name in names),
        300,
    )


def _check_names(file: RawFile, names: list[str]) -> None:
    seen: dict[str, int] = {}
    or_names = "" if file.is_parquet else ", or set the source's columns to names of your own"
    for number, name in enumerate(names, start=1):
        if name.lower() in seen:
            raise ValueError(
                f"{file.path}: columns {seen[name.lower()]} and {number} are both called {shown(name)} (SQL ignores "
                f"case); rename one{or_names}"
            )
        seen[name.lower()] = number
        if name.lower() in (RESERVED_IN_PARQUET if file.is_parquet else RESERVED):
            raise ValueError(
                f"{file.path}: column {number} is called {shown(name)}, a name that preprocessing itself uses; "
                f"rename it{or_names}"
            )


def _header(source: Source, file: RawFile) -> list[str]:
    """Return the column names of a text file with a header line; a column without a name is `unnamed_<number>`."""
    block = next(blocks(file, 0), b"\n")
    try:
        names = _header_names(source, block)
    except UnicodeDecodeError:
        raise ValueError(f"{file.path}, line 1: not UTF-8 text; correct the line") from None
    except csv.Error as error:
        raise ValueError(
            f"{file.path}, line 1: no header line ({shortened(printable(str(error)))}); correct it, or set the "
            "source's columns to their names"
        ) from None
    if not any(names):
        raise ValueError(f"{file.path}, line 1: blank, want the names of the columns; remove it")
    if any("\0" in name for name in names):
        raise ValueError(
            f"{file.path}, line 1: a null character in the name of a column, so this may be no text; correct it"
        )
    # pandas writes its index so.
    return [name or f"unnamed_{number}" for number, name in enumerate(names, start=1)]


def _header_names(source: Source, block: bytes) -> list[str]:
    def lines() -> Iterator[str]:
        for number, line in enumerate(block.splitlines(keepends=True)):
            yield line.decode("utf-8-sig" if number == 0 else "utf-8")

    first = next(lines()).rstrip("\r\n")
    if source.format == "tsv":
        return first.split("\t")
    if len(source.delimiter) > 1:
        return first.split(source.delimiter)
    # A quoted name may hold a line end.
    return next(csv.reader(lines(), delimiter=source.delimiter), [""]) or [""]


def refuse_damaged(files: list[RawFile]) -> None:
    """Read every value of Parquet files; ValueError names the first file that cannot be read."""
    with small_database() as connection:
        for file in files:
            if file.is_parquet:
                _read_parquet(connection, file, "SELECT max(hash(COLUMNS(*))) FROM read_parquet(?)")


def _read_parquet(
    connection: duckdb.DuckDBPyConnection, file: RawFile, query: str
) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query, [glob.escape(str(file.path))]).fetchall()
    except duckdb.OutOfMemoryException:
        raise
    except duckdb.Error as error:
        reason = shortened(printable(str(error).splitlines()[0].strip(" :")))
        raise ValueError(
            f"{file.path}: damaged Parquet data ({reason}); fetch or write it again"
        ) from None


def _parquet_columns(connection: duckdb.DuckDBPyConnection, file: RawFile) -> list[str]:
    """Return the names of the columns of a Parquet file as it stores them; engines rename the second of a name."""
    query = "SELECT name, coalesce(num_children, 0) FROM parquet_schema(?)"
    names, inside = [], 0
    # Elements are listed depth first, after the root.
    for name, children in _read_parquet(connection, file, query)[1:]:
        if inside == 0:
            names.append(name)
        inside = max(inside - 1, 0) + children
    return names


def find_sources(config: PreprocConfig, table: TableConfig) -> tuple[TableConfig, Sources]:
    """Return the description with the rule that divides its rows, and its sources; files of `test_source` follow the others.

    Raises ValueError: a file is missing or of another format; several options or keys divide the rows; it is not clear
    which source has the files of `test_source`.
    """
    sources = {name: find_source(name, source) for name, source in table.sources.items()}
    if config.one_split is not None:
        return table, sources
    table = replace(table, split=_rule(config, table))
    if config.test_source is None:
        return table, sources
    name, patterns = _test_files(config, table)
    source, files = sources[name]
    _, tests = find_source(name, replace(source, files=patterns), "test_source")
    refuse_shared(files, tests)
    sources[name] = (source, files + tests)
    tests_last = f"CASE WHEN file_ >= {len(files)} THEN 'test' ELSE 'train' END"
    return replace(table, split=SplitRule(by="column", expression=tests_last)), sources


def _rule(config: PreprocConfig, table: TableConfig) -> SplitRule:
    """Return the rule of `table.split`, or of the option `split`; ValueError unless one of all divides the rows."""
    by = config.split.name if config.split is not None else None
    if config.layout is Layout.criteo and config.test_source is not None:
        by = None  # the split that dataset=criteo_1tb sets
    rules = {
        "test_source": config.test_source and shown(config.test_source),
        "split": by,
        "table.split": f"{{by: {table.split.by}}}"
        if table.split != SplitRule() and table.split.by != by
        else None,
    }
    rules = {key: value for key, value in rules.items() if value is not None}
    if len(rules) > 1:
        *_, last = rules
        each = " and ".join(f"{key}={value}" for key, value in rules.items())
        raise ValueError(
            f"{each} each divide the rows; keep one, and unset the other as by {last}=null"
        )
    rule = SplitRule(by=by) if by is not None and table.split == SplitRule() else table.split
    require(
        not rule.unused,
        f"table.split: by: {rule.by} does not read {' and '.join(rule.unused)}; drop it (on a command line "
        "~table.split.KEY), or set another by: fraction reads train, random train and validation, column expression",
    )
    return rule


def _test_files(config: PreprocConfig, table: TableConfig) -> tuple[str, list[str]]:
    """Return the name of the source that has the files of `test_source`, and these as it names those of `source`."""
    tests = config.test_source if isinstance(config.test_source, list) else [config.test_source]
    found = {
        name: _in_place(source.files, config.source, tests)
        for name, source in table.sources.items()
    }
    having = [name for name, files in found.items() if files]
    if len(table.sources) == 1:
        (name,) = table.sources
        return name, found[name] or tests
    require(
        len(having) == 1,
        f"test_source={shown(config.test_source)} wants one source whose files are those of the option source, got "
        f"{', '.join(map(shown, having)) or 'none'}; name the files of the others in table.sources, or divide by table.split",
    )
    return having[0], found[having[0]]


def _in_place(files: Any, source: Any, tests: list[str]) -> list[str]:
    """Return `tests` where the files of a source are, or begin with, the option `source`; other files are no tests."""
    found = []
    for part in files if isinstance(files, list) and files != source else [files]:
        replaced = with_placeholder(part, source)
        if isinstance(replaced, str) and replaced.startswith(SOURCE):
            found += [test + replaced[len(SOURCE) :] for test in tests]
    return found
