"""Values of a feature that are removed from checkpoints, exports, model directories and vocabularies.

Each directory is replaced by a copy in which the rows of the values are zeros and their keys or texts are gone. A model keeps its
place in the chain of deltas; a running server takes it for another version of the same number, and swaps it in.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from configs.messages import shown
from dataloading.dataset.documents import read_json
from dataloading.dataset.durable_files import edited_copy, write_synced
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.keys.rekeyed import KEYS
from dataloading.lineage import FORGOTTEN
from nn.checkpoint.compatibility import vocabulary_mismatch
from nn.checkpoint.directory import DELTA, DELTAS, RUN_FILE
from nn.checkpoint.forgetting import forget_rows, keyed_rows, noted_rows
from nn.checkpoint.saved import SavedModel
from nn.checkpoint.tensor_index import INDEX_FILE
from nn.embedding.declared_tables import tables_of_feature
from nn.models.registry import declared_tables
from nn.saved_config import config_of
from preproc.fitted_state import vocabulary_name
from preproc.forgetting import forget_values, ids_of
from serving.exporting.applied import opened_table
from serving.inference.key_rows import KeyRows, write_key_rows
from serving.manifest import DENSE, MANIFEST, VOCABULARIES, Manifest, describe_files
from serving.value_search import Values, vocabulary_of
from serving.vocabulary import write_vocabulary

Line = tuple[Path, str, bool]
"""A directory, what was done to it, and whether it could be."""


@dataclass(frozen=True, slots=True)
class _Dataset:
    path: Path
    spec: FeatureSpec
    owner: str  # feature whose vocabulary, key map and table it is
    is_dynamic: bool
    ids: dict[str, int]  # of the values that its vocabulary has


def forget(values: Values, found: Mapping[str, Sequence[Path]]) -> Iterator[Line]:
    """Remove values from all directories; yield what each had.

    `found`: directories by the name of the file that makes them a checkpoint, a model or a dataset. Vocabularies are the last:
    the others need their ids, and if one of those could not be changed, a next call does. Raises ValueError: nothing has such a
    feature, or two vocabularies give other ids to a value.
    """
    datasets = [of for path in found[SPEC_NAME] if (of := _dataset(path, values))]
    if not (datasets or found[INDEX_FILE] or found[DENSE]):
        raise ValueError(f"directories: nothing there has a feature {shown(values.feature)}")
    ids: dict[str, int] = {}
    for dataset in datasets:
        for value, number in dataset.ids.items():
            if ids.setdefault(value, number) != number:
                raise ValueError(
                    f"directories: {dataset.path} has another id of a value; name one fit and its days at a time"
                )
    deltas, need_ids = set(), False
    for path in found[INDEX_FILE]:
        for line in _tried(path, partial(_in_checkpoint, path, values, datasets)):
            deltas.add(path.parent.parent / DELTAS)
            need_ids |= not line[2]
            yield line
    for path in sorted(filter(Path.is_dir, deltas)):
        yield path, "has the rows as they were; remove it once readers begin at a newer base", True
    for path in found[DENSE]:
        for line in _tried(path, partial(_in_model, path, values, datasets)):
            need_ids |= not line[2]
            yield line
    for dataset in datasets:
        if need_ids and dataset.ids:
            text = "not changed: what could not be changed needs its ids; call again then"
            yield dataset.path, text, False
            continue
        yield from _tried(dataset.path, partial(_in_dataset, dataset, values))
        yield dataset.path, "the raw files that it was made from were not looked at", True


def _tried(path: Path, change: Callable[[], str]) -> list[Line]:
    """Return the line of a change; none if there was nothing to change."""
    try:
        text = change()
    except (ValueError, OSError) as error:
        return [(path, f"not changed: {error}", False)]
    return [(path, text, True)] if text else []


def _dataset(path: Path, values: Values) -> _Dataset | None:
    """Return a dataset if it has the feature. Raises ValueError: it has ids without a vocabulary."""
    spec, feature = FeatureSpec.load_features(path), values.feature
    declared = next((of for of in spec.categorical if of.name == feature), None)
    if declared is None:
        return None
    owner = declared.table or feature
    if not declared.is_dynamic and not (path / vocabulary_name(owner)).exists():
        raise ValueError(
            f"feature={feature}: {path} has no vocabulary of it, as where values are hashed into rows that others share"
        )
    return _Dataset(path, spec, owner, declared.is_dynamic, ids_of(path, owner, values.texts))


def _of_fit(facts: Mapping[str, Any], datasets: Sequence[_Dataset]) -> list[_Dataset]:
    """Return the datasets of the fit of a checkpoint or a model, as far as the checksums in its `facts` tell."""
    learnt = {VOCABULARIES: facts.get(VOCABULARIES) or {}}
    return [of for of in datasets if not vocabulary_mismatch(learnt, of.spec.metadata)]


def _rows(datasets: Sequence[_Dataset]) -> np.ndarray:
    return np.array(sorted({number for of in datasets for number in of.ids.values()}), np.int64)


def _in_checkpoint(path: Path, values: Values, datasets: Sequence[_Dataset]) -> str:
    if DELTA in read_json(path / RUN_FILE):
        return ""
    saved = SavedModel.open(path, "directories")
    config = config_of(saved.facts)
    named = [
        of
        for of in _of_fit(saved.facts, datasets)
        if of.is_dynamic == (f"keys.{of.owner}.{KEYS}" in saved.index.tensors)
    ]
    dataset = next(iter(named), None) or _dataset(Path(config.data.path or ""), values)
    if dataset is None:
        raise ValueError(f"its dataset has no feature {shown(values.feature)}")
    rows: dict[str, np.ndarray] = {}
    ids = _rows(named)
    if dataset.is_dynamic:
        rows = keyed_rows(saved, dataset.owner, values.keys)
        ids = rows.get(f"keys.{dataset.owner}.", np.zeros(0, np.int64))
    elif not named:
        raise ValueError(f"its ids are those of the vocabulary of {dataset.path}; name that too")
    tables_of = tables_of_feature(declared_tables(config.model, dataset.spec))
    sharing = dataset.spec.table_features[dataset.owner] if len(ids) else ()
    for table in dict.fromkeys(table for of in sharing for table in tables_of[of.name]):
        weight = saved.index.tensors.get(f"tables.{table}.weight")
        if weight is None:
            raise ValueError(
                f"it has no tables.{table}.*, as runs on {dataset.path} have; name the dataset of its training"
            )
        # A later day has ids beyond a table that had not grown.
        if len(own := ids[ids < weight.size[0]]):
            rows[f"tables.{table}."] = own
    if rows:
        forget_rows(saved, rows)
        return f"values removed: {max(map(len, rows.values())):,} ({', '.join(rows)})"
    return ""


def _in_dataset(dataset: _Dataset, values: Values) -> str:
    count = len(dataset.ids)
    events = forget_values(
        dataset.path, dataset.owner, values.texts, {dataset.owner, values.feature}
    )
    text = f"values removed: {count:,} of the vocabulary; rows of the splits keep the ids: make it again to train on it again"
    of_latest = f"events of the next day removed: {events:,}"
    return "; ".join([text] * bool(count) + [of_latest] * bool(events))


def _in_model(directory: Path, values: Values, datasets: Sequence[_Dataset]) -> str:
    """Write a model directory again without the values, unless it has none; ValueError if it is damaged."""
    manifest = Manifest.read(directory)
    manifest.verify(directory)
    tables = [table for table in manifest.tables if values.feature in table.features]
    of_keys = manifest.keys.get(values.feature)
    with_ids = [of for of in datasets if not of.is_dynamic]
    name, vocabulary = vocabulary_of(directory, manifest, values.feature)
    if of_keys is not None:
        known = KeyRows(directory / of_keys.name, of_keys.count)
        rows = known.rows(values.keys)
    elif vocabulary is not None:
        rows = vocabulary.ids(values.texts)
    elif tables and (named := _of_fit(manifest.source, with_ids)):
        rows = _rows(named)
    else:
        raise ValueError(
            f"it has no raw values of a feature {shown(values.feature)}; if it takes ids, name the dataset of its training too"
        )
    rows = np.unique(rows[(rows > 0) & (rows < min(table.rows for table in tables))])
    if not len(rows):
        return ""
    files = [name for table in tables for name in (table.file, table.scale_file)]
    with edited_copy(directory, files) as copy:
        for table in tables:
            for numbers in opened_table(copy, manifest.dtype, table, table.rows):
                if numbers is not None:
                    numbers[rows] = 0
                    numbers.flush()
        if of_keys is not None:
            by_row = known.by_row(max(table.rows for table in tables))
            by_row[rows] = 0
            (copy / of_keys.name).unlink()
            new = write_key_rows(copy, unquote(Path(of_keys.name).stem), by_row)
            kept = {n: new if file == of_keys else file for n, file in manifest.keys.items()}
            manifest = replace(manifest, keys=kept)
        if vocabulary is not None:
            (copy / name).unlink()
            write_vocabulary(copy / name, vocabulary.texts_without(set(rows.tolist())))
        own = {f"tables.{table.name}": rows for table in tables}
        source = manifest.source | {FORGOTTEN: noted_rows(manifest.source.get(FORGOTTEN, {}), own)}
        (copy / MANIFEST).unlink()
        document = replace(manifest, files=describe_files(copy), source=source).to_json()
        write_synced(copy / MANIFEST, document)
    return f"values removed: {len(rows):,}"
