"""Check of the description of raw values in a manifest, which may come from anybody.

`serving.exporting.raw_values` writes it, and `serving.inference.raw_values` follows it without further checks.
"""

from collections.abc import Collection, Mapping
from typing import Any

from configs.messages import shown
from configs.table_schema import EMPTY_ITEMS, TAKE, check_transform, is_number, num_fitted
from dataloading.row_sql import KIND, columns_of

FILTER = "filter"
"""Key of the condition that a line is an event."""
CONDITION = "filter/"
"""Name of its value beside those of features, which have no slash."""


def inputs_of(raw: Mapping[str, Any]) -> dict[str, int]:
    """Return the inputs of raw values, 1 or 2 of a list; the columns of a sequence's events begin with its name."""
    events = {
        f"{of['name']}_{n}": 2 for of in raw.get("sequences", []) for n in of["events"]["columns"]
    }
    return {**raw["columns"], **events}


def expressions_of(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the SQL of features, of times and moments, and of the condition of events."""
    features = [f for f in (*raw["numerical"], *raw["categorical"]) if f.get("expression")]
    condition = {CONDITION: raw[FILTER]} if raw.get(FILTER) else {}
    return {f["name"]: f["expression"] for f in features} | times_of(raw) | condition


def times_of(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the SQL of the time of events, or of the moments of rows by sequence."""
    return raw.get("times", {}) | {of["name"]: of["moment"] for of in raw.get("sequences", [])}


def check_raw(
    raw: Mapping[str, Any],
    numerical: list[str],
    features: Mapping[str, tuple[int, int | None]],
    keys: Mapping[str, Any],
    files: Collection[str],
    groups: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Raise ValueError unless a description makes the features of a model, with ids of their tables.

    `keys`: those that have raw keys. `groups`: columns of the sequences that the model reads, by name. Raises ValueError: it does
    not. Raises LookupError, TypeError, AttributeError: it lacks a part, or has one of another type.
    """
    columns: Mapping[str, Any] = raw["columns"]
    if not all(name and type(size) is int and size in (1, 2) for name, size in columns.items()):
        raise ValueError(f"raw columns {shown(columns)}; want 1, or 2 of a list, by column")
    _require(type(raw["float16"]) is bool, "float16", raw["float16"], "true or false")
    missing = raw["missing"]
    is_texts = isinstance(missing, list) and all(isinstance(text, str) for text in missing)
    _require(is_texts, "missing", missing, "a list of texts")
    _check_columns(raw, columns)
    used = _check_expressions(raw, columns)
    used |= {f["column"] for f in raw["numerical"] if _check_numerical(f, columns)}
    by_name = {}
    for feature in raw["categorical"]:
        by_name[feature["name"]] = feature
        used |= _check_categorical(feature, columns, features, keys, files)
    for history in raw["history"]:
        name, of = history["name"], by_name[history["of"]]
        where = f"history {shown(name)}"
        _require(columns[name] == 2, where, columns[name], "a list among the columns")
        length = history["length"]
        _require(features[name][1] in (None, length), where, length, "the hotness of the feature")
        _require(type(length) is int and length > 0, where, length, "a positive length")
        _check_ids(of | {"name": name}, features[name][0], keys, files)
        used.add(name)
    names = [feature["name"] for feature in [*raw["categorical"], *raw["history"]]]
    sequences = raw.get("sequences", [])
    for of in sequences:
        names += _check_events(of, features, keys, files, groups or {})
    lists = raw.get("lists", [])
    for of in lists:
        used |= _check_lists(of, by_name, columns, features, groups or {})
    made = {of["name"] for of in (*sequences, *lists)}
    _require(made >= set(groups or {}), "sequences", sorted(made), "all of the model")
    num_inputs = len(columns) + sum(len(of["events"]["columns"]) for of in sequences)
    _require(len(inputs_of(raw)) == num_inputs, "columns", sorted(columns), "names of no events")
    _require(names == list(features), "categorical", names, "the features of the model")
    # In the order of `TableConfig.numerical_names`.
    names = [feature["name"] for feature in raw["numerical"]]
    names += [f"{name}_length" for name, feature in by_name.items() if feature.get("length")]
    names += [f"{history['name']}_length" for history in raw["history"]]
    _require(names == numerical, "numerical", names, "the numerical features of the model")
    other = sorted(used ^ set(columns))
    _require(not other, "columns", other, "the columns that features read, and no others")


def _check_events(
    of: Mapping[str, Any],
    features: Mapping[str, tuple[int, int | None]],
    keys: Mapping[str, Any],
    files: Collection[str],
    groups: Mapping[str, Collection[str]],
) -> list[str]:
    """Return the features of a sequence, whose events are rows of their own."""
    name, length, events = of["name"], of["length"], of["events"]
    where = f"sequence {shown(name)}"
    _require(not events.get("sequences"), where, events, "events without sequences of their own")
    _require(type(length) is int and length > 0, where, length, "a positive length")
    own = [feature["name"] for feature in events["categorical"]]
    hotness = [features[feature][1] for feature in own]
    _require(bool(own) and not any(hotness), where, hotness, "ragged features")
    numbers = [number["name"] for number in events["numerical"]]
    check_raw(
        {**events, "sequences": []}, numbers, {n: (features[n][0], 1) for n in own}, keys, files
    )
    made = [*own, *numbers, *events["times"]]
    _require(len(events["times"]) == 1, where, events["times"], "one time")
    _require(set(groups.get(name, made)) == set(made), where, made, "the columns of the model's")
    return own


def _check_lists(
    of: Mapping[str, Any],
    by_name: Mapping[str, Any],
    columns: Mapping[str, int],
    features: Mapping[str, tuple[int, int | None]],
    groups: Mapping[str, Collection[str]],
) -> set[str]:
    """Return the columns of the numbers of a group of lists."""
    name, length, separator = of["name"], of["length"], of["separator"]
    where = f"lists {shown(name)}"
    _require(type(length) is int and length > 0, where, length, "a positive length")
    own = of["features"]
    parts = [by_name[feature]["separator"] for feature in own]
    good = bool(own) and parts == [separator] * len(own)
    _require(good, where, parts, "features of one separator")
    ragged = all(features[feature][1] is None for feature in own)
    _require(ragged, where, own, "ragged features")
    for number in of["numbers"]:
        size = columns[number["column"]]
        _require(size == 1 + (not separator), where, size, "numbers in the form of the ids")
    made = [*own, *(number["name"] for number in of["numbers"])]
    _require(set(groups.get(name, made)) == set(made), where, made, "the columns of the model's")
    return {number["column"] for number in of["numbers"]}


def _check_columns(raw: Mapping[str, Any], columns: Mapping[str, int]) -> None:
    """Raise ValueError for wrong facts on the fit; models of 0.1.0 lack the first two."""
    empty = raw.get("empty_items", EMPTY_ITEMS[0])
    _require(empty in EMPTY_ITEMS, "empty_items", empty, f"one of {', '.join(EMPTY_ITEMS)}")
    five = raw.get("five", {})
    good = isinstance(five, dict) and all(isinstance(text, str) for text in five.values())
    _require(good, "five", five, "texts by column")
    were_text = raw["is_text"]
    good = all(type(were_text[name]) is bool for name in columns)
    _require(good, "is_text", were_text, "true or false by column")


def _check_expressions(raw: Mapping[str, Any], columns: Mapping[str, int]) -> set[str]:
    """Return the columns that expressions read."""
    types = raw.get("types", {})
    good = all(
        isinstance(kind, str) and KIND.fullmatch(kind) and columns[name] == 1
        for name, kind in types.items()
    )
    _require(good, "types", types, "SQL types by column with one value")
    read = [name.lower() for sql in expressions_of(raw).values() for name in columns_of(sql)]
    known = sorted(name.lower() for name in types)
    _require(known == sorted(set(read)), "types", known, "the columns of expressions")
    return set(types)


def _check_numerical(feature: Mapping[str, Any], columns: Mapping[str, int]) -> bool:
    """Return whether a numerical feature is a column, not an expression."""
    where = f"numerical {shown(feature['name'])}"
    transforms, fitted = feature["transforms"], feature["fitted"]
    for transform in transforms:
        check_transform(where, transform, imports=False)
    wanted = [num_fitted(transform) for transform in transforms]
    numbers = [number for entry in fitted for number in entry]
    good = [len(entry) for entry in fitted] == wanted and all(map(is_number, numbers))
    _require(good, f"{where}: fitted", fitted, f"{wanted} finite numbers")
    column = feature["column"]
    is_sql = bool(feature.get("expression"))
    good = column is None if is_sql else columns[column] == 1
    _require(good, where, column, "a column with one value, or none beside an expression")
    return not is_sql


def _check_categorical(
    feature: Mapping[str, Any],
    columns: Mapping[str, int],
    features: Mapping[str, tuple[int, int | None]],
    keys: Mapping[str, Any],
    files: Collection[str],
) -> set[str]:
    name, cross, separator = feature["name"], feature["cross"], feature["separator"] or ""
    where, is_list = f"categorical {shown(name)}", feature["list"]
    cardinality, hotness = features[name]
    good = type(is_list) is bool and isinstance(separator, str) and isinstance(cross, list)
    _require(good, where, [cross, separator, is_list], "cross, separator and list of one kind")
    kinds = bool(cross) + bool(separator) + is_list
    _require(kinds < 2, where, [cross, separator, is_list], "a cross, a separator or a list")
    _require(bool(separator) or is_list or hotness == 1, where, hotness, "hotness 1 without a list")
    take, has_length = feature.get("take", TAKE[0]), feature.get("length", False)
    _require(take in TAKE, f"{where}: take", take, f"one of {', '.join(TAKE)}")
    _require(type(has_length) is bool, f"{where}: length", has_length, "true or false")
    _check_ids(feature, cardinality, keys, files)
    used = set(cross or [feature["column"]])
    if feature.get("expression"):
        good = feature["column"] is None and not (cross or is_list)
        _require(good, where, feature, "no column, cross or list beside an expression")
        used = set()
    for column in used:
        _require(columns[column] == 1 + is_list, where, column, "a column, or a list if it is one")
    return used


def _check_ids(
    feature: Mapping[str, Any],
    cardinality: int,
    keys: Mapping[str, Any],
    files: Collection[str],
) -> None:
    """Raise ValueError if values of a feature may have ids beyond its table."""
    name, buckets, vocabulary = feature["name"], feature["buckets"], feature["vocabulary"]
    where, wanted = f"categorical {shown(name)}", f"ids below its cardinality, {cardinality:,}"
    if feature.get("is_key"):
        _require(name in keys, where, "raw keys", "a file of their rows")
        _require(buckets is None and vocabulary is None, where, [buckets, vocabulary], "keys alone")
        return
    if buckets is None:
        file, size = vocabulary
        _require(file in files, where, file, "a vocabulary among the files of the model")
    else:
        size = buckets
        _require(vocabulary is None, where, vocabulary, "buckets alone")
    good = type(size) is int and (buckets is not None) <= size < cardinality
    _require(good, where, size, wanted)


def _require(is_good: bool, where: str, got: object, wanted: str) -> None:
    if not is_good:
        raise ValueError(f"raw values: {where}: got {shown(got)}, want {wanted}")
