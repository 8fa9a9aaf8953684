"""A model directory: what serving reads, described by one manifest.

    model.json           features, tables, tasks, versions, proof; bytes and SHA-256 of every other file
    dense.pt2            dense component: torch.export, batch 1 to 65,536
    dense.onnx           the same for ONNX runtimes, on request
    dense.aoti.pt2       the same as machine code of AOTInductor, on request; nothing here loads it
    tables/<table>.bin   rows, one after another: float32, bfloat16, int8, or two int4 a byte
    tables/<table>.scale.bin      int8, int4: float32 per row, by which the row is multiplied
    vocabulary/<feature>.bin      raw values only: values and their ids (`serving.vocabulary`)
    proof_rows.bin       rows of the proof as features, for the proof of versions that deltas make of this one

A model directory is complete or absent. Nothing in it is a pickle, and nothing is executed but the operations of `dense.pt2`,
which `serving.inference.dense` checks first.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import numpy as np

from configs.messages import shortened, shown
from configs.table_schema import MOST_HOTNESS, is_number, one_of, record_of, records, whole
from dataloading.dataset.documents import open_regular, parse_json, read_regular, resolved
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from dataloading.lineage import FORGOTTEN
from serving.raw_description import ModelParts, check_raw
from serving.raw_records import RawDescription

MANIFEST = "model.json"
DENSE = "dense.pt2"
ONNX = "dense.onnx"
AOTI = "dense.aoti.pt2"
MACHINE_CODE = "machine_code"
"""Key of the proof of `dense.aoti.pt2`."""
ERROR = "largest_table_error"
"""Key of the proof of an export: largest difference of a number of the tables from the checkpoint."""
OF_ONNX = "onnx"
"""Key of the proof of `dense.onnx`."""
VOCABULARIES = "vocabularies"
"""Key of the source: checksums of the vocabularies that the model has learnt, by feature."""
PROOF_ROWS = "proof_rows.bin"
"""Features of the rows of the proof, with which the versions that deltas make of this one are proved."""
FORMAT = 1
MOST_ROWS = 65_536
"""Rows of the largest batch that the dense component takes."""
TABLE_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
SCALED = ("int8", "int4")
"""Dtypes of tables whose rows have a scale each."""
NUMERICAL = "numerical"
IDS = "ids"
"""Inputs of a request: numbers, and the ids of all features of fixed hotness."""
PADDING = -1
"""Fills the rows of a ragged feature behind their last id."""
KEY_BYTES = 12
"""Bytes of a raw key and its row."""


class ModelError(ValueError):
    """A directory is no model directory, or is damaged."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A categorical feature: its ids are row numbers below `cardinality`; `hotness` per row, None if rows differ."""

    name: str
    cardinality: int = whole(1, 2**48 - 1)
    hotness: int | None = whole(1, MOST_HOTNESS)


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table and the features that are looked up in it, in the order of the embeddings."""

    name: str
    rows: int = whole(1, 2**48 - 1)
    columns: int = whole(1, 2**48 - 1)
    pooling: str = one_of(MISSING, "sum", "mean", "none")
    features: list[str]  # type: ignore[misc]  # mypy takes what is before for a default

    @property
    def file(self) -> str:
        return f"tables/{quote(self.name, safe='')}.bin"

    def row_bytes(self, dtype: str) -> int:
        return -(-self.columns * TABLE_BITS[dtype] // 8)

    @property
    def scale_file(self) -> str:
        """Name of the file of its scales, which int8 and int4 tables have."""
        return f"tables/{quote(self.name, safe='')}.scale.bin"


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence group: ragged features and numbers, of which a row has equally many, the oldest event first."""

    name: str
    features: list[str]
    numbers: list[str]
    time: str | None  # which of `numbers` is the age of an event in seconds
    max_length: int
    weight: str | None = None  # which of `numbers` weighs the vectors of its events

    @property
    def group(self) -> SequenceGroup:
        """The same as a dataset has it. Raises ValueError: it can be no group."""
        columns = tuple(
            EventColumn(name, np.dtype(np.int64 if name == self.time else np.float32))
            for name in self.numbers
        )
        features = tuple(self.features)
        return SequenceGroup(
            self.name, features, self.max_length, columns, self.time, weight=self.weight
        )


@dataclass(frozen=True, slots=True)
class Output:
    """A task: a probability if it is binary, else a number.

    `shift`: added to the logit: that of the task, of its keep rate and its positive weight.
    """

    name: str
    is_binary: bool
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class KeyFile:
    """File of the rows of raw keys (`serving.inference.key_rows`), and the number of keys."""

    name: str
    count: int = whole(0, 2**48 - 1)


@dataclass(frozen=True, slots=True)
class FileState:
    bytes: int = whole(0, 2**63 - 1)
    sha256: str  # type: ignore[misc]  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of `model.json`.

    `keep_rate`: name of the column of keep rates that rows of the dataset have; None without. `dtype`: of the tables, a key of
    `TABLE_BITS`. `sequences`: groups of the dataset, if a table hands out rows. `keys`: file of the rows of raw keys by feature;
    features that are not named have ids. `raw`: how raw values become features, JSON of a `RawDescription`; None if only ids are
    served. `source`: checkpoint, step, fingerprint of the features, versions of the libraries. `proof`: rows that were compared
    with the training path, and the largest difference; likewise of machine code. `files`: bytes and SHA-256 of every other file.
    """

    name: str
    model: str
    numerical: list[str]
    categorical: list[Feature] = records(Feature)
    keep_rate: str | None
    outputs: list[Output] = records(Output)
    dtype: str = one_of(MISSING, *TABLE_BITS)
    tables: list[Table] = records(Table)
    sequences: list[Sequence] = records(Sequence)
    keys: dict[str, KeyFile] = field(default_factory=dict)
    raw: dict[str, Any] | None = None
    source: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileState] = field(default_factory=dict)

    @property
    def fixed(self) -> list[Feature]:
        """Features of fixed hotness, which share the matrix of ids."""
        return [feature for feature in self.categorical if feature.hotness is not None]

    @property
    def ragged(self) -> list[Feature]:
        """Features whose rows differ in their number of ids."""
        return [feature for feature in self.categorical if feature.hotness is None]

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Inputs of features, as metadata lists them; ids of 64 bits are accepted too."""
        are_short = all(feature.cardinality <= 2**31 for feature in self.categorical)
        ids = "INT32" if are_short and not self.keys else "INT64"
        inputs = []
        if self.numerical:
            inputs.append((NUMERICAL, "FP32", [-1, len(self.numerical)]))
        if self.fixed:
            inputs.append((IDS, ids, [-1, self.id_columns]))
        inputs += [(feature.name, ids, [-1, -1]) for feature in self.ragged]
        inputs += [(name, "FP32", [-1, -1]) for of in self.sequences for name in of.numbers]
        return [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in inputs]

    def check_inputs(self) -> None:
        """Raise ValueError: two inputs of a request have one name, so that one tensor would be read as both."""
        names = [*(of["name"] for of in self.inputs), *(of.name for of in self.sequences)]
        for name in names:
            if [*names, self.keep_rate].count(name) > 1:
                raise ValueError(f"two inputs of a request are named {shown(name)}; rename one")

    @property
    def id_columns(self) -> int:
        return sum(feature.hotness or 0 for feature in self.fixed)

    def id_slices(self) -> dict[str, slice]:
        """Return the columns of each feature of fixed hotness in the matrix of ids."""
        columns, first = {}, 0
        for feature in self.fixed:
            assert feature.hotness is not None
            columns[feature.name] = slice(first, first + feature.hotness)
            first += feature.hotness
        return columns

    @property
    def handed_out(self) -> list[tuple[Table, str]]:
        """Tables whose rows the dense component takes itself, with each of their features: none pools, and one is ragged."""
        ragged = {feature.name for feature in self.ragged}
        return [
            (table, name)
            for table in self.tables
            if table.pooling == "none" and ragged & {*table.features}
            for name in table.features
        ]

    @property
    def handed_out_ragged(self) -> list[str]:
        ragged = {feature.name for feature in self.ragged}
        return [*dict.fromkeys(name for _, name in self.handed_out if name in ragged)]

    @property
    def num_columns(self) -> int:
        hotness = {feature.name: feature.hotness or 0 for feature in self.categorical}
        handed_out = {table.name for table, _ in self.handed_out}
        return sum(
            table.columns * (hotness[name] if table.pooling == "none" else 1)
            for table in self.tables
            if table.name not in handed_out
            for name in table.features
        )

    @property
    def identity(self) -> str:
        """A number that differs between models of different weights, vocabularies or transformations, 12 hex digits."""
        left_out = ("source", "proof", "files")
        document = {k: v for k, v in self._document().items() if k not in left_out}
        hashes = {n: state.sha256 for n, state in self.files.items() if n != PROOF_ROWS}
        text = json.dumps([document, hashes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def interface(self) -> dict[str, Any]:
        """Return what a client depends on: a version that replaces another must have the same."""
        return {
            "name": self.name,
            "numerical": self.numerical,
            "categorical": [[feature.name, feature.hotness] for feature in self.categorical],
            "keep_rate": self.keep_rate,
            "outputs": [output.name for output in self.outputs],
            "raw": RawDescription.of(self.raw).inputs if self.raw else None,
            "keys": sorted(self.keys),
            "sequences": self.sequences,
        }

    def differing(self, interface: Mapping[str, Any]) -> list[str]:
        """Return the parts of its interface that are others than those of `interface`."""
        return [key for key, value in self.interface().items() if value != interface[key]]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **self._document()}, indent=1) + "\n"

    def _document(self) -> dict[str, Any]:
        document = asdict(self)
        if not self.sequences:  # as models without them were written before there were any
            del document["sequences"]
        return document

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read and check the manifest of a model directory; no other file is opened.

        Raises ModelError: there is none, or it is malformed.
        """
        path = directory / MANIFEST
        try:
            data = read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            raise ModelError(
                f"{directory} is no model directory (there is no {MANIFEST} in it); write one with python -m serving.export"
            ) from None
        except ValueError as error:
            raise ModelError(str(error)) from None
        try:
            document = parse_json(data, str(path))
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']}, and this version reads {FORMAT}")
            known = {declared.name for declared in fields(cls)}
            values = {name: value for name, value in document.items() if name in known}
            for part, kind in (("keys", KeyFile), ("files", FileState)):
                of = values.get(part) or {}
                values[part] = {
                    n: record_of(kind, file, f"{part}: {shown(n)}") for n, file in of.items()
                }
            manifest = record_of(cls, values, "manifest")
            _check(directory, manifest)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            is_told = isinstance(error, ValueError)
            reason = shortened(str(error), 300) if is_told else shown(error)
            raise ModelError(
                f"{path} is no manifest of a model: {reason}; name what serving.export wrote, no run directory"
            ) from None
        return manifest

    def check_sizes(self, directory: Path) -> None:
        """Compare the size of every file, which tells whether the directory is complete.

        Raises ModelError: a file is missing or differs.
        """
        for name, wanted in self.files.items():
            try:
                size = (directory / name).stat().st_size
            except OSError as error:
                raise ModelError(f"{directory / name} cannot be read ({error.strerror})") from None
            if size != wanted.bytes:
                raise _damaged(directory / name, f"{size:,} bytes instead of {wanted.bytes:,}")

    def verify(self, directory: Path, threads: int = 1) -> None:
        """Compare size and SHA-256 of every file, `threads` of them at a time.

        Raises ModelError: a file is missing or differs, or a table has a number that is not finite.
        """
        self.check_sizes(directory)
        # In the same pass: to read a table takes longer than to look at its numbers.
        kinds: dict[str, str] = {}
        for table in self.tables:
            kinds |= {table.file: self.dtype, table.scale_file: "fp32"}

        def check(name: str) -> None:
            try:
                got, is_finite = _read_file(directory / name, kinds.get(name))
            except OSError as error:
                raise ModelError(f"{directory / name} cannot be read ({error.strerror})") from None
            if got != self.files[name]:
                raise _damaged(directory / name, "its SHA-256 differs")
            if not is_finite:
                raise ModelError(
                    f"{directory / name} has a number that is not finite; export a checkpoint of a training that has not diverged"
                )

        with ThreadPoolExecutor(threads, "hash") as pool:
            # The largest first, so that no thread begins with it when the others end.
            names = sorted(self.files, key=lambda name: -self.files[name].bytes)
            for _ in pool.map(check, names):
                pass


def _all_finite(block: bytes, dtype: str | None) -> bool:
    """Return whether the numbers of a part of a table's file are finite; of a file that is no table nothing is known."""
    if dtype == "fp32":
        return bool(np.isfinite(np.frombuffer(block, "<f4", len(block) // 4)).all())
    if dtype == "bf16":
        # Infinities and NaN have all bits of the exponent.
        return not (np.frombuffer(block, "<u2", len(block) // 2) & 0x7F80 == 0x7F80).any()
    return True


def _damaged(path: Path, state: str) -> ModelError:
    return ModelError(f"{path} is damaged ({state}); export the model again")


def _read_file(path: Path, dtype: str | None = None) -> tuple[FileState, bool]:
    """Return size and SHA-256 of a file, and whether its numbers of a dtype are finite."""
    digest, size, is_finite = hashlib.sha256(), 0, True
    with open_regular(path) as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
            is_finite &= _all_finite(block, dtype)
            size += len(block)
    return FileState(size, digest.hexdigest()), is_finite


def _check(directory: Path, manifest: Manifest) -> None:
    """Raise ValueError unless all values that a reader uses are of the right kind and fit together."""
    names = [feature.name for feature in manifest.categorical]
    outputs = [output.name for output in manifest.outputs]
    _texts([manifest.name, manifest.model, *manifest.numerical, *names, *outputs])
    for several in (names, manifest.numerical, outputs):
        if len(set(several)) < len(several):
            raise ValueError("want features of different names, and outputs")
    if not names or not outputs:
        raise ValueError("want at least one feature and one output")
    if not isinstance(manifest.source.get(VOCABULARIES) or {}, dict):
        raise ValueError(f"{VOCABULARIES} of the source must be an object")
    if not all(
        type(n) is int and n >= 0 for of in manifest.source.get(FORGOTTEN, {}).values() for n in of
    ):
        raise ValueError(f"{FORGOTTEN} of the source must be numbers of rows, by table")
    if not _are_finite(manifest.proof):
        raise ValueError("the proof has a number that is not finite")
    rows = {feature.name: feature.cardinality for feature in manifest.categorical}
    for output in manifest.outputs:
        if not is_number(output.shift):
            raise ValueError(f"output {shown(output.name)} is malformed")
    for name in manifest.files:
        _check_file(directory, name)
    for name, file in manifest.keys.items():
        if name not in rows:
            raise ValueError(f"the keys of {shown(name)} are malformed")
        if manifest.files[file.name].bytes != file.count * KEY_BYTES:
            raise ValueError(f"{file.name} has not the size of {file.count} keys")
    for table in manifest.tables:
        _check_table(manifest, table, rows)
    if {name for table in manifest.tables for name in table.features} != set(names):
        raise ValueError("a feature has no table")
    ragged = {feature.name for feature in manifest.ragged}
    _texts([name for of in manifest.sequences for name in (of.name, *of.group.columns)])
    manifest.check_inputs()
    for sequence in manifest.sequences:
        if not ragged.issuperset(sequence.features) or ragged & {*sequence.numbers}:
            raise ValueError(f"sequence {shown(sequence.name)} is not of ragged features")
    if DENSE not in manifest.files:
        raise ValueError(f"there is no {DENSE}")
    if manifest.raw is not None:
        features = {f.name: (f.cardinality, f.hotness) for f in manifest.categorical}
        groups = {of.name: of.group.columns for of in manifest.sequences}
        model = ModelParts(features, manifest.keys, manifest.files, groups)
        check_raw(RawDescription.of(manifest.raw), manifest.numerical, model)


def _check_table(manifest: Manifest, table: Table, rows: Mapping[str, int]) -> None:
    _texts([table.name, *table.features])
    for feature in table.features:
        if rows[feature] > table.rows:
            raise ValueError(
                f"table {shown(table.name)} has fewer rows than feature {shown(feature)}"
            )
    wanted = {table.file: table.rows * table.row_bytes(manifest.dtype)}
    if manifest.dtype in SCALED:
        wanted[table.scale_file] = table.rows * 4
    for name, size in wanted.items():
        if manifest.files[name].bytes != size:
            raise ValueError(f"{name} has {manifest.files[name].bytes} bytes, want {size}")


def _check_file(directory: Path, name: str) -> None:
    parts = name.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"got file {shown(name)}, want a name in the directory or in one folder")
    if not resolved(directory / name).is_relative_to(resolved(directory)):
        raise ValueError(f"file {shown(name)} is a link that leads out of {directory}")


def _texts(values: list[str]) -> None:
    if not all(values):
        raise ValueError("got '', want a name")


def _are_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_are_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


def proof_line(name: str, proof: Mapping[str, Any], other: str = "the training path") -> str:
    """Return the line that a command prints of a proof."""
    return (
        f"{name:<10} {proof['rows']:,} rows of split {proof['split']}: largest difference from {other} "
        f"{proof['largest_difference']:.1e} (at most {proof['limit']:g})"
    )


def describe_files(directory: Path) -> dict[str, FileState]:
    """Return size and SHA-256 of all files of a directory, by their names in it."""
    names = sorted(
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, names in os.walk(directory)
        for name in names
    )
    return {name: _read_file(directory / name)[0] for name in names if name != MANIFEST}
