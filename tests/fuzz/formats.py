"""Inputs of `mode=convert` and tables of the TF2 recipe: npy files, Merlin's Parquet and schema, NVIDIA's CSV."""

import json
import shutil
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st

from configs.schema import Component
from nn.checkpoint import state as checkpoint
from tests.fuzz.commands import as_preproc, as_recipe
from tests.fuzz.harness import Fuzzer
from tests.fuzz.mutations import (
    INTEGERS,
    JSON_LITERALS,
    YAML_LITERALS,
    BytesEdit,
    Edit,
    apply_bytes,
    apply_edits,
    as_json,
    as_yaml,
    bytes_edits,
    document_edits,
)
from tests.fuzz.runs import OPTIONS
from tests.fuzz.tables import TableEdit, apply_table, table_edits
from tests.helpers.composed import build, compose_config, ranks_of_cpu, table_map
from tests.preproc.convert.test_convert import (
    CSV_SPEC,
    properties,
    schema,
    write_csv_files,
    write_merlin,
)

DTYPES = (
    "<f4",
    ">f4",
    "<f8",
    "<f2",
    "<c8",
    "<i4",
    "<i8",
    "|u1",
    "|b1",
    "<U3",
    "|S4",
    "<M8[s]",
    "V5",
)
HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 2), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (5,), }",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (5, 2), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (5, 2), }",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (5, 2), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (), }",
    "{'descr': '<f4', 'fortran_order': 3, 'shape': [5, 2], }",
    "{'descr': 'nope', 'fortran_order': False, 'shape': (5, 2), }",
    "{'descr': '<f4', 'fortran_order': False}",
    "{'descr': ('<f4', (3,)), 'fortran_order': False, 'shape': (5, 2), }",
    "[" * 300,
    "(" * 2000,
    "__import__('os').mkdir('trap')",
    "9" * 5000,
    "",
    "\x00",
)


@dataclass(frozen=True, slots=True)
class ArrayChange:
    """A change of one npy file: another dtype, order, dimension, header, value, bytes."""

    file: int
    action: str
    dtype: str
    header: str
    value: int
    edits: list[BytesEdit]


def array_changes(num_files: int) -> st.SearchStrategy[ArrayChange]:
    """Return a strategy of changes of one of several npy files."""
    actions = [
        "dtype",
        "order",
        "flat",
        "wide",
        "deep",
        "scalar",
        "empty",
        "header",
        "value",
        "bytes",
    ]
    return st.builds(
        ArrayChange,
        st.integers(0, num_files - 1),
        st.sampled_from([*actions, "pickle", "version"]),
        st.sampled_from(DTYPES),
        st.sampled_from(HEADERS),
        INTEGERS,
        bytes_edits(2),
    )


def apply_array(path: Path, change: ArrayChange) -> None:
    """Change an npy file."""
    array = np.load(path)
    if change.action == "header":
        header = change.header.encode() + b"\n"
        data = path.read_bytes()
        start = 10 + int.from_bytes(data[8:10], "little")
        path.write_bytes(data[:8] + len(header).to_bytes(2, "little") + header + data[start:])
        return
    if change.action == "bytes":
        path.write_bytes(apply_bytes(path.read_bytes(), change.edits))
        return
    if change.action == "version":
        data = path.read_bytes()
        path.write_bytes(data[:6] + bytes([change.value % 5, 0]) + data[8:])
        return
    with np.errstate(all="ignore"):
        if change.action == "dtype":
            array = (
                array.astype(change.dtype) if change.dtype != "V5" else np.zeros(len(array), "V5")
            )
        elif change.action == "order":
            array = np.asfortranarray(array)
        elif change.action == "flat":
            array = array.reshape(-1)
        elif change.action == "wide":
            array = array.reshape(1, -1)
        elif change.action == "deep":
            array = array[..., None, None]
        elif change.action == "scalar":
            array = array.reshape(-1)[0]
        elif change.action == "empty":
            array = array[:0]
        elif change.action == "pickle":
            array = np.array([{"a": 1}] * len(array), dtype=object)
        elif change.action == "value" and array.dtype.kind == "i":
            info = np.iinfo(array.dtype)
            array = array.copy()
            array.reshape(-1)[change.value % array.size] = min(
                max(change.value, info.min), info.max
            )
        elif change.action == "value":
            array = array.copy()
            array.reshape(-1)[change.value % array.size] = np.nan
    np.save(path, array, allow_pickle=True)


def _make_npy(root: Path) -> Path:
    root.mkdir()
    generator = np.random.default_rng(1)
    for day in range(2):
        np.save(root / f"day_{day}_labels.npy", generator.integers(0, 2, (8, 1)).astype(np.int32))
        np.save(root / f"day_{day}_dense.npy", generator.normal(size=(8, 2)).astype(np.float32))
        np.save(root / f"day_{day}_sparse.npy", generator.integers(0, 9, (8, 3)).astype(np.int32))
    return root


def _make_multi_hot(root: Path) -> Path:
    _make_npy(root)
    generator = np.random.default_rng(1)
    for day in range(2):
        (root / f"day_{day}_sparse.npy").unlink()
        ids = {str(i): generator.integers(0, 9, (8, i + 1)).astype(np.int32) for i in range(3)}
        np.savez(root / f"day_{day}_sparse_multi_hot.npz", **ids)
    return root


def _convert(root: Path, room: Path) -> None:
    as_preproc("mode=convert", f"path={root}", f"output={room / 'out'}")


def _changed_npy(made: Path, change: ArrayChange, room: Path) -> None:
    root = shutil.copytree(made, room / "in")
    apply_array(sorted(root.glob("*.npy"))[change.file], change)
    _convert(root, room)


def _changed_npz(made: Path, change: tuple[ArrayChange, str, bool], room: Path) -> None:
    """Change the archive's bytes, or an array of it, or the array's name."""
    array_change, name, whole = change
    root = shutil.copytree(made, room / "in")
    path = root / "day_0_sparse_multi_hot.npz"
    if whole:
        path.write_bytes(apply_bytes(path.read_bytes(), array_change.edits))
    else:
        arrays = dict(np.load(path))
        single = room / "single.npy"
        np.save(single, arrays.pop("0"))
        apply_array(single, array_change)
        with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings(action="ignore"):
            # A name may be there twice.
            archive.write(single, f"{name}.npy")
            for other, array in arrays.items():
                np.save(single, array)
                archive.write(single, f"{other}.npy")
    _convert(root, room)


def _make_merlin(root: Path) -> Path:
    write_merlin(root, text=schema(genres=properties(300)))
    (root / "train/_metadata.json").write_text(
        json.dumps(
            {
                "file_stats": [{"file_name": "part_0.parquet", "num_rows": 3}],
                "labels": [{"col_name": "click", "index": 4}],
                "conts": [{"col_name": "age", "index": 2}],
                "cats": [{"col_name": "genres", "index": 1}, {"col_name": "userId", "index": 0}],
            }
        )
    )
    return root


def _metadata(root: Path) -> dict[str, Any]:
    return json.loads((root / "train/_metadata.json").read_text())


def _changed_merlin_json(made: Path, edits: list[Edit], room: Path) -> None:
    root = shutil.copytree(made, room / "in")
    text = as_json(apply_edits(_metadata(made), edits))
    (root / "train/_metadata.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    _convert(root, room)


def _changed_merlin_schema(
    made: Path, change: tuple[list[BytesEdit], list[str]], room: Path
) -> None:
    edits, words = change
    root = shutil.copytree(made, room / "in")
    (root / "train/_metadata.json").unlink()
    path = root / "schema.pbtxt"
    text = path.read_text()
    for word in words:
        old, _, new = word.partition("->")
        text = text.replace(old, new, 1)
    path.write_bytes(apply_bytes(text.encode(), edits))
    _convert(root, room)


WORDS = (
    *("max: 7->max: 99999999999999999999", "max: 7->max: -3", "max: 7->max: 1.5", "max: 7->max: x"),
    *(
        'max: 7->max: "7"',
        "max: 3->max: 1",
        "min: 1->min: {a: 1}",
        'name: "age"->name: 5',
        "tag->tga",
    ),
    *('"userId"->"\\x1b[31m"', '"genres"->"\\n"', "int_domain {->int_domain: 5 #", 'name: "age"->'),
    *("annotation {->annotation: 3 extra {", "feature {->feature: 1 feature {", "}->", "{->{ {"),
    *("categorical->continuous", "continuous->categorical", "binary_classification->categorical"),
    *(
        '"age"->"../x"',
        '"age"->"userId"',
        "feature {->" + "a {" * 2000,
        "\\021->\\377",
        "\\132->\\001",
    ),
    *("\\052->\\012", 'name: "userId"->name: "userId" name: "b"', "value: ->value: { a: 1 } #"),
)


def _changed_merlin_parquet(
    made: Path, change: tuple[list[TableEdit], list[BytesEdit], bool], room: Path
) -> None:
    edits, byte_edits, with_json = change
    root = shutil.copytree(made, room / "in")
    if not with_json:
        (root / "train/_metadata.json").unlink()
    path = root / "train/part_0.parquet"
    if byte_edits:
        path.write_bytes(apply_bytes(path.read_bytes(), byte_edits))
    else:
        apply_table(pq.read_table(path), edits, path)
    _convert(root, room)


def _make_csv(root: Path) -> Path:
    return write_csv_files(root)


def _changed_csv_spec(made: Path, edits: list[Edit], room: Path) -> None:
    root = shutil.copytree(made, room / "in")
    text = as_yaml(apply_edits(yaml.safe_load(CSV_SPEC), edits))
    (root / "feature_spec.yaml").write_text(text, errors="surrogatepass")
    _convert(root, room)


def _changed_csv(made: Path, change: tuple[str, list[BytesEdit]], room: Path) -> None:
    name, edits = change
    root = shutil.copytree(made, room / "in")
    (root / name).write_bytes(apply_bytes((root / name).read_bytes(), edits))
    _convert(root, room)


def _make_tf2(root: Path) -> Path:
    (root / "sparse").mkdir(parents=True)
    for index, rows in enumerate((50, 7)):
        np.save(root / f"sparse/feature_{index}.npy", np.ones((rows, 4), np.float32))
    return root


def _changed_tf2(made: Path, change: ArrayChange, room: Path) -> None:
    root = shutil.copytree(made, room / "in")
    apply_array(root / f"sparse/feature_{change.file}.npy", change)
    config = compose_config(*OPTIONS)

    def load() -> None:
        with ranks_of_cpu():
            built = build(config)
            parts = (Component.tables,)
            checkpoint.check(root, built.source.spec, table_map(config), components=parts)
            checkpoint.restore(root, built.step, with_optimizer=False, components=parts)

    as_recipe(load)


FUZZERS = [
    Fuzzer("convert: npy", _make_npy, lambda _: array_changes(6), _changed_npy, 30),
    Fuzzer(
        "convert: npz",
        _make_multi_hot,
        lambda _: st.tuples(
            array_changes(1),
            st.sampled_from(["0", "1", "3", "x", "-1", "../0", "0\n", "٣"]),
            st.booleans(),
        ),
        _changed_npz,
        25,
    ),
    Fuzzer(
        "convert: Merlin's JSON",
        _make_merlin,
        lambda made: document_edits(_metadata(made), JSON_LITERALS),
        _changed_merlin_json,
        25,
    ),
    Fuzzer(
        "convert: Merlin's schema",
        _make_merlin,
        lambda _: st.tuples(
            st.one_of(st.just([]), bytes_edits(2)), st.lists(st.sampled_from(WORDS), max_size=3)
        ),
        _changed_merlin_schema,
        25,
    ),
    Fuzzer(
        "convert: Merlin's Parquet",
        _make_merlin,
        lambda _: st.tuples(
            table_edits(["userId", "genres", "age", "click"]),
            st.one_of(st.just([]), st.just([]), bytes_edits(2)),
            st.booleans(),
        ),
        _changed_merlin_parquet,
        25,
    ),
    Fuzzer(
        "convert: NVIDIA's spec",
        _make_csv,
        lambda _: document_edits(yaml.safe_load(CSV_SPEC), YAML_LITERALS),
        _changed_csv_spec,
        25,
    ),
    Fuzzer(
        "convert: NVIDIA's CSV",
        _make_csv,
        lambda _: st.tuples(st.sampled_from(["a.csv", "c.csv", "d.csv"]), bytes_edits()),
        _changed_csv,
        20,
    ),
    Fuzzer("checkpoint: TF2 tables", _make_tf2, lambda _: array_changes(2), _changed_tf2, 15),
]
