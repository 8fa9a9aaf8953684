"""Datasets that Merlin's NVTabular wrote: Parquet, with features described by `schema.pbtxt` or `_metadata.json`.

    DIR/schema.pbtxt        or DIR/train/schema.pbtxt: roles (tags) and cardinalities
    DIR/train/*.parquet     and valid/, validation/, val/ or test/
    DIR/train/_metadata.json  what HugeCTR reads: roles (cats, conts, labels), but no cardinalities

If both exist, `_metadata.json` defines the roles. An unspecified cardinality is the largest id plus one.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec, measured
from dataloading.dataset.parquet import ParquetSource
from dataloading.dataset.parquet_files import open_file
from dataloading.dataset.split_files import SplitFiles
from preproc.convert.rows import SourceRows, natural_order
from preproc.convert.text_proto import Message, parse_text_proto

SCHEMA, METADATA = "schema.pbtxt", "_metadata.json"
VALIDATION_FOLDERS = ("valid", "validation", "val")


@dataclass(slots=True)
class Roles:
    """Roles of the columns.

    Attributes:
        labels: names of the targets, the binary one first.
        numerical: names of the numericals.
        categorical: names of the categoricals.
        cardinalities: rows per table, where the schema has them.
        hotness: ids per row, where the schema fixes them.
    """

    labels: list[str] = field(default_factory=list)
    numerical: list[str] = field(default_factory=list)
    categorical: list[str] = field(default_factory=list)
    cardinalities: dict[str, int] = field(default_factory=dict)
    hotness: dict[str, int] = field(default_factory=dict)


def merlin_rows(root: Path) -> SourceRows:
    """Return the rows of the dataset in `root`.

    Raises:
        ValueError: neither file exists, a role is missing, or a column does not fit its role.
    """
    splits = _splits(root)
    roles = _roles(root)
    if not roles.categorical:
        raise ValueError(f"{root}: no categorical column; tag one as categorical in {SCHEMA}")
    if not roles.labels:
        raise ValueError(
            f"{root}: no label; tag one column as target in {SCHEMA}, or list it under labels in {METADATA}"
        )
    paths = [path for files in splits.values() for path in files]
    with open_file(splits["train"][0]) as file:
        schema = file.schema_arrow
    missing = sorted({*roles.categorical, *roles.numerical, roles.labels[0]} - {*schema.names})
    if missing:
        raise ValueError(
            f"{splits['train'][0]}: no column {', '.join(missing)}, which {root} names"
        )
    features = []
    for name in roles.categorical:
        kind = schema.field(name).type
        has_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        cardinality = roles.cardinalities.get(name) or _largest_id(paths, name) + 1
        features.append(
            CategoricalFeature.of(name, cardinality, roles.hotness.get(name) if has_list else 1)
        )
    unmeasured = FeatureSpec(
        root=root,
        numerical=tuple(roles.numerical),
        numerical_dtype=np.dtype(np.float32),
        label=roles.labels[0],
        categorical=tuple(features),
        splits={name: SplitFiles(0, parquet=tuple(files)) for name, files in splits.items()},
        metadata={},
    )
    return SourceRows(ParquetSource(measured(unmeasured)), "Merlin's Parquet")


def _splits(root: Path) -> dict[str, list[Path]]:
    """Return the files of train, test and validation; Merlin's `valid` becomes test where there is no test folder."""

    def files(name: str) -> list[Path]:
        return sorted((root / name).glob("*.parquet"), key=natural_order)

    splits = {"train": files("train"), "test": files("test")}
    validation = next((files(name) for name in VALIDATION_FOLDERS if files(name)), [])
    if validation:
        splits["validation" if splits["test"] else "test"] = validation
    if not splits["test"]:
        raise ValueError(f"{root}: train/ only; want valid/ or test/ beside it, with *.parquet")
    return splits


def _roles(root: Path) -> Roles:
    schema = next((p for p in (root / SCHEMA, root / "train" / SCHEMA) if p.is_file()), None)
    metadata = next((p for p in (root / "train" / METADATA, root / METADATA) if p.is_file()), None)
    if schema is None and metadata is None:
        raise ValueError(
            f"{root}: neither {SCHEMA} nor train/{METADATA}, which describe the columns"
        )
    roles = _read_schema(schema) if schema else Roles()
    if metadata:
        try:
            document = json.loads(metadata.read_text())
            labels, numerical, categorical = (
                [str(column["col_name"]) for column in document.get(key, [])]
                for key in ("labels", "conts", "cats")
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{metadata}: not the JSON that NVTabular writes: {error}") from None
        roles.labels, roles.numerical, roles.categorical = labels, numerical, categorical
    return roles


def _read_schema(path: Path) -> Roles:
    """Return the roles in a TensorFlow Metadata schema in text form, from Merlin's tags and properties."""
    try:
        document = parse_text_proto(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    roles = Roles()
    for feature in document.get("feature", []):
        name = str(_first(feature, "name"))
        annotation = _first(feature, "annotation") or {}
        tags = {str(tag).lower().rpartition(".")[2] for tag in annotation.get("tag", [])}
        domain = _first(feature, "int_domain") or {}
        counts = _first(feature, "value_count") or {}
        if "categorical" in tags:
            roles.categorical.append(name)
            extra = _first(annotation, "extra_metadata") or {}
            cardinality = _cardinality(_first(extra, "value"))
            if cardinality is None and _first(domain, "max") is not None:
                cardinality = int(_first(domain, "max")) + 1
            if cardinality is not None:
                roles.cardinalities[name] = cardinality
            if _first(counts, "min") == _first(counts, "max") and _first(counts, "max"):
                roles.hotness[name] = int(_first(counts, "max"))
        elif "continuous" in tags:
            roles.numerical.append(name)
        elif "binary_classification" in tags:
            roles.labels.insert(0, name)
        elif tags & {"target", "label"}:
            roles.labels.append(name)
    return roles


def _first(message: Message, key: str) -> Any:
    """Return the first value of a field, None if the field is absent."""
    return next(iter(message.get(key, [])), None)


def _cardinality(value: object) -> int | None:
    """Return `embedding_sizes.cardinality` of a serialised `google.protobuf.Struct`."""
    if not isinstance(value, str):
        return None
    try:
        sizes = _struct(value.encode("latin-1")).get("embedding_sizes")
        cardinality = sizes.get("cardinality") if isinstance(sizes, Mapping) else None
    except (IndexError, struct.error, UnicodeError):
        return None
    return int(cardinality) if cardinality else None


def _struct(data: bytes) -> dict[str, object]:
    """Decode a `google.protobuf.Struct`: field 1 is a map entry of key (1) and `Value` (2)."""
    decoded = {}
    for _, entry in _wire(data):
        parts = dict(_wire(entry))
        decoded[parts[1].decode()] = _value(parts.get(2, b""))
    return decoded


def _value(data: bytes) -> object:
    """Decode a `google.protobuf.Value`: of its kinds, number (2), string (3) and struct (5)."""
    for number, content in _wire(data):
        if number == 2:
            return struct.unpack("<d", content)[0]
        if number == 3:
            return content.decode()
        if number == 5:
            return _struct(content)
    return None


def _wire(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (field number, content) of a serialised message; a varint is yielded as the payload of its last byte."""

    def varint(at: int) -> tuple[int, int]:
        number = shift = 0
        while True:
            byte = data[at]
            number |= (byte & 127) << shift
            shift, at = shift + 7, at + 1
            if byte < 128:
                return number, at

    at = 0
    while at < len(data):
        key, at = varint(at)
        kind = key & 7
        if kind == 0:
            number, at = varint(at)
            yield key >> 3, bytes([number & 255])
            continue
        if kind == 2:
            length, at = varint(at)
        else:
            length = {1: 8, 5: 4}[kind]
        yield key >> 3, data[at : at + length]
        at += length


def _largest_id(paths: list[Path], name: str) -> int:
    """Return the largest id of a column over all files, a row group at a time."""
    largest = 0
    for path in paths:
        with open_file(path) as file:
            for group in range(file.num_row_groups):
                column = file.read_row_group(group, columns=[name]).column(name)
                if not (pa.types.is_integer(column.type)):
                    column = pc.list_flatten(column)
                maximum = pc.max(column).as_py()
                largest = max(largest, -1 if maximum is None else maximum)
    return largest
