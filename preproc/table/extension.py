"""Extension of a vocabulary by the values of one more day, as the same SQL text for DuckDB and Spark.

The rules:

* A value that has an id keeps it forever. No other value gets it.
* A value without one gets the next ids once its count over all days reaches the frequency limit: by descending count, and
  by the bytes of the value for equal counts, as in a fit. So ids are ordered by frequency within the block of a day only.
* With `retire_after=N`, a value that did not occur for N days is retired: rows with it get id 0, and its counting starts
  again. When that count reaches the limit, the value has its id again.

A vocabulary of a later day has these columns beside `value`, `id` and `count`: `day`, which gave the id, and `first_count`,
the count by which it was ordered there; `today`, its count in the rows of the latest day; `last_day` with the value; and
`retired`. Counts of the values without an id are in `rare/FEATURE.parquet`.
"""

DAYS_COLUMNS = ("day", "first_count", "today", "last_day", "retired")
"""Columns of the vocabulary of a later day, beside those of a fit."""


def fitted_rows(relation: str, has_days: bool) -> str:
    """Return a query of a vocabulary with all columns; those of day 0 have none of the later ones."""
    of_fit = "0 AS day, count AS first_count, count AS today, 0 AS last_day, false AS retired"
    columns = ", ".join(DAYS_COLUMNS) if has_days else of_fit
    return f"SELECT value, id, count, {columns} FROM {relation}"


def kept_ids(
    parent: str, counts: str, day: int, frequency_limit: int, retire_after: int | None
) -> str:
    """Return a query of the values that have an id already, in all columns, after one more day.

    `retire_after`: days without a value after which it is retired; None: never.
    """
    counted = f"SELECT p.*, coalesce(c.count, 0) AS seen FROM {parent} AS p LEFT JOIN {counts} AS c ON p.value = c.value"
    gone = "false"
    if retire_after is not None:
        gone = f"NOT retired AND seen = 0 AND {day} - last_day >= {retire_after}"
    return (
        f"SELECT value, id, CASE WHEN {gone} THEN 0 ELSE count + seen END AS count, day, first_count, seen AS today, "
        f"CASE WHEN seen > 0 THEN {day} ELSE last_day END AS last_day, "
        f"CASE WHEN retired THEN count + seen < {max(frequency_limit, 1)} ELSE {gone} END AS retired FROM ({counted})"
    )


def waiting(parent: str, rare: str | None, counts: str) -> str:
    """Return a query (value, count, seen) of the values without an id: counts over all days, and of this one.

    `rare`: relation (value, count) of the values that had no id yet; None: there are none.
    """
    every = f"SELECT value, count, count AS seen FROM {counts}"
    if rare is not None:
        every += f" UNION ALL SELECT value, count, 0 AS seen FROM {rare}"
    return (
        "SELECT w.value, CAST(sum(w.count) AS BIGINT) AS count, CAST(sum(w.seen) AS BIGINT) AS seen "
        f"FROM ({every}) AS w LEFT JOIN {parent} AS p ON w.value = p.value WHERE p.value IS NULL GROUP BY w.value"
    )


def new_ids(
    waiting_values: str, first: int, day: int, frequency_limit: int, max_size: int | None
) -> str:
    """Return a query of the values that get an id on this day, in all columns. `max_size`: largest id; None: any."""
    ranked = (
        f"SELECT value, row_number() OVER (ORDER BY count DESC, value) + {first - 1} AS id, count, {day} AS day, "
        f"count AS first_count, seen AS today, CASE WHEN seen > 0 THEN {day} ELSE {day} - 1 END AS last_day, "
        f"false AS retired FROM {waiting_values} WHERE count >= {frequency_limit}"
    )
    return ranked if max_size is None else f"SELECT * FROM ({ranked}) WHERE id <= {max_size}"


def still_waiting(waiting_values: str, vocabulary: str) -> str:
    """Return a query (value, count) of the values of `waiting` that are not in the vocabulary of this day."""
    return (
        f"SELECT w.value, w.count FROM {waiting_values} AS w LEFT JOIN {vocabulary} AS v ON w.value = v.value "
        "WHERE v.value IS NULL ORDER BY w.value"
    )
