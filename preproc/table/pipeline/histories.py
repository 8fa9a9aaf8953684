"""Phase of the histories: the last values of a column in earlier rows of the same user, as SQL for all engines.

A row is an item of its user's history if its value, user and time are known and the filter is true. A row sees the
items of its user with an earlier time, so it sees neither itself, nor a later row, nor one of the same time.

The items of all users form one array, ordered by user, time and row. The history of a row is a slice of that array,
so SQL computes the end and the length of the slice, and no query has a row per value of a history.
"""

from dataclasses import replace

from configs.table_schema import TableConfig
from preproc.report.console import ColumnSummary
from preproc.table.feature_values import FeatureValues, rows_of
from preproc.table.pipeline.categoricals import EncodedFeature
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.order import Ordered


def slice_histories(journal: Journal, rows: Ordered) -> None:
    """Write relations `past_items_<number>`, the values that are in histories, and `slices_<number>`, those of every row."""
    # Rows of the dataset, with their rows in the order of the sources.
    source = "before_" if rows.is_moved else "row_"
    both = f"SELECT row_, {source} AS source_ FROM rows_"
    for i, history in enumerate(journal.table.history):
        line, users = f"timeline_{i}", f"users_{i}"
        journal.query(line, _timeline(i, journal.table, rows.split_of_row))
        # (who_, first_): the position of every user's first item among the items of all users.
        counts = f"SELECT who_, count(value) AS items_ FROM {line} GROUP BY who_"
        until = "sum(items_) OVER (ORDER BY who_ ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
        first = f"CAST({until} AS BIGINT) - items_ AS first_"
        journal.query(users, f"SELECT who_, {first} FROM ({counts})")
        # (row_, value): the items of all users; `row_` is their position, from 0.
        journal.query(
            f"past_items_{i}",
            f"SELECT u.first_ + t.item_ - 1 AS row_, t.value FROM {line} AS t JOIN {users} AS u "
            "ON t.who_ = u.who_ WHERE t.value IS NOT NULL ORDER BY row_",
        )
        # (row_, stop_, length_): the slice of items that each row of the dataset sees.
        earlier = "coalesce(t.earlier_, 0)"
        journal.query(
            f"slices_{i}",
            f"SELECT r.row_, coalesce(u.first_, 0) + {earlier} AS stop_, least({earlier}, {history.length}) AS length_ "
            f"FROM ({both}) AS r LEFT JOIN {line} AS t ON r.source_ = t.row_ "
            f"LEFT JOIN {users} AS u ON t.who_ = u.who_ ORDER BY row_",
        )


def history_ids(
    journal: Journal, values: FeatureValues, number: int, of: EncodedFeature, counted: range
) -> ColumnSummary:
    """Write relation `past_ids_<number>`: the values in histories, with the ids of the feature `of` that they are of."""
    found = values.look_up("value", of.number, of.ids, of.owner)
    query = f"SELECT r.row_, {found.id} AS id FROM past_items_{number} AS r {found.join}"
    journal.query(f"past_ids_{number}", f"{query} ORDER BY r.row_")
    ((empty,),) = journal.engine.rows(
        f"SELECT count(*) FROM {rows_of(counted, f'slices_{number}')} WHERE length_ = 0"
    )
    return replace(of.summary, missing=empty / len(counted), coverage=None, rows=len(counted))


def _timeline(number: int, table: TableConfig, split: str) -> str:
    """Return a query (row_, who_, value, item_, earlier_) with one row per row whose user and time are known.

    `value` is null unless the row is an item, `item_` counts the items of the user up to it, and `earlier_` those with
    an earlier time.
    """
    history = table.history[number]
    column = [feature.name for feature in table.categorical].index(history.of)
    conditions = [f"past{number}_"] if history.filter else []
    if history.rows == "train":
        conditions.append(f"({split}) = 'train'")
    value = f"c{column}"
    if conditions:
        value = f"CASE WHEN {' AND '.join(conditions)} THEN {value} END"
    known = (
        f"SELECT row_, who{number}_ AS who_, time{number}_ AS time_, {value} AS value FROM staged_ "
        f"WHERE who{number}_ IS NOT NULL AND time{number}_ IS NOT NULL"
    )
    # Rows of one time are peers of a frame by range, so they are counted and subtracted again.
    return (
        "SELECT row_, who_, value, "
        "count(value) OVER (PARTITION BY who_ ORDER BY time_, row_ "
        "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS item_, "
        "count(value) OVER (PARTITION BY who_ ORDER BY time_ "
        "RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) "
        f"- count(value) OVER (PARTITION BY who_, time_) AS earlier_ FROM ({known})"
    )
