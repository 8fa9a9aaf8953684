"""The fit of a dataset as the server reads it: the description of features, and vocabularies in mapped files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from configs.messages import shown
from configs.table_schema import (
    Categorical,
    EventLists,
    EventLog,
    History,
    Numerical,
    RowNumber,
    TableConfig,
    transform_of,
)
from configs.transforms import is_served
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.lineage import FITTED
from dataloading.row_sql import COLUMN, columns_of, unserved
from nn.checkpoint.compatibility import vocabulary_mismatch
from preproc.fitted_state import AGAIN, IS_TEXT, FittedState, load_fitted, vocabulary_name
from serving.inference.requests import IDS, NUMERICAL
from serving.raw_description import FILTER
from serving.vocabulary import write_vocabulary

BATCH_ROWS = 1 << 17

VOCABULARY = "vocabulary"
"""Folder of the files of raw values."""


def write_raw_values(
    directory: Path, fitted: str, spec: FeatureSpec, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the vocabularies of a fit; return the description of the transformation.

    Raises ValueError: there is no fit, it is damaged or of other features, or a feature is an expression that no server
    evaluates.
    """
    state = load_fitted(Path(fitted))
    features = state.table
    own = FeatureSpec.load(state.directory)
    if own.fingerprint() != spec.fingerprint():
        raise ValueError(
            f"fitted={fitted} has other features than the dataset that the run was trained on; name the one that was fitted "
            "for it"
        )
    problem = vocabulary_mismatch(facts, own.metadata)
    if problem is not None:
        raise ValueError(
            f"the model {problem}; name the one that was fitted for it instead of fitted={fitted}"
        )
    (directory / VOCABULARY).mkdir()
    columns: dict[str, int] = {}
    types: dict[str, str] = {}
    numerical = [_numerical(feature, state, columns, types) for feature in features.numerical]
    sizes: dict[str, tuple[str, int]] = {}
    for feature in features.categorical:
        if not (feature.is_hashed or feature.vocabulary_of):
            sizes[feature.name] = _write(directory, state, feature.name)
    by_name = {feature.name: feature for feature in features.categorical}
    categorical = [
        _categorical(feature, by_name, sizes, state, columns, types)
        for feature in features.categorical
    ]
    history = [_history(history, by_name, columns) for history in features.history]
    lists_of_rows = [_lists(of, by_name, columns) for of in features.event_lists]
    sequences = [_sequence(log, features, sizes, state, columns, types) for log in features.logs]
    of_events = [feature for of in sequences for feature in of["events"]["categorical"]]
    names = [feature["name"] for feature in [*categorical, *history, *of_events]]
    if names != [feature.name for feature in spec.categorical]:
        raise ValueError(f"fitted={fitted}: its features are not those of its feature spec")
    lists = [f"{of['name']}_{name}" for of in sequences for name in of["events"]["columns"]]
    inputs = [NUMERICAL, IDS, *columns, *lists]
    clash = {name for name in inputs if inputs.count(name) > 1}
    if clash:
        raise ValueError(
            f"fitted={fitted}: the column {shown(min(clash))} has the name of the input of features or events; rename it in the "
            "source"
        )
    return {
        "columns": columns,
        "missing": features.missing,
        "empty_items": features.empty_items,
        "is_text": _text_columns(state, columns, categorical, history),
        "five": _five(state.five, categorical, history),
        "float16": spec.numerical_dtype.name == "float16",
        "numerical": numerical,
        "categorical": categorical,
        "history": history,
        **({"types": types} if types else {}),
        **({"sequences": sequences} if sequences else {}),
        **({"lists": lists_of_rows} if lists_of_rows else {}),
    }


def _lists(
    of: EventLists, by_name: dict[str, Categorical], columns: dict[str, int]
) -> dict[str, Any]:
    """Return the description of a group of lists, of whose numbers `columns` gets the columns."""
    if of.time:
        raise ValueError(
            f"the events {shown(of.name)} are lists with times, and a server takes raw values of lists without; leave fitted "
            "out, and send ids and numbers"
        )
    separator = by_name[of.lists[0]].separator
    numbers = []
    for number in of.numbers:
        sql = (number.expression or "").strip()
        if sql and not COLUMN.fullmatch(sql):
            raise ValueError(unserved(number.name, sql, "a list"))
        column = _column_name(sql) or number.name
        columns[column] = 1 if separator else 2
        numbers.append({"name": number.name, "column": column})
    return {
        "name": of.name,
        "length": of.length,
        "features": of.lists,
        "separator": separator,
        "numbers": numbers,
    }


def _sequence(
    log: EventLog,
    table: TableConfig,
    sizes: dict[str, tuple[str, int]],
    state: FittedState,
    columns: dict[str, int],
    types: dict[str, str],
) -> dict[str, Any]:
    """Return the description of a log: of its events as rows of their own, and of the moment, of whose columns `columns` gets."""
    if log.source:
        raise ValueError(
            f"the events {shown(log.name)} are of source {shown(log.source)}, and a server takes raw values of those that are "
            "rows; leave fitted out, and send ids and numbers"
        )
    by_name = {feature.name: feature for feature in table.categorical}
    of_events: dict[str, int] = {}
    of_types: dict[str, str] = {}
    features = [
        _categorical(by_name[of], by_name, sizes, state, of_events, of_types) for of in log.of
    ]
    numbers = [
        {
            "name": name,
            **_column(number, state, of_events, of_types),
            "transforms": [],
            "fitted": [],
        }
        for name, number in zip(log.number_names, log.numbers, strict=False)
    ]
    for sql in filter(None, (log.order_by, log.filter)):
        _add_columns(log.name, sql, state, of_events, of_types)
    _add_columns(log.name, log.order_by, state, columns, types)
    events = {
        "columns": of_events,
        "missing": table.missing,
        "empty_items": table.empty_items,
        "is_text": _text_columns(state, of_events, features, []),
        "five": _five(state.five, features, []),
        "float16": False,
        "numerical": numbers,
        "categorical": [f | {"name": n} for n, f in zip(log.features, features, strict=True)],
        "history": [],
        "types": of_types,
        "times": {log.time_name: log.order_by},
        FILTER: log.filter,
    }
    return {"name": log.name, "length": log.length, "moment": log.order_by, "events": events}


def _numerical(
    feature: Numerical, state: FittedState, columns: dict[str, int], types: dict[str, str]
) -> dict[str, Any]:
    column = _column(feature, state, columns, types)
    for transform in feature.transforms:
        name, _ = transform_of(transform)
        if not is_served(name):
            raise ValueError(
                f"the transform {name} of {shown(feature.name)} is not built in with its `python`, so a model cannot take raw "
                "values; export it without fitted"
            )
    return {
        "name": feature.name,
        **column,
        "transforms": feature.transforms,
        "fitted": state.statistics[feature.name],
    }


def _categorical(
    feature: Categorical,
    by_name: dict[str, Categorical],
    sizes: dict[str, tuple[str, int]],
    state: FittedState,
    columns: dict[str, int],
    types: dict[str, str],
) -> dict[str, Any]:
    owner = by_name[feature.vocabulary_of or feature.name]
    for name in feature.cross:
        columns[name] = 1
    return {
        "name": feature.name,
        **({"column": None} if feature.cross else _column(feature, state, columns, types)),
        "cross": feature.cross,
        "separator": feature.separator,
        "list": feature.list,
        "take": feature.take,
        "length": feature.length,
        "buckets": owner.buckets,
        "is_key": owner.is_dynamic,
        "vocabulary": sizes.get(owner.name),
    }


def _history(
    history: History, by_name: dict[str, Categorical], columns: dict[str, int]
) -> dict[str, Any]:
    of = (by_name[history.of].expression or "").strip()
    if of and not COLUMN.fullmatch(of):
        raise ValueError(unserved(history.name, of, "in a history"))
    if history.name in columns:
        raise ValueError(
            f"history {shown(history.name)} has the name of a column of the source; rename it to serve raw values"
        )
    columns[history.name] = 2
    return {"name": history.name, "of": history.of, "length": history.length}


def _five(
    five: Mapping[str, str], categorical: list[dict[str, Any]], history: list[dict[str, Any]]
) -> dict[str, str]:
    """Return the text of the number 5 in the fit, by column of numbers."""
    columns = {f["column"]: f["name"] for f in categorical}
    columns |= {h["name"]: h["of"] for h in history}
    return {column: five[name] for column, name in columns.items() if column and name in five}


def _text_columns(
    state: FittedState,
    columns: Mapping[str, int],
    categorical: list[dict[str, Any]],
    history: list[dict[str, Any]],
) -> dict[str, bool]:
    """Return whether each input was text in the fit."""
    kinds = state.text_columns.result
    of = {feature["name"]: feature["column"] for feature in categorical}
    # The values of a cross are of several columns, and those of a history of the column of its feature.
    read = dict(zip(columns, columns, strict=True)) | {h["name"]: of[h["of"]] for h in history}
    for name, column in read.items():
        if column is not None and column.lower() not in kinds:
            raise ValueError(
                f"{state.directory / FITTED}: {IS_TEXT} has no column {shown(name)}; {AGAIN}"
            )
    return {name: column is not None and kinds[column.lower()] for name, column in read.items()}


def _column(
    feature: Numerical | Categorical | RowNumber,
    state: FittedState,
    columns: dict[str, int],
    types: dict[str, str],
) -> dict[str, Any]:
    """Return the column of a feature, or its expression; add columns to `columns`, and those of expressions to `types`."""
    dimensions = 2 if isinstance(feature, Categorical) and feature.list else 1
    expression = (feature.expression or "").strip()
    if not expression:
        name = feature.name
    elif COLUMN.fullmatch(expression):
        name = _column_name(expression)
    else:
        if dimensions == 2:
            raise ValueError(unserved(feature.name, expression, "a list"))
        _add_columns(feature.name, expression, state, columns, types)
        return {"column": None, "expression": expression}
    if columns.setdefault(name, dimensions) != dimensions:
        raise ValueError(f"column {shown(name)} is a list for one feature and none for another")
    return {"column": name}


def _column_name(expression: str) -> str:
    """Return the name of a column from SQL of it."""
    return expression[1:-1].replace('""', '"') if expression[:1] == '"' else expression


def _add_columns(
    feature: str, sql: str, state: FittedState, columns: dict[str, int], types: dict[str, str]
) -> None:
    """Add the columns that an expression reads, and their types. Raises ValueError: a server does not evaluate it."""
    try:
        named = columns_of(sql)
    except ValueError as error:
        raise ValueError(unserved(feature, sql, error)) from None
    for name in named:
        is_text = state.text_columns.result.get(name.lower())
        kind = "varchar" if is_text else state.types.get(name.lower())
        if kind is None:
            reason = f"the fit does not record the type of {name}; fit again"
            raise ValueError(unserved(feature, sql, reason))
        # SQL ignores case.
        known = next((one for one in columns if one.lower() == name.lower()), name)
        types[known] = kind
        if columns.setdefault(known, 1) != 1:
            raise ValueError(
                f"column {shown(known)} is a list for one feature and none for another"
            )


def _write(directory: Path, state: FittedState, feature: str) -> tuple[str, int]:
    file = f"{VOCABULARY}/{quote(feature, safe='')}.bin"
    return file, write_vocabulary(directory / file, _values(state, feature))


def _values(state: FittedState, feature: str) -> Iterator[list[str | None]]:
    """Yield the values of a vocabulary in the order of their ids, which `load_fitted` has checked; None for a retired one."""
    from dataloading.dataset.parquet_files import open_file

    columns = ["value", "retired"] if state.has_days(feature) else ["value"]
    with open_file(state.directory / vocabulary_name(feature)) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            values = batch.column("value").to_pylist()
            retired = batch.column(1).to_pylist() if len(columns) > 1 else [False] * len(values)
            yield [
                None if is_retired else value
                for value, is_retired in zip(values, retired, strict=True)
            ]
