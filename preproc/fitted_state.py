"""Statistics and vocabularies fitted on training rows, stored beside a dataset for `mode=transform` to apply again.

`preproc.json` holds the statistics and the description of their features. The folder `vocabulary/` holds the
vocabularies: Parquet with `value`, `id` and `count`. The dataset's spec lists the checksums of all of them.

Nothing of it is used before it is compared with the spec. Ids of a vocabulary are 1, 2, ... by descending count, and by
the bytes of the value for equal counts, so exchanged ids are found without a checksum too.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from configs.messages import shown
from configs.preproc_schema import PreprocConfig
from configs.table_schema import Categorical, History, Numerical, TableConfig, transform_of
from dataloading.dataset.dataset_directory import checksums_of
from dataloading.dataset.documents import read_json, read_yaml
from dataloading.dataset.feature_spec import SPEC_NAME
from dataloading.dataset.split_files import find_file
from preproc.dataset_writer import checksum
from preproc.vocabulary_file import check_vocabulary

FITTED = "preproc.json"
FITTED_TRANSFORMS = ("minmax", "standardise")
AGAIN = "copy the dataset again, or fit again"


@dataclass(frozen=True, slots=True)
class FittedState:
    """A fit that is compared with its records.

    Attributes:
        directory: of the dataset that holds it.
        statistics: fitted numbers per numerical feature and transform.
        files: bytes and CRC-32 of each file, as they were compared.
    """

    directory: Path
    statistics: dict[str, list[list[float]]]
    files: dict[str, dict[str, Any]]

    def copy_vocabulary(self, name: str, path: Path) -> None:
        """Copy the vocabulary of feature `name` to the relation directory `path`.

        Raises:
            ValueError: it is not the one that was compared.
        """
        path.mkdir(exist_ok=True)
        source, copy = self.directory / vocabulary_name(name), path / "0.parquet"
        shutil.copyfile(source, copy)
        if checksum(copy) != self.files[vocabulary_name(name)]:
            shutil.rmtree(path)
            raise ValueError(f"{source} has changed during this run; rerun the same command")


def vocabulary_name(feature: str) -> str:
    """Return the path of a feature's vocabulary below its dataset."""
    return f"vocabulary/{feature}.parquet"


def features_of(table: TableConfig) -> dict[str, Any]:
    """Return the description of the features that a fitted state belongs to, as plain JSON."""
    whole = asdict(table)
    features = json.loads(json.dumps({key: whole[key] for key in ("numerical", "categorical")}))
    for feature in features["categorical"]:
        # Without it the bytes are those of earlier versions.
        if feature["vocabulary_of"] is None:
            del feature["vocabulary_of"]
    if table.history:
        features["history"] = json.loads(json.dumps(whole["history"]))
    return features


def save_fitted(directory: Path, table: TableConfig, statistics: dict[str, Any]) -> None:
    """Write preproc.json below `directory`."""
    saved: dict[str, Any] = {"features": features_of(table), "statistics": statistics}
    if table.missing:
        # Of no use to another fit, whose own description says it; served raw values need it.
        saved["missing"] = table.missing
    (directory / FITTED).write_text(json.dumps(saved, indent=1) + "\n")


def load_fitted(
    config: PreprocConfig, table: TableConfig, warn: Callable[[str], None]
) -> FittedState:
    """Return the fitted state of an earlier run, compared with the spec of its dataset.

    Args:
        config: `fitted` names the dataset.
        table: features that the fit is applied to.
        warn: called with one line if the spec lists no checksums.

    Raises:
        ValueError: `fitted` holds no fitted state, one of other features, or one that is not as it was written.
    """
    return _load(config.fitted, table, warn)


def open_fitted(fitted: str) -> tuple[FittedState, TableConfig]:
    """Return a fitted state with the features that it says it is of, for who has no description of their own.

    Of the description only features and missing texts are known.

    Raises:
        ValueError: as of `load_fitted`.
    """
    path = Path(fitted) / FITTED
    saved = _mapping(read_json(path), str(path)) if path.exists() else {}
    features = _mapping(saved.get("features", {}), f"{path}: features")
    try:
        table = TableConfig.of(
            {
                **features,
                "sources": {"rows": {"files": "-"}},
                "label": {"name": "label of the rows"},
                "missing": saved.get("missing", []),
            }
            if saved
            else {"sources": {"rows": {"files": "-"}}, "categorical": ["none"]}
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {AGAIN}") from None
    return _load(fitted, table, lambda line: None), table


def _load(fitted: str | None, table: TableConfig, warn: Callable[[str], None]) -> FittedState:
    """Return the fitted state of a dataset; see `load_fitted`."""
    directory = Path(fitted or "")
    path = directory / FITTED
    if not fitted or not path.exists() or not (directory / SPEC_NAME).exists():
        raise ValueError(
            f"fitted={fitted}: no dataset with a {FITTED} there; set it to the output of a "
            "run with mode=fit"
        )
    document = _mapping(read_yaml(directory / SPEC_NAME), str(directory / SPEC_NAME))
    listed = checksums_of(document.get("metadata"), f"{directory / SPEC_NAME}: metadata")
    with_vocabulary = [f.name for f in table.categorical if not (f.buckets or f.vocabulary_of)]
    names = [vocabulary_name(name) for name in with_vocabulary]
    files = {name: _compared(directory, name, listed.get(name)) for name in [FITTED, *names]}
    saved = _mapping(read_json(path), str(path))
    if _with_defaults(saved.get("features"), str(path)) != _with_defaults(features_of(table), ""):
        raise ValueError(
            f"{path}: fitted on other features or transforms; use the configuration of that run"
        )
    statistics = _statistics(saved.get("statistics"), table, f"{path}: statistics")
    for name in with_vocabulary:
        rows = check_vocabulary(directory / vocabulary_name(name), AGAIN)
        _check_rows(document, name, rows, directory)
    without = [name for name in files if name not in listed]
    if without:
        warn(
            f"{directory / SPEC_NAME} lists no checksum of {without[0]}"
            f"{f' and {len(without) - 1} others' if without[1:] else ''}, so only the content was checked"
        )
    files[SPEC_NAME] = checksum(directory / SPEC_NAME)
    return FittedState(directory, statistics, files)


def _compared(directory: Path, name: str, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Return bytes and CRC-32 of a file; ValueError unless they are the recorded ones, if there are any."""
    path = find_file(directory, name)
    got = checksum(path)
    if wanted and got != {"bytes": wanted["bytes"], "crc32": wanted["crc32"]}:
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


def _with_defaults(features: object, where: str) -> dict[str, list[dict[str, Any]]]:
    """Return saved features with the options that did not exist when they were saved."""
    saved = _mapping(features, f"{where}: features")
    kinds: dict[str, type[Numerical] | type[Categorical] | type[History]] = {
        "numerical": Numerical,
        "categorical": Categorical,
        "history": History,
    }
    completed = {}
    for key, kind in kinds.items():
        entries = saved.get(key, [] if kind is History else None)
        if not isinstance(entries, list):
            raise ValueError(f"{where}: features.{key}: got {shown(entries)}, want a list; {AGAIN}")
        completed[key] = [
            {**_defaults(kind), **_mapping(entry, f"{where}: features.{key}")} for entry in entries
        ]
    return completed


def _defaults(kind: type[Numerical] | type[Categorical] | type[History]) -> dict[str, Any]:
    """Return the default of every option that has one."""
    made = {f.name: f.default_factory for f in fields(kind) if f.default_factory is not MISSING}
    values = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
    return values | {name: make() for name, make in made.items()}


def _statistics(saved: object, table: TableConfig, where: str) -> dict[str, list[list[float]]]:
    """Return two finite numbers per fitted transform of every numerical, and none per other transform."""
    statistics = _mapping(saved, where)
    for feature in table.numerical:
        wanted = [
            2 * (transform_of(transform)[0] in FITTED_TRANSFORMS)
            for transform in feature.transforms
        ]
        fitted = statistics.get(feature.name)
        if not isinstance(fitted, list) or [_num_finite(entry) for entry in fitted] != wanted:
            raise ValueError(
                f"{where}.{feature.name}: got {shown(fitted)}, want one list per transform, with {wanted} finite "
                f"numbers; {AGAIN}"
            )
    return {feature.name: statistics[feature.name] for feature in table.numerical}


def _num_finite(numbers: object) -> int:
    """Return the length of a list of finite numbers, -1 for anything else."""
    is_list = isinstance(numbers, list) and all(
        type(number) in (int, float) and math.isfinite(number) for number in numbers
    )
    return len(numbers) if is_list else -1  # type: ignore[arg-type]


def _check_rows(document: Mapping[str, Any], name: str, rows: int, directory: Path) -> None:
    """Raise ValueError if the table of feature `name` has not the rows of its vocabulary, and row 0."""
    features = document.get("feature_spec")
    entry = features.get(name) if isinstance(features, Mapping) else None
    cardinality = entry.get("cardinality") if isinstance(entry, Mapping) else None
    if cardinality != rows + 1:
        raise ValueError(
            f"{directory / vocabulary_name(name)}: {rows:,} values, but {SPEC_NAME} has a table of "
            f"{shown(cardinality)} rows for them; {AGAIN}"
        )
