"""Specification of a dataset directory: its `feature_spec.yaml`, read, checked and hashed.

The yaml is NVIDIA's (DeepLearningExamples, DLRM and DCNv2) with additions, which `docs/data_format.md` marks.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.messages import shown
from dataloading.dataset.documents import read_yaml, reading, resolved
from dataloading.dataset.row_columns import LABEL_DTYPES, Channel, RowColumn
from dataloading.dataset.sequences import MOMENT_DTYPE, EventColumn, EventPools, SequenceGroup
from dataloading.dataset.split_files import (
    OFFSET_DTYPE,
    SPLITS,
    SplitFiles,
    check_events,
    count_rows,
    expect,
    names_of,
    parse_chunks,
    unnamed_validation,
)

SPEC_NAME = "feature_spec.yaml"
RAGGED = "ragged"
DYNAMIC = "dynamic"
NO_KEY = -1
"""Padding of ragged requests, which no key may be."""
ID_DTYPES = ("int8", "int16", "int32", "int64")
NUMERICAL_DTYPES = ("float16", "float32")
CHANNELS = ("categorical", "label", "numerical", "weight", "keep_rate", "teacher", "sequence")
MAX_HOTNESS = 2**31
"""Lengths of rows are int32."""
MOST_KEYS = 2**31 - 2
"""Rows of a table for keys; rows are int32."""
HOTNESS = f"an integer from 1 to {MAX_HOTNESS - 1}, or '{RAGGED}'"


def id_dtype(cardinality: int) -> np.dtype:
    """Return the dtype of the ids of `cardinality` rows by NVIDIA's rule, and int64 beyond its range."""
    for dtype in (np.int8, np.int16, np.int32):
        if cardinality < np.iinfo(dtype).max:
            return np.dtype(dtype)
    return np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class CategoricalFeature:
    """One categorical feature and the table that its ids point into."""

    name: str  # any string that is not empty; NVIDIA's own are `cat_0.bin`, `cat_1.bin`
    cardinality: int  # rows of the table; ids lie in [0, cardinality)
    dtype: np.dtype  # integer dtype of the ids on disk
    hotness: int | None  # ids per row; None if rows differ (ragged)
    mean_hotness: float  # mean ids per row without outliers (`Lengths.mean`); equal to `hotness` where that is fixed
    # name of its table; features that name one table share it, since an id means the same in all of
    # them. None: the table is named like the feature.
    table: str | None = None
    # whether the files hold int64 keys, 0 of missing ones, to which training gives rows of the table
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        where, card, hotness = f"feature_spec.{self.name}", self.cardinality, self.hotness
        dtypes = ", ".join(ID_DTYPES)
        expect(self.dtype.name in ID_DTYPES, f"{where}.dtype", self.dtype.name, f"one of {dtypes}")
        expect(_is_count(card), f"{where}.cardinality", card, "an integer of at least 1")
        most = np.iinfo(self.dtype).max + 1
        wider = f"at most {most} rows for ids of dtype {self.dtype.name}; use a wider dtype"
        expect(card <= most, f"{where}.cardinality", card, wider)
        expect(hotness is None or _is_hotness(hotness), f"{where}.hotness", hotness, HOTNESS)
        keys = "int64, of keys (vocabulary: dynamic)"
        expect(
            not self.is_dynamic or self.dtype == np.int64, f"{where}.dtype", self.dtype.name, keys
        )
        few = f"from 2 to {MOST_KEYS:,} rows for keys (vocabulary: dynamic)"
        expect(not self.is_dynamic or 2 <= card <= MOST_KEYS, f"{where}.cardinality", card, few)
        mean = self.mean_hotness
        good = isinstance(mean, int | float) and 0 <= mean < MAX_HOTNESS
        expect(good, f"{where}.mean_hotness", mean, f"a number from 0 to {MAX_HOTNESS}")
        named = self.table is None or (isinstance(self.table, str) and bool(self.table))
        expect(named, f"{where}.table", self.table, "the name of a table")

    def has_wrong(self, ids: np.ndarray) -> bool:
        """Return whether any of the ids lies outside the table, or of the keys is none; takes one maximum."""
        if self.is_dynamic:
            ids = ids.astype(np.int64, copy=False)
        return int(ids.view(f"u{ids.itemsize}").max(initial=0)) >= self._least_wrong(ids.dtype)

    def wrong(self, ids: np.ndarray) -> np.ndarray:
        """Return which integers of any width lie outside the table, or are no keys."""
        if self.is_dynamic:
            return ids.astype(np.int64, copy=False) == NO_KEY
        return ids.view(f"u{ids.itemsize}") >= self._least_wrong(ids.dtype)

    def _least_wrong(self, dtype: np.dtype) -> int:
        """Return the least wrong id, viewed as unsigned: negative ones are then larger than all others of their width."""
        if self.is_dynamic:
            return NO_KEY % 2**64
        return min(self.cardinality, np.iinfo(dtype).max + 1)

    def wrong_text(self, value: int, where: str) -> str:
        """Return the message about a wrong id or key."""
        wrong = "stands for no value; write 0 for a missing one, else another number"
        if not self.is_dynamic:
            wrong = f"lies outside its table of {self.cardinality} rows; correct it, or the cardinality in {SPEC_NAME}"
        return f"feature '{self.name}': {'key' if self.is_dynamic else 'id'} {value} at {where} {wrong}"

    @classmethod
    def of(
        cls, name: str, cardinality: int, hotness: int | None = 1, table: str | None = None
    ) -> "CategoricalFeature":
        """Return a feature for the writer, with the dtype by NVIDIA's rule; a ragged mean is measured later."""
        is_whole = isinstance(cardinality, int | np.integer)
        expect(
            is_whole, f"feature_spec.{name}.cardinality", cardinality, "an integer of at least 1"
        )
        return cls(name, int(cardinality), id_dtype(cardinality), hotness, hotness or 0.0, table)

    @classmethod
    def of_keys(
        cls, name: str, capacity: int, hotness: int | None = 1, table: str | None = None
    ) -> "CategoricalFeature":
        """Return a feature of keys (`vocabulary: dynamic`), whose table has `capacity` rows, for the writer."""
        return cls(name, capacity, np.dtype(np.int64), hotness, hotness or 0.0, table, True)


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Names, order, dtypes, table sizes and files of one dataset."""

    root: Path | None  # the dataset directory; None for synthetic streams
    numerical: tuple[str, ...]  # names in channel order; may be empty
    numerical_dtype: np.dtype  # float16 or float32
    # in channel order, which is the order of a model's logits; at least one
    labels: tuple[RowColumn, ...]
    # features in channel order, which is the model's order
    categorical: tuple[CategoricalFeature, ...]
    # at least one of `train`, `test` and `validation`, and any other split, by name
    splits: dict[str, SplitFiles]
    metadata: dict[str, Any]  # any keys; the writer fills in `rows` and `files`
    # factor of a row's loss and of its part in the metrics; None: all rows count alike
    weight: RowColumn | None = None
    # rate at which negatives such as this row were kept in the training rows; None without such a column
    keep_rate: RowColumn | None = None
    sequences: tuple[SequenceGroup, ...] = ()
    teachers: tuple[RowColumn, ...] = ()  # scores of other models, from which a model may learn

    @property
    def event_columns(self) -> tuple[EventColumn, ...]:
        """Numbers of the events of all groups, in the order of a batch."""
        return tuple(column for group in self.sequences for column in group.numbers)

    def group_of(self, name: str) -> SequenceGroup | None:
        return next((group for group in self.sequences if name in group.features), None)

    def with_means_of(self, other: "FeatureSpec") -> "FeatureSpec":
        """Return the spec with the mean hotness of another one's features, where it has them."""
        means = {feature.name: feature.mean_hotness for feature in other.categorical}
        categorical = (
            replace(f, mean_hotness=means.get(f.name, f.mean_hotness)) for f in self.categorical
        )
        return replace(self, categorical=tuple(categorical))

    def with_event_weights(self, weights: Mapping[str, str]) -> "FeatureSpec":
        """Return the spec with the number that weighs the events of a group, by group."""
        groups = (replace(group, weight=weights.get(group.name)) for group in self.sequences)
        return replace(self, sequences=tuple(groups))

    @property
    def names(self) -> list[str]:
        """Names of all columns: `row_columns`, numericals, categorical features, numbers of events and moments."""
        single = [column.name for column in self.row_columns]
        features = [feature.name for feature in self.categorical]
        events = [column.name for column in self.event_columns]
        moments = [group.name for group in self.sequences if group.time is not None]
        return [*single, *self.numerical, *features, *events, *moments]

    @property
    def row_columns(self) -> tuple[RowColumn, ...]:
        """Labels, weight, keep rate and teachers, in this order."""
        more = tuple(column for column in (self.weight, self.keep_rate) if column is not None)
        return self.labels + more + self.teachers

    def title(self, column: RowColumn) -> str:
        """Return the title of a column of `row_columns`, for messages; a single label needs no name."""
        is_single = self.labels == (column,)
        return column.channel.value if is_single else f"{column.channel.value} '{column.name}'"

    @property
    def ids_dtype(self) -> np.dtype:
        """Dtype of ids in memory: int32, or int64 once one table has 2**31 rows or more."""
        wide = any(feature.cardinality >= 2**31 for feature in self.categorical)
        return np.dtype(np.int64 if wide else np.int32)

    @property
    def dynamic_tables(self) -> dict[str, tuple[int, ...]]:
        """Indices in `categorical` of the features of every table for keys (`vocabulary: dynamic`)."""
        tables: dict[str, tuple[int, ...]] = {}
        for index, feature in enumerate(self.categorical):
            if feature.is_dynamic:
                table = feature.table or feature.name
                tables[table] = (*tables.get(table, ()), index)
        return tables

    @property
    def table_features(self) -> dict[str, tuple[CategoricalFeature, ...]]:
        """Features of every table, in the order of the tables' first features; they have the same cardinality."""
        return features_by_table(self.categorical)

    def row_bytes(self, files: SplitFiles) -> dict[Path, int]:
        """Return the bytes of a row in each file of a split in split binary but those of ragged features and events."""
        columns, features = self.row_columns, self.categorical
        widths = {
            files.columns[c.name]: c.stored.itemsize for c in columns if c.name in files.columns
        }
        if files.numerical is not None:
            widths[files.numerical] = len(self.numerical) * self.numerical_dtype.itemsize
        widths |= {path: 2 * OFFSET_DTYPE.itemsize for path in files.slices.values()}
        widths |= {path: MOMENT_DTYPE.itemsize for path in files.moments.values()}
        return widths | {
            files.ids[f.name]: f.dtype.itemsize * f.hotness for f in features if f.hotness
        }

    def rows_of(self, split: str) -> int:
        """Return the rows of `split`; ValueError if there is no such split."""
        if split not in self.splits:
            raise ValueError(
                f"{self.root or 'the synthetic stream'}: no split '{split}', only {', '.join(self.splits)}"
            )
        return self.splits[split].num_rows

    def require_labels(self, split: str) -> None:
        """Raise ValueError if the rows of `split` have no labels, or if there is no such split."""
        self.rows_of(split)
        if any(label.name in self.splits[split].absent for label in self.labels):
            raise ValueError(
                f"{self.root}: the rows of split '{split}' have no labels ({', '.join(label.name for label in self.labels)}); "
                "mode=predict scores them, but training and evaluation need labels: preprocess rows that have some"
            )

    def fingerprint(self, cardinalities: Mapping[str, int] | None = None) -> str:
        """Return the SHA-256 (hex) of names, order, cardinalities, hotness and shared tables, on which a model depends.

        `cardinalities`: rows per feature to use instead of its own.
        """
        rows = cardinalities or {}
        categorical = [
            [f.name, rows.get(f.name, f.cardinality), f.hotness]
            # Without a shared table the facts are those of earlier versions.
            + ([f.table] if f.table not in (None, f.name) else [])
            + ([DYNAMIC] if f.is_dynamic else [])
            for f in self.categorical
        ]
        # Of a single binary label the name alone, as in checkpoints of earlier versions.
        names = [label.name if label.is_binary else [label.name] for label in self.labels]
        facts: list[object] = [
            list(self.numerical),
            names[0] if len(names) == 1 else names,
            categorical,
            *([g.name, *g.columns, g.time, g.max_length] for g in self.sequences),
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @classmethod
    def load_features(cls, root: Path) -> "FeatureSpec":
        """Read the spec in `root` without its splits, whose files need not exist.

        Raises ValueError: it is missing, malformed or contradictory.
        """
        document = _read_yaml(root / SPEC_NAME)
        try:
            return _parse_features(root, document)
        except ValueError as error:
            raise ValueError(f"{root / SPEC_NAME}: {error}") from None

    @classmethod
    def load(
        cls, root: Path | str, filename: str = SPEC_NAME, *, measure: bool = True
    ) -> "FeatureSpec":
        """Read and check the spec in `root`, and the sizes of every file that it names.

        `measure`: check sizes and count rows; False also loads the spec of a dataset with damaged files. Raises
        ValueError: something is missing, malformed or contradictory; the message names file, key and expected value.
        """
        root = Path(root)
        path = root / filename
        if not resolved(path).is_relative_to(resolved(root)):
            raise ValueError(
                f"data.feature_spec={filename} lies outside the dataset directory {root}: want a file inside, "
                "symbolic links included"
            )
        document = _read_yaml(path)
        try:
            spec = _parse(root, document)
            return measured(spec) if measure else spec
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        except OSError as error:
            raise ValueError(
                f"{path}: {error.filename or 'a file of it'} cannot be read ({error.strerror})"
            ) from None


def features_by_table(
    categorical: Sequence[CategoricalFeature],
) -> dict[str, tuple[CategoricalFeature, ...]]:
    """Return the features of every table, in the order of the tables' first features.

    Raises ValueError: features of one table have different cardinalities.
    """
    tables: dict[str, tuple[CategoricalFeature, ...]] = {}
    for feature in categorical:
        table, where = feature.table or feature.name, f"feature_spec.{feature.name}"
        first, *_ = tables[table] = (*tables.get(table, ()), feature)
        same = f"that of {shown(first.name)}, which has the same table {shown(table)}"
        rows, own = first.cardinality, feature.cardinality
        expect(own == rows, f"{where}.cardinality", own, f"{rows}, {same}")
        vocabulary = DYNAMIC if feature.is_dynamic else None
        expect(feature.is_dynamic == first.is_dynamic, f"{where}.vocabulary", vocabulary, same)
    return tables


def check_groups(
    sequences: Sequence[SequenceGroup], categorical: Sequence[CategoricalFeature]
) -> None:
    """Raise ValueError unless the features of groups are ragged features of one group each, with the same mean."""
    known = {feature.name: feature for feature in categorical}
    taken: dict[str, str] = {}
    for group in sequences:
        where = f"sequence_spec.{group.name}"
        for name in group.columns:
            other = f"columns of no other group; it is one of {shown(taken.get(name))}"
            expect(name not in taken, where, name, other)
            taken[name] = group.name
        for name in group.features:
            ragged = name in known and known[name].hotness is None
            want = f"names of categorical features with hotness: {RAGGED}"
            expect(ragged, f"{where}.features", name, want)
            mean, first = (known[n].mean_hotness for n in (name, group.features[0]))
            same = f"{first}, that of {shown(group.features[0])}, as both have the same events"
            expect(mean == first, f"feature_spec.{name}.mean_hotness", mean, same)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_hotness(value: object) -> bool:
    return _is_count(value) and value < MAX_HOTNESS  # type: ignore[operator]


def _read_yaml(path: Path) -> object:
    remedy = "name a dataset directory (one without a spec is not complete: write it again)"
    with reading(str(path), remedy):
        return read_yaml(path)


def _section(document: object, key: str) -> Mapping[str, Any]:
    mapping = isinstance(document, Mapping)
    expect(mapping, "the file", type(document).__name__, "a mapping of four sections")
    section = document.get(key)  # type: ignore[attr-defined]
    # NVIDIA's generator writes null.
    is_synthetic = key == "source_spec" and section is None
    hint = (
        "; without rows, leave data.path out: experiments train on synthetic clicks" * is_synthetic
    )
    expect(isinstance(section, Mapping), key, section, f"a mapping{hint}")
    return section


def _parse(root: Path, document: object) -> FeatureSpec:
    """Return the checked spec of `document` without row counts; errors start with the key."""
    # First, since a file without it is no spec of a dataset, whatever else it lacks.
    sources = _section(document, "source_spec")
    spec = _parse_features(root, document)
    named = any(split in sources for split in SPLITS)
    expect(named, "source_spec", list(sources), f"a split, one of {', '.join(SPLITS)}")
    names = Counter(map(str, sources))
    expect(len(names) == len(sources), "source_spec", list(sources), "every split once")
    columns = {column.name: column.channel.value for column in spec.row_columns}
    ragged = {feature.name: feature.hotness is None for feature in spec.categorical}
    group_of = {name: group.name for group in spec.sequences for name in group.columns}
    moments = [group.name for group in spec.sequences if group.time is not None]
    of_spec = spec.numerical, columns, ragged, group_of, moments
    splits = {
        str(split): parse_chunks(root, f"source_spec.{split}", chunks, *of_spec)
        for split, chunks in sources.items()
    }
    if "validation" not in splits and "test" in splits:
        splits |= unnamed_validation(root, splits["test"])
    return replace(spec, splits=splits)


def _parse_features(root: Path, document: object) -> FeatureSpec:
    """Return the checked spec of `document` without splits."""
    features, channels = _section(document, "feature_spec"), _section(document, "channel_spec")
    metadata = document.get("metadata") or {}  # type: ignore[attr-defined]
    expect(isinstance(metadata, dict), "metadata", metadata, "a mapping")
    categorical, labels, numerical, *single, events = _channels(channels, features)
    row_columns = {
        channel: tuple(_row_column(features, name, channel) for name in names)
        for channel, names in zip(Channel, (labels, *single), strict=True)
    }
    widths = {name: _dtype(features, name) for name in numerical}
    wanted = " or ".join(NUMERICAL_DTYPES)
    for name, dtype in widths.items():
        expect(dtype in NUMERICAL_DTYPES, f"feature_spec.{name}.dtype", dtype, wanted)
    used = sorted(set(widths.values()) or {NUMERICAL_DTYPES[0]})
    expect(len(used) == 1, "channel_spec.numerical", used, "one dtype for all numericals")
    tables = tuple(_categorical(features, name) for name in categorical)
    features_by_table(tables)
    groups = document.get("sequence_spec") or {}  # type: ignore[attr-defined]
    sequences = _sequences(groups, features, events)
    check_groups(sequences, tables)
    return FeatureSpec(
        root,
        numerical,
        np.dtype(used[0]),
        row_columns[Channel.label],
        tables,
        {},
        metadata,
        weight=next(iter(row_columns[Channel.weight]), None),
        keep_rate=next(iter(row_columns[Channel.keep_rate]), None),
        sequences=sequences,
        teachers=row_columns[Channel.teacher],
    )


def _sequences(
    groups: object, features: Mapping[str, Any], events: Sequence[str]
) -> tuple[SequenceGroup, ...]:
    """Return the groups of `sequence_spec`, whose numbers are the channel `sequence`."""
    expect(isinstance(groups, Mapping), "sequence_spec", groups, "a mapping from group to columns")
    assert isinstance(groups, Mapping)
    sequences = []
    for name, entry in groups.items():
        where = f"sequence_spec.{name}"
        is_name = isinstance(name, str) and bool(name) and name not in features
        expect(is_name, "sequence_spec", name, "names of groups, which no column has")
        expect(isinstance(entry, Mapping), where, entry, "a mapping with features and max_length")
        numbers = names_of(entry.get("numbers") or [], f"{where}.numbers")
        unknown = [number for number in numbers if number not in events]
        expect(not unknown, f"{where}.numbers", unknown, "columns of channel_spec.sequence")
        sequences.append(
            SequenceGroup(
                name,
                names_of(entry.get("features"), f"{where}.features"),
                entry.get("max_length"),
                tuple(EventColumn.of(name, _dtype(features, name)) for name in numbers),
                entry.get("time"),
                _pools(entry.get("pools"), f"{where}.pools"),
            )
        )
    held = {column.name for group in sequences for column in group.numbers}
    homeless = [name for name in events if name not in held]
    expect(not homeless, "sequence_spec", homeless, "a group for every column of events")
    return tuple(sequences)


def _pools(entry: object, where: str) -> EventPools | None:
    if entry is None:
        return None
    good = isinstance(entry, Mapping) and set(entry) == {"of", "values"}
    expect(good and isinstance(entry["values"], list), where, entry, "a mapping with of and values")  # type: ignore[index]
    return EventPools(entry["of"], tuple(entry["values"]))  # type: ignore[index]


def _channels(channels: Mapping[str, Any], features: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the names per channel of CHANNELS; every feature must be in exactly one channel."""
    unknown = [channel for channel in channels if channel not in CHANNELS]
    expect(not unknown, "channel_spec", unknown, f"no channels but {', '.join(CHANNELS)}")
    listed = [
        names_of(channels.get(channel) or [], f"channel_spec.{channel}") for channel in CHANNELS
    ]
    expect(len(listed[0]) > 0, "channel_spec.categorical", [], "at least one feature")
    expect(len(listed[1]) > 0, "channel_spec.label", [], "at least one label")
    for channel, single in zip(CHANNELS[3:5], listed[3:5], strict=True):
        expect(len(single) < 2, f"channel_spec.{channel}", list(single), "at most one column")
    names = [name for channel in listed for name in channel]
    twice = [name for name, times in Counter(names).items() if times > 1]
    expect(not twice, "channel_spec", twice, "every feature in one channel, once")
    missing = [name for name in names if name not in features]
    expect(not missing, "feature_spec", missing, "an entry for every feature; these have none")
    known = set(names)
    homeless = [name for name in features if name not in known]
    expect(not homeless, "channel_spec", homeless, "a channel for every feature; these have none")
    return listed


def _dtype(features: Mapping[str, Any], name: str) -> str:
    entry = features[name]
    expect(isinstance(entry, Mapping), f"feature_spec.{name}", entry, "a mapping with a dtype")
    dtype = entry.get("dtype")
    expect(isinstance(dtype, str), f"feature_spec.{name}.dtype", dtype, "the name of a dtype")
    return str(dtype)


def _row_column(features: Mapping[str, Any], name: str, channel: Channel) -> RowColumn:
    dtype = _dtype(features, name)
    expect(dtype in LABEL_DTYPES, f"feature_spec.{name}.dtype", dtype, " or ".join(LABEL_DTYPES))
    return RowColumn(name, channel, np.dtype(dtype))


def _categorical(features: Mapping[str, Any], name: str) -> CategoricalFeature:
    """Return one entry of `feature_spec`; a missing ragged mean is 0 until it is measured."""
    dtype, entry, where = _dtype(features, name), features[name], f"feature_spec.{name}"
    expect(dtype in ID_DTYPES, f"{where}.dtype", dtype, f"one of {', '.join(ID_DTYPES)}")
    hotness = entry.get("hotness", 1)
    if hotness == RAGGED:
        hotness, mean = None, entry.get("mean_hotness", 0.0)
    else:
        expect(_is_hotness(hotness), f"{where}.hotness", hotness, HOTNESS)
        mean = hotness
    vocabulary, known = entry.get("vocabulary"), (None, DYNAMIC)
    expect(vocabulary in known, f"{where}.vocabulary", vocabulary, f"'{DYNAMIC}', or no such key")
    # Checked by the constructor.
    cardinality, table, is_dynamic = entry.get("cardinality"), entry.get("table"), bool(vocabulary)
    return CategoricalFeature(name, cardinality, np.dtype(dtype), hotness, mean, table, is_dynamic)


def measured(spec: FeatureSpec) -> FeatureSpec:
    """Return `spec` with the rows per split and missing means filled in; ValueError if sizes disagree."""
    id_bytes = {feature.name: feature.dtype.itemsize for feature in spec.categorical}
    splits = {}
    for name, files in spec.splits.items():
        if files.parquet:
            # Imported here, since only Parquet needs pyarrow.
            from dataloading.dataset import parquet_files

            count = parquet_files.count_rows(files.parquet, parquet_columns(spec, files))
        else:
            count = count_rows(files, spec.row_bytes(files), id_bytes)
        splits[name] = replace(files, num_rows=count)
    for files in spec.splits.values():
        for group in spec.sequences if files.slices else ():
            numbers = {files.events[c.name]: c.dtype.itemsize for c in group.numbers}
            check_events({files.ids[name]: id_bytes[name] for name in group.features} | numbers)
    rows = spec.metadata.get("rows") or {}
    expect(isinstance(rows, Mapping), "metadata.rows", rows, "a mapping from split to rows")
    for name, written in rows.items():
        held = splits[name].num_rows if name in splits else 0
        want = f"the {held} rows that its files hold; copy or write the dataset again"
        expect(held == written, f"metadata.rows.{name}", written, want)
    first = splits.get("train") or next(iter(splits.values()))
    tables = tuple(
        replace(f, mean_hotness=f.mean_hotness or mean_hotness(first, spec, f.name))
        for f in spec.categorical
    )
    return replace(spec, splits=splits, categorical=tables)


def mean_hotness(files: SplitFiles, spec: FeatureSpec, name: str) -> float:
    """Return the mean ids per row of a ragged feature in a split of `spec`."""
    if files.parquet:
        from dataloading.dataset import parquet_files

        return parquet_files.mean_hotness(files.parquet, name)
    group = spec.group_of(name)
    return group.mean_events(files) if group else files.mean_hotness(name)


def parquet_columns(spec: FeatureSpec, files: SplitFiles) -> dict[str, Any]:
    """Return the `ColumnKind` of each column of the Parquet files of a split of `spec`."""
    from dataloading.dataset.parquet_files import ColumnKind

    of_rows = [column.name for column in spec.row_columns if column.name not in files.absent]
    kinds = dict.fromkeys([*spec.numerical, *of_rows], ColumnKind.number)
    for group in spec.sequences:
        time = None if group.name in files.absent else group.time
        kinds |= {
            c.name: ColumnKind.ids if c.name == time else ColumnKind.numbers for c in group.numbers
        }
        kinds |= {group.name: ColumnKind.id} if time else {}
    return kinds | {
        f.name: ColumnKind.id if f.hotness == 1 else ColumnKind.ids for f in spec.categorical
    }
