"""The fit of a dataset as the server reads it: the description of features, and vocabularies in mapped files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.compute as pc

from configs.messages import shown
from configs.table_schema import (
    Categorical,
    EventLists,
    EventLog,
    History,
    Numerical,
    RowNumber,
    transform_of,
)
from configs.transforms import is_served
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.lineage import FITTED, Lineage
from dataloading.row_sql import COLUMN, columns_of, of_utc, unserved
from nn.checkpoint.compatibility import vocabulary_mismatch
from nn.checkpoint.forgetting import all_forgotten
from nn.checkpoint.run_facts import DAY_FACTS
from nn.embedding.declared_tables import table_name
from preproc.fitted_state import AGAIN, IS_TEXT, FittedState, load_fitted, vocabulary_name
from serving.inference.requests import IDS, NUMERICAL
from serving.raw_records import (
    RawCategorical,
    RawDescription,
    RawFeature,
    RawHistory,
    RawLists,
    RawNumber,
    RawRows,
    RawSequence,
)
from serving.vocabulary import write_vocabulary

BATCH_ROWS = 1 << 17

VOCABULARY = "vocabulary"
"""Folder of the files of raw values."""


def write_raw_values(
    directory: Path, fitted: str, spec: FeatureSpec, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the vocabularies of a fit; return the description of the transformation, as JSON.

    Raises ValueError: there is no fit, it is damaged or of other features, or no server evaluates a feature's expression.
    """
    state = load_fitted(Path(fitted))
    table = state.table
    own = FeatureSpec.load(state.directory)
    if own.fingerprint() != spec.fingerprint():
        raise ValueError(
            f"fitted={fitted} has other features than the dataset that the run was trained on; name the one that was fitted "
            "for it"
        )
    problem = vocabulary_mismatch(facts, own.metadata)
    day, lineage = facts.get(DAY_FACTS, {}).get("identity"), Lineage.of(own.metadata)
    # Vocabularies of a day have no checksum there, and several days may extend one fit.
    if lineage.day and day is not None and day != lineage.identity:
        problem = "was trained on another day, or on one of other rows"
    if problem is not None:
        raise ValueError(
            f"the model {problem}; name the one that was fitted for it instead of fitted={fitted}"
        )
    (directory / VOCABULARY).mkdir()
    vocabularies, forgotten = {}, all_forgotten(facts)
    for feature in table.categorical:
        if not (feature.is_hashed or feature.vocabulary_of):
            file = f"{VOCABULARY}/{quote(feature.name, safe='')}.bin"
            gone = forgotten.get(f"tables.{table_name(feature.name)}", [])
            size = write_vocabulary(directory / file, _values(state, feature.name, gone))
            vocabularies[feature.name] = file, size
    inputs = _Inputs(state, vocabularies)
    numerical = [_numerical(feature, inputs) for feature in table.numerical]
    categorical = [_categorical(feature, inputs) for feature in table.categorical]
    history = [_history(history, inputs) for history in table.history]
    lists = [_lists(group, inputs) for group in table.event_lists]
    sequences = [_sequence(log, inputs) for log in table.logs]
    described = RawDescription(
        **inputs.facts(categorical, history),
        float16=spec.numerical_dtype.name == "float16",
        numerical=numerical,
        categorical=categorical,
        history=history,
        sequences=sequences,
        lists=lists,
    )
    of_events = [feature.name for of in sequences for feature in of.events.categorical]
    names = [*(of.name for of in categorical), *(of.name for of in history), *of_events]
    if names != [feature.name for feature in spec.categorical]:
        raise ValueError(f"fitted={fitted}: its features are not those of its feature spec")
    of_lists = [name for of in sequences for name in of.columns.values()]
    inputs_of_all = [NUMERICAL, IDS, *inputs.columns, *of_lists]
    clash = {name for name in inputs_of_all if inputs_of_all.count(name) > 1}
    if clash:
        raise ValueError(
            f"fitted={fitted}: the column {shown(min(clash))} has the name of the input of features or events; rename it in the "
            "source"
        )
    return described.as_json()


class _Inputs:
    """The columns that features of rows, or of events, read.

    `vocabularies`: file and number of values, by feature.
    """

    def __init__(self, state: FittedState, vocabularies: Mapping[str, tuple[str, int]]) -> None:
        self.state, self.table, self.vocabularies = state, state.table, vocabularies
        self.features = {feature.name: feature for feature in self.table.categorical}
        self.columns: dict[str, int] = {}
        self._types: dict[str, str] = {}  # of those of expressions

    def add(self, name: str, dimensions: int = 1) -> None:
        if self.columns.setdefault(name, dimensions) != dimensions:
            raise ValueError(f"column {shown(name)} is a list for one feature and none for another")

    def add_sql(self, feature: str, sql: str) -> None:
        """Add the columns that an expression reads. Raises ValueError: a server does not evaluate it."""
        try:
            named = columns_of(sql)
        except ValueError as error:
            raise ValueError(unserved(feature, sql, error)) from None
        for name in named:
            is_text = self.state.text_columns.result.get(name.lower())
            kind = "varchar" if is_text else self.state.types.get(name.lower())
            if kind is None:
                reason = f"the fit does not record the type of {name}; fit again"
                raise ValueError(unserved(feature, sql, reason))
            # SQL ignores case.
            known = next((one for one in self.columns if one.lower() == name.lower()), name)
            self._types[known] = kind
            self.add(known)

    def values(self, feature: Numerical | Categorical | RowNumber) -> dict[str, Any]:
        """Return the column of a feature, or its expression, and add what it reads."""
        is_list = isinstance(feature, Categorical) and feature.list
        column = _column_of(feature)
        if column is not None:
            self.add(column, 1 + is_list)
            return {"column": column}
        expression = feature.expression.strip()
        if is_list:
            raise ValueError(unserved(feature.name, expression, "a list"))
        self.add_sql(feature.name, expression)
        return {"column": None, "expression": expression}

    def facts(
        self, categorical: Sequence[RawCategorical], history: Sequence[RawHistory]
    ) -> dict[str, Any]:
        kinds, five = self.state.text_columns.result, self.state.five
        of = {feature.name: feature.column for feature in categorical}
        # The values of a cross are of several columns, and those of a history of the column of its feature.
        read = {name: name for name in self.columns} | {h.name: of[h.of] for h in history}
        for name, column in read.items():
            if column is not None and column.lower() not in kinds:
                raise ValueError(
                    f"{self.state.directory / FITTED}: {IS_TEXT} has no column {shown(name)}; {AGAIN}"
                )
        features = {column: name for name, column in of.items()} | {h.name: h.of for h in history}
        return {
            "columns": self.columns,
            "missing": self.table.missing,
            "empty_items": self.table.empty_items,
            "is_text": {n: c is not None and kinds[c.lower()] for n, c in read.items()},
            "five": {c: five[name] for c, name in features.items() if c and name in five},
            "types": self._types,
        }


def _lists(group: EventLists, inputs: _Inputs) -> RawLists:
    if group.time:
        raise ValueError(
            f"the events {shown(group.name)} are lists with times, and a server takes raw values of lists without; leave fitted "
            "out, and send ids and numbers"
        )
    separator = inputs.features[group.lists[0]].separator
    numbers = []
    for number in group.numbers:
        column = _column_of(number)
        if column is None:
            raise ValueError(unserved(number.name, number.expression.strip(), "a list"))
        inputs.add(column, 1 if separator else 2)
        numbers.append(RawFeature(name=number.name, column=column))
    return RawLists(
        name=group.name,
        length=group.length,
        features=group.lists,
        separator=separator,
        numbers=numbers,
    )


def _sequence(log: EventLog, inputs: _Inputs) -> RawSequence:
    """Return the description of a log: of its events as rows of their own, and of the moment, a column of rows."""
    if log.source:
        raise ValueError(
            f"the events {shown(log.name)} are of source {shown(log.source)}, and a server takes raw values of those that are "
            "rows; leave fitted out, and send ids and numbers"
        )
    events = _Inputs(inputs.state, inputs.vocabularies)
    features = [_categorical(inputs.features[name], events) for name in log.of]
    numbers = [
        RawNumber(name=name, **events.values(number), transforms=[], fitted=[])
        for name, number in zip(log.number_names, log.numbers, strict=False)
    ]
    for sql in filter(None, (log.order_by, log.filter)):
        events.add_sql(log.name, sql)
    inputs.add_sql(log.name, log.order_by)
    moment = of_utc(log.order_by)
    described = RawRows(
        **events.facts(features, []),
        float16=False,
        numerical=numbers,
        categorical=[replace(f, name=n) for n, f in zip(log.features, features, strict=True)],
        times={log.time_name: moment},
        filter=log.filter,
    )
    return RawSequence(name=log.name, length=log.length, moment=moment, events=described)


def _numerical(feature: Numerical, inputs: _Inputs) -> RawNumber:
    values = inputs.values(feature)
    for transform in feature.transforms:
        name, _ = transform_of(transform)
        if not is_served(name):
            raise ValueError(
                f"the transform {name} of {shown(feature.name)} is not built in with its `python`, so a model cannot take raw "
                "values; export it without fitted"
            )
    fitted = inputs.state.statistics[feature.name]
    return RawNumber(name=feature.name, **values, transforms=feature.transforms, fitted=fitted)


def _categorical(feature: Categorical, inputs: _Inputs) -> RawCategorical:
    owner = inputs.features[feature.vocabulary_of or feature.name]
    for name in feature.cross:
        inputs.add(name)
    return RawCategorical(
        name=feature.name,
        **({"column": None} if feature.cross else inputs.values(feature)),
        cross=feature.cross,
        separator=feature.separator,
        list=feature.list,
        take=feature.take,
        length=feature.length,
        buckets=owner.buckets,
        is_key=owner.is_dynamic,
        vocabulary=inputs.vocabularies.get(owner.name),
    )


def _history(history: History, inputs: _Inputs) -> RawHistory:
    feature = inputs.features[history.of]
    if _column_of(feature) is None:
        raise ValueError(unserved(history.name, feature.expression.strip(), "in a history"))
    if history.name in inputs.columns:
        raise ValueError(
            f"history {shown(history.name)} has the name of a column of the source; rename it to serve raw values"
        )
    inputs.add(history.name, 2)
    return RawHistory(name=history.name, of=history.of, length=history.length)


def _column_of(feature: Numerical | Categorical | RowNumber) -> str | None:
    """Return the column that a feature is, None if it is an expression."""
    sql = feature.expression.strip()
    if not sql:
        return feature.name
    if not COLUMN.fullmatch(sql):
        return None
    return sql[1:-1].replace('""', '"') if sql[:1] == '"' else sql


def _values(state: FittedState, feature: str, gone: Sequence[int]) -> Iterator[list[str | None]]:
    """Yield the values of a vocabulary in the order of their ids, which `load_fitted` has checked; None for a retired one."""
    from dataloading.dataset.parquet_files import open_file

    first = 1
    columns = ["value", "retired"] if state.has_days(feature) else ["value"]
    with open_file(state.directory / vocabulary_name(feature)) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            values = batch["value"]
            if "retired" in columns:
                values = pc.if_else(batch["retired"], None, values)
            texts = values.to_pylist()
            if any(0 <= n - first < len(texts) and texts[n - first] is not None for n in gone):
                raise ValueError(
                    f"fitted={state.directory} has values of {shown(feature)} that serving.forget removed; remove them there too"
                )
            yield texts
            first += len(texts)
