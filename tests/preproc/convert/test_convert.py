"""`python -m preproc mode=convert`: conversion from and to other formats keeps every value."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from preproc.convert import mlperf_npy as npy
from preproc.convert import nvidia_csv as csv_spec
from preproc.convert import rows as rows_module
from tests.helpers.command import run_module
from tests.helpers.handwritten import ROWS, ids, label, numericals, write_handwritten
from tests.helpers.preproc_command import Refused, data_files, preproc


def convert(path: Path, output: Path, *options: str) -> Path:
    preproc("mode=convert", f"path={path}", f"output={output}", *options)
    return output


def columns_of(root: Path, split: str):
    source = open_dataset(FeatureSpec.load(root))
    return source.read(split, np.array([[0, source.num_rows(split)]]))


def error_of(path: Path, output: Path, *options: str) -> str:
    with pytest.raises(Refused) as ended:
        convert(path, output, *options)
    assert not output.exists()
    return ended.value.message.removeprefix("error: ")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Convert chunks of three rows, so that every boundary is tested."""
    for module in (rows_module, npy, csv_spec):
        monkeypatch.setattr(module, "CHUNK_ROWS", 3)


def test_a_dataset_of_nvidias_comes_back_byte_for_byte(tmp_path):
    root = write_handwritten(tmp_path / "nvidia")
    there = convert(root, tmp_path / "there", "to=parquet")
    back = convert(there, tmp_path / "back")
    assert data_files(back) == data_files(root)
    assert FeatureSpec.load(back).fingerprint() == FeatureSpec.load(root).fingerprint()


def test_several_ids_per_row_survive_parquet(tmp_path):
    features = [CategoricalFeature.of("pair", 9, 2), CategoricalFeature.of("tags", 300, None)]
    with write_dataset(tmp_path / "a", categorical=features) as dataset:
        for split in ("train", "test"):
            dataset[split].append(
                labels=[0, 1, 1, 0],
                ids={"pair": np.arange(8).reshape(4, 2), "tags": np.array([299, 5, 7])},
                lengths={"tags": [1, 0, 2, 0]},
            )
    there = convert(tmp_path / "a", tmp_path / "b", "to=parquet")
    assert data_files(convert(there, tmp_path / "c")) == data_files(tmp_path / "a")


def test_nvidias_csv_is_written_no_more(tmp_path):
    convert = ("mode=convert", f"path={tmp_path / 'a'}", f"output={tmp_path / 'b'}", "to=csv")
    ended = run_module("preproc", *convert)
    assert ended.exit_code == 2
    assert ended.err == "error: to: Invalid value 'csv', expected one of [binary, parquet]\n"
    shown = " ".join(run_module("preproc", "--help").out.split())
    assert "binary (NVIDIA's transcoder made it of csv, which is gone) or parquet" in shown


def test_shared_tables_survive_a_conversion(tmp_path):
    features = [
        CategoricalFeature.of("shop", 40, table="place"),
        CategoricalFeature.of("user", 9),
        CategoricalFeature.of("home", 40, table="place"),
    ]
    with write_dataset(tmp_path / "a", categorical=features) as dataset:
        for split in ("train", "test"):
            ids = {"shop": [1, 39], "user": [0, 1], "home": [7, 0]}
            dataset[split].append(
                labels=[0, 1], ids={name: np.array(column) for name, column in ids.items()}
            )
    there = convert(tmp_path / "a", tmp_path / "b", "to=parquet")
    back = FeatureSpec.load(convert(there, tmp_path / "c"))
    tables = {table: [f.name for f in of] for table, of in back.table_features.items()}
    assert tables == {"place": ["shop", "home"], "user": ["user"]}
    assert back.fingerprint() == FeatureSpec.load(tmp_path / "a").fingerprint()
    assert data_files(tmp_path / "c") == data_files(tmp_path / "a")


def test_an_automatic_cardinality_is_that_of_the_shared_table(tmp_path):
    root = write_csv_files(tmp_path / "csv")
    spec = CSV_SPEC.replace("{cardinality: 40000}", "{cardinality: auto, table: cat_0.bin}")
    (root / "feature_spec.yaml").write_text(spec)
    found = FeatureSpec.load(convert(root, tmp_path / "out"))
    first, second = found.categorical
    assert first.cardinality == second.cardinality == ids(0)[1] + 1
    assert found.table_features == {"cat_0.bin": (first, second)}


def test_an_output_that_holds_a_dataset_is_kept(tmp_path):
    root = write_handwritten(tmp_path / "a")
    convert(root, tmp_path / "b")
    with pytest.raises(Refused, match="holds a complete dataset"):
        convert(root, tmp_path / "b")
    convert(root, tmp_path / "b", "to=parquet", "overwrite=true")
    assert FeatureSpec.load(tmp_path / "b").splits["train"].parquet


@pytest.mark.parametrize("output", ["a/b", "a"])
def test_an_input_is_no_output(tmp_path, output):
    root = write_handwritten(tmp_path / "a" / "b")
    before = data_files(root)
    with pytest.raises(Refused, match="which the run reads; name another output") as refused:
        convert(root, tmp_path / output, "to=parquet", "overwrite=true")
    assert refused.value.exit_code == 2
    assert data_files(root) == before


def test_a_directory_of_an_unknown_format_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    assert "nothing to convert; want a directory with" in error_of(tmp_path / "x", tmp_path / "y")


def test_a_missing_path_is_refused():
    with pytest.raises(Refused, match="set path=DIR, the directory to convert"):
        preproc("mode=convert", "output=x")


# NVIDIA's CSV.

CSV_SPEC = """
channel_spec: {categorical: [cat_0.bin, cat_1.bin], label: [label], numerical: [num_0, num_1]}
feature_spec:
  cat_0.bin: {cardinality: auto}
  cat_1.bin: {cardinality: 40000}
  label: {}
  num_0: {}
  num_1: {}
metadata: {}
source_spec:
  train:
  - {type: csv, features: [label, num_0, cat_1.bin], files: [a.csv, b.csv]}
  - {type: csv, features: [cat_0.bin, num_1], files: [c.csv]}
  test:
  - {type: csv, features: [label, num_0, num_1, cat_0.bin, cat_1.bin], files: [d.csv]}
"""


def write_csv_files(root: Path) -> Path:
    """Write the rows of the handwritten dataset over files that end at different rows."""

    def lines(which, fields) -> str:
        return "".join(",".join(str(field) for field in fields(row)) + "\n" for row in which)

    def left(row):
        return label(row), numericals(row)[0], ids(row)[1]

    root.mkdir()
    (root / "a.csv").write_text(lines(range(4), left))
    (root / "b.csv").write_text(lines(range(4, ROWS["train"]), left))
    (root / "c.csv").write_text(
        lines(range(ROWS["train"]), lambda row: (ids(row)[0], numericals(row)[1]))
    )
    (root / "d.csv").write_text(
        lines(range(ROWS["test"]), lambda row: (label(row), *numericals(row), *ids(row)))
    )
    (root / "feature_spec.yaml").write_text(CSV_SPEC)
    return root


def test_csv_with_chunks_side_by_side_becomes_nvidias_binary(tmp_path):
    out = convert(write_csv_files(tmp_path / "csv"), tmp_path / "out")
    assert data_files(out) == data_files(write_handwritten(tmp_path / "want"))
    assert FeatureSpec.load(out).categorical[0].cardinality == ROWS["train"]  # auto: ids 0 to 6


def test_csv_of_earlier_versions_has_a_validation_split_beside_its_spec(tmp_path):
    root = write_csv_files(tmp_path / "csv")
    (root / "feature_spec.yaml").write_text(CSV_SPEC.replace("d.csv", "test.csv"))
    (root / "d.csv").rename(root / "test.csv")
    (root / "validation.csv").write_text((root / "test.csv").read_text())
    out = convert(root, tmp_path / "out")
    found = columns_of(out, "validation"), columns_of(out, "test")
    assert [columns.labels.tolist() for columns in found] == [[*map(label, range(4))]] * 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.csv", "0,0.5\n", "hold different numbers of rows"),
        ("a.csv", "0,0.5,x\n", "a.csv: "),
        ("a.csv", "0,0.5\n", "a.csv: "),
        ("a.csv", "0,,7\n", "a.csv: row 0: no num_0; want 3 numbers per line, no header"),
        ("a.csv", "0,0.5,40000\n" * 4, "feature 'cat_1.bin': id 40000 at row 0 of split 'train'"),
        ("a.csv", "2,0.5,7\n" * 4, "label: 2.0 at row 0 of split 'train'; want 0 or 1"),
    ],
)
def test_an_invalid_csv_is_named(tmp_path, name, text, message):
    root = write_csv_files(tmp_path / "csv")
    (root / name).write_text(text)
    assert message in error_of(root, tmp_path / "out")


def test_a_csv_spec_names_every_feature(tmp_path):
    root = write_csv_files(tmp_path / "csv")
    (root / "feature_spec.yaml").write_text(CSV_SPEC.replace("cat_0.bin, num_1]", "cat_0.bin]"))
    assert "want every feature of channel_spec, once" in error_of(root, tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("source_spec:", "source_spec: [1]\nmore:", "source_spec: got [1], want a mapping"),
        ("{cardinality: 40000}", "{cardinality: [7]}", "cat_1.bin.cardinality: got [7], want an"),
        ("{cardinality: 40000}", "{}", "cat_1.bin.cardinality: got None, want an integer"),
        ("label: [label]", "label: {a: 1}", "channel_spec.label: got {'a': 1}, want a list"),
        ("files: [d.csv]}", "files: 7}", "source_spec.test[0].files: got 7, want a list of files"),
        ("  test:\n", "  test:\n  - null\n", "source_spec.test[0]: got None, want a mapping"),
        ("metadata: {}", "metadata: 2001-99-99", "not plain yaml: month must be in 1..12"),
    ],
)
def test_a_csv_spec_of_another_shape_is_refused_with_its_key(tmp_path, old, new, message):
    root = write_csv_files(tmp_path / "csv")
    (root / "feature_spec.yaml").write_text(CSV_SPEC.replace(old, new))
    assert message in error_of(root, tmp_path / "out")


def test_a_csv_with_negative_ids_only_is_refused_as_such(tmp_path):
    root = write_csv_files(tmp_path / "csv")
    for name, row in (("c.csv", "-5,0.5\n"), ("d.csv", "0,0.5,0.5,-5,7\n")):
        (root / name).write_text(row * ROWS["train" if name == "c.csv" else "test"])
    assert "feature 'cat_0.bin': id -5 at row 0" in error_of(root, tmp_path / "out")


# Merlin.


def struct_field(name: str, value: bytes) -> bytes:
    """Return one entry of a serialised google.protobuf.Struct."""
    entry = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x12" + bytes([len(value)]) + value
    return b"\x0a" + bytes([len(entry)]) + entry


def properties(cardinality: int) -> str:
    """Return what Merlin writes as `value` of a feature's extra_metadata, escaped for text."""
    number = b"\x11" + np.float64(cardinality).tobytes()
    inner = struct_field("dimension", b"\x11" + np.float64(16).tobytes())
    inner += struct_field("cardinality", number)
    sizes = b"\x2a" + bytes([len(inner)]) + inner
    data = struct_field("is_list", b"\x20\x01") + struct_field("embedding_sizes", sizes)
    data += struct_field("cat_path", b"\x1a\x02./")
    return "".join(f"\\{byte:03o}" for byte in data)


def schema(**extra: str) -> str:
    def feature(name: str, tags: list[str], more: str = "") -> str:
        lines = "".join(f'    tag: "{tag}"\n' for tag in tags)
        value = extra.get(name)
        if value:
            lines += f'    extra_metadata {{\n      type_url: "x/Struct"\n      value: "{value}"\n    }}\n'
        return f'feature {{\n  name: "{name}"\n{more}  annotation {{\n{lines}  }}\n}}\n'

    domain = '  type: INT\n  int_domain { name: "userId" max: 7 is_categorical: true }\n'
    return (
        feature("userId", ["user_id", "categorical"], domain)
        + feature(
            "genres", ["categorical", "item"], "  value_count {\n    min: 1\n    max: 3\n  }\n"
        )
        + feature("age", ["continuous"])
        + feature("rating", ["target", "regression"])
        + feature("click", ["target", "binary_classification"])
        + feature("title", [])
    )


def write_merlin(root: Path, valid: str = "valid", text: str | None = None) -> Path:
    for name, start in (("train", 0), (valid, 2)):
        (root / name).mkdir(parents=True)
        for part in range(2):
            table = {
                "userId": pa.array([start, 3, 4], pa.int64()),
                "genres": pa.array([[1, 5], [], [2 + part]], pa.list_(pa.int64())),
                "age": pa.array([0.1, 0.2, 0.3], pa.float32()),
                "rating": pa.array([4.0, 2.0, 5.0]),
                "click": pa.array([1, 0, 1], pa.int8()),
                "title": pa.array(["a", "b", None]),
            }
            pq.write_table(pa.table(table), root / name / f"part_{part}.parquet", row_group_size=2)
    if text is not None:
        (root / "schema.pbtxt").write_text(text)
    return root


@pytest.mark.parametrize("to", ["binary", "parquet"])
def test_merlins_parquet_with_its_schema(tmp_path, to):
    root = write_merlin(tmp_path / "m", text=schema(genres=properties(300)))
    out = convert(root, tmp_path / "out", f"to={to}")
    spec = FeatureSpec.load(out)
    assert [(f.name, f.cardinality, f.hotness) for f in spec.categorical] == [
        ("userId", 8, 1),  # its int_domain reaches 7
        ("genres", 300, None),
    ]
    assert [(label.name, label.is_binary) for label in spec.labels] == [
        ("rating", False),
        ("click", True),
    ]
    assert (spec.numerical, spec.numerical_dtype) == (("age",), np.float32)
    train = columns_of(out, "train")
    assert train.labels.tolist() == [[4, 1], [2, 0], [5, 1]] * 2
    assert train.numerical[:, 0].tolist() == np.float32([0.1, 0.2, 0.3] * 2).tolist()
    assert train.ids[0].tolist() == [0, 3, 4, 0, 3, 4]
    assert train.ids[1].tolist() == [1, 5, 2, 1, 5, 3]
    assert train.lengths[1].tolist() == [2, 0, 1, 2, 0, 1]
    assert columns_of(out, "test").ids[0].tolist() == [2, 3, 4, 2, 3, 4]


def test_merlins_parquet_with_hugectrs_metadata_has_cardinalities_by_the_largest_ids(tmp_path):
    root = write_merlin(tmp_path / "m", valid="test")
    (root / "train/_metadata.json").write_text(
        json.dumps(
            {
                "file_stats": [{"file_name": "part_0.parquet", "num_rows": 3}],
                "labels": [{"col_name": "click", "index": 4}],
                "conts": [],
                "cats": [{"col_name": "genres", "index": 1}, {"col_name": "userId", "index": 0}],
            }
        )
    )
    spec = FeatureSpec.load(convert(root, tmp_path / "out"))
    assert [(f.name, f.cardinality) for f in spec.categorical] == [("genres", 6), ("userId", 5)]
    assert spec.numerical == ()


def test_every_column_of_merlins_is_converted_or_named(tmp_path, capsys):
    """Of two binary targets the last one was the label, and the first one was gone without a word."""
    tagged = schema().replace('tag: "regression"', 'tag: "continuous"')
    root = write_merlin(tmp_path / "m", text=tagged)
    (root / "other").mkdir()
    for path in [*root.glob("*/*.parquet")]:
        table = pq.read_table(path)
        bought = pa.array([0.0, 0.0, 1.0])
        table = table.append_column("bought", bought).append_column("extra", bought)
        pq.write_table(table, path)
    (root / "valid/part_1.parquet").rename(root / "other/part_1.parquet")
    text = tagged + 'feature { name: "bought" annotation { tag: "target" } }'
    (root / "schema.pbtxt").write_text(text)
    out = convert(root, tmp_path / "out")
    spec = FeatureSpec.load(out)
    # A target that is tagged continuous too is no input.
    assert spec.numerical == ("age",)
    kinds = {label.name: label.is_binary for label in spec.labels}
    assert kinds == {"rating": False, "click": True, "bought": True}
    assert columns_of(out, "train").labels.tolist() == [[4, 1, 0], [2, 0, 0], [5, 1, 1]] * 2
    lines = capsys.readouterr().out.splitlines()
    assert "labels         rating (number, float32), click (binary), bought (binary)" in lines
    assert "numericals     age" in lines
    left_out = "column 'title' (no tags), column 'extra' (no role), folder other/"
    assert f"not converted  {left_out}" in lines
    assert spec.metadata["left_out"] == left_out.split(", ")
    assert [line.split() for line in lines if "userId" in line] == [
        ["userId", "8", "userId", "(1)"]
    ]
    # HugeCTR's metadata says nothing of kinds; the values do.
    columns = {"labels": ["bought", "rating"], "conts": ["age"], "cats": ["userId"]}
    listed = {key: [{"col_name": name} for name in names] for key, names in columns.items()}
    (root / "train/_metadata.json").write_text(json.dumps(listed))
    spec = FeatureSpec.load(convert(root, tmp_path / "hugectr"))
    assert [(label.name, label.is_binary) for label in spec.labels] == [
        ("bought", True),
        ("rating", False),
    ]
    assert "column 'genres' (no role), column 'click' (no role)" in capsys.readouterr().out


def test_merlins_test_and_valid_become_test_and_validation(tmp_path):
    root = write_merlin(tmp_path / "m", text=schema())
    (root / "test").mkdir()
    (root / "valid/part_0.parquet").rename(root / "test/part_0.parquet")
    spec = FeatureSpec.load(convert(root, tmp_path / "out"))
    assert {name: files.num_rows for name, files in spec.splits.items()} == {
        "train": 6,
        "test": 3,
        "validation": 3,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: None, "neither schema.pbtxt nor train/_metadata.json"),
        (lambda text: re.sub("target|regr|binary_cl", "x", text), "no label; tag"),
        (lambda text: text.replace('"categorical"', '"x"'), "no categorical column; tag one"),
        (lambda text: text.replace('"userId"', '"who"'), "no column who, which"),
        (lambda text: text + "feature {", 'schema.pbtxt:50:9 : Expected "}".'),
        (
            lambda text: text.replace("regression", "multi_class"),
            "'rating' has several classes, and",
        ),
        (lambda text: text.replace("regression", "binary"), "label 'rating' 4.0 at row 0 of"),
        (lambda text: text.replace("max: 7", "max: 3"), "id 4 at row 2 of"),
    ],
)
def test_a_mistake_in_merlins_output_is_reported(tmp_path, change, message):
    root = write_merlin(tmp_path / "m", text=change(schema(genres=properties(300))))
    assert message in error_of(root, tmp_path / "out")


def test_merlins_output_needs_rows_to_test_on(tmp_path):
    root = write_merlin(tmp_path / "m", valid="other", text=schema())
    assert "train/ only; want valid/ or test/" in error_of(root, tmp_path / "out")


def test_the_schema_is_read_in_all_forms_of_its_text(tmp_path):
    """Comments, other quotes, `<`, `:`, `;`, fields that are not read, and properties that are written out."""
    text = """
    # a comment
    sparse_feature { name: "s"; index_feature: { name: 'i' } }
    feature < name: 'user' "Id"; annotation: { tag: ["x", 'Tags.CATEGORICAL'] } int_domain { max: 7 } >
    feature { name: "\\147\\x65nres", annotation { tag: "categorical" extra_metadata {
      [type.googleapis.com/google.protobuf.Struct] { fields { key: "embedding_sizes" value { struct_value {
        fields { key: "cardinality" value { number_value: 300 } } } } } } } } }
    feature { name: "click" annotation { tag: "target" } }
    """
    root = write_merlin(tmp_path / "m", text=text)
    spec = FeatureSpec.load(convert(root, tmp_path / "out"))
    assert [(f.name, f.cardinality) for f in spec.categorical] == [("userId", 8), ("genres", 300)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max: 7", "max: x", "Couldn't parse integer: x"),
        ("annotation {", "annotation: 3 more {", 'annotation: 3 more {\': Expected "{".'),
        ("feature {", "feature: 1 feature {", 'feature: 1 feature {\': Expected "{".'),
        ('name: "age"', "name: 5", "Expected string but found: '5'"),
        ('name: "age"', "", "the name of a feature: got '', want a text"),
        ("feature {", "a {" * 2000, "schema.pbtxt:"),
        ('"genres"', '"userId"', "roles: got ['userId'], want one role per column"),
    ],
)
def test_a_schema_of_another_shape_is_refused(tmp_path, old, new, message):
    root = write_merlin(tmp_path / "m", text=schema().replace(old, new, 1))
    assert message in error_of(root, tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["[1]", '{"cats": 7}', '{"cats": [7]}', '{"cats": [{"col_name": null}]}', "[" * 5000]
)
def test_hugectrs_metadata_of_another_shape_is_refused(tmp_path, text):
    root = write_merlin(tmp_path / "m", text=schema())
    (root / "train/_metadata.json").write_text(text)
    assert re.search("not JSON|want the mapping|want a list", error_of(root, tmp_path / "out"))


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    root = write_merlin(tmp_path / "m", text=schema())
    path = root / "train/part_0.parquet"
    table = pq.read_table(path)
    pq.write_table(
        pa.table([*table.columns, table["userId"]], [*table.column_names, "userId"]), path
    )
    assert "got 'several columns userId', want every feature once" in error_of(
        root, tmp_path / "out"
    )


# MLPerf's npy files.


def write_npy(root: Path, multi_hot: bool, days: int = 3) -> Path:
    """Write days of 7 rows; row r of day d has the id 10 d + r in every table."""
    root.mkdir()
    for day in range(days):
        rows = np.arange(7, dtype=np.int32) + 10 * day
        np.save(root / f"day_{day}_labels.npy", (rows % 2)[:, None])
        np.save(
            root / f"day_{day}_dense.npy", np.stack([rows / 3, -rows], axis=1).astype(np.float32)
        )
        sparse = np.stack([rows, rows, 2 * rows], axis=1)
        if multi_hot:
            tables = {str(i): np.stack([sparse[:, i]] * (i + 1), axis=1) for i in range(3)}
            np.savez(root / f"day_{day}_sparse_multi_hot.npz", **tables)
        else:
            np.save(root / f"day_{day}_sparse.npy", sparse)
    return root


@pytest.mark.parametrize("multi_hot", [False, True])
def test_mlperfs_npy_files(tmp_path, multi_hot):
    out = convert(write_npy(tmp_path / "npy", multi_hot), tmp_path / "out")
    spec = FeatureSpec.load(out)
    assert [f.cardinality for f in spec.categorical] == [27, 27, 53]
    assert [f.hotness for f in spec.categorical] == ([1, 2, 3] if multi_hot else [1, 1, 1])
    train_rows = [*range(7), *range(10, 17)]
    for split, rows in (
        ("train", train_rows),
        ("validation", [20, 21, 22, 23]),
        ("test", [24, 25, 26]),
    ):
        columns = columns_of(out, split)
        assert columns.labels.tolist() == [row % 2 for row in rows]
        assert columns.ids[0].tolist() == rows
        times = 3 if multi_hot else 1
        assert columns.ids[2].tolist() == [2 * row for row in rows for _ in range(times)]
        np.testing.assert_array_equal(columns.numerical[:, 0], np.float32(np.array(rows) / 3))


def test_hashed_ids_become_remainders_by_the_rows_that_are_asked_for(tmp_path, capsys):
    root = write_npy(tmp_path / "npy", False)
    hashes = np.random.default_rng(3).integers(-(2**63), 2**63, (3, 7, 3))
    for day, sparse in enumerate(hashes):
        np.save(root / f"day_{day}_sparse.npy", sparse)
    np.save(root / "day_0_weights.npy", np.ones(7))
    with pytest.raises(Refused, match=r"feature 'cat_\d': id -\d+ at row"):
        convert(root, tmp_path / "out")
    printed = capsys.readouterr().out
    assert "not converted  day_0_weights.npy (not read)" in printed
    assert f"note: the ids of 'cat_0' ({hashes[..., 0].max() + 1:,} rows for 21 ids), " in printed
    rows = [1024, 1024, 1024]
    option = f"table_rows={rows}".replace(" ", "")
    assert f"{option}, for example, writes each id as its remainder" in printed
    out = convert(root, tmp_path / "out", option)
    spec = FeatureSpec.load(out)
    assert [feature.cardinality for feature in spec.categorical] == rows
    found = columns_of(out, "train").ids
    for table, found_ids in enumerate(found):
        assert found_ids.tolist() == (hashes[:2, :, table] % 1024).reshape(-1).tolist()
    with pytest.raises(Refused, match="want one number per table: cat_0, cat_1, cat_2"):
        convert(root, tmp_path / "two", "table_rows=[5,6]")
    with pytest.raises(Refused, match="table_rows is for ids without a fit"):
        convert(out, tmp_path / "two", "table_rows=[5,6,7]")
    np.save(root / "day_0_sparse.npy", hashes[0].view(np.uint64))
    with pytest.raises(
        Refused, match=r"table 'cat_0': its largest id is \d+, a hash; set table_rows"
    ):
        convert(root, tmp_path / "two")
    assert columns_of(convert(root, tmp_path / "two", option), "train").ids[1].max() < 1024


def test_remainders_of_merlins_and_nvidias_ids(tmp_path):
    root = write_merlin(tmp_path / "m", text=schema(genres=properties(300)))
    train = columns_of(convert(root, tmp_path / "out", "table_rows=[2,3]"), "train")
    assert train.ids[0].tolist() == [0, 1, 0] * 2
    assert train.ids[1].tolist() == [1, 2, 2, 1, 2, 0]
    assert train.lengths[1].tolist() == [2, 0, 1] * 2
    path = root / "train/part_0.parquet"
    table = pq.read_table(path)
    large = pa.array([2**63, 1, 2], pa.uint64())
    pq.write_table(table.set_column(0, "userId", large), path)
    with pytest.raises(Refused, match=r"userId: got 9223372036854775808, want ids below 2\^63"):
        convert(root, tmp_path / "two", "table_rows=[2,3]")
    out = convert(write_csv_files(tmp_path / "csv"), tmp_path / "csv_out", "table_rows=[3,5]")
    wanted = [ids(row) for row in range(ROWS["train"])]
    found = columns_of(out, "train").ids
    assert [column.tolist() for column in found] == [
        [row[0] % 3 for row in wanted],
        [row[1] % 5 for row in wanted],
    ]


def test_npy_days_are_read_in_their_order_not_the_alphabets(tmp_path):
    out = convert(write_npy(tmp_path / "npy", False, days=11), tmp_path / "out")
    assert columns_of(out, "test").ids[0].tolist() == [104, 105, 106]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "day_1_dense.npy").unlink(), "day_1_dense.npy: no such file"),
        (
            lambda root: np.save(root / "day_1_sparse.npy", np.zeros((6, 3), np.int32)),
            "day_1_labels.npy: 7 rows, but its ids have 6; one of the two is truncated",
        ),
        (
            lambda root: np.save(root / "day_1_sparse.npy", np.zeros((7, 2), np.int32)),
            "want those of the first day",
        ),
        (lambda root: (root / "day_1_labels.npy").write_bytes(b"x" * 9), "not a complete npy file"),
        (
            lambda root: [(root / f"day_{day}_labels.npy").unlink() for day in (1, 2)],
            "1 day; want two at least",
        ),
    ],
)
def test_a_mistake_in_npy_files_is_reported(tmp_path, damage, message):
    root = write_npy(tmp_path / "npy", False)
    damage(root)
    assert message in error_of(root, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("sparse", np.zeros(7, np.int32), "got int32 (7,), want integers in 2 dimensions"),
        ("sparse", np.zeros((7, 3), np.float32), "got float32 (7, 3), want integers in 2"),
        ("dense", np.zeros(7, np.float32), "got float32 (7,), want numbers in 2 dimensions"),
        ("dense", np.zeros((7, 2), np.complex64), "got complex64 (7, 2), want numbers in 2"),
        ("labels", np.zeros((7, 2), np.int32), "got shape (7, 2), want [rows] or [rows, 1]"),
        ("labels", np.int32(1), "got int32 (), want numbers in one or two dimensions"),
        ("labels", np.array(["a"] * 7), "got <U1 (7,), want numbers in one or two dimensions"),
    ],
)
def test_an_npy_array_of_another_kind_is_refused(tmp_path, name, array, message):
    root = write_npy(tmp_path / "npy", False)
    np.save(root / f"day_1_{name}.npy", array)
    assert message in error_of(root, tmp_path / "out")


def test_npy_files_without_numericals_are_read(tmp_path):
    root = write_npy(tmp_path / "npy", False)
    want = data_files(convert(root, tmp_path / "want"))
    for path in root.glob("day_*_dense.npy"):
        np.save(path, np.load(path)[:, :0])
    found = data_files(convert(root, tmp_path / "out"))
    assert found == {name: data for name, data in want.items() if "numerical" not in name}


def test_npy_files_in_column_order_are_read(tmp_path):
    root = write_npy(tmp_path / "npy", False)
    want = data_files(convert(root, tmp_path / "want"))
    for name in ("dense", "sparse"):
        path = root / f"day_0_{name}.npy"
        np.save(path, np.asfortranarray(np.load(path)))
    assert data_files(convert(root, tmp_path / "out")) == want


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"0": np.zeros((7, 1), int), "2": np.zeros((7, 1), int)},
            "it has the arrays ['0.npy', '2",
        ),
        (
            {"0": np.zeros(7, int)},
            "an array is int64 (7,), want row-major integers [rows, hotness]",
        ),
        (
            {"0": np.zeros((7, 2), int, "F")},
            "int64 (7, 2) in column order, want row-major integers",
        ),
        ({"0": np.zeros((7, 0), int)}, "an array is int64 (7, 0), want row-major integers"),
        ({"0": np.zeros((7, 2))}, "an array is float64 (7, 2), want row-major integers"),
    ],
)
def test_an_npz_of_other_arrays_is_refused(tmp_path, arrays, message):
    root = write_npy(tmp_path / "npy", True)
    np.savez(root / "day_1_sparse_multi_hot.npz", **arrays)
    assert message in error_of(root, tmp_path / "out")


@pytest.mark.parametrize("damage", [lambda data: data[:-30], lambda data: b"x" * 40])
def test_a_damaged_npz_is_refused(tmp_path, damage):
    root = write_npy(tmp_path / "npy", True)
    path = root / "day_1_sparse_multi_hot.npz"
    path.write_bytes(damage(path.read_bytes()))
    assert "day_1_sparse_multi_hot.npz: not a complete npz file" in error_of(root, tmp_path / "out")


def test_metadata_of_the_source_is_kept(tmp_path):
    root = write_handwritten(tmp_path / "a")
    spec = root / "feature_spec.yaml"
    document = yaml.safe_load(spec.read_text())
    document["metadata"] = {"frequency_limit": 3}
    spec.write_text(yaml.safe_dump(document))
    assert FeatureSpec.load(convert(root, tmp_path / "b")).metadata["frequency_limit"] == 3


def test_merlins_file_list_has_the_order_and_the_names(tmp_path):
    """NVTabular writes the paths of the machine that it ran on."""
    root = write_merlin(tmp_path / "m", text=schema(genres=properties(300)))
    file_list = root / "train" / "_file_list.txt"
    file_list.write_text("2\n/gone/train/part_1.parquet\n/gone/train/part_0.parquet\n")
    out = convert(root, tmp_path / "out")
    assert columns_of(out, "train").ids[1].tolist() == [1, 5, 3, 1, 5, 2]
    for path in (file_list, root / "schema.pbtxt"):
        path.write_text(path.read_text(), encoding="utf-8-sig")
    assert data_files(convert(root, tmp_path / "marked")) == data_files(out)
    file_list.write_text("2\npart_1.parquet\npart_2.parquet\n")
    message = error_of(root, tmp_path / "missing")
    assert message.startswith(
        f"{root / 'train/part_2.parquet'}: no such file, which _file_list.txt"
    )
    file_list.write_text("2\n/a/part_1.parquet\n/b/part_1.parquet\n")
    assert "lists 'part_1.parquet' twice" in error_of(root, tmp_path / "twice")
