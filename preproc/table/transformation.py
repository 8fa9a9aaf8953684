"""The transformation of rows of one relation: numericals, ids and lists of ids, as SQL and arrays.

Preprocessing applies it to all rows of a dataset (`preproc/table/pipeline/build.py`), and `preproc/transformed_rows.py` to the
rows of raw files as they are read. Relations have the columns `row_`, `n<i>` and `c<i>` of `preproc/table/staging.py`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from configs.table_schema import Categorical, Numerical, TableConfig, transform_of
from configs.transforms import transform_named
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.table.expressions import as_float, hashed_id, transformed


def numerical_columns(
    features: Sequence[Numerical], statistics: Mapping[str, list[list[float]]]
) -> list[str]:
    """Return the expressions `... AS n<i>` of the transformed numericals, in single precision."""
    columns = []
    for number, feature in enumerate(features):
        expression = f"n{number}"
        for transform, fitted in zip(feature.transforms, statistics[feature.name], strict=True):
            expression = transformed(expression, transform, fitted)
        columns.append(f"{as_float(f'coalesce({expression}, 0)')} AS n{number}")
    return columns


def length_columns(table: TableConfig, num_items: Callable[..., str]) -> list[str]:
    """Return the expressions `... AS n<i>` of the lengths of lists, after those of the numericals."""
    whole = table.empty_items == "dropped"
    columns: list[str] = []
    for number, feature in enumerate(table.categorical):
        if feature.length:
            items = f"least({num_items(f'c{number}', whole=whole)}, {feature.hotness})"
            columns.append(f"CAST({items} AS FLOAT) AS n{len(table.numerical) + len(columns)}")
    return columns


def changed_values(
    features: Sequence[Numerical], statistics: Mapping[str, list[list[float]]]
) -> list[tuple[str, str, str]]:
    """Return the conditions (name, kind, SQL) of values that a transform empties (as a log) or replaces (as a clip)."""
    conditions = []
    for number, feature in enumerate(features):
        before = f"n{number}"
        for transform, fitted in zip(feature.transforms, statistics[feature.name], strict=True):
            after = transformed(before, transform, fitted)
            counts = transform_named(transform_of(transform)[0]).counts
            if counts == "emptied":
                lost = f"({before}) IS NOT NULL AND ({after}) IS NULL"
                conditions.append((feature.name, "emptied", lost))
            elif counts == "clipped":
                conditions.append((feature.name, "clipped", f"({after}) <> ({before})"))
            before = after
    return conditions


def vocabulary_ids(values: str, vocabulary: str, feature: Categorical) -> str:
    """Return the query (row_, id) of a feature, in the order of rows; lists have a `position_` too."""
    position = ", r.position_" if feature.is_list else ""
    return (
        f"SELECT r.row_{position}, CAST(coalesce(v.id, 0) AS INTEGER) AS id "
        f"FROM {values} AS r LEFT JOIN {vocabulary} AS v ON r.value = v.value "
        f"ORDER BY r.row_{position}"
    )


def hashed_ids(values: str, owner: Categorical, feature: Categorical) -> str:
    """Return the query of `vocabulary_ids` for a feature whose values are hashed."""
    position = ", r.position_" if feature.is_list else ""
    ids = hashed_id("r.value", owner)
    return f"SELECT r.row_{position}, {ids} AS id FROM {values} AS r ORDER BY r.row_{position}"


def stored_numericals(columns: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Return numericals [rows, features] as they are stored, infinite where the type cannot hold them."""
    with np.errstate(over="ignore"):
        return np.stack([column.astype(dtype) for column in columns], axis=1)


def stored_ids(
    rows: Mapping[str, np.ndarray],
    part: range,
    feature: CategoricalFeature,
    described: Categorical,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids of some rows as they are stored, [rows], [rows, hotness] or flat, and the lengths of ragged ones."""
    ids = np.asarray(rows["id"], np.int64 if feature.is_dynamic else np.int32)
    lengths = None
    if described.is_list:
        lengths = np.bincount(np.asarray(rows["row_"]) - part.start, minlength=len(part))
        ids = stored_lists(ids, lengths, feature, described.take)
        lengths = None if feature.hotness is not None else lengths
    elif len(ids) != len(part):  # no assertion, which `python -O` would leave out
        raise RuntimeError(f"{feature.name}: {len(ids)} ids of {len(part)} rows")
    return ids.astype(feature.dtype.newbyteorder("<")), lengths


def stored_lists(
    ids: np.ndarray, lengths: np.ndarray, feature: CategoricalFeature, take: str
) -> np.ndarray:
    """Return flat ids [ids] as they are stored: unchanged if ragged, else [rows, hotness].

    Longer lists are cut to their `first` or `last` ids, by `take`; shorter ones are padded with 0.
    """
    hotness = feature.hotness
    if hotness is None:
        return ids
    if len(lengths) and lengths.max() > hotness:
        index = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if take == "last":
            index = np.repeat(lengths, lengths) - 1 - index
        ids = ids[index < hotness]
    fixed = np.zeros((len(lengths), hotness), ids.dtype)
    fixed[np.arange(hotness) < lengths[:, None]] = ids
    return fixed
