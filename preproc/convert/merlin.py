"""Datasets that Merlin's NVTabular wrote: Parquet, with features described by `schema.pbtxt` or `_metadata.json`.

    DIR/schema.pbtxt        or DIR/train/schema.pbtxt: roles (tags) and cardinalities
    DIR/train/*.parquet     and valid/, validation/, val/ or test/, in the order of train/_file_list.txt if it exists
    DIR/train/_metadata.json  what HugeCTR reads: roles (cats, conts, labels), but no cardinalities

If both exist, `_metadata.json` defines the roles. An unspecified cardinality is the largest id plus one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from configs.messages import first_line, printable, shortened, shown
from dataloading.dataset.documents import (
    FILE_LIST,
    read_file_list,
    read_json,
    read_text,
    refuse_doubled,
)
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec, measured
from dataloading.dataset.parquet import ParquetSource
from dataloading.dataset.parquet_files import ColumnKind, check_columns, open_file
from dataloading.dataset.row_columns import BINARY, RowColumn
from dataloading.dataset.split_files import SplitFiles, expect
from preproc.convert.rows import SourceRows, input_feature
from preproc.raw_files import natural_order

SCHEMA, METADATA = "schema.pbtxt", "_metadata.json"
VALIDATION_FOLDERS = ("valid", "validation", "val")
BINARY_TAGS = {"binary_classification", "binary"}
REGRESSION_TAGS = {"regression"}
MULTI_CLASS_TAGS = {"multi_class_classification", "multi_class"}
REGRESSION = np.dtype(np.float32)
SCHEMA_PROTO = """
name: "merlin_schema.proto" package: "merlin" dependency: "google/protobuf/any.proto"
message_type { name: "Schema"
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: ".merlin.Feature" } }
message_type { name: "Feature"
  field { name: "name" number: 1 type: TYPE_STRING }
  field { name: "annotation" number: 2 type_name: ".merlin.Annotation" }
  field { name: "int_domain" number: 3 type_name: ".merlin.Range" }
  field { name: "value_count" number: 4 type_name: ".merlin.Range" } }
message_type { name: "Annotation"
  field { name: "tag" number: 1 label: LABEL_REPEATED type: TYPE_STRING }
  field { name: "extra_metadata" number: 2 label: LABEL_REPEATED type_name: ".google.protobuf.Any" } }
message_type { name: "Range"
  field { name: "min" number: 1 type: TYPE_INT64 }
  field { name: "max" number: 2 type: TYPE_INT64 } }
"""
"""What is read of TensorFlow Metadata's `schema.proto`; its numbers do not matter in a text."""


@dataclass(slots=True)
class Roles:
    labels: list[str] = field(default_factory=list)  # names of the targets
    # whether a label is binary, where the schema tells; else its values do
    kinds: dict[str, bool] = field(default_factory=dict)
    numerical: list[str] = field(default_factory=list)  # names of the numericals
    categorical: list[str] = field(default_factory=list)  # names of the categoricals
    cardinalities: dict[str, int] = field(default_factory=dict)
    hotness: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def merlin_rows(root: Path, *, has_tables: bool = True) -> SourceRows:
    """Return the rows of the dataset in `root`; without `has_tables` ids are any integers. ValueError: no role fits."""
    splits = _splits(root)
    roles = _roles(root)
    if not roles.categorical:
        raise ValueError(f"{root}: no categorical column; tag one as categorical in {SCHEMA}")
    if not roles.labels:
        raise ValueError(
            f"{root}: no label; tag one column as target in {SCHEMA}, or list it under labels in {METADATA}"
        )
    paths = [path for files in splits.values() for path in files]
    with open_file(paths[0]) as file:
        schema = file.schema_arrow
    names = [*roles.categorical, *roles.numerical, *roles.labels]
    missing = sorted({*names} - {*schema.names})
    if missing:
        raise ValueError(f"{paths[0]}: no column {', '.join(missing)}, which {root} names")
    twice = sorted({name for name in names if names.count(name) > 1})
    expect(not twice, f"{root}: roles", twice, "one role per column")
    unmeasured = FeatureSpec(
        root=root,
        numerical=tuple(roles.numerical),
        numerical_dtype=np.dtype(np.float32),
        labels=tuple(
            RowColumn(name, dtype=BINARY if _is_binary(roles, name, paths) else REGRESSION)
            for name in roles.labels
        ),
        categorical=tuple(
            _feature(root, name, roles, paths, schema, has_tables) for name in roles.categorical
        ),
        splits={name: SplitFiles(0, parquet=tuple(files)) for name, files in splits.items()},
        metadata={},
    )
    left_out = [
        f"column {shown(name)} ({roles.left_out.get(name, 'no role')})"
        for name in schema.names
        if name not in names
    ]
    left_out += [
        f"folder {folder.name}/"
        for folder in sorted({path.parent for path in root.glob("*/*.parquet")})
        if folder not in {path.parent for path in paths}
    ]
    return SourceRows(ParquetSource(measured(unmeasured)), "Merlin's Parquet", left_out)


def _feature(
    root: Path, name: str, roles: Roles, paths: list[Path], schema: pa.Schema, has_tables: bool
) -> CategoricalFeature:
    """Return a categorical feature of the files, of which the first has this schema."""
    # The first column of a name that several have is checked too.
    values = schema.types[schema.names.index(name)]
    has_lists = pa.types.is_list(values) or pa.types.is_large_list(values)
    kind = ColumnKind.ids if has_lists else ColumnKind.id
    check_columns(paths[0], schema, {name: kind})
    rows = roles.cardinalities.get(name) if has_tables else None
    values = values.value_type if has_lists else values
    # Unsigned ids may be beyond the keys.
    if rows is None and (has_tables or pa.types.is_uint64(values)):
        largest = 0
        for column in _columns(paths, name, kind):
            ids = pc.list_flatten(column) if kind is ColumnKind.ids else column
            maximum = pc.max(ids).as_py()
            largest = max(largest, -1 if maximum is None else maximum)
        # Keys are int64.
        expect(has_tables or largest < 2**63, f"{root}: {name}", largest, "ids below 2^63")
        rows = largest + 1 if has_tables else None
    hotness = roles.hotness.get(name) if kind is ColumnKind.ids else 1
    return input_feature(name, rows, hotness)


def _is_binary(roles: Roles, name: str, paths: list[Path]) -> bool:
    """Return whether a label is a binary one: as the schema says, or if it has no other values than 0 and 1."""
    if name in roles.kinds:
        return roles.kinds[name]
    columns = _columns(paths, name, ColumnKind.number)
    return all(np.isin(column.drop_null().to_numpy(), (0, 1)).all() for column in columns)


def _splits(root: Path) -> dict[str, list[Path]]:
    """Return the files of train, test and validation; Merlin's `valid` becomes test where there is no test folder.

    NVTabular lists the paths of its own machine, of files beside the list, so the names alone count. Raises ValueError: a file
    is missing, or two have one name.
    """

    def files(name: str) -> list[Path]:
        folder = root / name
        if not (folder / FILE_LIST).is_file():
            return sorted(folder.glob("*.parquet"), key=natural_order)
        names = [Path(listed).name for listed in read_file_list(folder / FILE_LIST)]
        refuse_doubled(folder / FILE_LIST, names)
        for listed in names:
            if not (folder / listed).is_file():
                raise ValueError(
                    f"{folder / listed}: no such file, which {FILE_LIST} lists; fetch it, or correct the list"
                )
        return [folder / listed for listed in names]

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
        document = read_json(metadata)
        expect(isinstance(document, Mapping), str(metadata), document, "the mapping of NVTabular")
        roles.labels, roles.numerical, roles.categorical = (
            _column_names(document.get(key, []), f"{metadata}: {key}")
            for key in ("labels", "conts", "cats")
        )
    return roles


def _column_names(columns: object, where: str) -> list[str]:
    want = "a list of columns, each with a col_name"
    expect(isinstance(columns, list), where, columns, want)
    assert isinstance(columns, list)
    names = [column.get("col_name") if isinstance(column, Mapping) else None for column in columns]
    expect(all(isinstance(name, str) and name for name in names), where, columns, want)
    return [str(name) for name in names]


@cache
def _schema_class() -> type[Any]:
    file = text_format.Parse(SCHEMA_PROTO, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("merlin.Schema"))


def _read_schema(path: Path) -> Roles:
    """Return the roles in a TensorFlow Metadata schema in text form, from Merlin's tags and properties."""
    roles = Roles()
    try:
        schema = text_format.Parse(read_text(path), _schema_class()(), allow_unknown_field=True)
    except (text_format.ParseError, RecursionError) as error:
        # Begins with line and column.
        raise ValueError(f"{path}:{shortened(printable(str(error)))}") from None
    for feature in schema.feature:
        name, annotation, domain = feature.name, feature.annotation, feature.int_domain
        expect(bool(name), f"{path}: the name of a feature", name, "a text")
        tags = {tag.lower().rpartition(".")[2] for tag in annotation.tag}
        # First: a target that is an input too would tell the model its answer.
        if tags & {"target", "label", *BINARY_TAGS, *REGRESSION_TAGS, *MULTI_CLASS_TAGS}:
            if tags & MULTI_CLASS_TAGS:
                raise ValueError(
                    f"{path}: target {shown(name)} has several classes, and a label is binary or a number; remove its tag target "
                    "to leave it out"
                )
            roles.labels.append(name)
            if tags & {"categorical", *BINARY_TAGS, *REGRESSION_TAGS}:
                roles.kinds[name] = not tags & REGRESSION_TAGS
        elif "categorical" in tags:
            roles.categorical.append(name)
            cardinality = next(map(_cardinality, annotation.extra_metadata), None)
            if cardinality is None and domain.HasField("max"):
                cardinality = domain.max + 1
            if cardinality is not None:
                roles.cardinalities[name] = cardinality
            counts = feature.value_count
            if counts.min == counts.max != 0:
                most = counts.max
                expect(most > 0, f"{path}: {name}: value_count.max", most, "a positive integer")
                roles.hotness[name] = most
        elif "continuous" in tags:
            roles.numerical.append(name)
        else:
            roles.left_out[name] = f"tags {', '.join(sorted(tags))}" if tags else "no tags"
    return roles


def _cardinality(properties: any_pb2.Any) -> int | None:
    try:
        sizes = Struct.FromString(properties.value).fields["embedding_sizes"].struct_value
    except DecodeError:
        return None
    cardinality = sizes.fields["cardinality"].number_value
    return int(cardinality) if 1 <= cardinality < 2**53 else None


def _columns(paths: list[Path], name: str, kind: ColumnKind) -> Iterator[pa.ChunkedArray]:
    for path in paths:
        with open_file(path) as file:
            check_columns(path, file.schema_arrow, {name: kind})
            for group in range(file.num_row_groups):
                try:
                    yield file.read_row_group(group, columns=[name]).column(name)
                except (pa.ArrowException, OSError) as error:
                    reason = shortened(first_line(error))
                    raise ValueError(
                        f"{path}: column '{name}' cannot be read ({reason}); copy or write it again"
                    ) from None
