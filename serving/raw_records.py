"""Records of how raw values become the features of a model, the part `raw` of a manifest.

`serving.exporting.raw_values` makes them. `serving.raw_description` checks those of a manifest, which may come from anybody, and
`serving.inference` follows them without further checks.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field
from typing import Any, Self

from configs.table_schema import (
    EMPTY_ITEMS,
    MOST_HISTORY,
    MOST_HOTNESS,
    TAKE,
    one_of,
    record_of,
    records,
    whole,
)

CONDITION = "filter/"
"""Name of the value of `RawRows.filter` beside those of features, which have no slash."""
OPTIONAL: dict[str, Any] = {
    "expression": "",
    "types": {},
    "times": {},
    "filter": None,
    "sequences": [],
    "lists": [],
}
"""Values that are left out of a manifest, as they were before there were any."""
# The name of a column, or that of a feature whose values no column has: a tuple.
Key = str | tuple[str]


@dataclass(kw_only=True, slots=True, frozen=True)
class RawFeature:
    """A feature or a number of events: the values of a column, or of an expression."""

    name: str
    column: str | None  # None of an expression or a cross
    expression: str = ""

    @property
    def key(self) -> Key:
        return (self.name,) if self.column is None else self.column


@dataclass(kw_only=True, slots=True, frozen=True)
class RawNumber(RawFeature):
    transforms: list[Any]
    fitted: list[list[float]]  # numbers of each transform


@dataclass(kw_only=True, slots=True, frozen=True)
class RawCategorical(RawFeature):
    """A categorical feature, whose ids are of a vocabulary, of buckets, or rows of raw keys."""

    cross: list[str]  # columns
    separator: str = ""
    list: bool
    # Models of 0.1.0 have neither of these two.
    take: str = one_of(TAKE[0], *TAKE)
    length: bool = False
    buckets: int | None = None
    is_key: bool = False
    vocabulary: Any = None  # its file and its number of values


@dataclass(kw_only=True, slots=True, frozen=True)
class RawHistory:
    """The last values of the feature `of`, in a list of the history's name."""

    name: str
    of: str
    length: int = whole(1, MOST_HISTORY)


@dataclass(kw_only=True, slots=True, frozen=True)
class RawRows:
    """The features of rows; or of events, which are rows of their own."""

    columns: dict[str, int]  # 1, or 2 of a list
    missing: list[str]  # texts
    # A model of 0.1.0 does not say, and takes them so.
    empty_items: str = one_of(EMPTY_ITEMS[1], *EMPTY_ITEMS)
    is_text: dict[str, bool]  # by column and history, in the fit
    five: dict[str, str] = field(default_factory=dict)  # text of the number 5 in the fit, by column
    float16: bool
    numerical: list[RawNumber] = records(RawNumber)
    categorical: list[RawCategorical] = records(RawCategorical)
    history: list[RawHistory] = records(RawHistory)
    types: dict[str, str] = field(default_factory=dict)  # of SQL, of columns of expressions
    times: dict[str, str] = field(default_factory=dict)  # SQL of the time of events, by its name
    filter: str | None = None  # SQL of the condition that a row is an event

    @property
    def seconds(self) -> dict[str, str]:
        return self.times

    @property
    def expressions(self) -> dict[str, str]:
        """Return the SQL of features, of seconds, and of the condition of events."""
        sql = {f.name: f.expression for f in (*self.numerical, *self.categorical) if f.expression}
        return sql | self.seconds | ({CONDITION: self.filter} if self.filter else {})


@dataclass(kw_only=True, slots=True, frozen=True)
class RawSequence:
    """A sequence group whose events are rows."""

    name: str
    length: int = whole(1, MOST_HOTNESS)
    moment: str  # SQL of the moment of a row
    events: RawRows = field(metadata={"record": RawRows})

    @property
    def columns(self) -> dict[str, str]:
        """Return the inputs that have the columns of the events."""
        return {column: f"{self.name}_{column}" for column in self.events.columns}


@dataclass(kw_only=True, slots=True, frozen=True)
class RawLists:
    """A sequence group of lists: ragged features with a separator, or none of lists, and numbers in the same form."""

    name: str
    length: int = whole(1, MOST_HOTNESS)
    features: list[str]
    separator: str
    numbers: list[RawFeature] = records(RawFeature)


@dataclass(kw_only=True, slots=True, frozen=True)
class RawDescription(RawRows):
    sequences: list[RawSequence] = records(RawSequence)
    lists: list[RawLists] = records(RawLists)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Return the records of JSON. Raises ValueError: a part is missing, unknown, or of another type."""
        return record_of(cls, raw, "raw values")

    def as_json(self) -> dict[str, Any]:
        return asdict(self, dict_factory=_written)

    @property
    def inputs(self) -> dict[str, int]:
        """Return the inputs of raw values, 1 or 2 of a list; the columns of a sequence's events begin with its name."""
        return self.columns | {name: 2 for of in self.sequences for name in of.columns.values()}

    @property
    def by_feature(self) -> dict[str, RawCategorical]:
        """Return what makes ids of values, by feature; a history has that of its feature."""
        rows = [self, *(of.events for of in self.sequences)]
        found = {feature.name: feature for each in rows for feature in each.categorical}
        return found | {history.name: found[history.of] for history in self.history}

    @property
    def seconds(self) -> dict[str, str]:
        """Return the SQL of the moments of rows, by sequence."""
        return {of.name: of.moment for of in self.sequences}


def _written(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value != OPTIONAL.get(name, MISSING)}
