"""Description of a table dataset, the `table` section of its yaml: sources, columns, transformations, splits.

`TableConfig.of` reads it from plain yaml and rejects unknown keys. Hydra's schema cannot list the user's columns.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from types import NoneType
from typing import Any, get_args, get_origin

from configs.messages import printable, shortened, shown
from configs.options import is_file_name, is_import_path, refuse, require
from configs.transforms import TRANSFORMS, is_served, transform_named

LINE_FORMATS = ("jsonl", "libsvm", "libffm")
"""Formats of text whose lines name their values (`preproc/table/line_formats.py`)."""
FORMATS = ("csv", "tsv", "parquet", *LINE_FORMATS)
SPLITS = ("fraction", "last_file", "random", "column")
# Ids are stored in at most 32 bits, and id 0 is taken.
MOST_IDS = 2**31 - 2
MOST_ROWS = 2**63 - 1
MOST_HOTNESS = 1 << 20
# The length of a history is a numerical feature, and float16 holds every whole number up to this one.
MOST_HISTORY = 2048
HISTORY_ROWS = ("all", "train")
TAKE = ("first", "last")
EMPTY_ITEMS = ("dropped", "unknown")
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
"""Texts that are finite numbers, or too large for one."""
# Numbers, dates and times, with the sign, the separators and the zone of them.
DIGITS = re.compile(r"[-+.,:/\s\deETZ]*\d[-+.,:/\s\deETZ]*", re.ASCII)
VALUES_IN_WORDS = ("true", "false", "inf", "infinity")
# A feature names files such as NAME.offsets.bin, and file systems allow 255 bytes.
MOST_NAME_BYTES = 200


# Fields of text, lists of texts and flags are checked by their types; these say what else a value may be.


def one_of(default: Any, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


def whole(least: int, most: int, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"least": least, "most": most})


def records(kind: type) -> Any:
    """Declare a list of records, each of which is described by a mapping, or by its name alone if it needs no more."""
    return field(default_factory=list, metadata={"of": kind})


@dataclass(kw_only=True, slots=True, frozen=True)
class Source:
    """One named relation; the rows of its files (a file, a glob or a list) in their order.

    Attributes:
        format: csv (quoted as in RFC 4180), tsv (never quoted), parquet, jsonl, libsvm or libffm; null: parquet if the
            files are Parquet, csv otherwise.
        header: whether the first line of each text file names the columns; null: where `columns` does not name them.
        columns: names of the columns of text files, in place of those of a header line; of `LINE_FORMATS` those to read, in
            place of all that the lines name.
    """

    files: Any
    format: str | None = one_of(None, *FORMATS)
    header: bool | None = None
    columns: list[str] = field(default_factory=list)
    delimiter: str = ","

    @property
    def has_header(self) -> bool:
        """Return whether the first line of each text file is no row."""
        return not self.columns if self.header is None else self.header


@dataclass(kw_only=True, slots=True, frozen=True)
class Label:
    """A label: SQL over the source's columns, by default the column called `name`.

    `kind` is binary (0 or 1, true or false) or regression (any finite number, stored as float32).
    """

    name: str = "label"
    expression: str = ""
    kind: str = one_of("binary", "binary", "regression")


@dataclass(kw_only=True, slots=True, frozen=True)
class RowNumber:
    """A number per row that is no feature, its weight or its keep rate: SQL, by default the column called `name`."""

    name: str
    expression: str = ""


@dataclass(kw_only=True, slots=True, frozen=True)
class Numerical:
    """One numerical feature: SQL over the source's columns, by default the column called `name`.

    Transforms are applied in order, each `{fill: 0}`, `{clip: [low, high]}` (`-.inf` or `.inf`: no bound), `{log: shift}` for
    ln(x + shift), which is missing where that is not defined, `minmax` to [0, 1] or `standardise` to mean 0 and deviation 1,
    both fitted on training rows; or `package.module:NAME` of a `configs.transforms.Transform`, with its arguments.
    """

    name: str
    expression: str = ""
    transforms: list[Any] = field(default_factory=lambda: [{"fill": 0}])


@dataclass(kw_only=True, slots=True, frozen=True)
class Categorical:
    """One categorical feature: SQL over the source's columns, by default the column called `name`.

    Attributes:
        cross: names of columns whose combined values are the value; instead of an expression.
        separator: separator of several values within one text.
        list: the value is a Parquet list of several values.
        hotness: ids per row of a list: longer ones are cut, shorter ones end with id 0; null: ragged.
        take: the items that a longer list keeps, the `first` or the `last` ones, in their order.
        length: whether the numerical feature `<name>_length` is the number of items that a row keeps.
        frequency_limit: values seen less often get id 0; null: the run's `frequency_limit`.
        max_size: most values to keep, the most frequent first.
        buckets: hash values to ids from 1 to this number, without a vocabulary.
        vocabulary: `dynamic` keeps 64-bit keys, hashes of the values, to which training gives rows of the table.
        capacity: with `dynamic`, rows of the table.
        vocabulary_of: name of a feature whose vocabulary, or buckets, it shares: a value has one id in both, its counts
            in both are added up, and the features share a table. The other feature has the limits.
    """

    name: str
    expression: str = ""
    cross: list[str] = field(default_factory=list)
    separator: str = ""
    list: bool = False
    hotness: int | None = whole(1, MOST_HOTNESS, None)
    take: str = one_of("first", *TAKE)
    length: bool = False
    frequency_limit: int | None = whole(0, MOST_ROWS, None)
    max_size: int | None = whole(1, MOST_ROWS, None)
    buckets: int | None = whole(1, MOST_IDS, None)
    vocabulary: str | None = one_of(None, "dynamic")
    capacity: int | None = whole(2, MOST_IDS, None)
    vocabulary_of: str | None = None

    @property
    def is_list(self) -> bool:
        """Return whether a row may hold several values."""
        return self.list or bool(self.separator)

    @property
    def length_name(self) -> str:
        return f"{self.name}_length"

    @property
    def is_dynamic(self) -> bool:
        """Return whether its values become keys."""
        return self.vocabulary is not None

    @property
    def is_hashed(self) -> bool:
        """Return whether its values become hashes: there is no file of its vocabulary."""
        return self.buckets is not None or self.is_dynamic


@dataclass(kw_only=True, slots=True, frozen=True)
class History:
    """The last values of a categorical feature in earlier rows of the same user, a categorical feature itself.

    It has the ids and the table of that feature, the most recent value first, and id 0 after the last value. The number of
    values is the numerical feature `<name>_length`.

    Attributes:
        of: name of the categorical feature whose values it holds, which is no list.
        by: SQL of the user; a row sees rows of equal users only.
        order_by: SQL of the time, a number, a date or a timestamp; a row sees rows of smaller times only.
        length: values per row, the latest ones.
        filter: SQL; rows for which it is not true are in no history. By default all rows are.
        rows: all, or train: values of training rows only.
    """

    name: str
    of: str
    by: str
    order_by: str
    length: int = whole(1, MOST_HISTORY)
    filter: str = ""
    rows: str = one_of("all", *HISTORY_ROWS)

    @property
    def length_name(self) -> str:
        return f"{self.name}_length"


@dataclass(kw_only=True, slots=True, frozen=True)
class EventLog:
    """A sequence group made of a log: a row sees the events of its user before its moment, oldest first.

    Features `<name>_<of>` have the ids and the tables of the features `of`; numbers are `<name>_<number>` and `<name>_time`.
    An event is a row with a user, a time and a value of the first feature of `of`, whose filter is true.

    Attributes:
        of: categorical features with one value per row.
        by, order_by: SQL of the user and of the time, as of `History`; times count in whole seconds, rounded down.
        length: events that a row sees, the latest ones.
        numbers: columns, or `{name, expression}`; a missing number is 0.
        filter, rows: as of `History`.
        source: another source that has the events; its columns are those that the SQL here and of the features `of` names.
    """

    name: str
    of: list[str]
    by: str
    order_by: str
    length: int = whole(1, MOST_HOTNESS)
    numbers: list[RowNumber] = records(RowNumber)
    filter: str = ""
    rows: str = one_of("all", *HISTORY_ROWS)
    source: str = ""

    @property
    def features(self) -> list[str]:
        return [f"{self.name}_{name}" for name in self.of]

    @property
    def time_name(self) -> str:
        return f"{self.name}_time"

    @property
    def number_names(self) -> list[str]:
        return [*(f"{self.name}_{number.name}" for number in self.numbers), self.time_name]


@dataclass(kw_only=True, slots=True, frozen=True)
class EventLists:
    """A sequence group of lists that a row has, oldest event first: equally many items of each.

    Attributes:
        lists: categorical features that are ragged lists; an empty item is an event with id 0.
        length: events that a row sees, the last ones.
        numbers: columns with lists, of Parquet or of a text with the separator of the features; or `{name, expression}`.
        time, order_by: the number that is the time of an event, and SQL of the moment of the row, both in whole seconds.
    """

    name: str
    lists: list[str]
    length: int = whole(1, MOST_HOTNESS)
    numbers: list[RowNumber] = records(RowNumber)
    time: str = ""
    order_by: str = ""

    @property
    def features(self) -> list[str]:
        return self.lists

    @property
    def time_name(self) -> str | None:
        return self.time or None

    @property
    def number_names(self) -> list[str]:
        return [number.name for number in self.numbers]

    def columns(self, number: int) -> dict[str, tuple[str, str]]:
        """Return key and SQL of the columns of rows that group `number` of `event_lists` needs, by their names."""
        named = {f"moment{number}_": ("order_by", self.order_by)} if self.time else {}
        return named | {
            f"numbers{number}_{j}_": (f"numbers: {shown(n.name)}", n.expression or quoted(n.name))
            for j, n in enumerate(self.numbers)
        }


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

    by: str = one_of("fraction", *SPLITS)
    expression: str = ""
    train: float | None = None
    validation: float = 0.0

    @property
    def unused(self) -> list[str]:
        """Return the keys that are set and that `by` does not read."""
        reads = {"fraction": ["train"], "random": ["train", "validation"], "column": ["expression"]}
        is_set = {key for key in ("train", "validation", "expression") if getattr(self, key)}
        return sorted(is_set.difference(reads.get(self.by, [])))

    @property
    def needs_file(self) -> bool:
        """Return whether it divides the rows by the files that they are from."""
        return self.by == "last_file" or re.search(r"\bfile_\b", self.expression) is not None


@dataclass(kw_only=True, slots=True, frozen=True)
class TableConfig:
    """Description of a dataset made from tables.

    Attributes:
        query: SQL over the sources; by default all rows of the only source.
        order_by: expressions that order the rows of a query, which are unordered otherwise.
        missing: texts that are missing values when they are all of a field, such as NA, in every column of text. Later rows
            are treated as those of the fit, by what a column was there: where it was text, an integer is missing if its text
            is, and a float if one of the texts reads as it (`numbers_of`). Where it was none, a text is missing if no value
            of another type has it (`texts_of_no_other_type`).
        history: histories of categorical features, which follow these in the model's order.
        sequence: sequence groups, whose features follow these.
        keep_rate: the rate at which negatives such as a row were kept.
        teacher: scores of other models, from 0 to 1, from which a model may learn (`tasks.LABEL.teacher`).
        keep: columns of the source, or of the query, that the dataset keeps beside its rows as they stand.
        empty_items: what an empty item of a list is, as of 'a||b': dropped, or `unknown`, id 0, as in fits of earlier versions.
            Later rows are treated as those of the fit.
    """

    sources: dict[str, Source]
    label: list[Label]
    query: str = ""
    order_by: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    numerical: list[Numerical] = records(Numerical)
    categorical: list[Categorical] = records(Categorical)
    history: list[History] = records(History)
    sequence: list[EventLog | EventLists] = field(default_factory=list)
    split: SplitRule = field(default_factory=SplitRule)
    weight: RowNumber | None = None
    keep_rate: RowNumber | None = None
    teacher: list[RowNumber] = records(RowNumber)
    keep: list[str] = field(default_factory=list)
    empty_items: str = one_of("dropped", *EMPTY_ITEMS)

    @property
    def row_numbers(self) -> dict[str, tuple[str, Label | RowNumber]]:
        """Labels, weight, keep rate and teachers by the names of their columns in SQL, with their keys in the description."""
        named: dict[str, tuple[str, Label | RowNumber]] = {
            f"label{i or ''}_": ("label", label) for i, label in enumerate(self.label)
        }
        for key in ("weight", "keep_rate"):
            if (number := getattr(self, key)) is not None:
                named[f"{key}_"] = (key, number)
        return named | {f"teacher{i}_": ("teacher", of) for i, of in enumerate(self.teacher)}

    def without(self, absent: Collection[str]) -> "TableConfig":
        """Return the description of rows without the columns `absent` of `row_numbers`, if all teachers or labels are."""
        keys = {name: key for name, (key, _) in self.row_numbers.items()}
        has_teacher = any(key == "teacher" and n not in absent for n, key in keys.items())
        of_rows = self if has_teacher else replace(self, teacher=[])
        if any(key == "label" and name not in absent for name, key in keys.items()):
            return of_rows
        return replace(
            of_rows,
            label=[],
            weight=None if "weight_" in absent else self.weight,
            keep_rate=None if "keep_rate_" in absent else self.keep_rate,
        )

    @classmethod
    def of(cls, content: Any) -> "TableConfig":
        """Return the checked form of a `table` section; ValueError names the key that is wrong."""
        require(
            content is not None,
            "table is missing: describe the columns of the files by table={sources: ..., label: ..., ...}, or by a yaml with "
            "dataset=NAME; mode=extend and mode=transform want the description of the fit, with the new files",
        )
        content = dict(_mapping(content, "table", cls))
        sources, label = content.get("sources"), content.get("label") or {}
        require(
            isinstance(sources, Mapping) and bool(sources),
            f"table.sources: got {shown(sources)}, want a mapping from names to files",
        )
        content["sources"] = {
            str(name): record_of(Source, source, f"table.sources.{name}")
            for name, source in sources.items()
        }
        if isinstance(content.get("order_by"), str):
            content["order_by"] = [content["order_by"]]
        content["label"] = (
            _list_of(Label, label, "table.label")
            if isinstance(label, list)
            else [record_of(Label, label, "table.label")]
        )
        groups = content.get("sequence") or []
        _check_list("table.sequence", groups)
        content["sequence"] = [_sequence(of, f"table.sequence[{i}]") for i, of in enumerate(groups)]
        for key, kind in (("weight", RowNumber), ("keep_rate", RowNumber), ("split", SplitRule)):
            content[key] = (
                record_of(kind, content[key], f"table.{key}") if content.get(key) else None
            )
        parsed = record_of(cls, content, "table")
        parsed.check()
        if parsed.query or not parsed.order_by:
            return parsed
        # Equal rows of a source stay as they are in its files.
        (name,) = parsed.sources
        order_by = [*parsed.order_by, "file_", "order_"]
        return replace(parsed, query=f"SELECT * FROM {quoted(name)}", order_by=order_by)

    @property
    def numerical_names(self) -> list[str]:
        """Return the names of all numerical features in channel order, the lengths of lists and of histories last."""
        names = [feature.name for feature in self.numerical]
        names += [feature.length_name for feature in self.categorical if feature.length]
        return names + [history.length_name for history in self.history]

    @property
    def pasts(self) -> list[History | EventLog]:
        return [*self.history, *self.logs]

    @property
    def logs(self) -> list[EventLog]:
        return [group for group in self.sequence if isinstance(group, EventLog)]

    @property
    def event_lists(self) -> list[EventLists]:
        return [group for group in self.sequence if isinstance(group, EventLists)]

    def drops_empty(self, feature: str) -> bool:
        """Return whether the empty items of a list are left out."""
        return self.empty_items == "dropped" and not any(
            feature in group.lists for group in self.event_lists
        )

    def past_columns(self, number: int) -> dict[str, tuple[str, str]]:
        """Return key and SQL of the columns of rows that number `number` of `pasts` needs, by their names."""
        past = self.pasts[number]
        named = {f"who{number}_": ("by", past.by), f"time{number}_": ("order_by", past.order_by)}
        if isinstance(past, EventLog) and past.source:
            return named
        if past.filter:
            named[f"past{number}_"] = ("filter", past.filter)
        for j, item in enumerate(past.numbers if isinstance(past, EventLog) else []):
            sql = item.expression or quoted(item.name)
            named[f"event{number}_{j}_"] = (f"numbers: {shown(item.name)}", sql)
        return named

    def check(self) -> None:
        lowered = [name.lower() for name in self.keep]
        twice = [name for name in self.keep if lowered.count(name.lower()) > 1 or not name]
        require(
            not twice,
            f"table.keep: got {shown(twice[-1:])} twice or without a name (SQL ignores case); name every column once",
        )
        for name, source in self.sources.items():
            _check_source(f"table.sources.{name}", source)
        refuse(
            len(self.sources) != 1 and not self.query,
            f"table.query: {len(self.sources)} sources and no query; write one that joins them",
        )
        refuse(
            self.query and not self.order_by,
            "table.order_by: the rows of a query have no order; set it to columns that give one",
        )
        require(bool(self.categorical), "table.categorical: none; want at least one")
        for numerical in self.numerical:
            for transform in numerical.transforms:
                check_transform(f"table.numerical: {shown(numerical.name)}", transform)
        for categorical in self.categorical:
            _check_categorical(f"table.categorical: {shown(categorical.name)}", categorical)
        self._check_names()
        self._check_vocabularies()
        for history in self.history:
            where = f"table.history: {shown(history.name)}"
            self._check_of(where, history.of)
            _check_past(where, history)
        for log in self.logs:
            self._check_log(f"table.sequence: {shown(log.name)}", log)
        for lists in self.event_lists:
            self._check_lists(f"table.sequence: {shown(lists.name)}", lists)
        _check_split(self.split)

    def _check_names(self) -> None:
        """Raise ValueError for names of features that cannot name the dataset's files, or the same one."""
        named = [(feature.name, "a categorical feature") for feature in self.categorical]
        named += [(history.name, "a history") for history in self.history]
        for group in self.sequence:
            named.append((group.name, "a sequence"))
            if isinstance(group, EventLog):
                named += [(name, f"a feature of {shown(group.name)}") for name in group.features]
            for name in group.number_names:
                kind = "the time of an event" if name == group.time_name else "a number"
                named.append((name, f"{kind} of {shown(group.name)}"))
        named += [(name, "a numerical feature") for name in self.numerical_names]
        named += [(number.name, f"a {key}") for key, number in self.row_numbers.values()]
        for name, _ in named:
            require(
                is_file_name(name),
                f"table: feature {shown(name)} cannot name a file: no slash, no leading dot; set expression to the column",
            )
            require(
                len(name.encode()) <= MOST_NAME_BYTES,
                f"table: feature {shown(name)} has a name of over {MOST_NAME_BYTES} bytes; shorten it, and "
                "set expression to the column",
            )
        uses: dict[str, list[str]] = {}
        for name, what in named:
            uses.setdefault(name, []).append(what)
        for name, users in uses.items():
            require(
                len(users) == 1,
                f"table: {shown(name)} is named twice: {' and '.join(users)}; rename one, and set expression to its column",
            )
        taken = {"label": "the labels"} if len(self.label) == 1 else {}
        if self.numerical_names:
            taken["numerical"] = "the numericals"
        for categorical in self.categorical:
            if categorical.is_list and categorical.hotness is None:
                taken[f"{categorical.name}.offsets"] = f"the offsets of {shown(categorical.name)}"
        row_numbers = list(self.row_numbers.values())[len(self.label) == 1 :]
        for key, column in (
            *(("categorical", categorical) for categorical in self.categorical),
            *row_numbers,
            *(("history", history) for history in self.history),
        ):
            require(
                column.name not in taken,
                f"table.{key}: {shown(column.name)} would share a file with {taken.get(column.name)}; rename it"
                + ", and set expression to the column" * (key != "history"),
            )

    def _check_vocabularies(self) -> None:
        """Raise ValueError for a feature that shares the vocabulary of no feature, or of one that has none itself."""
        by_name = {feature.name: feature for feature in self.categorical}
        for feature in self.categorical:
            if feature.vocabulary_of is None:
                continue
            where = f"table.categorical: {shown(feature.name)}: vocabulary_of"
            other = by_name.get(feature.vocabulary_of)
            require(
                other is not None and other is not feature,
                f"{where}: got {shown(feature.vocabulary_of)}, want another categorical feature, one of "
                f"{', '.join(shown(name) for name in by_name if name != feature.name)}",
            )
            assert other is not None
            require(
                other.vocabulary_of is None,
                f"{where}: {shown(other.name)} shares the vocabulary of {shown(other.vocabulary_of)}; name that one",
            )
            for key in ("frequency_limit", "max_size", "buckets", "vocabulary", "capacity"):
                require(
                    getattr(feature, key) is None,
                    f"{where}: got {key} too; set it at {shown(other.name)}, which has the vocabulary",
                )

    def _check_log(self, where: str, log: EventLog) -> None:
        """Raise ValueError for a log of other than categorical features, or settings that contradict each other."""
        for of in log.of:
            self._check_of(where, of)
        require(
            log.source in ("", *self.sources),
            f"{where}: got source {shown(log.source)}, want one of {', '.join(map(shown, self.sources))}",
        )
        refuse(
            log.source and log.rows != "all",
            f"{where}: rows: train is for events that are rows of the dataset; drop it, or source",
        )
        _check_past(where, log)

    def _check_lists(self, where: str, group: EventLists) -> None:
        """Raise ValueError for a group of other than ragged lists, or settings that contradict each other."""
        ragged = {f.name: f for f in self.categorical if f.is_list and f.hotness is None}
        several = [name for other in self.event_lists for name in other.lists]
        for name in group.lists:
            require(
                name in ragged and several.count(name) == 1,
                f"{where}: lists: got {shown(name)}, want a list feature without hotness that is in no other group, one of "
                f"{', '.join(map(shown, ragged)) or 'none here'}",
            )
        require(
            group.time in ("", *group.number_names),
            f"{where}: got time {shown(group.time)}, want one of the numbers",
        )
        require(
            bool(group.time) == bool(group.order_by),
            f"{where}: time, of an event, and order_by, the moment of a row, belong together; set both, or none",
        )

    def _check_of(self, where: str, of: str) -> None:
        scalars = [feature.name for feature in self.categorical if not feature.is_list]
        kinds = {feature.name: "a list" for feature in self.categorical}
        kinds |= {feature.name: "a numerical feature" for feature in self.numerical}
        kinds |= {other.name: "a history" for other in self.history}
        require(
            of in scalars,
            f"{where}: of: got {shown(of)}, which is {kinds.get(of, 'no feature')}; want a categorical feature with "
            f"one value per row, one of {', '.join(map(shown, scalars)) or 'none here'}",
        )


def _check_past(where: str, past: History | EventLog) -> None:
    for key in ("by", "order_by"):
        value = getattr(past, key)
        require(bool(value), f"{where}: {key}: got {shown(value)}, want SQL, such as a column")


def transform_of(transform: Any) -> tuple[str, Any]:
    if isinstance(transform, Mapping):
        return next(iter(transform.items()))
    return transform, None


def arguments_of(transform: Any, fitted: Sequence[float]) -> list[float]:
    """Return the numbers that the functions of a transform take: of the description, or the two that are fitted."""
    _, argument = transform_of(transform)
    if fitted:
        smallest, size = fitted
        return [smallest, size or 1.0]
    return argument if isinstance(argument, list) else [] if argument is None else [argument]


def num_fitted(transform: Any) -> int:
    """Return how many numbers are fitted for a transform: 2 or 0."""
    return 2 * (transform_named(transform_of(transform)[0]).fits is not None)


def numbers_of(missing: Iterable[str]) -> list[float]:
    numbers = [float(text) for text in missing if NUMBER.fullmatch(text)]
    return [number for number in numbers if math.isfinite(number)]


def texts_of_no_other_type(missing: Iterable[str]) -> list[str]:
    """Return the texts that no number, date, time or truth value has, such as NA: a column of these cannot have held them."""
    return [
        text
        for text in missing
        if not DIGITS.fullmatch(text) and text.strip().lower().lstrip("+-") not in VALUES_IN_WORDS
    ]


def _check_source(where: str, source: Source) -> None:
    files = source.files
    is_list = isinstance(files, list) and bool(files)
    require(
        all(isinstance(path, str) and path for path in (files if is_list else [files])),
        f"{where}.files: got {shown(files)}, want a file, a glob or a list of them (source=... sets "
        "what a description takes from ${source})",
    )
    lowered = [name.lower() for name in source.columns]
    twice = [name for name in source.columns if lowered.count(name.lower()) > 1]
    require(
        not twice,
        f"{where}.columns: two columns are called {shown(twice[-1:])}, and SQL ignores case; rename one",
    )
    delimiter = source.delimiter
    require(
        1 <= len(delimiter.encode()) <= 4 and not {"\n", "\r", '"', "\0"} & set(delimiter),
        f"{where}.delimiter: got {shown(delimiter)}, want a character such as ';', no quote and no line end",
    )
    unnamed = source.format != "parquet" and not source.has_header and not source.columns
    require(not unnamed, f"{where}: no header and no columns; set columns to their names")


def _check_split(split: SplitRule) -> None:
    refuse(
        split.by == "column" and not split.expression,
        "table.split: by column needs an expression that is 'train', 'test' or 'validation'",
    )
    require(
        split.train is None or (is_number(split.train) and 0 < split.train <= 1),
        f"table.split.train: got {shown(split.train)}, want a fraction between 0 and 1",
    )
    require(
        is_number(split.validation) and 0 <= split.validation < 1,
        f"table.split.validation: got {shown(split.validation)}, want a fraction between 0 and 1",
    )


def check_transform(where: str, transform: Any, *, imports: bool = True) -> None:
    """Raise ValueError unless a transform is one of `Numerical`; the message begins with `where`.

    Without `imports` it has to be one that servers compute: an untrusted description must not name modules to import.
    """
    single = not isinstance(transform, Mapping) or len(transform) == 1
    name, argument = transform_of(transform) if single else (None, None)
    known = [name for name in TRANSFORMS if imports or is_served(name)]
    require(
        isinstance(name, str) and (name in known or (imports and is_import_path(name))),
        f"{where}: got transform {shown(transform)}, want one of {', '.join(known)}"
        + ", or package.module:NAME of your own" * imports,
    )
    try:
        count = transform_named(str(name)).arguments
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    numbers = argument if isinstance(argument, list) else [argument]
    num_arguments = 0 if argument is None else len(numbers)
    # An infinite bound of clip leaves that side open.
    good = num_arguments == count and all(
        is_number(n) or (name == "clip" and n in (math.inf, -math.inf)) for n in numbers if count
    )
    kind = {0: "no number", 1: "1 finite number"}.get(count, f"{count} numbers")
    require(good, f"{where}: transform {name} takes {kind}, got {shown(argument)}")
    refuse(
        name == "clip" and float(numbers[0] or 0) > float(numbers[1] or 0),
        f"{where}: got transform clip {shown(argument)}, want the lower bound first",
    )


def _check_categorical(where: str, feature: Categorical) -> None:
    refuse(feature.expression and feature.cross, f"{where}: an expression or a cross, not both")
    refuse(len(feature.cross) == 1, f"{where}: a cross needs two columns or more")
    kinds = bool(feature.cross) + bool(feature.list) + bool(feature.separator)
    require(kinds < 2, f"{where}: a cross, a list or a separator, not two of them")
    refuse(
        feature.hotness is not None and not feature.is_list,
        f"{where}: hotness is for a list or separated text only; set list: true or separator",
    )
    refuse(
        feature.hotness is None and (feature.take != "first" or feature.length),
        f"{where}: take and length are for lists that are cut and filled; set hotness, or drop them",
    )
    refuse(
        feature.length and (feature.hotness or 0) > MOST_HISTORY,
        f"{where}: got hotness {feature.hotness} and a length, which is a number of float16; want at most {MOST_HISTORY:,}",
    )
    has_limits = feature.max_size is not None or feature.frequency_limit is not None
    refuse(
        feature.buckets is not None and has_limits,
        f"{where}: buckets have no vocabulary; drop frequency_limit and max_size, or buckets",
    )
    require(
        feature.is_dynamic == (feature.capacity is not None),
        f"{where}: vocabulary: dynamic and capacity, the rows of its table, belong together; set both, or none",
    )
    refuse(
        feature.is_dynamic and (has_limits or feature.buckets),
        f"{where}: vocabulary: dynamic has no limits and no buckets; drop frequency_limit, max_size and buckets",
    )


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number that a double holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _check_text(where: str, value: Any) -> None:
    require(isinstance(value, str), f"{where}: got {shown(value)}, want text; put it in quotes")
    require("\0" not in value, f"{where}: got {shown(value)}, want text without a null character")
    # An escape in yaml can make a lone surrogate.
    is_utf8 = not any("\ud800" <= char <= "\udfff" for char in value)
    require(is_utf8, f"{where}: got {shown(value)}, want text that UTF-8 can encode")


def _check_list(where: str, value: Any, of: str = "") -> None:
    require(isinstance(value, list), f"{where}: got {shown(value)}, want a list{of}")


def _mapping(content: Any, where: str, kind: type) -> Mapping[str, Any]:
    require(isinstance(content, Mapping), f"{where}: got {shown(content)}, want a mapping")
    known = [declared.name for declared in fields(kind)]
    for key in content:
        name = shortened(printable(str(key)))
        require(key in known, f"{where}.{name}: no such key; want one of {', '.join(known)}")
    return content


def _sequence(content: Any, where: str) -> EventLog | EventLists:
    is_lists = isinstance(content, Mapping) and "lists" in content
    group = record_of(EventLists if is_lists else EventLog, content, where)
    of = group.lists if is_lists else group.of
    key = "lists" if is_lists else "of"
    require(bool(of), f"{where}: got {key} [], want a list of categorical features")
    return group


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _list_of(kind: type, content: Any, where: str) -> list[Any]:
    _check_list(where, content)
    return [record_of(kind, item, f"{where}[{i}]") for i, item in enumerate(content)]


def record_of(kind: type, content: Any, where: str) -> Any:
    """Return a record of the values that a mapping has; null is the default, or a value where there is no other.

    Raises ValueError: a value is missing, or of another kind.
    """
    if isinstance(content, str) and kind in (Numerical, Categorical, Label, RowNumber):
        content = {"name": content}
    content = _mapping(content, where, kind)
    needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
    nullable = {f.name for f in fields(kind) if f.name in needed and NoneType in get_args(f.type)}
    given = {key for key, value in content.items() if value is not None or key in nullable}
    absent = [key for key in needed if key not in given]
    require(not absent, f"{where}: got no {', '.join(absent)}; want at least {', '.join(needed)}")
    name = content.get("name")
    start = f"{where}." if name is None else f"{where.partition('[')[0]}: {shown(name)}: "
    return kind(
        **{
            declared.name: _checked(declared, content[declared.name], f"{start}{declared.name}")
            for declared in fields(kind)
            if declared.name in given
        }
    )


def _checked(declared: Field[Any], value: Any, where: str) -> Any:
    """Return the value of a field, with records in the place of their descriptions."""
    rule = declared.metadata
    if value is None:
        return None
    if "of" in rule:
        return _list_of(rule["of"], value, where)
    if "record" in rule:
        return record_of(rule["record"], value, where)
    if "choices" in rule:
        choices = rule["choices"]
        require(value in choices, f"{where}: got {shown(value)}, want one of {', '.join(choices)}")
    elif "least" in rule:
        require(
            type(value) is int and rule["least"] <= value <= rule["most"],
            f"{where}: got {shown(value)}, want a whole number, {rule['least']} to {rule['most']:,}",
        )
    elif declared.type in (str, str | None):
        _check_text(where, value)
    elif declared.type in (bool, bool | None):
        require(isinstance(value, bool), f"{where}: got {shown(value)}, want true or false")
    elif declared.type == list[str]:
        _check_list(where, value, " of texts")
        for text in value:
            _check_text(where, text)
    elif declared.type == list[Any]:
        _check_list(where, value)
    elif get_origin(declared.type) is dict:
        require(isinstance(value, Mapping), f"{where}: got {shown(value)}, want a mapping")
    return value
