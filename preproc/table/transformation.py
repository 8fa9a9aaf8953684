"""The transformation of rows of one relation: numericals, ids and lists of ids, as SQL and arrays.

Preprocessing applies it to all rows of a dataset (`preproc/table/pipeline/build.py`), and `preproc/transformed_rows.py` to the
rows of raw files as they are read. Relations have the columns `row_`, `n<i>` and `c<i>` of `preproc/table/staging.py`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from configs.table_schema import Categorical, Numerical, TableConfig, arguments_of, transform_of
from configs.transforms import transform_named
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.table.expressions import as_float, double, transformed

NO_VALUE = -1
"""In place of the id, or the key, of a missing value or an empty item."""


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
            of = transform_named(transform_of(transform)[0])
            if of.counts:
                changed = f"({after}) <> ({before})"
                if of.counted:
                    changed = of.counted(before, *map(double, arguments_of(transform, fitted)))
                elif of.counts == "emptied":
                    changed = f"({before}) IS NOT NULL AND ({after}) IS NULL"
                conditions.append((feature.name, of.counts, changed))
            before = after
    return conditions


def stored_numericals(columns: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Return numericals [rows, features] as they are stored, infinite where the type cannot hold them."""
    stored = np.empty((len(columns[0]), len(columns)), dtype)
    with np.errstate(over="ignore"):
        for number, column in enumerate(columns):
            stored[:, number] = column
    return stored


def stored_ids(
    ids: np.ndarray,
    lengths: np.ndarray,
    feature: CategoricalFeature,
    described: Categorical,
    *,
    drops_empty: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids as they are stored, [rows], [rows, hotness] or flat, and the lengths of lists before they are cut.

    `ids`: flat, `NO_VALUE` where there is none, which they get 0 for. `drops_empty`: leave such items of lists out instead.
    """
    has_value, hotness = ids != NO_VALUE, feature.hotness
    if described.is_list and drops_empty and not has_value.all():
        rows = np.repeat(np.arange(len(lengths)), lengths)
        ids, lengths = ids[has_value], np.bincount(rows[has_value], minlength=len(lengths))
    else:
        ids[~has_value] = 0
    if not described.is_list or hotness is None:
        return ids, lengths
    if len(lengths) and lengths.max() > hotness:
        index = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if described.take == "last":
            index = np.repeat(lengths, lengths) - 1 - index
        ids = ids[index < hotness]
    fixed = np.zeros((len(lengths), hotness), ids.dtype)
    # By number: a mask takes twice the time.
    fixed.reshape(-1)[np.flatnonzero(np.arange(hotness) < lengths[:, None])] = ids
    return fixed, lengths
