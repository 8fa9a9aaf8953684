"""The first query of a run: rows of the sources as labels, numbers and values, with missing values as null.

NaN in a column of floats is a missing value. DuckDB evaluates isnan and comparisons from the statistics of Parquet files, which
leave NaN out, so NaN becomes null before any expression sees it. An expression, or a query, that calls isnan itself sees it.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from configs.messages import printable, shown
from configs.table_schema import (
    Categorical,
    EventLists,
    EventLog,
    History,
    Label,
    Numerical,
    RowNumber,
    TableConfig,
)
from dataloading.row_sql import (
    COLUMN,
    KIND,
    columns_of,
    of_many_rows,
    of_utc,
    reads_other_rows,
    unserved,
)
from preproc.table.duckdb_engine import Engine, MissingColumnError, QueryError, StagedRows
from preproc.table.expressions import (
    LARGEST_DOUBLE,
    as_float,
    categorical_value,
    crossed,
    is_missing,
    not_a_number,
    number_of,
    only_duckdb_reads,
    quoted,
    seconds_of,
    shown_value,
    text,
)
from preproc.table.known_values import text_of_five
from preproc.table.source_files import SourceFiles, listed, refuse_damaged
from preproc.table.text_order import is_text, ordered_text, refuse_text_order, remedy
from preproc.text_columns import TEXT_TYPES, TextColumns

# Columns that give the order of a source's rows; DuckDB numbers those of further sources of a query.
OWN_COLUMN = re.compile(r"(file|order)_(_\d+)?")
FLOAT_TYPES = ("float", "double")
INTEGERS = ("tinyint", "smallint", "integer", "int", "bigint")
# Columns that order rows and events, and that divide rows.
ORDERS = re.compile(r"(key|time|moment)\d+_|split_")
# Types of numbers that become doubles without NaN. Parquet, as DuckDB writes it, would round a hugeint.
TIME_TYPE = re.compile(r"u?(tiny|small|big)?int(eger)?|decimal.*|float|double|date|timestamp.*")
# Values, and items of lists, whose text would be the engine's own: DuckDB writes \\xC3\\xA9 for the bytes of an é.
NO_TEXT_TYPE = re.compile(
    r"(blob|binary)(\[\d*\])?|(struct|map|union)\(.*\)\[\d*\]|.*\]\[\d*\]"
    r'|array .*"elementtype":(\{|"binary").*',
    re.DOTALL,
)
# Types that Parquet stores as they stand, and both engines alike.
KEPT_TYPE = re.compile(
    r"u?(tiny|small|big)?int(eger)?|boolean|decimal.*|float|double|varchar|string|date|timestamp.*"
)
WHOLE_TYPE = re.compile(r"u?(tiny|small|big)?int(eger)?")
EXACT_TYPE = re.compile(r"u?(tiny|small|big|huge)?int(eger)?|boolean|decimal.*")
NAN = "'nan'"
LARGEST_FLOAT = "3.4028234663852886e38"
VALUE_NAMES = {
    *("user", "current_user", "session_user", "current_role", "current_schema", "current_catalog"),
    *("current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"),
}
"""Names that an engine takes for a value of its own where no column has them, in quotes too."""
ROLES = {
    **{"label": "label", "weight": "weight", "keep_rate": "keep rate", "teacher": "teacher"},
    **dict.fromkeys(("n", "c"), "feature"),
    **dict.fromkeys(("who", "time", "past", "event", "moment", "numbers"), "history"),
    **{"split": "split", "keep": "kept", "key": "order"},
}
"""What a column becomes by the names of the columns of expressions, without their numbers."""


def _role(column: str) -> str:
    return ROLES[re.sub(r"[\d_]*$", "", column)]


@dataclass(frozen=True, slots=True)
class _Expression:
    column: str  # name of the column that holds its value
    where: str  # its key in the description, for messages
    sql: str  # the expression
    shown: str  # what the description has, for messages

    @property
    def sees_nan(self) -> bool:
        return _calls_isnan(self.sql)

    @property
    def is_column(self) -> bool:
        return re.fullmatch(r'\w+|"([^"]|"")*"', self.sql) is not None

    def is_other_value(self, columns: Container[str]) -> bool:
        """Return whether an engine takes the name, such as `user`, for a value of its own, since no column has it."""
        name = self.sql.strip('"').replace('""', '"').lower()
        return self.is_column and name in VALUE_NAMES and name not in columns


class Staging:
    def __init__(
        self,
        engine: Engine,
        table: TableConfig,
        sources: dict[str, SourceFiles],
        may_lack_labels: bool = False,
        fitted: TextColumns | None = None,
    ) -> None:
        """Read the sources.

        `fitted`: columns of the fit that is applied to the rows; None if these are fitted themselves. Raises
        ValueError: a file cannot be read, or an expression has no meaning; names the file or the expression.
        """
        self._engine = engine
        self.sources = sources  # by name, resolved
        self.table = table
        self._fitted = None if fitted is None else fitted.named(sources)
        self._expressions = _expressions_of(table, engine)
        base = self._base()
        found_columns = engine.columns(base)
        times = {name.lower() for name, kind in found_columns if kind == "TIMESTAMP"}
        self._names = [name for name, _ in found_columns if not OWN_COLUMN.fullmatch(name.lower())]
        found = self._find_text_columns(base)
        self.text_columns = found if self._fitted is None else self._fitted.over(found)
        self._column_names = set(found.result)
        if may_lack_labels:
            self.table = self._without_absent(base)
        self._expressions = _expressions_of(self.table, engine, times)
        if table.query and table.split.needs_file:
            self._require_file(base)
        for item in self._expressions:
            if item.is_other_value(self._column_names):
                self._refuse_item(item, f"no column {quoted(item.sql.strip(chr(34)))}")
        reason = "not one value per expression"
        try:
            values = self._values(base, self._expressions)
            columns = [(name, kind.lower()) for name, kind in engine.columns(values)]
        except QueryError as error:
            reason, columns = str(error), []
        if len(columns) != len(self._expressions) + (1 if table.query else 2):
            width = len(engine.columns(base))
            self._refuse_expression(base, lambda query: len(engine.columns(query)) == width + 1)
            raise ValueError(f"table: {reason}")
        self._base_query, self._kinds = base, dict(columns)
        self._whole = {
            c for c, kind in columns if engine.codes_texts and WHOLE_TYPE.fullmatch(kind)
        }
        self.query = self._checked(values)
        self._plain = self._plain_columns()
        keys = [f"key{i}_" for i in range(len(table.order_by))]
        # columns of the query that order it
        self.order_by = keys if table.query else ["file_", "order_"]

    def leave_out_failing(self) -> None:
        """Make a row for which an expression fails a bad one; QueryError: the engine cannot try an expression."""
        tried, unpacked, reasons = list[_Expression](), list[str](), list[str]()
        for item in self._expressions:
            tried.append(item)
            if item.is_column:
                continue
            # A value that fails is no struct; one that is missing is a struct of null.
            tried[-1] = replace(item, sql=f"TRY({{'v': ({item.sql}\n)}})")
            value, of = item.column, f"{item.column}of_"
            named = ", ".join(map(quoted, _columns_in(item.sql, self._names))) or "''"
            tried.append(replace(item, column=of, sql=f"concat_ws(', ', {named})"))
            unpacked += [
                f"{value}.v AS {value}",
                f"CASE WHEN {value} IS NULL THEN {of} END AS {of}",
            ]
            reason = text(f"{item.where}: {item.shown} fails for ")
            reasons.append(f"WHEN {of} IS NOT NULL THEN {reason} || {shown_value(of)}")
        values = f"SELECT * REPLACE ({', '.join(unpacked)}) FROM ({self._values(self._base_query, tried)})"
        self.query = self._checked(values, reasons)

    @property
    def rows(self) -> StagedRows:
        features = {f"c{i}": feature for i, feature in enumerate(self.table.categorical)}
        single = {
            f.name: c for c, f in features.items() if not (f.expression or f.cross or f.is_list)
        }
        crosses = {
            c: [single.get(name, "") for name in f.cross] for c, f in features.items() if f.cross
        }
        return StagedRows(
            self.query,
            self.order_by,
            {column: feature.is_list for column, feature in features.items()},
            self._plain,
            {column: parts for column, parts in crosses.items() if all(parts)},
            [] if self.table.query else next(iter(self.sources.values())).files,
        )

    def refuse_text_order(self, *, is_fit: bool, is_its_query: bool = False) -> None:
        """Raise ValueError if texts order or divide the rows, or are compared.

        `is_fit`: the rows are fitted; the features of a fit that is applied mean what they meant there.
        """
        for item in self._expressions:
            if item.column.startswith("key") and is_text(self._kinds[item.column]):
                raise ordered_text(item.where, item.sql, item.sql)
            if is_fit or item.column.startswith(("key", "split_")):
                refuse_text_order(self._engine, item.where, item.sql, self._base_query)
        if self.table.query and not is_its_query:
            query = self.table.query.strip().removesuffix(";")
            refuse_text_order(self._engine, "table.query", query, None)

    def refuse_other_rows(self) -> None:
        """Raise ValueError if what new rows need too (features, keep rates, what events know) comes from other rows."""
        for item in self._of_scores:
            if reads_other_rows(item.sql):
                raise ValueError(
                    f"{item.where}: {item.shown} reads other rows, later ones too, and new rows would read others; compute it "
                    "from its own row, or join it in table.query"
                )

    def notes_of_query(self) -> list[str]:
        """Return what to say of windows and aggregates of the query, which new rows compute again."""
        columns = of_many_rows(self.table.query)
        of = [item.where for item in self._of_scores if _columns_in(item.sql, columns)]
        what = "windows or aggregates in table.query; new rows compute them over their own files"
        return [f"{', '.join(of)}: {what}; join those of the fit from a source"] * bool(of)

    @property
    def _of_scores(self) -> list[_Expression]:
        return [
            i for i in self._expressions if _role(i.column) in ("feature", "keep rate", "history")
        ]

    def refuse_no_text(self) -> None:
        """Raise ValueError for categories that are bytes, or lists of bytes, lists or structs; in new rows if it was text."""
        columns = self._engine.columns(self._base_query)
        kinds = {name.lower(): kind.lower() for name, kind in columns}
        found: dict[str, list[str]] = {}
        for i, feature in enumerate(self.table.categorical):
            column = (feature.expression or feature.name).strip('" ').lower()
            if self._fitted is not None and not self._fitted.result.get(column):
                continue
            crossed = [kinds[name.lower()] for name in feature.cross or []]
            for kind in filter(NO_TEXT_TYPE.fullmatch, [self._kinds[f"c{i}"], *crossed]):
                is_bytes = kind.startswith(("blob", "binary")) or '"binary"' in kind
                what = (
                    "bytes, want text or numbers; make such of it, as by decode(...) of UTF-8 or hex(...)"
                    if is_bytes
                    else "a list with lists or structs, want text or numbers; make such of it, as by flatten(...)"
                )
                found.setdefault(what, []).append(shown(feature.name))
        for what, names in found.items():
            raise ValueError(
                f"table.categorical: {', '.join(names)}: a value is {what}, in an expression or in table.query"
            )

    def types_of_served(self) -> tuple[dict[str, str], list[str]]:
        """Return the types that columns of expressions have, text left out, and why raw values of features cannot be served."""
        found = self._engine.columns(self._base_query)
        kinds = {name.lower(): kind.lower() for name, kind in found}
        types: dict[str, str] = {}
        notes = []
        logs = [log for log in self.table.logs if not log.source]
        numbers = [number for log in logs for number in log.numbers]
        features: list[Numerical | Categorical | RowNumber]
        features = [*self.table.numerical, *self.table.categorical, *numbers]
        expressions = [
            (feature.name, sql, isinstance(feature, Categorical) and feature.list)
            for feature in features
            if (sql := (feature.expression or "").strip()) and not COLUMN.fullmatch(sql)
        ]
        expressions += [
            (log.name, sql, False) for log in logs for sql in (log.order_by, log.filter) if sql
        ]
        for feature_name, sql, is_list in expressions:
            try:
                of = {name.lower(): kinds[name.lower()] for name in columns_of(sql)}
                other = [kind for kind in of.values() if not KIND.fullmatch(kind)]
                if other or is_list:
                    raise ValueError(f"of {other[0]}" if other else "a list")
                types |= {name: kind for name, kind in of.items() if not is_text(kind)}
            except KeyError as error:
                notes.append(unserved(feature_name, sql, f"no column {error}"))
            except ValueError as error:
                notes.append(unserved(feature_name, sql, error))
        return types, notes

    @property
    def column_roles(self) -> dict[str, str]:
        """Role of every column, that of the first expression that reads it, else unused.

        Of a query these are the columns of its result, and those of sources as `source.column`.
        """
        roles = {name: "unused" for name in self._names}
        for item in self._expressions:
            role = _role(item.column)
            for name in _columns_in(item.sql, roles):
                if roles[name] == "unused":
                    roles[name] = role
        query = self.table.query
        if not query:
            return roles
        for source, files in self.sources.items():
            named = set(files.columns if "*" in query else _columns_in(query, files.columns))
            roles |= {
                f"{source}.{name}": "query" if name in named else "unused" for name in files.columns
            }
        return roles

    def _plain_columns(self) -> dict[str, str]:
        """Return the categorical columns that are columns of text of Parquet files, and the names there."""
        table = self.table
        (*_, source) = self.sources.values()
        if table.query or table.missing or source.source.format != "parquet":
            return {}
        return {
            item.column: item.sql.removeprefix('"').removesuffix('"').replace('""', '"')
            for item in self._expressions
            if item.is_column
            and re.fullmatch(r"c\d+", item.column)
            and not table.categorical[int(item.column[1:])].is_list
            and self._kinds[item.column] == "varchar"
        }

    def _require_file(self, base: str) -> None:
        """Raise ValueError if the rows of the query do not say which files they are from."""
        if "file_" not in {name.lower() for name, _ in self._engine.columns(base)}:
            raise ValueError(
                "table.split: the rows are divided by their files (test_source, last_file or file_), and the result of "
                "table.query has no column file_; select that of the source which test_source is for, as in SELECT t.file_"
            )

    def _without_absent(self, base: str) -> TableConfig:
        """Return the description without the row numbers whose columns do not exist, as `TableConfig.without` leaves them out."""
        absent = set()
        for item in self._expressions[: len(self.table.row_numbers)]:
            if item.is_other_value(self._column_names):
                absent.add(item.column)
                continue
            try:
                self._engine.columns(f"SELECT *, ({item.sql}\n) AS x_ FROM ({base})")
            except MissingColumnError:
                absent.add(item.column)
            except QueryError:
                continue  # refused later, by name
        return self.table.without(absent)

    def _unread(self, rows: str) -> QueryError | None:
        try:
            self._engine.rows(f"SELECT count(order_) FROM (SELECT order_ FROM {rows})")
        except QueryError as error:
            return error
        return None

    def refuse(self, error: QueryError, note: str = "") -> None:
        """Raise ValueError that names the expression or the file for which a run of the query has failed; `note` on the first."""
        base = self._base()
        for name, files in self.sources.items():
            if self._unread(quoted(name)) is None:
                continue
            for number, file in enumerate(files.files):
                reason = self._unread(f"{quoted(name)} WHERE file_ = {number}")
                if reason is not None:
                    raise ValueError(
                        f"{file.path}: {reason}; correct it, or write it again"
                    ) from None
        self._refuse_expression(
            base, lambda query: bool(self._engine.rows(f"SELECT count(x_) FROM ({query})")), note
        )
        for files in self.sources.values():
            refuse_damaged(files.files)
        raise ValueError(f"table: {error}{note}") from None

    def _base(self) -> str:
        """Create the relations of the sources; return the query of the rows that expressions read."""
        table = self.table
        # Without a query, expressions read the source itself.
        sql = [table.query] if table.query else [item.sql for item in self._expressions]
        keep_nan = any(map(_calls_isnan, sql))
        for name, files in self.sources.items():
            self._engine.read(name, files, self._change(name, files, keep_nan))
        if not table.query:
            return f"SELECT * FROM {quoted(next(iter(self.sources)))}"
        query = table.query.strip().removesuffix(";")
        try:
            self._engine.columns(f"SELECT * FROM ({query}\n)")
        except QueryError as error:
            columns = "; ".join(
                f"{printable(name)} has {listed(files.columns)}"
                for name, files in self.sources.items()
            )
            raise ValueError(f"table.query: {error}{_cast(error)}; {columns}") from None
        return f"SELECT * FROM ({query}\n)"

    def _change(self, name: str, files: SourceFiles, keep_nan: bool) -> Callable[[str], str]:
        missing = self.table.missing
        if files.source.format != "parquet" and not missing:
            return lambda query: query
        were_text = {} if self._fitted is None else self._fitted.sources.get(name, {})
        return lambda query: _with_missing(
            self._engine, query, missing, NAN if keep_nan else "NULL", were_text=were_text
        )

    def _find_text_columns(self, base: str) -> TextColumns:
        """Return which columns of the sources, and of the rows that expressions read, are text."""

        def kinds(query: str) -> dict[str, bool]:
            return {
                name.lower(): kind.lower() in TEXT_TYPES
                for name, kind in self._engine.columns(query)
                if not OWN_COLUMN.fullmatch(name.lower())
            }

        sources = {name: kinds(f"SELECT * FROM {quoted(name)}") for name in self.sources}
        result = kinds(base) if self.table.query else next(iter(sources.values()))
        return TextColumns(sources, result)

    def _values(self, base: str, expressions: Sequence[_Expression]) -> str:
        aware = [item for item in expressions if item.sees_nan]
        if aware:
            values = ", ".join(f"({item.sql}\n) AS {item.column}seen_" for item in aware)
            base = f"SELECT *, {values} FROM ({base})"
        if aware or self.table.query:
            base = _with_missing(self._engine, base)
        columns = ["file_", "order_"]
        if self.table.query:
            columns = ["file_" if self.table.split.by == "last_file" else "0 AS file_"]
        columns += [
            f"{item.column}seen_ AS {item.column}"
            if item.sees_nan
            else f"({item.sql}\n) AS {item.column}"
            for item in expressions
        ]
        return f"SELECT {', '.join(columns)} FROM ({base})"

    def _checked(self, values: str, failures: Sequence[str] = ()) -> str:
        """Return the query of the stored columns, and the mistake of a row as `bad_`, first of `failures`."""
        table, engine, kinds = self.table, self._engine, self._kinds
        # Columns of the base have no NaN; what expressions compute may.
        clean = {item.column for item in self._expressions if item.is_column}
        values = _with_missing(engine, values, clean=clean)
        self.five = {
            feature.name: found
            for i, feature in enumerate(table.categorical)
            if (found := text_of_five(kinds[f"c{i}"])) is not None
        }
        # Users of a log are compared as texts with those of another source, and of the days before.
        for i, past in enumerate(table.pasts):
            if isinstance(past, EventLog) and (found := text_of_five(kinds[f"who{i}_"])):
                self.five[f"{past.name}: by"] = found
        numbers = ", ".join(
            f"{number_of(f'n{i}')} AS number{i}_" for i in range(len(table.numerical))
        )
        if numbers:
            values = f"SELECT *, {numbers} FROM ({values})"
        columns = ["file_"] if table.query else ["file_", "order_"]
        reasons = [*failures]
        for name, (key, row_number) in table.row_numbers.items():
            title = (
                "the label" if list(table.row_numbers) == [name] else f"the {key} {row_number.name}"
            )
            binary = isinstance(row_number, Label) and row_number.kind == "binary"
            kind = kinds[name]
            if binary:
                value, mistakes = _binary(name, kind, title)
            else:
                value, mistakes = _number(name, key, title, kind)
            columns.append(f"{value} AS {name}")
            reasons += mistakes
        for i, numerical in enumerate(table.numerical):
            number, kind = f"number{i}_", kinds[f"n{i}"]
            if kind in FLOAT_TYPES:
                columns.append(f"{number} AS n{i}")
                bad = f"abs({number}) > {LARGEST_DOUBLE}"
            elif EXACT_TYPE.fullmatch(kind):
                columns.append(f"{number} AS n{i}")
                continue
            else:
                columns.append(f"{engine.without_nan(number, 'double')} AS n{i}")
                bad = not_a_number(f"n{i}", number)
            hint = " such as epoch(...) of it" * kind.startswith(("date", "timestamp"))
            reasons.append(
                f"WHEN {bad} THEN {text(numerical.name + ' is ')} || {shown_value(f'n{i}')} || ', wanted a number{hint}'"
            )
        for i, feature in enumerate(table.categorical):
            _check_kind(feature, kinds[f"c{i}"])
            columns.append(f"{categorical_value(feature, f'c{i}', f'c{i}' in self._whole)} AS c{i}")
        for of, mistakes in (
            *(self._past_columns(i) for i in range(len(table.pasts))),
            *(self._list_columns(i) for i in range(len(table.event_lists))),
        ):
            columns += of
            reasons += mistakes
        if table.split.by == "column":
            columns.append("CAST(split_ AS STRING) AS split_")
        mistake = f"CASE {' '.join(reasons)} END" if reasons else "CAST(NULL AS STRING)"
        columns.append(f"{mistake} AS bad_")
        if table.query:
            columns += [f"key{i}_" for i in range(len(table.order_by))]
        columns += self._kept_columns()
        return f"SELECT {', '.join(columns)} FROM ({values})"

    def _kept_columns(self) -> list[str]:
        for i, name in enumerate(self.table.keep):
            kind = self._kinds[f"keep{i}_"]
            if not KEPT_TYPE.fullmatch(kind):
                raise ValueError(
                    f"table.keep: {shown(name)} is {kind.partition(' ')[0]}, want numbers, text, dates or times; cast it "
                    "in table.query, or drop it"
                )
        return [f"keep{i}_" for i in range(len(self.table.keep))]

    def _past_columns(self, number: int) -> tuple[list[str], list[str]]:
        """Return the stored columns of a history or a log (user, time, filter, numbers), and the mistakes of its numbers."""
        past = self.table.pasts[number]
        where, named = _where(past), self.table.past_columns(number)
        who, time, condition = (f"{key}{number}_" for key in ("who", "time", "past"))
        kind, past_kind = self._kinds[time], self._kinds.get(condition, "boolean")
        _check_time(past, kind)
        if past_kind != "boolean":
            raise ValueError(
                f"{where}: filter {shown(past.filter)} is {past_kind.partition(' ')[0]}, want a condition that is true "
                "or false, such as CAST(rating AS DOUBLE) >= 4"
            )
        seconds = f"{seconds_of(time, kind)} AS {time}" if isinstance(past, EventLog) else time
        columns = [f"nullif(CAST({who} AS STRING), '') AS {who}", seconds]
        if condition in named:
            columns.append(condition)
        mistakes = []
        for column, (key, _) in named.items():
            if not column.startswith("event"):
                continue
            number_ = self._engine.without_nan(number_of(column), "double")
            columns.append(f"{as_float(f'coalesce({number_}, 0)')} AS {column}")
            bad = f"abs({number_}) > {LARGEST_FLOAT}"
            kind = self._kinds[column]
            if kind not in FLOAT_TYPES and not EXACT_TYPE.fullmatch(kind):
                bad = f"{not_a_number(column, number_of(column))} OR {bad}"
            mistakes.append(
                f"WHEN {bad} THEN {text(f'{where}: {key} is ')} || {shown_value(column)} "
                "|| ', wanted a number that float32 holds'"
            )
        return columns, mistakes

    def _list_columns(self, number: int) -> tuple[list[str], list[str]]:
        """Return the stored columns of a group of lists (the moment of the row, lists of numbers), and a row's mistakes.

        These are lists of different lengths, or without a number for an item.
        """
        group, num_items = self.table.event_lists[number], self._engine.num_items
        features = {f.name: (f"c{i}", f) for i, f in enumerate(self.table.categorical)}
        separator = features[group.lists[0]][1].separator
        sizes = {}
        for name in group.lists:
            column, feature = features[name]
            sizes[name] = num_items(categorical_value(feature, column), whole=False)
        columns, lacking = [], []
        names = iter(group.number_names)
        for column, (key, sql) in group.columns(number).items():
            kind, value = self._kinds[column], column
            if column.startswith("moment"):
                _check_time(group, kind)
                columns.append(f"{seconds_of(column, kind)} AS {column}")
                continue
            if separator and is_text(kind):
                value = f"split_text(nullif({column}, ''), {text(separator)})"
            elif not (kind.startswith("array ") or kind.endswith("]")):
                raise ValueError(
                    f"{_where(group)}: {key}: got {shown(sql)}, which is {kind.partition(' ')[0]}; want a list of numbers, or "
                    f"text with the separator of {shown(group.lists[0])}"
                )
            elif re.search('^(date|time)|"elementtype":"(date|time)', kind):
                raise ValueError(
                    f"{_where(group)}: {key}: got {shown(sql)}, a list of dates or times; want numbers, such as {{name: NAME, "
                    f'expression: "[epoch(x) for x in {sql}]"}}'
                )
            numbers = f"try_cast({value} AS {self._engine.doubles})"
            columns.append(f"{numbers} AS {column}")
            name = next(names)
            sizes[name] = num_items(numbers, whole=False)
            lacks = f"{shown(name)} of {shown(group.name)} lacks the number of an item"
            lacking.append(
                f"WHEN {num_items(numbers, whole=True)} <> {sizes[name]} THEN {text(lacks)}"
            )
        first, *others = sizes.values()
        unequal = " OR ".join(f"{size} <> {first}" for size in others) or "false"
        shown_sizes = " || ', ' || ".join(
            f"CAST({size} AS STRING) || {text(f' of {name}')}" for name, size in sizes.items()
        )
        counts = text(f"{group.name} has other numbers of items: ")
        return columns, [f"WHEN {unequal} THEN {counts} || {shown_sizes}", *lacking]

    def _refuse_expression(self, base: str, works: Callable[[str], bool], note: str = "") -> None:
        """Raise ValueError for the first expression for which `works` of its query is false or fails."""
        for item in self._expressions:
            reason = "not one expression"
            try:
                if works(f"SELECT *, ({item.sql}\n) AS x_ FROM ({base})"):
                    continue
            except QueryError as error:
                absent = re.match(r'Referenced column (".*) not found', str(error))
                reason = f"no column {absent[1]}" if absent else f"{error}{_cast(error)}{note}"
            self._refuse_item(item, reason)

    def _refuse_item(self, item: _Expression, reason: str) -> NoReturn:
        if re.match("event|numbers", item.column) and item.is_column:
            reason += " (an expression has a name: {name: bought, expression: \"action = 'buy'\"})"
        raise ValueError(f"{item.where}: got {item.shown}: {reason}{_hint(self._names)}")


def _binary(name: str, kind: str, title: str) -> tuple[str, list[str]]:
    """Return the SQL of a binary label, and of the mistakes of its column of type `kind`."""
    label = f"lower(CAST({name} AS STRING))"
    # One list of six would be a join, which does not keep the order of rows.
    one, zero = f"{label} IN ('1', '1.0', 'true')", f"{label} IN ('0', '0.0', 'false')"
    if kind in (*INTEGERS, *FLOAT_TYPES):
        one, zero = f"{name} = 1", f"{name} = 0"
    return f"CAST(CASE WHEN {one} THEN 1 WHEN {zero} THEN 0 END AS TINYINT)", [
        f"WHEN {name} IS NULL THEN {text(f'{title} is missing')}",
        f"WHEN NOT ({zero} OR {one}) THEN {text(f'{title} is ')} || {shown_value(label)} || ', wanted 0 or 1'",
    ]


def _number(name: str, key: str, title: str, kind: str) -> tuple[str, list[str]]:
    """Return the SQL of a regression label, weight or keep rate as float32, and of the mistakes of its column of type `kind`."""
    number = f"try_cast({name} AS FLOAT)"
    good, wanted = {
        "label": (f"abs({number}) <= {LARGEST_FLOAT}", "a finite number"),
        "weight": (
            f"{number} BETWEEN 0 AND {LARGEST_FLOAT}",
            "a finite number that is not negative",
        ),
        "keep_rate": (f"{number} > 0 AND {number} <= 1", "a number above 0 and at most 1"),
        "teacher": (f"{number} BETWEEN 0 AND 1", "a number from 0 to 1"),
    }[key]
    empty, unread = f"coalesce(CAST({name} AS STRING), '') = ''", only_duckdb_reads(name)
    if kind in FLOAT_TYPES or EXACT_TYPE.fullmatch(kind):
        empty, unread = f"{name} IS NULL", "false"
    return number, [
        f"WHEN {empty} THEN {text(f'{title} is missing')}",
        f"WHEN NOT coalesce({good}, false) OR {unread} "
        f"THEN {text(f'{title} is ')} || {shown_value(name)} || {text(f', wanted {wanted}')}",
    ]


def _expressions_of(
    table: TableConfig, engine: Engine, times: Container[str] = ()
) -> list[_Expression]:
    expressions = [
        _expression(column, f"table.{key}: ", number.name, number.expression or "")
        for column, (key, number) in table.row_numbers.items()
    ]
    for i, numerical in enumerate(table.numerical):
        expressions.append(
            _expression(f"n{i}", "table.numerical: ", numerical.name, numerical.expression or "")
        )
    for i, feature in enumerate(table.categorical):
        item = _expression(f"c{i}", "table.categorical: ", feature.name, feature.expression or "")
        if feature.cross:
            item = replace(item, sql=crossed(feature.cross), shown=f"cross {shown(feature.cross)}")
        expressions.append(item)
    for i, past in enumerate(table.pasts):
        for column, (key, sql) in table.past_columns(i).items():
            expressions.append(_Expression(column, f"{_where(past)}: {key}", sql, shown(sql)))
    for i, lists in enumerate(table.event_lists):
        for column, (key, sql) in lists.columns(i).items():
            expressions.append(_Expression(column, f"{_where(lists)}: {key}", sql, shown(sql)))
    if table.split.by == "column":
        expressions.append(_expression("split_", "table.split", "", table.split.expression))
    for i, name in enumerate(table.keep):
        expressions.append(_expression(f"keep{i}_", "table.keep: ", name, ""))
    if table.query:
        expressions += [
            _expression(f"key{i}_", f"table.order_by[{i}]", "", key)
            for i, key in enumerate(table.order_by)
        ]
    if not engine.drops_zones:
        return expressions
    return [
        replace(of, sql=of_utc(of.sql, times)) if ORDERS.fullmatch(of.column) else of
        for of in expressions
    ]


def _where(past: History | EventLog | EventLists) -> str:
    return f"table.{'history' if isinstance(past, History) else 'sequence'}: {shown(past.name)}"


def _check_time(past: History | EventLog | EventLists, kind: str) -> None:
    """Raise ValueError if the type of `order_by` is none of a time."""
    if not TIME_TYPE.fullmatch(kind):
        raise ValueError(
            f"{_where(past)}: order_by {shown(past.order_by)} is {kind.partition(' ')[0]}, want a number, a date or a "
            f"timestamp: {remedy(past.order_by)}"
        )


def _expression(column: str, where: str, name: str, sql: str) -> _Expression:
    described = f"expression {shown(sql)}" if sql else f"column {shown(name)}"
    return _Expression(
        column, f"{where}{shown(name) if name else ''}", sql or quoted(name), described
    )


def _columns_in(sql: str, columns: Iterable[str]) -> list[str]:
    """Return the columns that SQL names, which is not case-sensitive: words and quoted names outside of texts."""
    names = re.findall(r"'(?:[^']|'')*'|\"((?:[^\"]|\"\")*)\"|(\w+)(?!\s*\()", sql)
    found = {(quoted_name.replace('""', '"') or word).lower() for quoted_name, word in names}
    return [name for name in columns if name.lower() in found]


def _calls_isnan(sql: str) -> bool:
    return re.search(r"\bisnan\s*\(", sql, re.IGNORECASE) is not None


def _with_missing(
    engine: Engine,
    query: str,
    missing: Sequence[str] = (),
    nan: str = "NULL",
    clean: Container[str] = (),
    were_text: Mapping[str, bool] | None = None,
) -> str:
    """Return `query` with `nan` for NaN in columns and lists of floats, and with null for the texts `missing`.

    Columns named in `clean` have neither. `were_text` says of columns of a fit whether they were text.
    """
    columns = engine.columns(query)
    changed = []
    for i, (name, kind) in enumerate(columns):
        column = f"v{i}_"
        value = None if name in clean else engine.without_nan(column, kind, nan)
        was_text = None if were_text is None else were_text.get(name.lower())
        condition = is_missing(value or column, kind, missing, was_text)
        if condition is not None:
            value = f"(CASE WHEN {condition} THEN NULL ELSE {value or column} END)"
        changed.append((value, column, quoted(name)))
    if not any(value for value, *_ in changed):
        return query
    # By position: a query may have two columns of one name.
    select = ", ".join(f"{value or column} AS {name}" for value, column, name in changed)
    return f"SELECT {select} FROM ({query}) AS values_({', '.join(v for _, v, _ in changed)})"


def _cast(error: QueryError) -> str:
    """Return what to do about a text where a number is wanted, as a column of a text file is; else nothing."""
    is_text = "VARCHAR" in str(error) and "explicit cast" in str(error)
    return " (columns of text files are text: CAST(name AS DOUBLE))" * is_text


def _hint(names: list[str]) -> str:
    """Return the end of a message: the columns there are, and the delimiter if it seems to be another."""
    if len(names) == 1:
        options = {"\t": "format: tsv", ";": "delimiter: ';'", "|": "delimiter: '|'"}
        for delimiter, option in options.items():
            if delimiter in names[0]:
                return f"; the header {shown(names[0])} is one column, so set the source's {option}"
    return f"; correct it; the columns are {listed(names)}"


def _check_kind(feature: Categorical, kind: str) -> None:
    """Raise ValueError if a categorical feature wants lists and has none, or the other way round."""
    is_list = kind.startswith("array ") or kind.endswith("]")
    where = f"table.categorical: {shown(feature.name)}"
    # Null is the type of lists that are all missing.
    if feature.list and not is_list and kind != '"null"':
        raise ValueError(
            f"{where}: list is set, but a value is {kind.partition(' ')[0]}, no list; drop it, or set separator for several "
            "values within a text"
        )
    if not feature.list and (is_list or kind.startswith(("struct", "map"))):
        what = "a list" if is_list else f"a {kind.partition('(')[0]}"
        raise ValueError(
            f"{where}: a value is {what}, want one value; set list: true for several ids of a row, or an expression that takes "
            "one value of it"
        )
