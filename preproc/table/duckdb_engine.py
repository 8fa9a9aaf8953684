"""Engines that run the SQL of table datasets: the interface, and DuckDB.

An engine reads sources, numbers rows, and writes the result of a query to Parquet. The SQL itself and the
files of the dataset are the same for all engines (`preproc/table/pipeline/build.py`).
"""

import glob
import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import duckdb
import numpy as np

from configs.messages import first_line, printable, shortened
from configs.preproc_schema import OnBad, PreprocConfig
from configs.table_schema import LINE_FORMATS, Source
from dataloading.dataset.durable_files import replace_directory
from dataloading.dataset.split_files import SPLITS
from preproc.raw_files import RawFile, cut_short
from preproc.table.expressions import CODED_FILE, RELATION_FILE, quoted, text
from preproc.table.line_formats import lines_of
from preproc.table.output_files import allocate
from preproc.table.source_files import SourceFiles
from preproc.work_directory import connect, is_disk_error, is_small, memory_bytes

if TYPE_CHECKING:  # 25 MB of memory that preprocessing does not need
    import pyarrow as pa

SOURCE_ORDER = ["file_", "order_"]
IN_ORDER = {
    *("READ_PARQUET", "READ_CSV", "READ_JSON", "UNION", "STREAMING_WINDOW", "PROJECTION", "FILTER")
}
"""Operators of plans that yield rows in the order of the files."""
SPLIT_TYPE = f"ENUM{SPLITS}"  # a byte per row
# Memory of Python, NumPy, Arrow and the texts of some batches beside DuckDB.
BASE_BYTES = 300 << 20


def nulls_first(order_by: list[str]) -> str:
    """Return an ORDER BY list with the same meaning in every engine."""
    return ", ".join(f"{expression} NULLS FIRST" for expression in order_by)


class QueryError(ValueError):
    """SQL that an engine rejects, in its words; no file, line or column is known."""


class MissingColumnError(QueryError):
    """SQL that names a column that does not exist."""


@dataclass(frozen=True, slots=True)
class StagedRows:
    query: str  # of them
    # columns of the query that order it: `file_` and `order_` of one source, or others
    order_by: list[str]
    # names of the columns of categorical values, and whether these are lists
    values: Mapping[str, bool]
    plain: Mapping[str, str]
    crosses: Mapping[str, list[str]]  # values that join those of other columns, by name
    files: list[RawFile]  # these files, in order

    @property
    def with_text_items(self) -> str:
        """The query for DuckDB, in which items of lists are texts, as single values are."""
        lists = [name for name, is_list in self.values.items() if is_list]
        casts = ", ".join(f"CAST({name} AS VARCHAR[]) AS {name}" for name in lists)
        replaced = f"REPLACE ({casts})" if lists else ""
        return f"SELECT * {replaced} FROM ({self.query})"


class Engine(Protocol):
    """Interface of an engine. Relations have names, and stored results are directories of Parquet files."""

    columns_at_once: int  # threads that may call the engine at the same time
    doubles: str  # type of lists of doubles
    drops_zones: bool  # whether a text that becomes a TIMESTAMP loses its zone
    codes_texts: bool  # whether `stage` writes codes in place of texts
    num_ties: int  # rows of the latest `stage` whose order is that of the row before; Spark: 0
    staged: Mapping[str, Any]  # bytes and CRC-32 of files of the latest `stage`; Spark: none

    def read(self, name: str, files: SourceFiles, change: Callable[[str], str]) -> None:
        """Create relation `name` of the rows of the files, with the columns `file_` and `order_`.

        Rows are ordered by `(file_, order_)`. All columns of text files are text, and empty fields are missing.
        The relation is `change` of a query of these rows.
        """

    def columns(self, query: str) -> list[tuple[str, str]]:
        """Return the names and the types of the columns of a query, which is not run.

        Raises QueryError: the query has no meaning.
        """

    def without_nan(self, value: str, kind: str, instead: str = "NULL") -> str | None:
        """Return the expression `value` with `instead` for NaN, also within lists and structs; None if `kind` has none.

        The engine must not evaluate the result from statistics of files: those of Parquet leave NaN out.
        """

    def stage(self, rows: StagedRows, path: Path) -> None:
        """Write the rows of the sources as `number` does; values may become codes.

        With codes, directories `texts_<column>` below `path` hold their texts (code, value).
        """

    def number(self, query: str, order_by: list[str], path: Path) -> None:
        """Write `query`, ordered by `order_by`, with the row number `row_` from 0 as the first column."""

    def write(self, query: str, path: Path) -> None:
        """Write the result of `query` in its own order."""

    def view(self, name: str, path: Path) -> None:
        """Create relation `name` of the files written to `path`."""

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the few rows of a query."""

    def rejected(self) -> list[tuple[str, int, str, str]]:
        """Return the lines that could not be split into columns: file, line number, reason, text.

        Under `on_bad=fail` an engine may raise an error at the first one instead.
        """

    def num_items(self, column: str, *, whole: bool) -> str:
        """Return an expression of the items of a staged list column, without the empty ones if `whole`; 0 for no list."""

    def close(self) -> None:
        """Release all resources."""


class DuckDBEngine:
    """DuckDB in this process, within `memory_limit`; it spills to the work directory.

    `may_skip`: whether the command has `on_bad`, which messages about bad lines then name.
    """

    codes_texts = True
    num_ties = 0
    doubles = "DOUBLE[]"
    drops_zones = True

    def __init__(self, config: PreprocConfig, directory: Path, *, may_skip: bool = True) -> None:
        self._may_skip = may_skip
        memory = memory_bytes(config)
        self._on_bad = config.on_bad
        self._is_small = is_small(config)
        self._threads = config.threads or os.cpu_count() or 1
        # Most queries of a column are too small for several threads.
        self.columns_at_once = 1 if self._is_small else self._threads
        self._own, self._of_threads = threading.get_ident(), threading.local()
        self.staged: Mapping[str, Any] = {}
        self._coded: dict[str, Any] = {}  # relations that `stage` has written
        self._connection = connect(config, directory, max(memory - BASE_BYTES, 2 * memory // 5))
        self._connection.execute(
            # With a buffer of some batches DuckDB runs on while one of them is taken.
            f"SET preserve_insertion_order = true; SET streaming_buffer_size = '{memory // 128}B'; "
            "CREATE MACRO hex_number(digits) AS CAST('0x' || digits AS BIGINT); "
            "CREATE MACRO text_order(value) AS encode(CAST(value AS VARCHAR)); "
            "CREATE MACRO whole_number(value) AS CAST(floor(value) AS BIGINT); "
            "CREATE MACRO whole_seconds(time) AS try_cast(floor(epoch(time)) AS BIGINT); "
            "CREATE MACRO split_text(value, separator) AS string_split(value, separator)"
        )

    def read(self, name: str, files: SourceFiles, change: Callable[[str], str]) -> None:
        """Read each file by its own query, so that an error names the file."""
        parts = []
        for number, file in enumerate(files.files):
            path = glob.escape(str(file.path))
            if file.is_parquet:
                relation = f"read_parquet({text(path)}, file_row_number = true)"
                parts.append(
                    f"SELECT {number} AS file_, file_row_number AS order_, * EXCLUDE (file_row_number) FROM {relation}"
                )
                continue
            columns = files.columns_of[number]
            if files.source.format in LINE_FORMATS:
                relation = lines_of(files.source, file, columns, files.lists)
            else:
                relation = self._text(files.source, file, path, columns)
            with self._errors_explained(file):
                self._connection.execute(f"FROM {relation} LIMIT 0")
            parts.append(
                f"SELECT {number} AS file_, row_number() OVER () AS order_, * FROM {relation}"
            )
        query = change(" UNION ALL BY NAME ".join(parts))
        with self._errors_explained():
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW {quoted(name)} AS {query}")

    def _text(self, source: Source, file: RawFile, path: str, names: list[str]) -> str:
        is_csv = source.format == "csv"
        types = ", ".join(f"{text(column)}: 'VARCHAR'" for column in names)
        quote = "'\"'" if is_csv else "''"
        lenient = self._on_bad is not OnBad.fail
        return (
            f"read_csv({text(path)}, compression = '{file.compression}', columns = {{{types}}}, "
            f"delim = {text(source.delimiter if is_csv else chr(9))}, quote = {quote}, "
            f"escape = {quote}, comment = '', nullstr = '', header = {source.has_header}, "
            f"auto_detect = false, strict_mode = true, store_rejects = {lenient}, rejects_limit = 0)"
        )

    def columns(self, query: str) -> list[tuple[str, str]]:
        return [(name, kind) for name, kind, *_ in self.rows(f"DESCRIBE {query}")]

    def without_nan(self, value: str, kind: str, instead: str = "NULL") -> str | None:
        """Ask isfinite and isinf, which DuckDB does not evaluate from statistics, as it does isnan and comparisons."""
        try:
            return _without_nan(value, duckdb.sqltype(kind), instead)
        except duckdb.Error:
            # A type that only exists within a database, which holds no plain float.
            return None

    def stage(self, rows: StagedRows, path: Path) -> None:
        """Stream the rows, unsorted if they have the order of their files, and write codes of the values.

        Texts that lie in Parquet files as dictionaries are read as such.
        """
        import pyarrow as pa

        from preproc.table.parquet_texts import dictionary_columns

        temporary = path.with_name(f"{path.name}.new")
        paths = [file.path for file in rows.files]
        found = dictionary_columns(paths, rows.plain) if rows.plain else {}
        split = SPLIT_TYPE
        while True:
            try:
                self._stage(rows, found, _emptied(temporary), split)
                break
            except pa.ArrowException:
                if not found:
                    raise
                # DuckDB reads what Arrow does not, or names what is wrong with it.
                found = {}
            except QueryError as error:
                # The message may end before the type, at the end of a line in the text.
                if split != SPLIT_TYPE or "Could not convert string" not in str(error):
                    raise
                # Perhaps another split, which is staged as it is written, and refused later.
                split = "VARCHAR"
        replace_directory(temporary, path)

    def _stage(
        self, rows: StagedRows, dictionaries: Mapping[str, list[str]], path: Path, split: str
    ) -> None:
        import pyarrow as pa

        from preproc.table.parquet_texts import ParquetTexts
        from preproc.table.text_codes import write_coded

        rows_at_once = 1 << (15 if self._is_small else 18)
        if self._is_small:
            # It returns what is free.
            pa.set_memory_pool(pa.system_memory_pool())
        query = rows.with_text_items
        if "split_" in dict(self.columns(query)):
            query = f"SELECT * REPLACE (CAST(split_ AS {split}) AS split_) FROM ({query})"
        schema = self.schema(query)
        for name in set(rows.order_by) - {"file_"}:
            schema = schema.remove(schema.get_field_index(name))
        if found := [*dictionaries, *rows.crosses]:
            query = f"SELECT * EXCLUDE ({', '.join(found)}) FROM ({query})"
        is_sorted = rows.order_by != SOURCE_ORDER
        has_order = not is_sorted
        if is_sorted:
            query = f"SELECT * FROM ({query}) ORDER BY {nulls_first(rows.order_by)}"
        elif not any(file.is_parquet for file in rows.files) and self._keeps_order(query):
            # Numbering the lines of text files would take one thread for all columns.
            query = f"SELECT * EXCLUDE (order_) FROM ({query})"
            has_order = False
        else:
            query = self.in_source_order(query)
        stream = self.stream(query, rows_at_once)
        batches = checked_order(stream) if has_order else stream
        if is_sorted:
            batches = self._counting_ties(stream, rows.order_by)
        # What sorts runs here, where Ctrl-C interrupts it.
        first = next(batches, None)
        texts = ParquetTexts([file.path for file in rows.files], dictionaries, rows_at_once)

        def with_texts() -> Iterator[tuple[pa.RecordBatch, dict[str, list[pa.DictionaryArray]]]]:
            for batch in itertools.chain([] if first is None else [first], batches):
                yield batch, texts.take(len(batch) if dictionaries else 0)

        with closing(stream):  # another query needs the connection, also after an error
            staged = write_coded(
                with_texts(), schema, rows.values, path, self._threads, rows.crosses
            )
        self.staged = staged

    def _counting_ties(
        self, batches: "Iterator[pa.RecordBatch]", keys: list[str]
    ) -> "Iterator[pa.RecordBatch]":
        """Yield rows in the order of `keys`, and count those whose keys, none of them nested, are equal to the row's before."""
        import pyarrow as pa
        import pyarrow.compute as pc

        last: list[pa.RecordBatch] = []
        self.num_ties = 0
        for batch in batches:
            rows = pa.Table.from_batches([*last, batch.select(keys)]).combine_chunks()
            same: Any = pa.scalar(value=not any(pa.types.is_nested(c.type) for c in rows.columns))
            for column in rows.columns if same.as_py() else ():
                one, other = column[:-1], column[1:]
                # NaN is equal to NaN here, as where rows are sorted.
                both = pc.and_(one.is_null(nan_is_null=True), other.is_null(nan_is_null=True))
                same = pc.and_(same, pc.or_(pc.equal(one, other).fill_null(fill_value=False), both))
            self.num_ties += pc.sum(same).as_py() or 0 if len(rows) > 1 else 0
            last = [batch.select(keys)[-1:]] if len(batch) else last
            yield batch

    def in_source_order(self, query: str) -> str:
        """Return a query of rows with `file_` and `order_` that yields them in that order, sorted only if necessary."""
        if self._keeps_order(query):
            return query
        return f"SELECT * FROM ({query}) ORDER BY {', '.join(SOURCE_ORDER)}"

    def _keeps_order(self, query: str) -> bool:
        """Tell whether DuckDB keeps the order of the files: there is no join, as a long list after IN is one."""
        ((_, plan),) = self.rows(f"EXPLAIN (FORMAT json) {query}")
        return _operators(json.loads(plan)) <= IN_ORDER

    def count_codes(self, directory: Path, column: str, rows: range) -> str:
        """Return a relation (value, count) of the values in some rows, each in one row or several; it is read once."""
        from preproc.table.text_codes import count_codes, counted_texts

        texts = f"texts_{column}"
        ((num_codes,),) = self.rows(f"SELECT count(*) FROM {texts}")
        path = directory.with_name(f"counts_{column}.bin")
        allocate(path, 8 * max(num_codes, 1))
        counts = np.memmap(path, np.int64, "r+")
        path.unlink()
        count_codes(directory, column, rows, counts)
        found = counted_texts(directory.with_name("all_") / texts, counts)
        self._current.register(f"counted_{column}", found)
        return f"counted_{column}"

    def number(self, query: str, order_by: list[str], path: Path) -> None:
        """Number the rows in one streaming pass after the sort."""
        self.write(
            f"SELECT row_number() OVER () - 1 AS row_, * FROM (SELECT * FROM ({query}) ORDER BY {nulls_first(order_by)})",
            path,
        )

    def write(self, query: str, path: Path) -> None:
        temporary = _emptied(path.with_name(f"{path.name}.new"))
        file = text(str(temporary / RELATION_FILE))
        with self._errors_explained():
            self._current.execute(
                f"COPY ({query}) TO {file} (FORMAT parquet, COMPRESSION uncompressed)"
            )
        replace_directory(temporary, path)

    def view(self, name: str, path: Path) -> None:
        if (path / CODED_FILE).exists():
            from preproc.table.text_codes import mapped_by_query, mapped_rows

            self._coded[name] = (mapped_by_query if self._is_small else mapped_rows)(path)
            self._current.register(name, self._coded[name])
            return
        rows = f"SELECT * FROM read_parquet({text(glob.escape(str(path)) + '/*.parquet')})"
        self.rows(f"CREATE OR REPLACE VIEW {quoted(name)} AS {rows}")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self._errors_explained():
            return self._current.execute(query).fetchall()

    @contextmanager
    def _errors_explained(self, file: RawFile | None = None) -> Iterator[None]:
        """Raise the errors of queries as `_explained` words them, but for a lack of memory, which others handle."""
        try:
            yield
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error as error:
            raise _explained(file, error, may_skip=self._may_skip) from None

    def stream(self, query: str, rows_at_once: int) -> Generator["pa.RecordBatch"]:
        """Yield the rows of a query as it runs; meanwhile only cursors may run others."""
        import pyarrow as pa

        try:
            with self._connection.sql(query).to_arrow_reader(rows_at_once) as reader:
                yield from reader
        except duckdb.OutOfMemoryException:
            raise
        # Arrow passes on what DuckDB raises as its own errors.
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise _explained(None, duckdb.Error(str(error)), may_skip=self._may_skip) from None

    def schema(self, query: str) -> "pa.Schema":
        """Return names and types of the columns of a query, as `stream` yields them."""
        return self._connection.sql(f"SELECT * FROM ({query}) LIMIT 0").to_arrow_table().schema

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Return another connection to the database, which sees its tables, but not the relations of sources."""
        return self._connection.cursor()

    @property
    def _current(self) -> duckdb.DuckDBPyConnection:
        """The connection of this thread; one of another thread does not see the relations of sources."""
        if threading.get_ident() == self._own:
            return self._connection
        if not hasattr(self._of_threads, "connection"):
            self._of_threads.connection = self._connection.cursor()
            for name, rows in self._coded.items():
                self._of_threads.connection.register(name, rows)
        return self._of_threads.connection

    def rejected(self) -> list[tuple[str, int, str, str]]:
        """Read DuckDB's own list of rejects, one entry per line."""
        if not self.rows("FROM duckdb_tables() WHERE table_name = 'reject_errors'"):
            return []
        return self.rows(
            "SELECT any_value(s.file_path), e.line, min(e.error_message), any_value(e.csv_line) "
            "FROM reject_errors AS e JOIN reject_scans AS s USING (scan_id, file_id) "
            "GROUP BY e.scan_id, e.file_id, e.line ORDER BY e.scan_id, e.file_id, e.line"
        )

    def num_items(self, column: str, *, whole: bool) -> str:
        """Count codes, which are null for an empty item."""
        return f"coalesce({'list_count' if whole else 'len'}({column}), 0)"

    def close(self) -> None:
        self._connection.close()
        self._coded.clear()  # else files would stay mapped, and be freed at the very end


def _emptied(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def _operators(plan: list[dict[str, Any]]) -> set[str]:
    return {name for node in plan for name in (node["name"], *_operators(node["children"]))}


def checked_order(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    """Yield rows of one source; RuntimeError if they are not in the order of its files."""
    last = (-1, -1)
    for batch in batches:
        # numpy.asarray would import pandas.
        files, order = (np.from_dlpack(batch.column(name)) for name in SOURCE_ORDER)
        if len(files):
            steps = np.diff(files, prepend=last[0]), np.diff(order, prepend=last[1])
            # No assertion, which `python -O` would leave out.
            if not ((steps[0] > 0) | ((steps[0] == 0) & (steps[1] == 1))).all():
                raise RuntimeError("rows out of order")
            last = int(files[-1]), int(order[-1])
        yield batch


def _without_nan(value: str, kind: Any, instead: str, depth: int = 0) -> str | None:
    if kind.id in ("float", "double"):
        # A case per condition takes half the time of OR.
        other = (
            "" if instead == "NULL" else f"WHEN {value} IS NOT NULL THEN CAST({instead} AS {kind}) "
        )
        return f"(CASE WHEN isfinite({value}) THEN {value} WHEN isinf({value}) THEN {value} {other}END)"
    if kind.id in ("list", "array"):
        name = f"item{depth}_"
        item = _without_nan(name, kind.children[0][1], instead, depth + 1)
        return item and f"list_transform({value}, lambda {name}: {item})"
    if kind.id == "map":
        name = f"item{depth}_"
        item = _without_nan(name, kind.children[1][1], instead, depth + 1)
        values = f"list_transform(map_values({value}), lambda {name}: {item})"
        return item and f"(CASE WHEN {value} IS NOT NULL THEN map(map_keys({value}), {values}) END)"
    if kind.id != "struct" or not all(name for name, _ in kind.children):
        return None
    fields = [(quoted(name), item) for name, item in kind.children]
    changed = [_without_nan(f"{value}.{name}", item, instead, depth) for name, item in fields]
    if not any(changed):
        return None
    packed = ", ".join(
        f"{name} := {change or f'{value}.{name}'}"
        for (name, _), change in zip(fields, changed, strict=True)
    )
    return f"(CASE WHEN {value} IS NOT NULL THEN struct_pack({packed}) END)"


def _explained(file: RawFile | None, error: duckdb.Error, *, may_skip: bool) -> Exception:
    """Return the error to raise: a ValueError for user errors, any other error unchanged; `may_skip` as of the engine."""
    message = str(error)
    if "GZIP" in message and file:
        return ValueError(cut_short(file.path))
    if is_disk_error(error) and "CSV" not in message and "GZIP" not in message:
        return error
    named = re.search(r"^\s*file = (.+)$", message, flags=re.MULTILINE)
    line = re.search(r"Error on Line: (\d+)", message)
    if named and line:
        or_skip = ", or set on_bad=quarantine" * may_skip
        return ValueError(
            f"{named[1]}, line {line[1]}: {_mistake(message)}; correct or remove it{or_skip}"
        )
    line_end = re.search(r"^\s*new_line = (\S+)", message, flags=re.MULTILINE)
    if named and line_end and "reached an invalid state" in message:
        return ValueError(
            f"{named[1]}: not all of its lines end with {line_end[1]} as the first does, or a field has a line end without "
            "quotes; write all line ends alike, as the command dos2unix does"
        )
    reason = re.sub(r"^(\w+ )+Error: ", "", first_line(message))
    reason = shortened(printable(reason.rstrip("!")), 300)
    if "Parallel CSV Reader" in reason:
        reason = "a line of many million bytes"
    if file:
        return ValueError(f"{file.path}: {reason}")
    lacks_column = re.match(r"Referenced column .* not found", reason)
    return MissingColumnError(reason) if lacks_column else QueryError(reason)


def _mistake(message: str) -> str:
    """Return the mistake in a line of text from DuckDB's message, which also holds the line and advice."""
    wanted = re.search(r"Expected Number of Columns.*", message)
    if wanted:
        is_one = wanted[0].endswith("Found: 1")
        hint = " (are its fields separated otherwise? see the source's format and delimiter)"
        return wanted[0] + hint * is_one
    if "unicode" in message:
        return "not UTF-8 text"
    if "unterminated quote" in message:
        return "a quote that is not closed, or text after the closing quote"
    longest = re.search(r"Maximum line size of (\d+) bytes exceeded", message)
    if longest:
        return f"a line of over {int(longest[1]):,} bytes"
    return shortened(printable(first_line(message)))
