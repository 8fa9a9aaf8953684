"""Writer of a dataset directory that is complete or absent.

All files are written to a temporary sibling, the spec last. The sibling is then renamed to the dataset directory.
"""

import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from configs.messages import shown
from dataloading.dataset.column_files import EventWriter, GrowingFile, file_name
from dataloading.dataset.counted_file import CountedFile
from dataloading.dataset.documents import YamlDumper, open_regular
from dataloading.dataset.durable_files import new_output, replace_text
from dataloading.dataset.feature_spec import (
    DYNAMIC,
    NUMERICAL_DTYPES,
    RAGGED,
    SPEC_NAME,
    CategoricalFeature,
    FeatureSpec,
    check_groups,
    features_by_table,
)
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.dataset.sequences import EVENTS, SequenceGroup
from dataloading.dataset.split_files import (
    PARQUET,
    SPLITS,
    SplitFiles,
    expect,
    find_file,
    unnamed_validation,
)
from dataloading.dataset.split_writer import SplitWriter

READ_BYTES = 1 << 22


class DatasetWriter:
    """The splits of a dataset that is being written; `writer["train"]` is a `SplitWriter`."""

    def __init__(
        self, directory: Path, spec: FeatureSpec, splits: Mapping[str, Callable[..., SplitWriter]]
    ) -> None:
        # temporary directory of the files; other files added there become part of the dataset
        self.directory = directory
        self._spec = spec
        self._splits = {split: make(directory, split, spec) for split, make in splits.items()}
        self._copied: dict[str, dict[str, Any]] = {}
        # Shared with the splits.
        self._logs: dict[str, EventWriter] = {}
        for writer in self._splits.values():
            writer.logs = self._logs

    def __getitem__(self, split: str) -> SplitWriter:
        return self._splits[split]

    def append_events(
        self, *, ids: Mapping[str, np.ndarray], events: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Append events of one or more groups, of which `slices` of any split's rows may then be appended.

        `ids`, `events`: flat, by the columns of a group, all of them. Raises ValueError: a value that a file cannot hold.
        """
        given = {*ids, *(events or {})}
        unknown = given.difference(*(group.columns for group in self._spec.sequences))
        if unknown or not all(type(writer) is SplitWriter for writer in self._splits.values()):
            what = f"no column of events: {sorted(unknown)}" if unknown else "got Parquet"
            raise ValueError(
                f"append_events: {what}; want columns of sequences, in file_format=binary"
            )
        features = {feature.name: feature for feature in self._spec.categorical}
        for group in self._spec.sequences:
            if given.intersection(group.columns):
                log = self._logs.get(group.name) or EventWriter(
                    group, features, lambda name: self.directory / EVENTS / name
                )
                self._logs[group.name] = log
                log.append_log(ids, events or {})

    def copy_file(self, name: str, root: Path) -> None:
        """Copy a file that is none of the splits' own, such as their kept columns, from the dataset in `root`."""
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        with open_regular(find_file(root, name)) as source, CountedFile(path) as copy:
            shutil.copyfileobj(source, copy, READ_BYTES)
            copy.sync()
        self._copied[name] = copy.record

    def finish(self) -> None:
        """Close and check all files, then write the spec."""
        splits = {name: writer.close() for name, writer in self._splits.items()}
        first = self._splits.get("train") or next(iter(self._splits.values()))
        checksums: dict[str, dict[str, Any]] = {}
        for writer in self._splits.values():
            checksums |= writer.checksums(self.directory)
        for file in self._log_files():
            file.sync()
            file.close()
            checksums[file.path.relative_to(self.directory).as_posix()] = file.record
        checksums |= self._copied
        metadata = self._spec.metadata | {
            "rows": {name: files.num_rows for name, files in splits.items()},
            "files": checksums,
        }
        categorical = tuple(
            replace(f, mean_hotness=f.hotness or first.mean_hotness(f.name, splits[first.split]))
            for f in self._spec.categorical
        )
        write_spec(
            replace(self._spec, categorical=categorical, splits=splits, metadata=metadata),
            self.directory,
        )

    def abandon(self) -> None:
        """Close all files without a check."""
        for writer in self._splits.values():
            writer.abandon()
        for file in self._log_files():
            file.close()

    def _log_files(self) -> list[GrowingFile]:
        return [file for log in self._logs.values() for file in log.files.values()]


@contextmanager
def write_dataset(
    root: Path | str,
    *,
    categorical: Sequence[CategoricalFeature],
    numerical: Sequence[str] = (),
    label: str | Sequence[RowColumn] = "label",
    weight: str | None = None,
    keep_rate: str | None = None,
    teacher: Sequence[str] = (),
    numerical_dtype: str = "float16",
    file_format: str = "binary",
    splits: Sequence[str] = ("train", "test"),
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    absent: Mapping[str, Collection[str]] | None = None,
    part_rows: Mapping[str, Sequence[int]] | None = None,
    sequences: Sequence[SequenceGroup] = (),
) -> Iterator[DatasetWriter]:
    """Write a dataset directory; leaving the block completes it, an exception leaves `root` as it was.

    `categorical`: features in the model's order. `numerical`: names of the numericals; may be empty. `numerical_dtype`:
    float16 (required by NVIDIA's recipe) or float32. `file_format`: `binary`, or `parquet`, whose columns must grow
    together. `splits`: at least one of `train`, `test` and `validation`, and any other. `metadata`: plain yaml values;
    `rows` and `files` are added. `teacher`: names of scores of other models. `absent`: per split, names of the labels,
    the weight, the keep rate and the teachers that it lacks: all labels, teachers alone, or nothing. `part_rows`: of a
    dataset in Parquet, the rows of each file per split; a file list then names the files. `sequences`: groups of ragged
    features of `categorical`. Raises ValueError: at the start, if `root` cannot be written or the features contradict
    each other; at the end, if the columns of a split hold different rows.
    """
    root = check_output(root, overwrite)
    if numerical_dtype not in NUMERICAL_DTYPES:
        raise ValueError(
            f"numerical_dtype: got {shown(numerical_dtype)}, want one of {', '.join(NUMERICAL_DTYPES)}"
        )
    if file_format not in ("binary", PARQUET):
        raise ValueError(f"file_format: got {shown(file_format)}, want binary or {PARQUET}")
    spec = FeatureSpec(
        root,
        tuple(numerical),
        np.dtype(numerical_dtype),
        (RowColumn(label),) if isinstance(label, str) else tuple(label),
        tuple(categorical),
        {},
        dict(metadata or {}),
        None if weight is None else RowColumn.of(weight, Channel.weight),
        None if keep_rate is None else RowColumn.of(keep_rate, Channel.keep_rate),
        tuple(sequences),
        tuple(RowColumn.of(name, Channel.teacher) for name in teacher),
    )
    _check_spec(spec, splits)
    writer: Callable[..., SplitWriter] = SplitWriter
    if file_format == PARQUET:
        # Imported here, since only Parquet needs pyarrow.
        from dataloading.dataset.parquet_writer import ParquetSplitWriter as writer
    makers = {split: partial(writer, absent=(absent or {}).get(split, ())) for split in splits}
    for split, rows in (part_rows or {}).items():
        makers[split] = partial(makers[split], part_rows=rows)
    with new_output(root, partial(check_output, overwrite=overwrite)) as directory:
        dataset = DatasetWriter(directory, spec, makers)
        try:
            yield dataset
            dataset.finish()
        finally:
            dataset.abandon()


def _check_spec(spec: FeatureSpec, splits: Sequence[str]) -> None:
    reserved = {"rows", "files"} & set(spec.metadata)
    if reserved:
        raise ValueError(
            f"metadata: got the keys {sorted(reserved)}, which the writer fills in; rename them"
        )
    twice = [name for name, times in Counter(spec.names).items() if times > 1]
    if twice:
        raise ValueError(f"feature '{twice[0]}' is named twice; names are unique over all channels")
    features_by_table(spec.categorical)
    check_groups(spec.sequences, spec.categorical)
    if spec.sequences and EVENTS in splits:
        raise ValueError(
            f"splits: got '{EVENTS}', the directory of events; name the split otherwise"
        )
    if not set(SPLITS).intersection(splits):
        raise ValueError(
            f"splits: got {shown(list(splits))}, want at least one of {', '.join(SPLITS)}"
        )
    for split in splits:
        file_name(split)
    try:
        yaml.safe_dump(spec.metadata)
    except yaml.YAMLError as error:
        raise ValueError(f"metadata: want plain yaml values: {error}") from None


def check_output(root: Path | str, overwrite: bool = False) -> Path:
    """Return `root`, resolved; ValueError if a dataset must not or cannot be written there."""
    root = Path(root).resolve()
    if root.is_mount():
        raise ValueError(
            f"{root} is a mount point and cannot be renamed; name a directory inside it"
        )
    if not root.exists():
        return root
    if not root.is_dir():
        raise ValueError(f"{root} is a file; name a directory that is new or empty")
    if (root / SPEC_NAME).exists():
        if not overwrite:
            raise ValueError(
                f"{root} holds a complete dataset; name another directory, or ask to overwrite it"
            )
    elif any(root.iterdir()):
        raise ValueError(
            f"{root} is not empty and holds no {SPEC_NAME}; name a directory that is new or empty"
        )
    return root


def write_spec(spec: FeatureSpec, root: Path) -> None:
    """Write `root`/feature_spec.yaml by rename, synced, so that it is never partial.

    A split `validation` is not named if NVIDIA's recipes can read the dataset, since they refuse a spec with other splits than
    `train` and `test`. Readers here find its files beside those of `test`. `spec`: its paths must lie below `root`.
    """
    features: dict[str, dict[str, Any]] = {}
    for feature in spec.categorical:
        entry: dict[str, Any] = {"cardinality": feature.cardinality, "dtype": feature.dtype.name}
        if feature.is_dynamic:
            entry["vocabulary"] = DYNAMIC
        if feature.hotness is None:
            entry |= {"hotness": RAGGED, "mean_hotness": float(feature.mean_hotness)}
        elif feature.hotness > 1:
            entry["hotness"] = feature.hotness
        if feature.table not in (None, feature.name):
            entry["table"] = feature.table
        features[feature.name] = entry
    features |= {name: {"dtype": spec.numerical_dtype.name} for name in spec.numerical}
    features |= {column.name: {"dtype": column.dtype.name} for column in spec.row_columns}
    features |= {column.name: {"dtype": column.dtype.name} for column in spec.event_columns}
    channels = {
        "categorical": [feature.name for feature in spec.categorical],
        "label": [label.name for label in spec.labels],
        "numerical": list(spec.numerical),
    }
    for column in spec.row_columns[len(spec.labels) :]:
        channels.setdefault(column.channel.value, []).append(column.name)
    if spec.event_columns:
        channels["sequence"] = [column.name for column in spec.event_columns]
    groups = {"sequence_spec": {group.name: _group(group) for group in spec.sequences}}
    document = {
        "channel_spec": channels,
        "feature_spec": features,
        **(groups if spec.sequences else {}),
        "metadata": spec.metadata,
        "source_spec": {
            name: _chunks(spec, files, root)
            for name, files in spec.splits.items()
            if name != "validation" or not _nvidia_reads(spec, root)
        },
    }
    text = yaml.dump(document, Dumper=YamlDumper, sort_keys=False)
    replace_text(root / SPEC_NAME, text)


def _group(group: SequenceGroup) -> dict[str, Any]:
    numbers, pools = [column.name for column in group.numbers], group.pools
    return {
        "features": list(group.features),
        **({"numbers": numbers} if numbers else {}),
        **({} if group.time is None else {"time": group.time}),
        **({"pools": {"of": pools.of, "values": list(pools.values)}} if pools else {}),
        "max_length": group.max_length,
    }


def _nvidia_reads(spec: FeatureSpec, root: Path) -> bool:
    """Return whether NVIDIA's recipes read a dataset of these features once its spec names `train` and `test` alone."""
    one_hot = all(f.hotness == 1 and f.dtype.itemsize <= 4 for f in spec.categorical)
    half = bool(spec.numerical) and spec.numerical_dtype == np.float16
    one_label = len(spec.row_columns) == 1 and spec.labels[0].is_binary
    if any(files.absent for files in spec.splits.values()):
        return False
    if not (one_hot and half and one_label and set(spec.splits) == set(SPLITS)):
        return False
    # Files of another name than those of `test` would not be found again.
    found = unnamed_validation(root, spec.splits["test"]).get("validation")
    wanted = spec.splits["validation"]
    return found is not None and replace(found, num_rows=wanted.num_rows) == wanted


def _chunks(spec: FeatureSpec, files: SplitFiles, root: Path) -> list[dict[str, Any]]:
    def chunk(features: Sequence[str], *paths: Path) -> dict[str, Any]:
        names = [path.relative_to(root).as_posix() for path in paths]
        return {"type": "split_binary", "features": list(features), "files": names}

    if files.parquet:
        parts = [path.relative_to(root).as_posix() for path in files.parquet]
        names = [name for name in spec.names if name not in files.absent]
        return [{"type": PARQUET, "features": names, "files": parts}]
    chunks = [] if files.numerical is None else [chunk(spec.numerical, files.numerical)]
    chunks += [chunk([name], path) for name, path in files.columns.items()]
    for feature in spec.categorical:
        group = spec.group_of(feature.name)
        if group is not None:
            second = [files.slices[group.name]]
        else:
            second = [files.offsets[feature.name]] if feature.hotness is None else []
        chunks.append(chunk([feature.name], files.ids[feature.name], *second))
    for group in spec.sequences:
        slices = files.slices[group.name]
        chunks += [chunk([c.name], files.events[c.name], slices) for c in group.numbers]
    return chunks + [chunk([name], path) for name, path in files.moments.items()]


def checksums_of(metadata: object, where: str) -> dict[str, dict[str, Any]]:
    """Return `files` of a spec's metadata: bytes and CRC-32 per file; empty if it lists none.

    Raises ValueError: it is of another shape; starts with `where`, the key of `metadata`.
    """
    listed = metadata.get("files") if isinstance(metadata, Mapping) else None
    if not listed:
        return {}
    expect(isinstance(listed, Mapping), f"{where}.files", listed, "a mapping from file to checksum")
    assert isinstance(listed, Mapping)
    for name, entry in listed.items():
        good = (
            isinstance(entry, Mapping)
            and type(entry.get("bytes")) is int
            and isinstance(entry.get("crc32"), str)
        )
        expect(good, f"{where}.files.{shown(name)}", entry, "bytes (an integer) and crc32 (a text)")
    return dict(listed)


def verify_checksums(spec: FeatureSpec, only: Collection[str] | None = None) -> int:
    """Compare the checksum of every file in the metadata of the spec; return the number of files.

    `only`: names of files to compare; None: all listed. Raises ValueError: a file has changed, or the spec lists no checksums.
    """
    assert spec.root is not None
    listed = checksums_of(spec.metadata, f"{spec.root / SPEC_NAME}: metadata")
    if not listed:
        raise ValueError(
            f"{spec.root}: its {SPEC_NAME} lists no checksums (metadata.files); nothing to compare with"
        )
    if only is not None:
        listed = {name: listed[name] for name in only}
    for name, wanted in listed.items():
        try:
            path = find_file(spec.root, name)
        except ValueError as error:
            raise ValueError(f"{spec.root / SPEC_NAME}: metadata.files: {error}") from None
        num_bytes = crc32 = 0
        with open_regular(path) as stream:
            while data := stream.read(READ_BYTES):
                num_bytes, crc32 = num_bytes + len(data), zlib.crc32(data, crc32)
        got = {"bytes": num_bytes, "crc32": f"{crc32:08x}"}
        if got != wanted:
            raise ValueError(
                f"{path} has changed since it was written: got {got}, want {shown(wanted)}; copy it again"
            )
    return len(listed)
