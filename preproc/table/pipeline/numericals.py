"""Phase of the numericals: fitted on training rows, or by an earlier fit, and transformed."""

import math
from dataclasses import dataclass
from typing import Any

from configs.messages import shown
from configs.table_schema import Numerical, transform_of
from configs.transforms import TRANSFORMS, is_served, transform_named
from preproc.report.console import ColumnSummary, SplitSummary
from preproc.table.duckdb_engine import QueryError
from preproc.table.expressions import (
    double,
    extremes,
    fixed_point_sums,
    mean_and_deviation,
    transformed,
)
from preproc.table.feature_values import rows_of
from preproc.table.mistakes import SMALLEST_OVERFLOW, overflow
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.order import Ordered, where_in_output
from preproc.table.transformation import changed_values, length_columns, numerical_columns


@dataclass(frozen=True, slots=True)
class Numericals:
    """Transformed numericals of the rows of the dataset."""

    relation: str  # of them, as columns `n<i>`
    stored_in: str  # relation whose files have the rows
    columns: list[str]  # expressions of them over these rows
    # two numbers, or none, per transform of a feature, fitted on training rows
    statistics: dict[str, list[list[float]]]
    summaries: dict[str, ColumnSummary]


def transform_numericals(journal: Journal, rows: Ordered, counted: range) -> Numericals:
    """Fit the transforms on training rows, unless an earlier fit is applied, and describe what they make of all rows."""
    features, histories = journal.table.numerical, journal.table.history
    if journal.fitted is None or journal.config.refit:
        statistics = _fit_transforms(journal, rows.splits.get("train", counted))
    else:
        statistics = journal.fitted.statistics
    names = journal.table.numerical_names
    if not names:
        return Numericals("", "", [], statistics, {})
    expressions = numerical_columns(features, statistics)
    for number, feature in enumerate(features):
        _check_own(journal, feature, f"n{number}", expressions[number], "rows_")
    expressions += length_columns(journal.table, journal.engine.num_items)
    relation = "rows_"
    if histories:
        joins = (f"JOIN slices_{i} AS s{i} ON r.row_ = s{i}.row_" for i in range(len(histories)))
        lengths = ", ".join(f"s{i}.length_ AS length{i}_" for i in range(len(histories)))
        relation = f"(SELECT r.*, {lengths} FROM rows_ AS r {' '.join(joins)})"
        expressions += [
            f"CAST(length{i}_ AS FLOAT) AS n{len(expressions) + i}" for i in range(len(histories))
        ]
    query = f"SELECT row_, {', '.join(expressions)} FROM {relation}"
    if histories or not journal.engine.codes_texts:
        journal.query("numerical_", f"{query} ORDER BY row_")
        relation = stored_in = "numerical_"
        expressions = [f"n{i}" for i in range(len(expressions))]
    else:
        # Computed twice in less time than it is stored.
        relation, stored_in = f"({query})", rows.relation
    summaries = {}
    if features:
        present = ", ".join(f"count(n{i})" for i in range(len(features)))
        (counts,) = journal.engine.rows(f"SELECT {present} FROM {rows_of(counted)}")
        for feature, count in zip(features, counts, strict=True):
            summaries[feature.name] = ColumnSummary(1 - count / len(counted), rows=len(counted))
    for name in names[len(features) :]:
        summaries[name] = ColumnSummary(0.0, rows=len(counted))
    return Numericals(relation, stored_in, expressions, statistics, summaries)


def _fit_transforms(journal: Journal, train: range) -> dict[str, list[list[float]]]:
    """Return two numbers, or none, per transform of every feature, fitted on rows `train`."""
    features = journal.table.numerical
    names = {transform_of(transform)[0] for each in features for transform in each.transforms}
    if own := [name for name in sorted(names) if not is_served(name)]:
        journal.progress.say(
            f"note: {', '.join(own)} is not built in with its `python`, so models of this dataset cannot be exported for raw "
            "values"
        )
    statistics: dict[str, list[list[float]]] = {}
    for number, feature in enumerate(features):
        # Each transform is fitted on the result of those before it.
        expression, statistics[feature.name] = f"n{number}", []
        for transform in feature.transforms:
            fitted = _fit(journal, feature, transform, expression, rows_of(train))
            statistics[feature.name].append(fitted)
            expression = transformed(expression, transform, fitted)
            checked = f"coalesce({expression}, 0) AS x"
            _check_own(journal, feature, "x", checked, rows_of(train))
    return statistics


def _check_own(journal: Journal, feature: Numerical, name: str, expression: str, rows: str) -> None:
    """Compute what transforms of the user make of rows; ValueError if an engine refuses their SQL, or they are no numbers."""
    if all(transform_of(transform)[0] in TRANSFORMS for transform in feature.transforms):
        return
    try:
        journal.engine.rows(f"SELECT sum({name}) FROM (SELECT {expression} FROM {rows})")
    except QueryError as error:
        raise ValueError(
            f"table.numerical: {shown(feature.name)}: the SQL of its transforms: {error}; correct it"
        ) from None


def _fit(
    journal: Journal, feature: Numerical, transform: Any, expression: str, train: str
) -> list[float]:
    """Return the two numbers of a fitted transform, or an empty list for any other."""
    name, _ = transform_of(transform)
    fits = transform_named(name).fits
    if fits is None:
        return []
    ((count, low, high),) = journal.engine.rows(extremes(expression, train))
    if not count:
        return [0.0, 1.0]
    if not math.isfinite(high - low):
        raise ValueError(
            f"table.numerical: {shown(feature.name)}: values from {low:g} to {high:g}, whose range is no finite "
            f"double; clip them before {name}"
        )
    if fits == "range":
        return [low, high - low]
    ((first, second),) = journal.engine.rows(fixed_point_sums(expression, low, high, train))
    return list(mean_and_deviation(count, low, high, (int(first), int(second))))


def count_changes(
    journal: Journal, rows: Ordered, numericals: Numericals, summaries: dict[str, SplitSummary]
) -> None:
    """Count per split the values that transforms emptied or replaced."""
    changes = changed_values(journal.table.numerical, numericals.statistics)
    # Of conditions that are all null, the count is null too.
    selected = ", ".join(f"CAST(coalesce(count_if({sql}), 0) AS BIGINT)" for *_, sql in changes)
    for split, part in rows.splits.items() if changes else ():
        (found,) = journal.engine.rows(f"SELECT {selected} FROM {rows_of(part)}")
        for (name, kind, _), count in zip(changes, found, strict=True):
            summary = summaries[split]
            of_kind = summary.emptied if kind == "emptied" else summary.clipped
            of_kind[name] = of_kind.get(name, 0) + count


def refuse_overflows(journal: Journal, rows: Ordered, relation: str) -> None:
    """Raise ValueError that names the first value that the stored type cannot hold, of the first such feature."""
    features, dtype = journal.table.numerical, journal.config.numerical_dtype.name
    values = ", ".join(f"max(n{i}), min(n{i})" for i in range(len(features)))
    (extremes_of,) = journal.engine.rows(f"SELECT {values} FROM {relation}")
    for i, feature in enumerate(features):
        if max(extremes_of[2 * i], -extremes_of[2 * i + 1]) >= SMALLEST_OVERFLOW[dtype]:
            ((row, stored, raw),) = journal.engine.rows(
                f"SELECT x.row_, x.n{i}, r.n{i} FROM {relation} AS x JOIN rows_ AS r ON x.row_ = r.row_ "
                f"WHERE abs(x.n{i}) >= {double(SMALLEST_OVERFLOW[dtype])} ORDER BY x.row_ LIMIT 1"
            )
            raise overflow(where_in_output(journal, rows, row), feature, raw, stored, dtype)
