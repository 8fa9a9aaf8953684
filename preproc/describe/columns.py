"""The content of the columns of a table, counted by DuckDB on its first rows."""

import re
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from configs.preproc_schema import PreprocConfig
from configs.table_schema import NUMBER
from preproc.table.duckdb_engine import DuckDBEngine
from preproc.table.expressions import quoted, text
from preproc.table.mistakes import MISSING_WORDS
from preproc.table.source_files import SourceFiles
from preproc.table.staging import FLOAT_TYPES, NO_TEXT_TYPE
from preproc.text_columns import TEXT_TYPES

MOST_ROWS = 1_000_000
"""Rows that are counted, the first ones."""
MOST_VALUES = 20
"""Values that are kept, the most frequent ones; a column of no more has few values."""
# Separators of lists, with the part of the values that have them from which on they are ones: texts have commas and blanks too.
SEPARATORS = {"|": 0.02, "^": 0.02, "\x01": 0.02, "\x02": 0.02, ";": 0.1, ",": 0.3, " ": 0.3}


@dataclass(kw_only=True, slots=True)
class Column:
    name: str
    kind: str  # its type in SQL, in lower case
    rows: int
    missing: int = 0  # rows without a value
    distinct: int = 0
    # the most frequent ones, with their rows
    values: list[tuple[str, int]] = field(default_factory=list)
    numbers: int = 0  # rows with a number, of which `whole` have a whole one
    whole: int = 0
    padded: int = 0  # rows with a number that begins with 0, as 007
    lowest: float = 0.0
    highest: float = 0.0
    middle: float = 0.0  # the median
    times: int = 0  # rows with a date or a time in text
    # of `MISSING_WORDS`, as they are written, if all other values are numbers or times: missing values of all texts
    words: list[str] = field(default_factory=list)
    separator: str = ""  # between the items of a text
    items: int = 0  # distinct items of a list
    has_numbers: bool = False  # whether all items of its lists are numbers, from `lowest` on

    @property
    def present(self) -> int:
        return self.rows - self.missing

    @property
    def is_text(self) -> bool:
        """Return whether its values are texts, which SQL must cast."""
        return self.kind in TEXT_TYPES

    @property
    def is_float(self) -> bool:
        """Return whether it is stored as floats, so that 5 is 5.0."""
        return self.kind in FLOAT_TYPES

    @property
    def is_list(self) -> bool:
        return self.kind.endswith("]") or bool(self.separator)

    @property
    def is_nested(self) -> bool:
        """Return whether its values are no texts, numbers or lists of them."""
        return bool(NO_TEXT_TYPE.fullmatch(self.kind)) or self.kind.startswith(("struct", "map"))

    @property
    def is_number(self) -> bool:
        return 0 < self.numbers == self.present and not self.is_list

    @property
    def is_whole(self) -> bool:
        return self.is_number and self.whole == self.present

    @property
    def is_time(self) -> bool:
        return self.kind.startswith(("date", "timestamp")) or 0 < self.times == self.present

    @property
    def type_name(self) -> str:
        if self.is_nested:
            return self.kind.partition("(")[0]
        if self.is_list:
            return "list"
        if self.is_time:
            return "time"
        if self.is_number:
            return "integer" if self.is_whole else "number"
        return "text" if self.is_text else self.kind


def count_columns(files: SourceFiles, config: PreprocConfig) -> list[Column]:
    """Return the columns of the first `MOST_ROWS` rows; ValueError if a row cannot be read, or there is none."""
    with (
        TemporaryDirectory(prefix="describe-", dir=config.temp_directory) as directory,
        closing(DuckDBEngine(config, Path(directory))) as engine,
    ):
        engine.read("source_rows", files, lambda query: query)
        engine.rows(
            "CREATE TEMP TABLE sample_ AS SELECT * EXCLUDE (file_, order_) FROM source_rows "
            f"LIMIT {MOST_ROWS}"
        )
        ((rows,),) = engine.rows("SELECT count(*) FROM sample_")
        if rows == 0:
            raise ValueError(
                f"{files.files[0].path}: no rows below the header; give a file with rows"
            )
        kinds = engine.columns("SELECT * FROM sample_")
        columns = [Column(name=n, kind=k.lower(), rows=rows) for n, k in kinds]
        for column in columns:
            _count(engine, column, missing=[])
        words = sorted({word for column in columns for word in column.words})
        for column in columns:
            if words and column.is_text and not column.words:
                _count(engine, column, words)
        return columns


def _count(engine: DuckDBEngine, column: Column, missing: list[str]) -> None:
    """Count the values of a column, of which the texts `missing` are none."""
    name = quoted(column.name)
    value = engine.without_nan(name, column.kind) or name
    none = ", ".join(map(text, ["", *missing]))
    is_number = f"regexp_full_match(v, {text(NUMBER.pattern)})"
    engine.rows(
        "CREATE OR REPLACE TEMP TABLE values_ AS SELECT v, c, "
        f"CASE WHEN {is_number} THEN try_cast(v AS DOUBLE) END AS n, "
        f"v IS NOT NULL AND NOT {is_number} AND try_cast(v AS TIMESTAMP) IS NOT NULL AS t, "
        f"lower(trim(v)) IN ({', '.join(map(text, MISSING_WORDS))}) AS m FROM "
        f"(SELECT CASE WHEN x NOT IN ({none}) THEN x END AS v, count(*) AS c FROM "
        f"(SELECT CAST({value} AS VARCHAR) AS x FROM sample_) GROUP BY ALL)"
    )
    sums = {
        "missing": "v IS NULL",
        "numbers": "n IS NOT NULL",
        "times": "t",
        "words": "m",
        "whole": "n = floor(n)",
        "padded": "n IS NOT NULL AND regexp_matches(v, '^0[0-9]')",
    }
    counted = [f"coalesce(sum(c) FILTER ({condition}), 0)" for condition in sums.values()]
    ((*found, column.distinct, low, high),) = engine.rows(
        f"SELECT {', '.join(counted)}, count(v), min(n), max(n) FROM values_"
    )
    column.missing, column.numbers, column.times, words, column.whole, column.padded = found
    if 0 < words < column.present and column.present - words in (column.numbers, column.times):
        column.words = sorted(w for (w,) in engine.rows("DELETE FROM values_ WHERE m RETURNING v"))
        column.missing += words
        column.distinct -= len(column.words)
    column.values = engine.rows(
        f"SELECT v, c FROM values_ WHERE v IS NOT NULL ORDER BY c DESC, v LIMIT {MOST_VALUES}"
    )
    if column.numbers:
        column.lowest, column.highest = low, high
        ((column.middle,),) = engine.rows(
            "SELECT min(n) FROM (SELECT n, sum(c) OVER (ORDER BY n) AS s FROM values_ WHERE n IS NOT NULL) "
            f"WHERE 2 * s >= {column.numbers}"
        )
    if column.kind.endswith("]") and not column.is_nested:
        _count_items(engine, column, f"unnest({name}) AS i FROM sample_")
    elif column.is_text and not (column.is_number or column.is_time):
        _find_separator(engine, column)
        items = f"string_split(v, {text(column.separator or ' ')})"
        _count_items(engine, column, f"unnest({items}) AS i FROM values_")


def _count_items(engine: DuckDBEngine, column: Column, items: str) -> None:
    """Count the items of lists, of which `items` selects `i`."""
    number = "try_cast(CAST(i AS VARCHAR) AS DOUBLE)"
    ((column.items, others, lowest),) = engine.rows(
        f"SELECT count(DISTINCT i), count(i) - count({number}), min({number}) FROM (SELECT {items})"
    )
    if lowest is not None and not others:
        column.has_numbers, column.lowest = True, lowest


def _find_separator(engine: DuckDBEngine, column: Column) -> None:
    """Set the separator whose items recur: a list has fewer distinct items than a text has values."""
    for separator, part in SEPARATORS.items():
        ((having,),) = engine.rows(
            f"SELECT sum(c) FROM values_ WHERE contains(v, {text(separator)})"
        )
        if not having or having < part * column.present:
            continue
        ((items,),) = engine.rows(
            f"SELECT count(DISTINCT i) FROM (SELECT unnest(string_split(v, {text(separator)})) AS i FROM values_)"
        )
        # Words of a title recur as well, but there are many of them.
        if items <= column.distinct / (2 if part == 0.3 else 1) or part == 0.02:
            column.separator = separator
            return


def has_name(column: Column, pattern: str) -> bool:
    """Return whether a whole name, without blanks and ? around it and in lower case with _ between words, fits the pattern."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.name.strip(" ?").partition(":")[0])
    return re.fullmatch(pattern, words.lower()) is not None
