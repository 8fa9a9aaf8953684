"""Values of the columns of a request: texts, numbers, and what expressions make of them, by the rules of preprocessing."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from configs.messages import shown
from configs.table_schema import (
    NUMBER,
    arguments_of,
    numbers_of,
    texts_of_no_other_type,
    transform_of,
)
from configs.transforms import TRANSFORMS
from dataloading.row_sql import RowSql
from serving.inference.requests import refuse
from serving.raw_records import CONDITION, Key, RawCategorical, RawNumber, RawRows

FLOATS = re.compile("float|double|decimal")
"""Types whose values are sent as floating-point numbers too."""
WHOLE = re.compile(r"[+-]?[0-9]+")
SEPARATOR = "\x1f"
"""Separates the values of a cross."""
MOST_VALUES = 65_536
"""Values of one text that a separator parts."""
SMALLEST_OVERFLOW = {True: 65520.0, False: math.inf}
"""By whether numbers are stored as float16: beyond it the stored type has no number."""

# A column has a text or None per row; a list has several per row.
Texts = Sequence[str | None]


class RawColumns:
    """The columns of rows, or of events; values of `table.missing` are missing, as `TableConfig` says."""

    def __init__(self, raw: RawRows) -> None:
        self._raw = raw
        # Items of a list are not whole fields; those of a history were.
        whole = {name for name, dimensions in raw.columns.items() if dimensions == 1}
        whole |= {history.name for history in raw.history}
        missing = {
            True: frozenset(raw.missing),
            False: frozenset(texts_of_no_other_type(raw.missing)),
        }
        self._missing: dict[Key, frozenset[str]] = {
            name: missing[raw.is_text[name]] for name in whole
        }
        self._with_missing_numbers = {name for name in whole if raw.is_text[name]}
        self._missing_numbers = numbers_of(raw.missing)
        self._sql = None
        if raw.types:
            scalars = [CONDITION, *(feature.name for feature in raw.numerical)]
            self._sql = RowSql(raw.expressions, raw.types, scalars, raw.seconds)

    def with_expressions(self, inputs: dict[Key, Any]) -> dict[Key, Any]:
        """Return inputs with the values of expressions: texts, whole seconds, or numbers, where a missing one is NaN."""
        if self._sql is None:
            return inputs
        texts = [
            self._texts_of_type(name, kind, inputs[name]) for name, kind in self._raw.types.items()
        ]
        try:
            computed = self._sql.values(texts)
        except ValueError as error:
            refuse(str(error))
        return inputs | {
            (name,): values
            if name in self._raw.seconds or all(isinstance(value, str | None) for value in values)
            else np.array([math.nan if value is None else value for value in values])
            for name, values in computed.items()
        }

    def _texts_of_type(self, name: str, kind: str, values: Any) -> list[str | None]:
        """Return the values of a column that expressions read as texts, which SQL casts to the type that it had in the fit."""
        if not isinstance(values, list) and values.dtype.kind == "f" and FLOATS.match(kind):
            return [None if math.isnan(x) else repr(float(x)) for x in values.flat]
        texts = self.texts(name, values)
        for row, text in enumerate(texts):
            # A cast would round it.
            if text is not None and "int" in kind and not WHOLE.fullmatch(text):
                refuse(f"row {row}: {shown(name)} is {shown(text)}, wanted a whole number")
        return texts

    def texts(self, key: Key, values: Any) -> list[str | None]:
        """Return the texts of an input, None of a missing value. Raises InputError: it has numbers that are none in the fit."""
        if isinstance(values, list):
            missing = self._missing.get(key, frozenset())
            return [None if not text or text in missing else text for text in values]
        if values.dtype.kind not in "iub":
            refuse(f"column {shown(key)} has floating-point numbers; send it as integers or BYTES")
        five = self._raw.five.get(key, "5") if isinstance(key, str) else "5"
        if five != "5":
            refuse(
                f"column {shown(key)} had numbers with a point in the fit, where 5 is the text {shown(five)}; send such texts"
            )
        is_missing = self._are_missing(key, values)
        return [
            None if missing else _text_of(number)
            for number, missing in zip(values.flat, is_missing.flat, strict=True)
        ]

    def values(self, feature: RawCategorical, inputs: Mapping[Key, Any]) -> Texts:
        """Return the values of a feature, or the items of its lists, one after another."""
        if not feature.cross:
            return self.texts(feature.key, inputs[feature.key])
        columns = [self.texts(name, inputs[name]) for name in feature.cross]
        return [
            None if None in values else SEPARATOR.join(values)
            for values in zip(*columns, strict=True)
        ]

    def numbers(self, feature: RawNumber, inputs: Mapping[Key, Any]) -> np.ndarray:
        """Return the stored numbers of a numerical feature, float32 [B]."""
        key, values = feature.key, inputs[feature.key]
        if isinstance(values, list):
            texts = self.texts(key, values)
            numbers = [number_of(feature.name, row, text) for row, text in enumerate(texts)]
        else:
            is_infinite = np.isinf(values)
            if is_infinite.any():
                row = int(is_infinite.argmax())
                refuse(f"row {row}: {shown(feature.name)} is infinite, wanted a number")
            is_missing = (values != values) | self._are_missing(key, values)
            numbers = [
                None if missing else float(number)
                for number, missing in zip(values.flat, is_missing.flat, strict=True)
            ]
        for transform, fitted in zip(feature.transforms, feature.fitted, strict=True):
            python = TRANSFORMS[transform_of(transform)[0]].python
            assert python is not None, "descriptions are checked when they are read"
            numbers = python(numbers, *map(float, arguments_of(transform, fitted)))
        with np.errstate(over="ignore"):
            stored = np.array([0.0 if x is None else x for x in numbers]).astype(np.float32)
        is_float16 = self._raw.float16
        bad = ~(np.abs(stored) < SMALLEST_OVERFLOW[is_float16])
        if bad.any():
            row, column = int(bad.argmax()), feature.column or feature.name
            refuse(
                f"column {shown(column)}, row {row}: {shown(feature.name)} is {stored[row]} after its "
                "transforms, more than the model has seen"
            )
        return stored.astype(np.float16).astype(np.float32) if is_float16 else stored

    def _are_missing(self, key: Key, values: np.ndarray) -> np.ndarray:
        """Return which numbers of an input are missing: floats by their value, integers by their text."""
        if key not in self._with_missing_numbers or not self._missing_numbers:
            return np.zeros(values.shape, bool)
        if values.dtype.kind == "f":
            with np.errstate(over="ignore"):
                return np.isin(values, np.array(self._missing_numbers).astype(values.dtype))
        texts = [_text_of(number) in self._missing[key] for number in values.flat]
        return np.array(texts, bool).reshape(values.shape)


def _text_of(number: np.integer | np.bool_) -> str:
    """Return the text of an integer, or of a boolean as SQL has it: true, false."""
    return str(number).lower()


def number_of(name: str, row: int, text: str | None) -> float | None:
    """Return the number of a text of a column, None if it is missing or NaN."""
    if text is None:
        return None
    if NUMBER.fullmatch(text):
        number = float(text)
        if math.isfinite(number):
            return number
    if text.strip().lower() not in ("nan", "+nan", "-nan"):
        refuse(f"row {row}: {shown(name)} is {shown(text)}, wanted a number")
    return None


def split(text: str, separator: str) -> list[str | None]:
    """Return the items of a text, None of an empty one. Raises InputError: there are too many."""
    # Before a short request becomes gigabytes of Python objects.
    if text.count(separator) > MOST_VALUES:
        refuse(f"a text has {text.count(separator) + 1:,} values; want at most {MOST_VALUES:,}")
    return [value or None for value in text.split(separator)]


def without_end(values: Sequence[str | None]) -> list[str | None]:
    """Return a list without the missing values at its end, which fill a tensor."""
    last = max((number for number, value in enumerate(values, 1) if value is not None), default=0)
    return [*values[:last]]
