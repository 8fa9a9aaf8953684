"""Raw values of a request to rows, by the fit of the dataset that the model was trained on.

It computes what `preproc.table.expressions` computes in SQL, without a database:
`tests/serving/inference/test_raw_values.py` compares both. A value that preprocessing would refuse as a bad row is refused
here too; unseen and missing values have id 0. What a column was in the fit decides what is missing in it, not the datatype of
a request.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from configs.messages import shown
from configs.table_schema import (
    NUMBER,
    arguments_of,
    numbers_of,
    texts_of_no_other_type,
    transform_of,
)
from configs.transforms import TRANSFORMS
from dataloading.dataset.sequences import ages_of, seen_events
from dataloading.row_sql import RowSql
from serving.inference.key_rows import KeyRows, load_key_rows
from serving.inference.model_rows import RaggedIds, Rows
from serving.inference.requests import InputError, keep_rates
from serving.manifest import Manifest, ModelError
from serving.raw_description import CONDITION, FILTER, expressions_of, inputs_of, times_of
from serving.vocabulary import Vocabulary

FLOATS = re.compile("float|double|decimal")
"""Types whose values are sent as floating-point numbers too."""
WHOLE = re.compile(r"[+-]?[0-9]+")
NOT_A_NUMBER = ("nan", "+nan", "-nan")
SEPARATOR = "\x1f"
"""Separates the values of a cross."""
MOST_VALUES = 65_536
"""Values of one text that a separator parts."""
SMALLEST_OVERFLOW = {True: 65520.0, False: math.inf}
"""By whether numbers are stored as float16: beyond it the stored type has no number."""

# A column has a text or None per row; a list has several per row.
Texts = Sequence[str | None]


class RawValues:
    def __init__(
        self,
        description: Mapping[str, Any],
        manifest: Manifest,
        vocabularies: Mapping[str, Vocabulary],
        keys: Mapping[str, KeyRows] | None = None,
    ) -> None:
        self._manifest = manifest
        self._columns: dict[str, int] = description["columns"]
        self._inputs = inputs_of(description)
        # Events are rows of their own.
        self._sequences = [
            (of, RawValues(of["events"], manifest, vocabularies, keys))
            for of in description.get("sequences", [])
        ]
        self._lists: list[dict[str, Any]] = description.get("lists", [])
        self._groups = {of.name: of.group for of in manifest.sequences}
        self._numerical: list[dict[str, Any]] = description["numerical"]
        self._categorical: list[dict[str, Any]] = description["categorical"]
        self._histories: list[dict[str, Any]] = description["history"]
        self._is_float16: bool = description["float16"]
        self._missing = _MissingValues(description)
        # Where a model of an earlier version does not say, empty items of lists have id 0.
        self._drops_empty = description.get("empty_items") == "dropped"
        self._keeps_empty = {name for of in self._lists for name in of["features"]}
        # The text of the number 5 in the fit, by column.
        self._five: Mapping[str, str] = {**description.get("five", {})}
        self._vocabularies = vocabularies
        self._keys = keys or {}
        self._optional = {manifest.keep_rate} if manifest.keep_rate else set()
        self._hotness = {feature.name: feature.hotness for feature in manifest.categorical}
        self._by_name = {feature["name"]: feature for feature in self._categorical}
        self._types: Mapping[str, str] = description.get("types", {})
        self._times, self._filters = times_of(description), bool(description.get(FILTER))
        if self._types:
            self._sql = RowSql(
                expressions_of(description),
                self._types,
                [CONDITION, *(feature["name"] for feature in self._numerical)],
                self._times,
            )

    @classmethod
    def load(cls, directory: Path, manifest: Manifest) -> Self:
        """Map the vocabularies of a model directory, whose description `Manifest.read` has checked.

        Raises ModelError: the description is malformed, or a vocabulary is damaged.
        """
        description = manifest.raw or {}
        try:
            vocabularies = {}
            of_events = [of["events"]["categorical"] for of in description.get("sequences", [])]
            for feature in chain(description["categorical"], *of_events):
                if feature["vocabulary"] is not None:
                    file, size = feature["vocabulary"]
                    if file not in vocabularies:
                        vocabularies[file] = Vocabulary(directory / file, size)
            return cls(description, manifest, vocabularies, load_key_rows(directory, manifest))
        except ModelError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OSError) as error:
            raise ModelError(f"{directory}: raw values are malformed: {shown(error)}") from None

    def describe_inputs(self) -> list[dict[str, Any]]:
        """Return the inputs of raw values, as metadata lists them."""
        return [
            {"name": name, "datatype": "BYTES", "shape": [-1] * dimensions}
            for name, dimensions in self._inputs.items()
        ]

    def rows(
        self, inputs: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], num_rows: int
    ) -> Rows:
        """Return the features of raw values.

        `inputs`: by column: texts, None where one is missing, or an array of numbers. `shapes`: of the inputs: [B], or [B,
        L] of lists. B is `num_rows`. Raises InputError: a column is missing or unknown, or a value is none that
        preprocessing accepts.
        """
        for name in set(self._inputs) - set(inputs):
            _refuse(f"there is no column {shown(name)}; want {', '.join(self._inputs)}")
        for name in set(inputs) - set(self._inputs) - self._optional:
            _refuse(
                f"there is no column {shown(name)} in the model; want {', '.join(self._inputs)}"
            )
        for name, dimensions in self._inputs.items():
            shape = shapes[name]
            if dimensions == 1 and shape not in ((num_rows,), (num_rows, 1)):
                _refuse(f"column {shown(name)} has shape {list(shape)}; want {[num_rows]}")
            if dimensions == 2 and len(shape) != 2:
                _refuse(f"list {shown(name)} has shape {list(shape)}; want [{num_rows}, values]")
        inputs = {**inputs, **self._computed(inputs)}
        ids: dict[str, Any] = {}  # int64 [B * hotness], or `RaggedIds`
        numbers_of_events: dict[str, RaggedIds] = {}
        for of, events in self._sequences:
            ids_of_events, found = events._events(of, inputs, shapes)
            ids |= ids_of_events
            numbers_of_events |= found
        lengths = []
        for feature in self._categorical:
            ids[feature["name"]], counts = self._ids(feature, inputs, shapes, num_rows)
            if feature.get("length"):
                lengths.append(counts)
        for history in self._histories:
            name = history["name"]
            ids[name], counts = self._history(history, inputs[name], shapes[name], num_rows)
            lengths.append(counts)
        for of in self._lists:
            numbers_of_events |= self._numbers_of_lists(of, inputs, shapes, ids)
        numbers = [self._numbers(feature, inputs[_input(feature)]) for feature in self._numerical]
        stacked = np.zeros((num_rows, 0), np.float32)
        if numbers or lengths:
            stacked = np.stack([*numbers, *lengths], axis=1).astype(np.float32)
        rates = {name: np.asarray(inputs[name]) for name in self._optional & set(inputs)}
        fixed = [ids[feature.name].view(num_rows, -1) for feature in self._manifest.fixed]
        return Rows(
            torch.from_numpy(stacked),
            torch.cat(fixed, dim=1) if fixed else torch.zeros(num_rows, 0).long(),
            {feature.name: ids[feature.name] for feature in self._manifest.ragged},
            keep_rates(self._manifest, rates, num_rows),
            numbers_of_events,
        )

    def _events(
        self,
        of: Mapping[str, Any],
        inputs: Mapping[Any, Any],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[dict[str, RaggedIds], dict[str, RaggedIds]]:
        """Return the ids by feature, and the numbers, of the events that rows see of those in `inputs`, by the rules of a log.

        An event has a time, a value of the first feature, and a filter that is true; others, and what fills the lists, are none.
        """
        first, *others = (f"{of['name']}_{column}" for column in self._columns)
        for name in others:
            if shapes[name] != shapes[first]:
                _refuse(
                    f"list {shown(name)} has shape {list(shapes[name])}, and {shown(first)} {list(shapes[first])}; want an item "
                    "per event in each"
                )
        flat: dict[Any, Any] = {
            name: values if isinstance(values, list) else values.reshape(-1)
            for name in self._columns
            for values in [inputs[f"{of['name']}_{name}"]]
        }
        try:
            flat |= self._computed(flat)
            texts = {f["name"]: self._scalars(f, flat) for f in self._categorical}
            numbers = {f["name"]: self._numbers(f, flat[_input(f)]) for f in self._numerical}
        except InputError as error:
            _refuse(f"events of {shown(of['name'])}, counted over all rows: {error}")
        (time,) = self._times
        every, values = flat[(time,)], texts[self._categorical[0]["name"]]
        events = np.array(
            [
                event
                for event, (at, value) in enumerate(zip(every, values, strict=True))
                if None not in (at, value) and (not self._filters or flat[(CONDITION,)][event] == 1)
            ],
            np.int64,
        )
        times = np.array([every[event] for event in events], np.int64)
        never = np.iinfo(np.int64).min
        moments = np.array([never if at is None else at for at in inputs[(of["name"],)]], np.int64)
        rows = events // max(shapes[first][1], 1)
        seen, lengths = seen_events(rows, times, moments, of["length"])
        found = {name: of_events[events[seen]] for name, of_events in numbers.items()}
        found[time] = ages_of(times[seen], moments, lengths).astype(np.float32)
        ids = {
            f["name"]: self._encode(f, [texts[f["name"]][event] for event in events[seen]])
            for f in self._categorical
        }
        counts = torch.from_numpy(lengths)

        def ragged(columns: Mapping[str, np.ndarray]) -> dict[str, RaggedIds]:
            return {n: RaggedIds(torch.from_numpy(v), counts) for n, v in columns.items()}

        return ragged(ids), ragged(found)

    def _numbers_of_lists(
        self,
        of: Mapping[str, Any],
        inputs: Mapping[Any, Any],
        shapes: Mapping[str, tuple[int, ...]],
        ids: dict[str, Any],
    ) -> dict[str, RaggedIds]:
        """Return the numbers of a group of lists; of these and of its features in `ids`, the last ones that a row sees."""
        first, *others = of["features"]
        counts = ids[first].lengths.numpy()

        def require_counts(name: str, own: Sequence[int]) -> None:
            for row, (got, wanted) in enumerate(zip(own, counts.tolist(), strict=True)):
                if got != wanted:
                    _refuse(
                        f"row {row}: {shown(name)} has {got} items, and {shown(first)} {wanted}; want equally many"
                    )

        for name in others:
            require_counts(name, ids[name].lengths.tolist())
        ends = counts.cumsum()
        seen = np.arange(counts.sum()) >= np.repeat(ends - of["length"], counts)
        lengths = np.minimum(counts, of["length"])
        for name in of["features"]:
            ids[name] = RaggedIds(
                ids[name].values[torch.from_numpy(seen)], torch.from_numpy(lengths)
            )
        found = {}
        for number in of["numbers"]:
            rows = self._number_lists(number, of["separator"], inputs, shapes, counts)
            require_counts(number["name"], [*map(len, rows)])
            with np.errstate(over="ignore"):
                values = np.array([x for row in rows for x in row], np.float32)[seen]
            if (group := self._groups.get(of["name"])) is not None:
                (column,) = (column for column in group.numbers if column.name == number["name"])
                try:
                    group.checked(column, values, lengths, None, lambda row: f"row {row}")
                except ValueError as error:
                    _refuse(str(error))
            found[number["name"]] = RaggedIds(torch.from_numpy(values), torch.from_numpy(lengths))
        return found

    def _number_lists(
        self,
        number: Mapping[str, Any],
        separator: str,
        inputs: Mapping[Any, Any],
        shapes: Mapping[str, tuple[int, ...]],
        counts: np.ndarray,
    ) -> list[list[float]]:
        """Return a list of numbers per row; what fills a tensor behind the items, missing or 0, is none."""
        name, column = number["name"], number["column"]
        values, rows = inputs[column], list[Sequence[float | None]]()
        if separator:
            parted = [_split(text or "", separator) for text in self._texts(column, values)]
            parted = [[] if items == [None] else items for items in parted]
            rows = [[_number(name, r, x) for x in items] for r, items in enumerate(parted)]
        else:
            width = shapes[column][1]
            if isinstance(values, list):
                given = [_number(name, n // width, x or None) for n, x in enumerate(values)]
                values = np.array([math.nan if x is None else x for x in given])
            matrix = values.reshape(len(counts), width)
            for items, count in zip(matrix, counts.tolist(), strict=True):
                behind = items[count:]
                if len(items) < count or ((behind != 0) & (behind == behind)).any():
                    rows.append(range(width))  # of another length, which is refused
                else:
                    rows.append([None if x != x else x for x in items[:count].tolist()])
        for row, items in enumerate(rows):
            if None in items:
                _refuse(f"row {row}: {shown(name)} lacks the number of an item")
        return [[x for x in items if x is not None] for items in rows]

    def _computed(self, inputs: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the values of expressions: texts, whole seconds, or numbers, where a missing one is NaN."""
        if not self._types:
            return {}
        texts = [
            self._texts_of_type(name, kind, inputs[name]) for name, kind in self._types.items()
        ]
        try:
            values = self._sql.values(texts)
        except ValueError as error:
            _refuse(str(error))
        return {
            (name,): found
            if name in self._times or all(isinstance(value, str | None) for value in found)
            else np.array([math.nan if value is None else value for value in found])
            for name, found in values.items()
        }

    def _texts_of_type(self, name: str, kind: str, values: Any) -> list[str | None]:
        """Return the values of a column that expressions read as texts, which SQL casts to the type that it had in the fit."""
        if not isinstance(values, list) and values.dtype.kind == "f" and FLOATS.match(kind):
            return [None if math.isnan(x) else repr(float(x)) for x in values.flat]
        texts = self._texts(name, values)
        for row, text in enumerate(texts):
            # A cast would round it.
            if text is not None and "int" in kind and not WHOLE.fullmatch(text):
                _refuse(f"row {row}: {shown(name)} is {shown(text)}, wanted a whole number")
        return texts

    def _numbers(self, feature: Mapping[str, Any], values: Any) -> np.ndarray:
        """Return the stored numbers of a numerical feature, float32 [B]."""
        if isinstance(values, list):
            texts = self._texts(_input(feature), values)
            numbers = [_number(feature["name"], row, text) for row, text in enumerate(texts)]
        else:
            is_infinite = np.isinf(values)
            if is_infinite.any():
                row = int(is_infinite.argmax())
                _refuse(f"row {row}: {shown(feature['name'])} is infinite, wanted a number")
            is_missing = (values != values) | self._missing.of_numbers(feature["column"], values)
            numbers = [
                None if missing else float(number)
                for number, missing in zip(values.flat, is_missing.flat, strict=True)
            ]
        for transform, fitted in zip(feature["transforms"], feature["fitted"], strict=True):
            python = TRANSFORMS[transform_of(transform)[0]].python
            assert python is not None, "descriptions are checked when they are read"
            numbers = python(numbers, *map(float, arguments_of(transform, fitted)))
        with np.errstate(over="ignore"):
            stored = np.array([0.0 if x is None else x for x in numbers]).astype(np.float32)
        most = SMALLEST_OVERFLOW[self._is_float16]
        bad = ~(np.abs(stored) < most)
        if bad.any():
            row, column = int(bad.argmax()), feature["column"] or feature["name"]
            _refuse(
                f"column {shown(column)}, row {row}: {shown(feature['name'])} is {stored[row]} after its "
                "transforms, more than the model has seen"
            )
        return stored.astype(np.float16).astype(np.float32) if self._is_float16 else stored

    def _texts(self, name: str, values: Any) -> list[str | None]:
        if isinstance(values, list):
            missing = self._missing.of_texts(name)
            return [None if not text or text in missing else text for text in values]
        if values.dtype.kind not in "iub":
            _refuse(
                f"column {shown(name)} has floating-point numbers; send it as integers or BYTES"
            )
        five = self._five.get(name, "5")
        if five != "5":
            _refuse(
                f"column {shown(name)} had numbers with a point in the fit, where 5 is the text {shown(five)}; send such texts"
            )
        is_missing = self._missing.of_numbers(name, values)
        return [
            None if missing else _text_of(number)
            for number, missing in zip(values.flat, is_missing.flat, strict=True)
        ]

    def _ids(
        self,
        feature: Mapping[str, Any],
        inputs: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        num_rows: int,
    ) -> tuple[Tensor | RaggedIds, np.ndarray]:
        """Return the ids of a feature, and how many of its items every row keeps, float32 [B]."""
        texts = self._scalars(feature, inputs)
        if not feature["separator"] and not feature["list"]:
            return torch.from_numpy(self._encode(feature, texts)), np.ones(num_rows, np.float32)
        lists: list[list[str | None]]
        if feature["separator"]:
            lists = [[] if text is None else _split(text, feature["separator"]) for text in texts]
        else:
            width = shapes[feature["column"]][1]
            lists = [without_end(texts[row * width : (row + 1) * width]) for row in range(num_rows)]
        if self._drops_empty and feature["name"] not in self._keeps_empty:
            lists = [[value for value in values if value is not None] for values in lists]
        return self._several(feature, lists)

    def _scalars(self, feature: Mapping[str, Any], inputs: Mapping[Any, Any]) -> Texts:
        if not feature["cross"]:
            return self._texts(_input(feature), inputs[_input(feature)])
        columns = [self._texts(name, inputs[name]) for name in feature["cross"]]
        return [
            None if None in values else SEPARATOR.join(values)
            for values in zip(*columns, strict=True)
        ]

    def _several(
        self, feature: Mapping[str, Any], lists: list[list[str | None]]
    ) -> tuple[Tensor | RaggedIds, np.ndarray]:
        """Return the ids of lists, cut or filled with id 0 to fixed hotness, or ragged; and their items, float32 [B]."""
        hotness = self._hotness[feature["name"]]
        if hotness is not None:
            kept = slice(-hotness, None) if feature.get("take") == "last" else slice(hotness)
            lists = [values[kept] for values in lists]
        lengths = [len(values) for values in lists]
        if hotness is not None:
            lists = [[*values, *[None] * (hotness - len(values))] for values in lists]
        ids = torch.from_numpy(
            self._encode(feature, [value for values in lists for value in values])
        )
        counts = np.array(lengths, np.float32)
        return (ids if hotness is not None else RaggedIds(ids, torch.tensor(lengths))), counts

    def _history(
        self, history: Mapping[str, Any], values: Any, shape: tuple[int, ...], num_rows: int
    ) -> tuple[Tensor | RaggedIds, np.ndarray]:
        """Return the ids of the last values, the most recent first, and their number, float32 [B]."""
        texts, width = self._texts(history["name"], values), shape[1]
        rows = (texts[row * width : (row + 1) * width] for row in range(num_rows))
        present = ([value for value in values if value is not None] for values in rows)
        lists: list[list[str | None]] = [[*values[: history["length"]]] for values in present]
        of = self._by_name[history["of"]] | {"name": history["name"]}
        return self._several(of | {"take": "first"}, lists)

    def _encode(self, feature: Mapping[str, Any], texts: Texts) -> np.ndarray:
        if feature.get("is_key"):
            keys = np.array([0 if text is None else key_of(text) for text in texts], np.int64)
            return self._keys[feature["name"]].rows(keys)
        if feature["buckets"]:
            buckets = feature["buckets"]
            hashed = [0 if text is None else _bucket(text, buckets) for text in texts]
            return np.array(hashed, np.int64)
        return self._vocabularies[feature["vocabulary"][0]].ids(texts)


class _MissingValues:
    """Values of the inputs that are missing by `table.missing`, as `TableConfig` says."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        texts: list[str] = description["missing"]
        columns: Mapping[str, int] = description["columns"]
        histories = {history["name"] for history in description["history"]}
        is_text: Mapping[str, bool] = description["is_text"]
        # Items of a list are not whole fields; those of a history were.
        lists = {name for name, size in columns.items() if size > 1} - histories
        chosen = {True: frozenset(texts), False: frozenset(texts_of_no_other_type(texts))}
        self._texts = {
            name: frozenset() if name in lists else chosen[is_text[name]] for name in columns
        }
        self._of_numbers = {name for name in columns if is_text[name]} - lists
        self._numbers = numbers_of(texts)

    def of_texts(self, name: str) -> frozenset[str]:
        return self._texts.get(name, frozenset())

    def of_numbers(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return which numbers of an input are missing: floats by their value, integers by their text."""
        if name not in self._of_numbers or not self._numbers:
            return np.zeros(values.shape, bool)
        if values.dtype.kind == "f":
            with np.errstate(over="ignore"):
                return np.isin(values, np.array(self._numbers).astype(values.dtype))
        texts = [_text_of(number) in self._texts[name] for number in values.flat]
        return np.array(texts, bool).reshape(values.shape)


def _text_of(number: np.integer | np.bool_) -> str:
    """Return the text of an integer, or of a boolean as SQL has it: true, false."""
    return str(number).lower()


def _number(name: str, row: int, text: str | None) -> float | None:
    """Return the number of a text of a column, None if it is missing or NaN."""
    if text is None:
        return None
    if NUMBER.fullmatch(text):
        number = float(text)
        if math.isfinite(number):
            return number
    if text.strip().lower() not in NOT_A_NUMBER:
        _refuse(f"row {row}: {shown(name)} is {shown(text)}, wanted a number")
    return None


def _input(feature: Mapping[str, Any]) -> Any:
    """Return the key of the values of a feature: its column, or else its name, which no column has as a tuple."""
    return (feature["name"],) if feature["column"] is None else feature["column"]


def _split(text: str, separator: str) -> list[str | None]:
    # Before a short request becomes gigabytes of Python objects.
    if text.count(separator) > MOST_VALUES:
        raise InputError(
            f"a text has {text.count(separator) + 1:,} values; want at most {MOST_VALUES:,}"
        )
    return [value or None for value in text.split(separator)]


def without_end(values: Sequence[str | None]) -> list[str | None]:
    """Return a list without the missing values at its end, which fill a tensor."""
    last = max((number for number, value in enumerate(values, 1) if value is not None), default=0)
    return [*values[:last]]


def _bucket(text: str, buckets: int) -> int:
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:15], 16) % buckets + 1


def key_of(text: str) -> int:
    """Return the key of a value, as `preproc.table.expressions.key` does."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    key = int.from_bytes(digest[:8], "big", signed=True)
    return key if key not in (0, -1) else 1


def _refuse(message: str) -> NoReturn:
    raise InputError(message)
