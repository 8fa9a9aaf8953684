"""Description of a table dataset, the `table` section of its yaml: sources, columns, transformations, splits.

`TableConfig.of` reads it from plain yaml and rejects unknown keys. Column names are chosen by the user, so
Hydra's schema cannot list them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from configs.schema import is_file_name, require

FORMATS = ("csv", "tsv", "parquet")
SPLITS = ("fraction", "last_file", "random", "column")
# Transforms of numbers, applied in order; minmax and standardise take no argument.
TRANSFORMS = ("fill", "clip", "log", "minmax", "standardise")


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """One named relation.

    Attributes:
        files: a file, a glob or a list; their rows in that order.
        format: csv (quoted as in RFC 4180), tsv (never quoted) or parquet.
        header: whether the first line of each text file names the columns.
        columns: names of the columns of text files without a header line.
        delimiter: between the fields of a csv.
    """

    files: Any
    format: str = "csv"
    header: bool = True
    columns: list[str] = field(default_factory=list)
    delimiter: str = ","


@dataclass(kw_only=True, slots=True, frozen=True)
class Label:
    """The label: an SQL expression that is 0 or 1, true or false."""

    name: str = "label"
    expression: str = ""


@dataclass(kw_only=True, slots=True, frozen=True)
class Numerical:
    """One numerical feature.

    Attributes:
        name: of the feature.
        expression: SQL over the source's columns; by default the column called `name`.
        transforms: applied in order, each `{fill: 0}`, `{clip: [low, high]}`, `{log: shift}` for
            ln(x + shift), which is missing where that is not defined, `minmax` to [0, 1] or
            `standardise` to mean 0 and deviation 1, both fitted on training rows.
    """

    name: str
    expression: str = ""
    transforms: list[Any] = field(default_factory=lambda: [{"fill": 0}])


@dataclass(kw_only=True, slots=True, frozen=True)
class Categorical:
    """One categorical feature.

    Attributes:
        name: of the feature.
        expression: SQL over the source's columns; by default the column called `name`.
        cross: names of columns whose combined values are the value; instead of an expression.
        separator: separator of several values within one text.
        list: the value is a Parquet list of several values.
        hotness: ids per row of a list, the rest cut off or filled with id 0; null: ragged.
        frequency_limit: values seen less often get id 0; null: the run's `frequency_limit`.
        max_size: most values to keep, the most frequent first.
        buckets: hash values to ids from 1 to this number, without a vocabulary.
    """

    name: str
    expression: str = ""
    cross: list[str] = field(default_factory=list)
    separator: str = ""
    list: bool = False
    hotness: int | None = None
    frequency_limit: int | None = None
    max_size: int | None = None
    buckets: int | None = None

    @property
    def is_list(self) -> bool:
        """Return whether a row may hold several values."""
        return self.list or bool(self.separator)


@dataclass(kw_only=True, slots=True, frozen=True)
class SplitRule:
    """Division of the rows into splits.

    Attributes:
        by: fraction (the first rows train), last_file (its halves test and validate), random (by
            `seed`), or column.
        expression: with by=column, SQL that is 'train', 'test', 'validation', or null to leave out.
        train: part of the rows that train, with fraction and random; null: `train_fraction`.
        validation: part of the rows that validate, with random.
    """

    by: str = "fraction"
    expression: str = ""
    train: float | None = None
    validation: float = 0.0


@dataclass(kw_only=True, slots=True, frozen=True)
class TableConfig:
    """Description of a dataset made from tables.

    Attributes:
        sources: relations by name.
        query: SQL over the sources; by default all rows of the only source.
        order_by: expressions that order the rows of a query, which are unordered otherwise.
        label: the label.
        numerical: numerical features in channel order.
        categorical: categorical features in the model's order.
        split: division into splits.
    """

    sources: dict[str, Source]
    label: Label
    query: str = ""
    order_by: list[str] = field(default_factory=list)
    numerical: list[Numerical] = field(default_factory=list)
    categorical: list[Categorical] = field(default_factory=list)
    split: SplitRule = field(default_factory=SplitRule)

    @classmethod
    def of(cls, content: Any) -> "TableConfig":
        """Return the checked form of a `table` section; ValueError names the key that is wrong."""
        content = _mapping(content, "table", cls)
        sources = content.get("sources")
        require(
            isinstance(sources, Mapping) and bool(sources),
            f"table.sources: got {sources!r}, want a mapping from names to files",
        )
        parsed = cls(
            sources={
                str(name): _make(Source, source, f"table.sources.{name}")
                for name, source in sources.items()
            },
            query=content.get("query") or "",
            order_by=list(content.get("order_by") or []),
            label=_make(Label, content.get("label") or {}, "table.label"),
            numerical=[
                _make(Numerical, feature, f"table.numerical[{i}]")
                for i, feature in enumerate(content.get("numerical") or [])
            ],
            categorical=[
                _make(Categorical, feature, f"table.categorical[{i}]")
                for i, feature in enumerate(content.get("categorical") or [])
            ],
            split=_make(SplitRule, content.get("split") or {}, "table.split"),
        )
        parsed.check()
        return parsed

    def check(self) -> None:
        """Raise ValueError if settings contradict each other."""
        for name, source in self.sources.items():
            where = f"table.sources.{name}"
            known = f"{where}.format: got {source.format!r}, want one of {', '.join(FORMATS)}"
            require(source.format in FORMATS, known)
            unnamed = source.format != "parquet" and not source.header and not source.columns
            require(not unnamed, f"{where}: no header and no columns; set columns to their names")
        require(
            bool(self.query) or len(self.sources) == 1,
            f"table.query: {len(self.sources)} sources and no query; write one that joins them",
        )
        require(
            not self.query or bool(self.order_by),
            "table.order_by: the rows of a query have no order; set it to columns that give one",
        )
        names = [feature.name for feature in self.categorical]
        names += [feature.name for feature in self.numerical] + [self.label.name]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"table: feature {twice[:1]} is named twice")
        for name in names:
            require(
                is_file_name(name),
                f"table: feature {name!r} cannot name a file: no slash, no leading dot; set expression to the column",
            )
        require(bool(self.categorical), "table.categorical: none; want at least one")
        for numerical in self.numerical:
            for transform in numerical.transforms:
                _check_transform(f"table.numerical: {numerical.name}", transform)
        for categorical in self.categorical:
            _check_categorical(f"table.categorical: {categorical.name}", categorical)
        rule = self.split
        require(
            rule.by in SPLITS, f"table.split.by: got {rule.by!r}, want one of {', '.join(SPLITS)}"
        )
        require(
            rule.by != "column" or bool(rule.expression),
            "table.split: by column needs an expression that is 'train', 'test' or 'validation'",
        )
        require(
            rule.by != "last_file" or not self.query,
            "table.split: last_file needs rows that come from files, not from a query",
        )


def transform_of(transform: Any) -> tuple[str, Any]:
    """Return the name of a transform and its argument."""
    if isinstance(transform, Mapping):
        return next(iter(transform.items()))
    return transform, None


def _check_transform(where: str, transform: Any) -> None:
    single = not isinstance(transform, Mapping) or len(transform) == 1
    name, argument = transform_of(transform) if single else (None, None)
    require(
        name in TRANSFORMS,
        f"{where}: got transform {transform!r}, want one of {', '.join(TRANSFORMS)}",
    )
    numbers = argument if isinstance(argument, list) else [argument]
    count = {"fill": 1, "clip": 2, "log": 1}.get(str(name), 0)
    num_arguments = 0 if argument is None else len(numbers)
    good = num_arguments == count and all(isinstance(n, int | float) for n in numbers if count)
    require(good, f"{where}: transform {name} takes {count} numbers, got {argument!r}")


def _check_categorical(where: str, feature: Categorical) -> None:
    require(
        bool(feature.expression) + bool(feature.cross) < 2,
        f"{where}: an expression or a cross, not both",
    )
    require(
        not feature.cross or len(feature.cross) > 1, f"{where}: a cross needs two columns or more"
    )
    require(
        feature.hotness is None or (feature.is_list and feature.hotness > 0),
        f"{where}: hotness is positive, and for a list or separated text only; got {feature.hotness}",
    )
    for key in ("max_size", "buckets"):
        value = getattr(feature, key)
        require(value is None or value > 0, f"{where}: {key} must be positive, got {value}")
    vocabulary = feature.max_size is not None or feature.frequency_limit is not None
    require(
        feature.buckets is None or not vocabulary,
        f"{where}: buckets have no vocabulary; drop frequency_limit and max_size, or buckets",
    )


def _mapping(content: Any, where: str, kind: type) -> Mapping[str, Any]:
    require(isinstance(content, Mapping), f"{where}: got {content!r}, want a mapping")
    known = [declared.name for declared in fields(kind)]
    for key in content:
        require(key in known, f"{where}.{key}: no such key; want one of {', '.join(known)}")
    return content


def _make(kind: type, content: Any, where: str) -> Any:
    if isinstance(content, str) and kind in (Numerical, Categorical):
        content = {"name": content}
    content = _mapping(content, where, kind)
    try:
        return kind(**content)
    except TypeError as error:
        raise ValueError(f"{where}: {str(error).split('__init__() ')[-1]}") from None
