"""Phase of the histories: the earlier rows of its user that each row sees."""

from dataclasses import replace

from configs.table_schema import History
from preproc.table.feature_values import FeatureValues, rows_of
from preproc.table.history import first_items, items, slices, timeline
from preproc.table.pipeline.categoricals import EncodedFeature, values_with_id
from preproc.table.pipeline.journal import Journal


def slice_histories(journal: Journal, split: str) -> None:
    """Write relations `past_items_<number>`, the values that are in histories, and `slices_<number>`, those of every row.

    `split` is the expression of the split of a row of `staged_`.
    """
    # Rows keep their place in the sources as `before_` where they were reordered.
    source = "before_" if journal.work.state["rows_in"] == "rows_" else "row_"
    rows = f"SELECT row_, {source} AS source_ FROM rows_"
    for i, history in enumerate(journal.table.history):
        line, users = f"timeline_{i}", f"users_{i}"
        journal.query(line, timeline(i, journal.table, "staged_", split))
        journal.query(users, first_items(line))
        journal.query(f"past_items_{i}", f"{items(line, users)} ORDER BY row_")
        journal.query(f"slices_{i}", f"{slices(line, users, rows, history.length)} ORDER BY row_")


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
