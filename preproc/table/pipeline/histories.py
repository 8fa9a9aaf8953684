"""Phase of the histories: the last values of a column in earlier rows of the same user, as SQL for all engines.

A row is an item of its user's history if its value, user and time are known and the filter is true. A row sees the
items of its user with an earlier time, so it sees neither itself, nor a later row, nor one of the same time.

The items of all users form one array, ordered by user, time and row. The history of a row is a slice of that array,
so SQL computes the end and the length of the slice, and no query has a row per value of a history.
"""

from dataclasses import replace

from configs.table_schema import History, TableConfig
from preproc.table.feature_values import FeatureValues, rows_of
from preproc.table.pipeline.categoricals import EncodedFeature, values_with_id
from preproc.table.pipeline.journal import Journal


def slice_histories(journal: Journal, split: str) -> None:
    """Write relations `past_items_<number>`, the values that are in histories, and `slices_<number>`, those of every row.

    `split` is the expression of the split of a row of `staged_`.
    """
    # Rows of the dataset, with their rows in the order of the sources: `before_` where they were reordered.
    source = "before_" if journal.work.state["rows_in"] == "rows_" else "row_"
    rows = f"SELECT row_, {source} AS source_ FROM rows_"
    for i, history in enumerate(journal.table.history):
        line, users = f"timeline_{i}", f"users_{i}"
        journal.query(line, _timeline(i, journal.table, split))
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
            f"FROM ({rows}) AS r LEFT JOIN {line} AS t ON r.source_ = t.row_ "
            f"LEFT JOIN {users} AS u ON t.who_ = u.who_ ORDER BY row_",
        )


def history_ids(
    journal: Journal,
    values: FeatureValues,
    number: int,
    history: History,
    encoded: dict[str, EncodedFeature],
    counted: range,
) -> EncodedFeature:
    """Write relation `past_ids_<number>`: the values in histories, with the ids of the feature that they are of."""
    features = {f.name: (i, f) for i, f in enumerate(journal.table.categorical)}
    of_number, of = features[history.of]
    first, owner = features[of.vocabulary_of or of.name]
    vocabulary = "" if owner.is_hashed else values_with_id(journal, first, owner)
    found = values.look_up("value", of_number, vocabulary, owner)
    query = f"SELECT r.row_, {found.id} AS id FROM past_items_{number} AS r {found.join}"
    journal.query(f"past_ids_{number}", f"{query} ORDER BY r.row_")
    ((empty,),) = journal.engine.rows(
        f"SELECT count(*) FROM {rows_of(counted, f'slices_{number}')} WHERE length_ = 0"
    )
    whole = encoded[history.of]
    summary = replace(whole.summary, missing=empty / len(counted), coverage=None, rows=len(counted))
    return EncodedFeature(summary, whole.num_embeddings, None, is_dynamic=owner.is_dynamic)


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
