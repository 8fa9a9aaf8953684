"""Check whether values are those of a fit in another writing, as 5.0 is of 5: SQL for all engines.

Values are texts, so an id column that became floating-point has no value of the fit. Numbers that are written alike tell that
from a day whose values are new.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from configs.messages import shown

NEARLY_ALL = 0.9
"""Share of the values that are new from which on their writing is compared."""
FEWEST_VALUES = 10
"""Fewer values may well all be new."""
AS_IT_WAS = (
    "Give the column the type that it had there: write the source so, or cast it in table.query, as by SELECT *, CAST(item AS "
    "BIGINT) AS item_id"
)

# Of the codes 0012e003 and 00012000 none is the other in other writing; Spark writes 12000000.0 as 1.2E7. It also takes 12d
# and 12f for numbers, and DuckDB 1_2.
NUMBER = "^[+-]?([0-9]+|[0-9]*[.][0-9]*([eE][+-]?[0-9]+)?)$"

Rows = Callable[[str], list[tuple[Any, ...]]]
"""Returns the few rows of a query."""


def text_of_five(kind: str) -> str | None:
    """Return the text of the number 5 as a value of a column, or of a list, of a type in SQL; None if it holds no numbers."""
    # Of a list DuckDB says `double[]`, and the JSON of Spark has the type as `"double"`.
    found = re.search(
        r"^(\w+)(?:\((\d+), ?(\d+)\))?(?:\[\d*\])?$|\"elementType\":\"(\w+)(?:\((\d+), ?(\d+)\))?\"",
        kind,
        re.IGNORECASE,
    )
    if found is None:
        return None
    name, scale = (found[1] or found[4]).lower(), int(found[3] or found[6] or 0)
    if name == "decimal":
        # DuckDB writes no 0 before the point if all digits are behind it.
        whole = "5" if int(found[2] or found[5] or 18) > scale else ""
        return f"{whole}.{'0' * scale}" if scale else "5"
    if name in ("float", "double"):
        return "5.0"
    return (
        "5" if re.fullmatch(r"u?(tiny|small|big|huge)?int(eger)?|long|short|byte", name) else None
    )


def refuse_other_numbers(now: Mapping[str, str], fitted: Mapping[str, str]) -> None:
    """Raise ValueError for a feature whose numbers are texts of another form than in the fit; `text_of_five` by feature."""
    for name, five in now.items():
        there = fitted.get(name, five)
        if there != five:
            raise ValueError(
                f"{shown(name)}: 5 would be the value {shown(five)}, and in the fit it was {shown(there)}, so that no number is "
                f"known. {AS_IT_WAS}"
            )


def written_alike(value: str) -> str:
    """Return the expression of a value without blanks around it, and of a whole number as digits: 5 for ' 5.00'."""
    bare = f"trim({value})"
    number = f"try_cast({bare} AS DOUBLE)"
    is_number = f"regexp_replace({bare}, '{NUMBER}', '') = ''"
    is_whole = f"{is_number} AND {number} = floor({number}) AND abs({number}) < {2**53}"
    return f"(CASE WHEN {is_whole} THEN CAST(CAST({number} AS BIGINT) AS STRING) ELSE {bare} END)"


def note_of_twins(rows: Rows, counts: str, name: str) -> str | None:
    """Return a line on values of a feature that differ in blanks or in the writing of a number only; None without any."""
    alike = written_alike("value")
    # Any other value is as it would be written; this takes a quarter of the time of the regular expression and trim().
    may = "value<'1' OR value>'~' OR value LIKE '%.%' OR right(value, 1) NOT BETWEEN '!' AND '~'"
    changed = f"SELECT value, {alike} AS alike FROM {counts} WHERE ({may}) AND {alike} <> value"
    # The other writing is a value that does not change itself.
    twins = (
        "SELECT least(min(c.value), min(k.value)) AS one, greatest(max(c.value), max(k.value)) AS other, "
        "count(*) + count(DISTINCT k.value) AS texts "
        f"FROM ({changed}) AS c LEFT JOIN {counts} AS k ON c.alike = k.value GROUP BY c.alike"
    )
    found = rows(
        f"SELECT one, other, sum(texts) OVER (), count(*) OVER () FROM ({twins}) WHERE texts > 1 ORDER BY one LIMIT 1"
    )
    if not found:
        return None
    ((one, other, num_texts, num_values),) = found
    return (
        f"note: {int(num_texts):,} values of {shown(name)} are {num_values:,} in other writing, such as {shown(one)} and "
        f"{shown(other)}: blanks belong to a value, and a number is its text; write them alike, as by trim() or CAST(... AS "
        "BIGINT)"
    )


def note_of_new_values(rows: Rows, counts: str, known: str, name: str) -> str | None:
    """Return a line on a feature nearly all of whose values the fit does not have; None if it has more of them.

    Raises ValueError: most of them are values of the fit in other writing.
    """
    new = f"{counts} AS c LEFT JOIN {known} AS k ON c.value = k.value"
    ((num_values,),) = rows(f"SELECT count(*) FROM {known}")
    ((total, num_new),) = rows(
        f"SELECT sum(c.count), sum(CASE WHEN k.value IS NULL THEN c.count ELSE 0 END) FROM {new}"
    )
    if not num_values or (total or 0) < FEWEST_VALUES or num_new < NEARLY_ALL * total:
        return None
    alike = written_alike("value")
    joined = (
        f"(SELECT c.value, c.count, {written_alike('c.value')} AS alike FROM {new} WHERE k.value IS NULL) AS c JOIN "
        f"(SELECT {alike} AS alike, min(value) AS value FROM {known} GROUP BY {alike}) AS k ON c.alike = k.alike"
    )
    ((num_alike,),) = rows(f"SELECT coalesce(sum(c.count), 0) FROM {joined}")
    if 2 * num_alike >= num_new:
        ((here, there),) = rows(f"SELECT c.value, k.value FROM {joined} ORDER BY c.value LIMIT 1")
        raise ValueError(
            f"{shown(name)}: {int(num_new):,} of {int(total):,} values are not in the fit, and {int(num_alike):,} of them are "
            f"there in other writing: {shown(here)} here, {shown(there)} in the fit. {AS_IT_WAS}"
        )
    return (
        f"note: {int(num_new):,} of {int(total):,} values of {shown(name)} are not in the fit: nearly all are new, or are "
        "written in another way"
    )
