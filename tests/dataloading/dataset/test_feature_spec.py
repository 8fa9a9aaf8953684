"""Spec of a dataset directory: specs of NVIDIA's recipe are read, and contradictions are named.

pytest tests/dataloading/dataset/test_feature_spec.py
"""

import os
from pathlib import Path

import numpy as np
import pytest
import yaml

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec, id_dtype
from dataloading.dataset.row_columns import RowColumn
from tests.helpers.handwritten import ROWS, SPEC, write_files, write_handwritten


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_handwritten(tmp_path / "dataset")


def edited(root: Path, old: str, new: str) -> Path:
    """Replace `old` in the spec on disk."""
    assert old in SPEC
    (root / "feature_spec.yaml").write_text(SPEC.replace(old, new))
    return root


def error_of(root: Path) -> str:
    with pytest.raises(ValueError, match=r"feature_spec\.yaml: ") as caught:
        FeatureSpec.load(root)
    return str(caught.value)


def test_a_spec_with_anchors_and_names_in_bin_is_read(root):
    spec = FeatureSpec.load(root)
    assert spec.numerical == ("num_0", "num_1")
    assert spec.numerical_dtype == np.float16
    assert spec.labels == (RowColumn("label"),)
    assert [(f.name, f.cardinality, f.dtype, f.hotness) for f in spec.categorical] == [
        ("cat_0.bin", 10, np.int8, 1),
        ("cat_1.bin", 40000, np.int32, 1),
    ]
    assert {name: files.num_rows for name, files in spec.splits.items()} == ROWS


def test_the_channel_decides_the_order_and_not_the_yaml(root):
    edited(root, "categorical: [cat_0.bin, cat_1.bin]", "categorical: [cat_1.bin, cat_0.bin]")
    assert [f.name for f in FeatureSpec.load(root).categorical] == ["cat_1.bin", "cat_0.bin"]


def test_renamed_features_and_other_paths_are_read(root):
    (root / "train").rename(root / "days_0_22")
    (root / "days_0_22/cat_1.bin").rename(root / "days_0_22/Site id.x")
    spec = SPEC.replace("cat_1.bin: {", "Site id: {").replace(
        "0.bin, cat_1.bin]", "0.bin, Site id]"
    )
    spec = spec.replace(
        "[cat_1.bin], files: [train/cat_1.bin]", "[Site id], files: [days_0_22/Site id.x]"
    )
    spec = spec.replace("[cat_1.bin], files: [test", "[Site id], files: [test").replace(
        "[train/", "[days_0_22/"
    )
    (root / "feature_spec.yaml").write_text(spec)
    loaded = FeatureSpec.load(root)
    assert loaded.categorical[1].name == "Site id"
    assert loaded.splits["train"].ids["Site id"] == root / "days_0_22/Site id.x"


def test_another_file_name_for_the_spec_is_read(root):
    (root / "feature_spec.yaml").rename(root / "other.yaml")
    assert FeatureSpec.load(root, "other.yaml").splits["train"].num_rows == ROWS["train"]


def test_validation_files_that_the_spec_leaves_out_are_a_split(root):
    write_files(root, "validation", 3)
    assert FeatureSpec.load(root).splits["validation"].num_rows == 3


def test_half_a_validation_directory_is_no_split(root):
    write_files(root, "validation", 3)
    (root / "validation/cat_0.bin").unlink()
    assert set(FeatureSpec.load(root).splits) == {"train", "test"}


def test_a_dataset_without_numericals_has_no_chunk_for_them(root):
    document = yaml.safe_load(SPEC)
    document["channel_spec"]["numerical"] = []
    document["feature_spec"] = {k: v for k, v in document["feature_spec"].items() if "num" not in k}
    document["source_spec"] = {
        split: chunks[1:] for split, chunks in document["source_spec"].items()
    }
    (root / "feature_spec.yaml").write_text(yaml.safe_dump(document))
    spec = FeatureSpec.load(root)
    assert spec.numerical == ()
    assert spec.splits["train"].numerical is None


def test_the_fingerprint_follows_the_model_and_not_the_paths(root, tmp_path):
    spec = FeatureSpec.load(root)
    copy = FeatureSpec.load(write_handwritten(tmp_path / "copy"))
    assert copy.fingerprint() == spec.fingerprint()
    assert len(spec.fingerprint()) == 64
    for old, new in (
        ("cardinality: 10,", "cardinality: 11,"),
        ("[cat_0.bin, cat_1.bin]", "[cat_1.bin, cat_0.bin]"),
    ):
        assert FeatureSpec.load(edited(root, old, new)).fingerprint() != spec.fingerprint()


def test_features_of_one_table_are_listed_in_the_order_of_the_first(root):
    spec = FeatureSpec.load(root)
    assert {k: [f.name for f in v] for k, v in spec.table_features.items()} == {
        "cat_0.bin": ["cat_0.bin"],
        "cat_1.bin": ["cat_1.bin"],
    }
    entry = "cat_0.bin: {cardinality: 10, dtype: int8}"
    shared = entry.replace("10, dtype: int8", "40000, dtype: int32, table: cat_1.bin")
    (root / "train/cat_0.bin").write_bytes(bytes(4 * ROWS["train"]))
    (root / "test/cat_0.bin").write_bytes(bytes(4 * ROWS["test"]))
    both = FeatureSpec.load(edited(root, entry, shared))
    assert [(f.name, f.table) for f in both.categorical] == [
        ("cat_0.bin", "cat_1.bin"),
        ("cat_1.bin", None),
    ]
    assert both.table_features == {"cat_1.bin": both.categorical}
    apart = FeatureSpec.load(edited(root, entry, shared.replace(", table: cat_1.bin", "")))
    assert both.fingerprint() != apart.fingerprint()
    own = FeatureSpec.load(edited(root, entry, shared.replace("cat_1.bin", "cat_0.bin")))
    assert own.fingerprint() == apart.fingerprint()


def test_the_writer_refuses_one_table_of_two_sizes(tmp_path):
    features = [CategoricalFeature.of("a", 5), CategoricalFeature.of("b", 6, table="a")]
    with (
        pytest.raises(
            ValueError, match=r"b\.cardinality: got 6, want 5, that of 'a', which has the"
        ),
        write_dataset(tmp_path / "d", categorical=features),
    ):
        pass


def test_id_dtypes_follow_nvidias_rule():
    sizes = {1: 1, 126: 1, 127: 2, 32_766: 2, 32_767: 4, 2**31 - 2: 4, 2**31 - 1: 8}
    assert {rows: id_dtype(rows).itemsize for rows in sizes} == sizes


def test_ids_in_memory_are_wide_only_for_a_table_that_needs_it(root):
    spec = FeatureSpec.load(root)
    assert spec.ids_dtype == np.int32
    huge = CategoricalFeature("huge", 2**31, np.dtype(np.int64), 1, 1)
    assert (
        FeatureSpec(None, (), np.dtype("f4"), (RowColumn("y"),), (huge,), {}, {}).ids_dtype
        == np.int64
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("label: [label]", "label: [label, other]", "feature_spec: got ['other'], want an entry for every feature"),
        ("label: [label]", "label: []", "channel_spec.label: got [], want at least one label"),
        ("[cat_0.bin, cat_1.bin]", "[]", "channel_spec.categorical: got [], want at least one feature"),
        ("[cat_0.bin, cat_1.bin]", "[cat_0.bin]", "channel_spec: got ['cat_1.bin'], want a channel for every"),
        ("[cat_0.bin, cat_1.bin]", "[cat_0.bin, cat_0.bin, cat_1.bin]", "want every feature in one channel, once"),
        ("[cat_0.bin, cat_1.bin]", "[cat_0.bin, cat_1.bin, x]", "feature_spec: got ['x'], want an entry for every"),
        ("[cat_0.bin, cat_1.bin]", "7", "channel_spec.categorical: got 7, want a list of feature names"),
        ("  label: [label]", "  extra: [label]\n  label: [label]", "channel_spec: got ['extra'], want no channels but"),
        ("cat_0.bin: {cardinality: 10, dtype: int8}", "cat_0.bin: 3", "feature_spec.cat_0.bin: got 3, want a mapping"),
        ("dtype: int8", "dtype: uint8", "feature_spec.cat_0.bin.dtype: got 'uint8', want one of int8, int16"),
        ("dtype: int8", "dtype: [int8]", "feature_spec.cat_0.bin.dtype: got ['int8'], want the name of a dtype"),
        ("cardinality: 10", "cardinality: 0", "feature_spec.cat_0.bin.cardinality: got 0, want an integer of at least 1"),
        ("cardinality: 10", "cardinality: auto", "cat_0.bin.cardinality: got 'auto', want an integer of at least 1"),
        ("cardinality: 10", "cardinality: 129", "got 129, want at most 128 rows for ids of dtype int8; use a wider dtype"),
        ("dtype: int8", "dtype: int8, hotness: 0", "cat_0.bin.hotness: got 0, want an integer from 1 to 2147483647, or 'ragged'"),
        ("dtype: int8", "dtype: int8, hotness: null", "cat_0.bin.hotness: got None, want an integer from 1 to 2147483647"),
        ("dtype: int8", "dtype: int8, table: 3", "feature_spec.cat_0.bin.table: got 3, want the name of a table"),
        ("dtype: int8", "dtype: int8, table: ''", "feature_spec.cat_0.bin.table: got '', want the name of a table"),
        ("dtype: int8", "dtype: int8, table: cat_1.bin",
         "feature_spec.cat_1.bin.cardinality: got 40000, want 10, that of 'cat_0.bin', which has the same table 'cat_1.bin'"),
        ("label: {dtype: bool}", "label: {dtype: int8}", "feature_spec.label.dtype: got 'int8', want bool or float16 or float32"),
        ("num_0: {dtype: float16}", "num_0: {dtype: int32}", "num_0.dtype: got 'int32', want float16 or float32"),
        ("num_0: {dtype: float16}", "num_0: {dtype: float32}", "want one dtype for all numericals"),
        ("metadata: {}", "metadata: 3", "metadata: got 3, want a mapping"),
        ("metadata: {}", "metadata: {rows: 3}", "metadata.rows: got 3, want a mapping from split to rows"),
        ("metadata: {}", "metadata: {rows: {train: 8}}", "metadata.rows.train: got 8, want the 7 rows that its files"),
        ("source_spec:\n", "source_spec: {learn: []}\nother:\n",
         "source_spec: got ['learn'], want a split, one of train, test, validation"),
        ("source_spec:\n", "source_spec: 5\nother:\n", "source_spec: got 5, want a mapping"),
        ("source_spec:\n", "source_spec: null\nother:\n",
         "source_spec: got None, want a mapping; without rows, leave data.path out"),
        ("  train:\n", "  spare: 4\n  train:\n", "source_spec.spare: got 4, want a list of chunks"),
        ("  train:\n", "  train:\n  - 9\n", "source_spec.train[0]: got 9, want a mapping with type"),
        ("{type: split_binary, features: [label], files: [train", "{type: csv, features: [label], files: [train",
         "source_spec.train[1].type: got 'csv', want split_binary"),
        ("features: *id001, files: [train", "features: [num_1, num_0], files: [train",
         "train[0].features: got ['num_1', 'num_0'], want all numericals in channel order"),
        ("features: [cat_0.bin], files: [train", "features: [cat_0.bin, cat_1.bin], files: [train",
         "want all numericals in channel order, or the label alone, or one categorical feature alone"),
        ("features: [cat_0.bin], files: [train", "features: [cat_1.bin], files: [train",
         "source_spec.train[3]: got 'cat_1.bin', want every feature once in a split"),
        ("  - {type: split_binary, features: [cat_0.bin], files: [train/cat_0.bin]}\n", "",
         "source_spec.train: got ['cat_0.bin'], want a chunk for every feature; these have none"),
        ("  - {type: split_binary, features: *id001, files: [train/numerical.bin]}\n", "",
         "source_spec.train: got ['num_0', 'num_1'], want a chunk for every feature"),
        ("files: [train/label.bin]", "files: [train/label.bin, train/cat_0.bin]", "want one file"),
        ("files: [train/label.bin]", "files: train/label.bin", "got 'train/label.bin', want a list of files"),
        ("files: [train/label.bin]", "files: [3]", "file name 3: want a path relative to the dataset directory"),
        ("dtype: int8}", "dtype: int8, hotness: ragged}", "want two files (ids, offsets) for a ragged feature"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_with_its_key(root, old, new, message):
    assert message in error_of(edited(root, old, new))


def test_a_missing_spec_is_reported_with_the_remedy(tmp_path):
    message = error_of(tmp_path / "nowhere")
    assert "nowhere/feature_spec.yaml: no such file; name a dataset directory" in message


def test_a_spec_that_is_no_yaml_is_named(root):
    (root / "feature_spec.yaml").write_text("a: [")
    assert "not plain yaml" in error_of(root)


def test_a_spec_that_is_no_text_is_named(root):
    (root / "feature_spec.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in error_of(root)


def test_a_spec_that_is_a_list_is_named(root):
    (root / "feature_spec.yaml").write_text("- 1")
    assert "the file: got 'list', want a mapping of four sections" in error_of(root)


def test_a_yaml_that_asks_to_run_code_is_refused(root):
    (root / "feature_spec.yaml").write_text(
        "!!python/object/apply:os.mkdir ['" + str(root / "made") + "']"
    )
    assert "not plain yaml" in error_of(root)
    assert not (root / "made").exists()


@pytest.mark.parametrize("outside", ["../label.bin", "train/../../label.bin", "{tmp}/label.bin"])
def test_a_path_that_leaves_the_directory_is_refused(root, tmp_path, outside):
    (tmp_path / "label.bin").write_bytes(bytes(7))
    outside = outside.format(tmp=tmp_path)
    message = error_of(edited(root, "[train/label.bin]", f"[{outside}]"))
    assert (
        f"source_spec.train[1].files: file '{outside}' lies outside the dataset directory"
        in message
    )


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_symbolic_link_that_leaves_the_directory_is_refused(root, tmp_path, split):
    write_files(root, "validation", 7)
    (tmp_path / "label.bin").write_bytes(bytes(7))
    (root / split / "label.bin").unlink()
    (root / split / "label.bin").symlink_to(tmp_path / "label.bin")
    assert f"file '{split}/label.bin' lies outside the dataset directory" in error_of(root)


def test_a_dataset_directory_may_itself_be_a_link(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    assert FeatureSpec.load(tmp_path / "link").splits["train"].num_rows == ROWS["train"]


def test_a_missing_file_is_named(root):
    (root / "train/cat_0.bin").unlink()
    assert "source_spec.train[2].files: file 'train/cat_0.bin' is missing from" in error_of(root)


def test_a_directory_in_place_of_a_file_is_named(root):
    (root / "train/cat_0.bin").unlink()
    (root / "train/cat_0.bin").mkdir()
    assert "file 'train/cat_0.bin' is missing from" in error_of(root)


@pytest.mark.parametrize(
    ("file", "num_bytes", "message"),
    [
        (
            "cat_1.bin",
            27,
            "train/cat_1.bin is truncated: got 27 bytes, want 28 = 7 x 4 bytes for the 7 rows of",
        ),
        (
            "numerical.bin",
            24,
            "train/numerical.bin is truncated: got 24 bytes, want 28 = 7 x 4 bytes",
        ),
        ("cat_0.bin", 0, "train/cat_0.bin is empty: got 0 bytes, want 7 = 7 x 1 bytes"),
        ("label.bin", 0, "train/label.bin is empty: want one byte per row"),
        (
            "label.bin",
            6,
            "train/numerical.bin is too long: got 28 bytes, want 24 = 6 x 4 bytes for the 6 rows of",
        ),
    ],
)
def test_a_file_of_the_wrong_size_is_named(root, file, num_bytes, message):
    os.truncate(root / "train" / file, num_bytes)
    assert message in error_of(root)


def test_a_wider_dtype_asks_for_more_bytes(root):
    edited(root, "dtype: int8", "dtype: int16")
    assert "cat_0.bin is truncated: got 4 bytes, want 8 = 4 x 2 bytes" in error_of(root)


def test_an_unknown_split_is_named(root):
    with pytest.raises(ValueError, match="no split 'dev', only test, train"):
        FeatureSpec.load(root).rows_of("dev")


def test_a_mean_hotness_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"feature_spec\.g\.mean_hotness: got 'x', want a number"):
        CategoricalFeature("g", 4, np.dtype("i1"), None, "x")


def test_a_dtype_that_is_no_integer_is_named():
    with pytest.raises(
        ValueError, match=r"feature_spec\.g\.dtype: got 'float32', want one of int8"
    ):
        CategoricalFeature("g", 4, np.dtype("f4"), 1, 1)
