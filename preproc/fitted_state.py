"""Statistics and vocabularies fitted on training rows, stored beside a dataset for `mode=transform` to apply again.

`preproc.json` holds the statistics, the description of their features, and how raw rows are read. The folder `vocabulary/` holds
the vocabularies: Parquet with `value`, `id` and `count`. The dataset's spec lists the checksums of all of them.

Nothing of it is used before it is compared with the spec. Ids of a vocabulary are 1, 2, ... by descending count, and by
the bytes of the value for equal counts, so exchanged ids are found without a checksum too.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.messages import printable, shortened, shown
from configs.preproc_schema import Mode, PreprocConfig, VocabularyRows
from configs.table_schema import TableConfig, is_number, num_fitted
from dataloading.dataset.dataset_directory import checksums_of
from dataloading.dataset.documents import read_json, read_yaml
from dataloading.dataset.feature_spec import SPEC_NAME
from dataloading.dataset.split_files import find_file
from dataloading.lineage import FITTED, RARE, VOCABULARY, Lineage
from preproc.dataset_writer import checksum
from preproc.text_columns import TextColumns
from preproc.vocabulary_file import check_vocabulary, has_days

SOURCE = "${source}"
ROWS_KEYS = (
    *("sources", "query", "order_by", "missing", "label", "weight", "keep_rate", "split", "keep"),
    *("teacher", "empty_items"),
)
IS_TEXT = "is_text"
"""Key of `TextColumns` in preproc.json."""
EARLIER_EMPTY_ITEMS = "unknown"
"""Rule of fits that do not record one: an empty item of a list had id 0."""
FIVE = "text_of_5"
"""Key of the text of the number 5 in preproc.json."""
TYPES = "types"
"""Key of the SQL types of the columns that expressions read in preproc.json, in lower case; text is left out."""
READ = "read"
"""Key of the fingerprints of files in preproc.json."""
AGAIN = "copy the dataset again, or fit again"


@dataclass(frozen=True, slots=True)
class FittedState:
    directory: Path  # of the dataset that holds it
    table: TableConfig  # the description of its rows, with `${source}` for the option
    statistics: dict[str, list[list[float]]]  # fitted numbers per numerical feature and transform
    text_columns: TextColumns
    files: dict[str, dict[str, Any]]  # bytes and CRC-32 of each file, as they were compared
    lineage: Lineage = field(default_factory=Lineage)  # its day and its identity
    limits: Mapping[str, Any] = field(default_factory=dict)
    # fingerprints of the files whose values it and the fits before it have counted; none of an earlier version
    read: Sequence[str] = ()
    # the text of the number 5, by categorical feature whose values were numbers; none of an earlier version
    five: Mapping[str, str] = field(default_factory=dict)
    # SQL types of columns that expressions read, text left out
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def next_day(self) -> Lineage:
        """The day of a dataset that extends this fit."""
        return Lineage(self.lineage.day + 1, None, self.lineage.identity)

    def has_rare(self, name: str) -> bool:
        return rare_name(name) in self.files

    def has_days(self, name: str) -> bool:
        """Tell whether the vocabulary of feature `name` is of a later day, with its columns."""
        return has_days(self.directory / vocabulary_name(name))

    def copy(self, name: str, path: Path) -> None:
        """Copy file `name` to the relation directory `path`; ValueError unless it is that which was compared."""
        path.mkdir(exist_ok=True)
        source, copy = self.directory / name, path / "0.parquet"
        shutil.copyfile(source, copy)
        if checksum(copy) != self.files[name]:
            shutil.rmtree(path)
            raise ValueError(f"{source} has changed during this run; rerun the same command")

    def unreadable(self, name: str, error: Exception) -> ValueError:
        reason = shortened(printable(str(error).partition("\n")[0]))
        return ValueError(f"{self.directory / name}: damaged Parquet data ({reason}); {AGAIN}")

    def two_ids(self, name: str) -> ValueError:
        return ValueError(f"{self.directory / vocabulary_name(name)}: a value has two ids; {AGAIN}")


def vocabulary_name(feature: str) -> str:
    return f"{VOCABULARY}/{feature}.parquet"


def rare_name(feature: str) -> str:
    return f"{RARE}/{feature}.parquet"


def latest_name(log: str) -> str:
    """Return the path of the latest events of every user in a log, as raw values, below its dataset."""
    return f"latest/{log}.parquet"


def features_of(table: TableConfig) -> dict[str, Any]:
    """Return the description of the features that a fitted state belongs to, as plain JSON."""
    whole = asdict(table)
    past = [key for key in ("history", "sequence") if whole[key]]
    keys = ["numerical", "categorical", *past]
    features = json.loads(json.dumps({key: whole[key] for key in keys}))
    for feature in features["categorical"]:
        # Without it the bytes are those of earlier versions.
        if feature["vocabulary_of"] is None:
            del feature["vocabulary_of"]
        if feature["take"] == "first" and not feature["length"]:
            del feature["take"], feature["length"]
    return features


def with_placeholder(files: Any, source: Any) -> Any:
    """Return the files of a source with `${source}` in the place of `source`, with which paths may begin."""
    if files == source:
        return SOURCE
    if isinstance(files, list):
        return [with_placeholder(file, source) for file in files]
    begins = isinstance(source, str) and bool(source) and files.startswith(source)
    return SOURCE + files[len(source) :] if begins else files


def described_rows(directory: Path, sources: Sequence[str]) -> TableConfig:
    """Return the description of the fitted rows with these `sources`; ValueError without a fit that names its source."""
    path = directory / FITTED
    if not path.exists():
        raise ValueError(_no_fit(directory))
    table = table_of(read_json(path), path)
    replaced = {
        name: replace(source, files=_in_place(source.files, sources, f"{path}: {name}"))
        for name, source in table.sources.items()
    }
    if all(replaced[name].files == source.files for name, source in table.sources.items()):
        raise ValueError(f"{path}: no source of it depends on the option source; make a dataset")
    return replace(table, sources=replaced)


def table_of(saved: object, path: Path) -> TableConfig:
    saved = _mapping(saved, str(path))
    rows = _mapping(saved.get("rows"), f"{path}: rows")
    features = _mapping(saved.get("features"), f"{path}: features")
    try:
        return TableConfig.of({"empty_items": EARLIER_EMPTY_ITEMS, **rows, **features})
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {AGAIN}") from None


def _in_place(files: Any, sources: Sequence[str], where: str) -> Any:
    """Return the files of a source with `sources` in the place of `${source}`."""
    if files == SOURCE:
        return list(sources)
    if isinstance(files, list):
        return [_in_place(file, sources, where) for file in files]
    if not files.startswith(SOURCE):
        return files
    if len(sources) != 1:
        raise ValueError(
            f"{where} is {shown(files)}: got {len(sources)} sources, want one in its place"
        )
    return sources[0] + files[len(SOURCE) :]


def load_fitted(directory: Path, table: TableConfig | None = None) -> FittedState:
    """Return the fitted state of an earlier run, compared with its spec.

    `table`: description of further rows. Raises ValueError: there is no fit, it is not intact, or it is of other features.
    """
    if not all((directory / n).exists() for n in (FITTED, SPEC_NAME)):
        raise ValueError(_no_fit(directory))
    path = directory / FITTED
    document = _mapping(read_yaml(directory / SPEC_NAME), str(directory / SPEC_NAME))
    listed = checksums_of(document.get("metadata"), f"{directory / SPEC_NAME}: metadata")
    files = {FITTED: _compared(directory, FITTED, listed.get(FITTED))}
    saved = read_json(path)
    own = table_of(saved, path)
    if table is not None and features_of(table) != features_of(own):
        raise ValueError(
            f"{path}: fitted on other features or transforms; use the dataset= and description of that run"
        )
    with_vocabulary = [f.name for f in own.categorical if not (f.is_hashed or f.vocabulary_of)]
    names = [vocabulary_name(name) for name in with_vocabulary]
    more = [rare_name(name) for name in with_vocabulary]
    more += [latest_name(log.name) for log in own.logs]
    names += [name for name in more if name in listed]
    files |= {name: _compared(directory, name, listed.get(name)) for name in names}
    statistics = _statistics(saved.get("statistics"), own, f"{path}: statistics")
    described = document.get("feature_spec")
    for name in with_vocabulary:
        num_values = check_vocabulary(directory / vocabulary_name(name), AGAIN)
        entry = described.get(name) if isinstance(described, Mapping) else None
        cardinality = entry.get("cardinality") if isinstance(entry, Mapping) else None
        if cardinality != num_values + 1:
            raise ValueError(
                f"{directory / vocabulary_name(name)}: {num_values:,} values, but {SPEC_NAME} has a table of "
                f"{shown(cardinality)} rows for them; {AGAIN}"
            )
    files[SPEC_NAME] = checksum(directory / SPEC_NAME)
    written = document.get("metadata")
    metadata = written if isinstance(written, Mapping) else {}
    read = saved.get(READ, [])
    if not isinstance(read, list) or not all(isinstance(file, str) for file in read):
        raise ValueError(f"{path}: {READ}: got {shown(read)}, want a list of texts; {AGAIN}")
    try:
        text_columns = TextColumns.of(saved.get(IS_TEXT), f"{path}: {IS_TEXT}")
    except ValueError as error:
        raise ValueError(f"{error}; {AGAIN}") from None
    return FittedState(
        directory,
        own,
        statistics,
        text_columns,
        files,
        Lineage.of(metadata),
        metadata,
        read,
        _mapping(saved.get(FIVE, {}), f"{path}: {FIVE}"),
        _mapping(saved.get(TYPES, {}), f"{path}: {TYPES}"),
    )


def with_missing_of(fitted: FittedState, table: TableConfig) -> TableConfig:
    """Return the description of new rows with the missing texts and empty items of the fit: no value there is none here."""
    own = fitted.table
    more = [value for value in own.missing if value not in table.missing]
    return replace(table, missing=[*table.missing, *more], empty_items=own.empty_items)


def with_limits_of(fitted: FittedState, config: PreprocConfig, table: TableConfig) -> PreprocConfig:
    """Return the options of `mode=extend` with the frequency limit of the fit, and the rows that it counted.

    Raises ValueError: the options name another limit; or the spec of the fit has no checksums or no limit, or the fit
    no counts of the values below it.
    """
    limit, rows = (fitted.limits.get(key) for key in ("frequency_limit", "vocabulary_rows"))
    where = f"fitted={fitted.directory}"
    counted = VocabularyRows.__members__.get(str(rows))
    if fitted.lineage.identity is None or type(limit) is not int or limit < 0 or counted is None:
        raise ValueError(
            f"{where}: {SPEC_NAME} lists no checksums, or what no day can follow: frequency_limit {shown(limit)}, "
            f"vocabulary_rows {shown(rows)}; fit again"
        )
    if fitted.limits.get("mode") == Mode.transform.name:
        raise ValueError(
            f"{where} was made by mode=transform, which fits nothing; extend the dataset that it was fitted on"
        )
    if config.frequency_limit not in (0, limit):
        raise ValueError(
            f"frequency_limit={config.frequency_limit}, but {where} was fitted with {limit}, which counts over all days; "
            "leave it out"
        )
    for feature in table.categorical:
        if feature.is_hashed or feature.vocabulary_of or fitted.has_rare(feature.name):
            continue
        own = limit if feature.frequency_limit is None else feature.frequency_limit
        if own > 1 or feature.max_size is not None:
            raise ValueError(
                f"{where} has no counts of the values of {shown(feature.name)} without an id, which are counted over days; "
                "fit it again with rare_counts=true"
            )
    if config.vocabulary is VocabularyRows.all and counted is not VocabularyRows.all:
        raise ValueError(
            f"vocabulary=all, but {where} was fitted on the training rows, and every day is counted alike; leave it out"
        )
    return replace(config, frequency_limit=limit, vocabulary=counted)


def _no_fit(directory: Path) -> str:
    return f"fitted={directory}: no dataset with a {FITTED} there; set it to the output of a run with mode=fit"


def _compared(directory: Path, name: str, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Return bytes and CRC-32 of a file; ValueError unless they are the recorded ones."""
    path = find_file(directory, name)
    got = checksum(path)
    if wanted is None:
        raise ValueError(f"{directory / SPEC_NAME} lists no checksum of {name}; {AGAIN}")
    if got != {"bytes": wanted["bytes"], "crc32": wanted["crc32"]}:
        raise ValueError(
            f"{path} has changed since it was written: {got['bytes']:,} bytes with CRC-32 {got['crc32']}, "
            f"want {wanted['bytes']:,} with {shown(wanted['crc32'])}; {AGAIN}"
        )
    return got


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{where}: got {shown(value)}, want a mapping as mode=fit writes it; {AGAIN}"
        )
    return value


def _statistics(saved: object, table: TableConfig, where: str) -> dict[str, list[list[float]]]:
    """Return two finite numbers per fitted transform of every numerical, and none per other transform."""
    statistics = _mapping(saved, where)
    for feature in table.numerical:
        wanted = [num_fitted(transform) for transform in feature.transforms]
        fitted = statistics.get(feature.name)
        entries = fitted if isinstance(fitted, list) else [None]
        found = [len(e) if isinstance(e, list) and all(map(is_number, e)) else -1 for e in entries]
        if found != wanted:
            raise ValueError(
                f"{where}.{feature.name}: got {shown(fitted)}, want one list per transform, with {wanted} finite "
                f"numbers; {AGAIN}"
            )
    return {feature.name: statistics[feature.name] for feature in table.numerical}
