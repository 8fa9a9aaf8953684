"""Check of the description of raw values in a manifest, which may come from anybody."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from configs.messages import shown
from configs.table_schema import check_transform, is_number, num_fitted
from dataloading.row_sql import KIND, columns_of
from serving.raw_records import (
    RawCategorical,
    RawDescription,
    RawLists,
    RawNumber,
    RawRows,
    RawSequence,
)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a model that the features of raw values must fit."""

    features: Mapping[str, tuple[int, int | None]]  # cardinality, and hotness unless it is ragged
    keys: Collection[str]  # features that have raw keys
    files: Collection[str]
    groups: Mapping[str, Collection[str]]  # columns of the sequences that it reads, by name

    def check_group(self, where: str, name: str, made: list[str]) -> None:
        wanted = {*self.groups.get(name, made)}
        _require(wanted == {*made}, where, made, "the columns of the model's")


def check_raw(raw: RawDescription, numerical: list[str], model: ModelParts) -> None:
    """Raise ValueError unless a description makes the features of a model, with ids of their tables.

    Raises LookupError, TypeError, AttributeError: a name is unknown, or a value of another type.
    """
    names = [feature.name for feature in raw.categorical] + [of.name for of in raw.history]
    for sequence in raw.sequences:
        names += _check_events(sequence, model)
    _require(names == list(model.features), "categorical", names, "the features of the model")
    by_name = {feature.name: feature for feature in raw.categorical}
    read = {column for of in raw.lists for column in _check_lists(of, by_name, raw.columns, model)}
    made = {of.name for of in raw.sequences} | {of.name for of in raw.lists}
    _require(made >= {*model.groups}, "sequences", sorted(made), "all of the model")
    num_inputs = len(raw.columns) + sum(len(of.columns) for of in raw.sequences)
    _require(len(raw.inputs) == num_inputs, "columns", sorted(raw.columns), "names of no events")
    _check_rows(raw, numerical, read, model)


def _check_rows(
    raw: RawRows, numerical: list[str], read: set[str | None], model: ModelParts
) -> None:
    """Raise ValueError for wrong features of rows or events, of whose columns `read` are read by others."""
    columns = raw.columns
    if not all(name and type(size) is int and size in (1, 2) for name, size in columns.items()):
        raise ValueError(f"raw columns {shown(columns)}; want 1, or 2 of a list, by column")
    good = isinstance(raw.five, dict) and all(isinstance(text, str) for text in raw.five.values())
    _require(good, "five", raw.five, "texts by column")
    good = all(type(raw.is_text[name]) is bool for name in columns)
    _require(good, "is_text", raw.is_text, "true or false by column")
    good = all(
        isinstance(kind, str) and KIND.fullmatch(kind) and columns[name] == 1
        for name, kind in raw.types.items()
    )
    _require(good, "types", raw.types, "SQL types by column with one value")
    in_sql = {name.lower() for sql in raw.expressions.values() for name in columns_of(sql)}
    known = sorted(name.lower() for name in raw.types)
    _require(known == sorted(in_sql), "types", known, "the columns of expressions")
    used: set[str | None] = {*read, *raw.types}
    used |= {f.column for f in raw.numerical if _check_numerical(f, columns)}
    for feature in raw.categorical:
        used |= _check_categorical(feature, columns, model)
    by_name = {feature.name: feature for feature in raw.categorical}
    for history in raw.history:
        name, length = history.name, history.length
        where = f"history {shown(name)}"
        _require(columns[name] == 2, where, columns[name], "a list among the columns")
        wanted = "the hotness of the feature"
        _require(model.features[name][1] in (None, length), where, length, wanted)
        _check_ids(name, by_name[history.of], model)
        used.add(name)
    # In the order of `TableConfig.numerical_names`.
    names = [feature.name for feature in raw.numerical]
    names += [f"{feature.name}_length" for feature in raw.categorical if feature.length]
    names += [f"{history.name}_length" for history in raw.history]
    _require(names == numerical, "numerical", names, "the numerical features of the model")
    other = sorted(map(str, used ^ {*columns}))
    _require(not other, "columns", other, "the columns that features read, and no others")


def _check_events(of: RawSequence, model: ModelParts) -> list[str]:
    """Return the features of a sequence, whose events are rows of their own."""
    where, events = f"sequence {shown(of.name)}", of.events
    own = [feature.name for feature in events.categorical]
    hotness = [model.features[feature][1] for feature in own]
    _require(bool(own) and not any(hotness), where, hotness, "ragged features")
    _require(not events.history, where, events.history, "events without histories")
    numbers = [number.name for number in events.numerical]
    one_hot = {name: (model.features[name][0], 1) for name in own}
    _check_rows(events, numbers, set(), replace(model, features=one_hot))
    _require(len(events.times) == 1, where, events.times, "one time")
    model.check_group(where, of.name, [*own, *numbers, *events.times])
    return own


def _check_lists(
    of: RawLists,
    by_name: Mapping[str, RawCategorical],
    columns: Mapping[Any, int],
    model: ModelParts,
) -> list[str | None]:
    """Return the columns of the numbers of a group of lists."""
    where, own = f"lists {shown(of.name)}", of.features
    separators = [by_name[feature].separator for feature in own]
    good = bool(own) and separators == [of.separator] * len(own)
    _require(good, where, separators, "features of one separator")
    ragged = all(model.features[feature][1] is None for feature in own)
    _require(ragged, where, own, "ragged features")
    for number in of.numbers:
        size = columns[number.column]
        _require(size == 1 + (not of.separator), where, size, "numbers in the form of the ids")
    model.check_group(where, of.name, [*own, *(number.name for number in of.numbers)])
    return [number.column for number in of.numbers]


def _check_numerical(feature: RawNumber, columns: Mapping[Any, int]) -> bool:
    """Return whether a numerical feature is a column, not an expression."""
    where = f"numerical {shown(feature.name)}"
    for transform in feature.transforms:
        check_transform(where, transform, imports=False)
    wanted = [num_fitted(transform) for transform in feature.transforms]
    numbers = [number for entry in feature.fitted for number in entry]
    good = [len(entry) for entry in feature.fitted] == wanted and all(map(is_number, numbers))
    _require(good, f"{where}: fitted", feature.fitted, f"{wanted} finite numbers")
    column, is_sql = feature.column, bool(feature.expression)
    good = column is None if is_sql else columns[column] == 1
    _require(good, where, column, "a column with one value, or none beside an expression")
    return not is_sql


def _check_categorical(
    feature: RawCategorical, columns: Mapping[Any, int], model: ModelParts
) -> set[str | None]:
    """Return the columns that a feature reads beside those of an expression."""
    cross, separator, is_list = feature.cross, feature.separator, feature.list
    where, kinds = f"categorical {shown(feature.name)}", [cross, separator, is_list]
    _require(sum(map(bool, kinds)) < 2, where, kinds, "a cross, a separator or a list")
    hotness = model.features[feature.name][1]
    _require(bool(separator) or is_list or hotness == 1, where, hotness, "hotness 1 without a list")
    _check_ids(feature.name, feature, model)
    if feature.expression:
        good = feature.column is None and not (cross or is_list)
        _require(good, where, feature, "no column, cross or list beside an expression")
        return set()
    used: set[str | None] = {*cross} or {feature.column}
    for column in used:
        _require(columns[column] == 1 + is_list, where, column, "a column, or a list if it is one")
    return used


def _check_ids(name: str, feature: RawCategorical, model: ModelParts) -> None:
    """Raise ValueError if values of a feature may have ids beyond the table of feature `name`."""
    cardinality, _ = model.features[name]
    buckets, vocabulary = feature.buckets, feature.vocabulary
    where, wanted = f"categorical {shown(name)}", f"ids below its cardinality, {cardinality:,}"
    if feature.is_key:
        _require(name in model.keys, where, "raw keys", "a file of their rows")
        _require(buckets is None and vocabulary is None, where, [buckets, vocabulary], "keys alone")
        return
    if buckets is None:
        file, size = vocabulary
        _require(file in model.files, where, file, "a vocabulary among the files of the model")
    else:
        size = buckets
        _require(vocabulary is None, where, vocabulary, "buckets alone")
    good = type(size) is int and (buckets is not None) <= size < cardinality
    _require(good, where, size, wanted)


def _require(is_good: bool, where: str, got: object, wanted: str) -> None:
    if not is_good:
        raise ValueError(f"raw values: {where}: got {shown(got)}, want {wanted}")
