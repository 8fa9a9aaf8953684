"""Transformations of table datasets, as the same SQL text for DuckDB and Spark.

Where the two differ, each engine defines a function of the same name: `hex_number(text)`,
`split_text(text, separator)`, and `text_order(text)`, whose order is that of the bytes of the text. Sums are over integers
(`whole_number(number)`), so they do not depend on the order in which an engine adds.

Categorical values are compared as text. An empty text is missing, like null.
"""

from collections.abc import Sequence
from fractions import Fraction

from configs.messages import shown
from configs.table_schema import (
    Categorical,
    SplitRule,
    arguments_of,
    numbers_of,
    quoted,
    texts_of_no_other_type,
    transform_of,
)
from configs.transforms import TRANSFORMS, transform_named
from configs.user_objects import described
from preproc.text_columns import TEXT_TYPES

# Separates the values of a cross; it does not occur in text.
UNIT_SEPARATOR = "chr(31)"
RELATION_FILE = "0.parquet"
"""File of a relation that DuckDB stores, in its directory."""
CODED_FILE = "0.arrow"
"""File of the staged rows, and of each column's texts, in its directory: read without decoding."""
NO_CODE = -1
"""In place of the code of a missing text, in arrays."""
FIXED_POINT = 2.0**40
LARGEST_DOUBLE = "1.7976931348623157e308"


def text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def double(value: float) -> str:
    """Return a literal that both engines read as the same double."""
    return f"CAST('{float(value)!r}' AS DOUBLE)"


def crossed(columns: list[str]) -> str:
    """Return the value of a cross: the texts of its columns, or null if one is missing."""
    parts = [f"nullif(CAST({quoted(name)} AS STRING), '')" for name in columns]
    return f" || {UNIT_SEPARATOR} || ".join(parts)


def categorical_value(feature: Categorical, value: str, is_whole: bool = False) -> str:
    """Return the value to count of the column `value`: text, a list, or a whole number that becomes text by value."""
    if feature.list or feature.cross or (is_whole and not feature.separator):
        return value
    as_text = f"nullif(CAST({value} AS STRING), '')"
    return f"split_text({as_text}, {text(feature.separator)})" if feature.separator else as_text


def is_missing(value: str, kind: str, missing: Sequence[str], was_text: bool | None) -> str | None:
    """Return the condition that a column holds one of the texts `missing`; None if it is never true.

    `was_text`: whether the column was text in the fit; None if that is not known, and its own type decides.
    """
    kind = kind.lower()
    is_text = kind in TEXT_TYPES
    if is_text and was_text is False:
        missing = texts_of_no_other_type(missing)
    if kind.endswith("]") or kind.startswith(("array", "map", "struct", "union")):
        return None
    if is_text:
        values = list(map(text, missing))
    elif not was_text:
        return None
    elif kind in ("float", "double"):
        values = [f"try_cast('{number!r}' AS {kind})" for number in numbers_of(missing)]
    elif kind.startswith("decimal"):
        value = f"CAST({value} AS DOUBLE)"
        values = [double(number) for number in numbers_of(missing)]
    else:
        value = f"CAST({value} AS STRING)"
        values = list(map(text, missing))
    return f"{value} IN ({', '.join(values)})" if values else None


def number_of(value: str) -> str:
    """Return a column as a double, NaN included; null where it is no number."""
    return f"try_cast({value} AS DOUBLE)"


def as_float(number: str) -> str:
    """Return a double that is not null rounded to single precision; infinite if that cannot hold it."""
    # DuckDB's cast fails there, Spark's does not.
    return f"coalesce(try_cast({number} AS FLOAT), CAST('inf' AS FLOAT))"


def seconds_of(value: str, kind: str) -> str:
    """Return a time in whole seconds, rounded down, of dates and timestamps since 1970 in UTC; null if no BIGINT holds it."""
    if kind.startswith(("date", "timestamp")):
        return f"whole_seconds(CAST({value} AS TIMESTAMP))"
    rounded = f"floor({value})" if kind.startswith(("decimal", "float", "double")) else value
    return f"try_cast({rounded} AS BIGINT)"


def not_a_number(value: str, number: str) -> str:
    """Return the condition that the column `value` is not missing, and its `number` not a finite one."""
    as_text = f"CAST({value} AS STRING)"
    return (
        f"(NOT coalesce(abs({number}) <= {LARGEST_DOUBLE}, false) AND {value} IS NOT NULL "
        f"AND {as_text} <> '' AND lower(trim({as_text})) NOT IN ('nan', '+nan', '-nan') "
        f"OR {only_duckdb_reads(value)})"
    )


def only_duckdb_reads(value: str) -> str:
    """Return the condition that DuckDB takes the text of a column for a number, and `NUMBER` and Spark do not: 1_0, +-1."""
    as_text = f"CAST({value} AS STRING)"
    return f"(contains({as_text}, '_') OR contains({as_text}, '+-'))"


def shown_value(value: str) -> str:
    """Return an expression of the text of a column as a message shows it, at most 100 characters."""
    as_text = f"CAST({value} AS STRING)"
    return f"CASE WHEN length({as_text}) > 100 THEN substr({as_text}, 1, 97) || '...' ELSE {as_text} END"


def transformed(expression: str, transform: object, fitted: list[float]) -> str:
    """Return `expression` after one transform; `fitted` holds the two numbers of a fitted transform."""
    name, _ = transform_of(transform)
    numbers = arguments_of(transform, fitted)
    sql = transform_named(name).sql
    if name in TRANSFORMS:
        return sql(expression, *map(double, numbers))
    try:
        value = sql(expression, *map(double, numbers))
    except (Exception, SystemExit) as error:  # the user's may raise anything
        raise ValueError(f"transform={name} has failed ({described(error)}); correct it") from error
    if not isinstance(value, str):
        raise ValueError(f"transform={name} returns {shown(value)}, want a text of SQL")
    return value


def extremes(expression: str, rows: str) -> str:
    """Return a query of one row: values, smallest, largest."""
    return f"SELECT count(x), min(x), max(x) FROM (SELECT {expression} AS x FROM {rows})"


def fixed_point_sums(expression: str, low: float, high: float, rows: str) -> str:
    """Return a query of one row: sums of u and u * u in units of 2**-40, u = x scaled to [0, 1].

    A sum of integers is the same in any order, and so on any engine and cluster.
    """
    size = double((high - low) or 1.0)
    unit = f"(x - {double(low)}) / {size}"
    terms = (f"u * {double(FIXED_POINT)}", f"u * u * {double(FIXED_POINT)}")
    sums = ", ".join(f"sum(whole_number({term}))" for term in terms)
    return f"SELECT {sums} FROM (SELECT {unit} AS u FROM (SELECT {expression} AS x FROM {rows}))"


def mean_and_deviation(
    count: int, low: float, high: float, sums: tuple[int, int]
) -> tuple[float, float]:
    """Return mean and standard deviation (of the population) from `fixed_point_sums`."""
    first, second = (int(total) / FIXED_POINT / count for total in sums)
    size = (high - low) or 1.0
    return low + size * first, size * max(second - first * first, 0.0) ** 0.5


def random_number(seed: int, row: str) -> str:
    """Return an expression in [0, 1) that depends only on the seed and the row number."""
    digits = f"substr(md5('{int(seed)}:' || CAST({row} AS STRING)), 1, 13)"
    return f"(CAST(hex_number({digits}) AS DOUBLE) / {double(2.0**52)})"


def split_of(
    rule: SplitRule, rows: int, last: tuple[int, int], train_fraction: float, seed: int
) -> str:
    """Return the expression of a row's split, over the columns `row_` and `file_`, or `split_` with by=column."""
    train = rule.train if rule.train is not None else train_fraction
    if rule.by == "column":
        return "split_"
    if rule.by == "random":
        number = random_number(seed, "row_")
        return (
            f"CASE WHEN {number} < {double(train)} THEN 'train' "
            f"WHEN {number} < {double(train + rule.validation)} THEN 'validation' ELSE 'test' END"
        )
    if rule.by == "last_file":
        file, middle = last
        # A row of a query may be of no file.
        return (
            f"CASE WHEN NOT coalesce(file_ = {file}, false) THEN 'train' "
            f"WHEN row_ < {middle} THEN 'test' ELSE 'validation' END"
        )
    return f"CASE WHEN row_ < {int(rows * Fraction(str(train)))} THEN 'train' ELSE 'test' END"


def bucket(value: str, buckets: int) -> str:
    """Return the id of a value among hash buckets: 1 to `buckets`, 0 for a missing value."""
    digits = f"substr(md5({value}), 1, 15)"
    return f"coalesce(hex_number({digits}) % {buckets} + 1, 0)"


def key(value: str) -> str:
    """Return the 64-bit key of a value: the first 64 bits of its MD5, and 0 for a missing value.

    0 and -1 are no keys of values, since -1 fills the rows of a request; values with them have key 1.
    """
    high, low = (f"hex_number(substr(md5({value}), {first}, 8))" for first in (1, 9))
    signed = f"({high} - CASE WHEN {high} >= {2**31} THEN {2**32} ELSE 0 END)"
    bits = f"({signed} * {2**32} + {low})"
    return f"CASE WHEN {value} IS NULL THEN 0 WHEN {bits} IN (0, -1) THEN 1 ELSE {bits} END"


def hashed_id(value: str, owner: Categorical) -> str:
    """Return the id of a value of a feature whose values are hashed: its bucket, or its key."""
    if owner.is_dynamic:
        return f"CAST({key(value)} AS BIGINT)"
    assert owner.buckets is not None
    return f"CAST({bucket(value, owner.buckets)} AS INTEGER)"
