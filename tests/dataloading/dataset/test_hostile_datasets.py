"""Datasets from anybody: each is read, or refused with one short line that names the place."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dataloading.dataset.dataset_directory import verify_checksums, write_dataset
from dataloading.dataset.feature_spec import SPEC_NAME, CategoricalFeature, FeatureSpec
from dataloading.dataset.file_states import file_samples, file_states
from dataloading.dataset.open_dataset import open_dataset
from tests.helpers.handwritten import SPEC, write_handwritten

CATEGORICAL = "categorical: [cat_0.bin, cat_1.bin]"
CARDINALITY = "cat_0.bin: {cardinality: 10, dtype: int8}"
BOMB = "\n".join(
    [
        "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
    ]
)
SMALLER_BOMB = BOMB.partition("a5:")[0]


def read_all(root: Path, filename: str = SPEC_NAME) -> FeatureSpec:
    """Read everything that a run reads of a dataset before and while it trains."""
    spec = FeatureSpec.load(root, filename)
    source = open_dataset(spec)
    for split in spec.splits:
        source.read(split, np.array([[0, source.num_rows(split)]]))
    spec.fingerprint()
    file_states(spec)
    file_samples(spec)
    if spec.metadata.get("files"):
        verify_checksums(spec)
    return spec


def refusal(root: Path, filename: str = SPEC_NAME) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read_all(root, filename)
    return checked(caught.value, root)


def checked(error: ValueError, root: Path) -> str:
    """Return the message of a refusal, which is short and names the dataset."""
    message = str(error)
    assert type(error) is ValueError, error
    assert str(root) in message
    assert len(message) < 1500
    assert "\n" not in message
    return message


def replaced(old: str, new: str) -> str:
    assert old in SPEC
    return SPEC.replace(old, new)


def first_feature(text: str) -> str:
    return replaced(CARDINALITY, f"cat_0.bin: {{{text}}}")


SPECS = {
    "aliases in a label": f"{SMALLER_BOMB}\n{replaced('label: [label]', 'label: *a4')}",
    "aliases in a channel": f"{SMALLER_BOMB}\n{replaced(CATEGORICAL, 'categorical: [*a4, *a4]')}",
    "aliases in metadata.rows": f"{SMALLER_BOMB}\n{replaced('metadata: {}', 'metadata: {rows: *a4}')}",
    "aliases in a row count": f"{SMALLER_BOMB}\n{replaced('metadata: {}', 'metadata: {rows: {train: *a4}}')}",
    "aliases in a cardinality": f"{SMALLER_BOMB}\n{first_feature('cardinality: *a4, dtype: int8')}",
    "aliases in a dtype": f"{SMALLER_BOMB}\n{first_feature('cardinality: 10, dtype: *a4')}",
    "aliases in a hotness": f"{SMALLER_BOMB}\n{first_feature('cardinality: 10, dtype: int8, hotness: *a4')}",
    "aliases in files": f"{SMALLER_BOMB}\n{replaced('files: [train/label.bin]', 'files: *a4')}",
    "aliases in a file": f"{SMALLER_BOMB}\n{replaced('files: [train/label.bin]', 'files: [*a4]')}",
    "aliases in features": f"{SMALLER_BOMB}\n{replaced('[label], files: [train', '*a4, files: [train')}",
    "aliases in a split": f"{SMALLER_BOMB}\n{replaced('source_spec:', 'source_spec:' + chr(10) + '  more: *a4')}",
    "aliases in a type": f"{SMALLER_BOMB}\n"
    + SPEC.replace(
        "{type: split_binary, features: [label], files: [train",
        "{type: *a4, features: [label], files: [train",
    ),
    "too many aliases": f"{BOMB}\n{SPEC}",
    "500 brackets": f"{SPEC}\nmore: {'[' * 500}{']' * 500}",
    "500 brackets alone": "[" * 500,
    "no mapping": "3",
    "empty": "",
    "null sections": "{channel_spec: , feature_spec: , source_spec: }",
    "a list of sections": "[channel_spec, feature_spec, source_spec]",
    "a feature twice in the yaml": replaced(
        CARDINALITY, f"{CARDINALITY}\n  cat_0.bin: {{cardinality: 9, dtype: int8}}"
    ),
    "a feature twice in a channel": replaced(CATEGORICAL, "categorical: [cat_0.bin, cat_0.bin]"),
    "100,000 features": replaced(CATEGORICAL, f"categorical: {[f'f{n}' for n in range(20_000)]}"),
    "a feature of 100,000 letters": SPEC.replace("cat_0.bin: {", "x" * 100_000 + ": {"),
    "a number as a feature": replaced(CARDINALITY, CARDINALITY.replace("cat_0.bin", "7")),
    "null as a feature": replaced(CARDINALITY, CARDINALITY.replace("cat_0.bin", "null")),
    "cardinality beyond its dtype": first_feature("cardinality: 9000000000000000000, dtype: int8"),
    "cardinality of 400 digits": first_feature(f"cardinality: 1{'0' * 400}, dtype: int64"),
    "cardinality of 5,000 digits": first_feature(f"cardinality: 1{'0' * 5000}, dtype: int64"),
    "cardinality in hex": first_feature(f"cardinality: 0x{'f' * 4000}, dtype: int64"),
    "cardinality nan": first_feature("cardinality: .nan, dtype: int8"),
    "cardinality inf": first_feature("cardinality: .inf, dtype: int8"),
    "cardinality true": first_feature("cardinality: true, dtype: int8"),
    "cardinality text": first_feature("cardinality: '10', dtype: int8"),
    "cardinality a date": first_feature("cardinality: 2021-01-01, dtype: int8"),
    "cardinality missing": first_feature("dtype: int8"),
    "dtype object": first_feature("cardinality: 10, dtype: object"),
    "dtype unsigned": first_feature("cardinality: 10, dtype: uint8"),
    "hotness huge": first_feature("cardinality: 10, dtype: int8, hotness: 4000000000"),
    "hotness of 400 digits": first_feature(f"cardinality: 10, dtype: int8, hotness: 1{'0' * 400}"),
    "hotness nan": first_feature("cardinality: 10, dtype: int8, hotness: .nan"),
    "hotness false": first_feature("cardinality: 10, dtype: int8, hotness: false"),
    "split of two types": replaced("  train:", "  1: []\n  '1': []\n  train:"),
    "rows of 400 digits": replaced("metadata: {}", f"metadata: {{rows: {{train: 1{'0' * 400}}}}}"),
    "rows nan": replaced("metadata: {}", "metadata: {rows: {train: .nan}}"),
    "metadata a list": replaced("metadata: {}", "metadata: [1]"),
    "checksums a list": replaced("metadata: {}", "metadata: {files: [1]}"),
    "checksums of nothing": replaced("metadata: {}", "metadata: {files: {train/label.bin: null}}"),
    "checksums of a number": replaced("metadata: {}", "metadata: {files: {1: {}}}"),
    "checksums of the outside": replaced("metadata: {}", "metadata: {files: {/etc/passwd: {}}}"),
    "a file of a NUL": SPEC.replace("train/label.bin", '"train/label.bin\\0"').replace(
        "[test/label.bin]", "[test/label.bin]"
    ),
    "a file of half a letter": SPEC.replace("train/label.bin", '"\\ud800"'),
    "a file of 5,000 letters": SPEC.replace("train/label.bin", "x" * 5000),
    "a file with a line break": SPEC.replace("train/label.bin", '"a\\nerror: all is well"'),
    "the directory as a file": SPEC.replace("train/label.bin", "."),
}


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS)
def test_a_hostile_spec_is_refused_with_one_short_line(tmp_path, text):
    root = write_handwritten(tmp_path / "dataset", text)
    if "1: []" in text or "files: [1]" in text:
        shutil.rmtree(root / "test")
    refusal(root)


MEANS = ["1" + "0" * 400, ".inf", ".nan", "-1", "1.0e+300", "x", "[1]"]


def ragged(root: Path, ids: list[list[int]]) -> Path:
    """Write a dataset whose one categorical feature is ragged."""
    with write_dataset(root, categorical=[CategoricalFeature.of("tags", 9, None)]) as dataset:
        for split in ("train", "test"):
            flat = np.array([i for row in ids for i in row], np.int64)
            dataset[split].append(
                labels=np.arange(len(ids)) % 2,
                ids={"tags": flat},
                lengths={"tags": np.array([len(row) for row in ids])},
            )
    return root


@pytest.mark.parametrize("mean", MEANS)
def test_a_mean_that_is_no_hotness_is_refused(tmp_path, mean):
    root = ragged(tmp_path / "data", [[1, 2], [3]])
    text = (root / SPEC_NAME).read_text()
    (root / SPEC_NAME).write_text(text.replace("mean_hotness: 1.5", f"mean_hotness: {mean}"))
    assert "mean_hotness" in refusal(root)


def offsets(*values: int) -> Callable[[Path], object]:
    return lambda root: np.array(values, "<i8").tofile(root / "train/tags.offsets.bin")


@pytest.mark.parametrize(
    "values", [(0, 9, 3), (0, -1, 3), (0, -(2**63), 3), (0, 2**63 - 1, 3), (1, 2, 3), (0, 2, 4)]
)
def test_offsets_that_lead_anywhere_are_refused(tmp_path, values):
    root = ragged(tmp_path / "data", [[1, 2], [3]])
    offsets(*values)(root)
    assert "tags.offsets.bin" in refusal(root)


def test_a_feature_without_any_id_is_read(tmp_path):
    spec = read_all(ragged(tmp_path / "data", [[], [], []]))
    assert spec.categorical[0].mean_hotness == 0


def special_file(path: Path, kind: str) -> None:
    path.unlink()
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "circle":
            path.symlink_to(path.name)
        case "directory":
            path.mkdir()
        case "broken link":
            path.symlink_to("nowhere")


@pytest.mark.parametrize("kind", ["FIFO", "device", "circle", "directory", "broken link"])
@pytest.mark.parametrize("name", [SPEC_NAME, "train/label.bin", "test/cat_1.bin"])
def test_only_regular_files_are_read(tmp_path, kind, name):
    root = write_handwritten(tmp_path / "dataset")
    special_file(root / name, kind)
    assert name in refusal(root)


@pytest.mark.parametrize("kind", ["FIFO", "circle"])
def test_a_special_file_is_no_split(tmp_path, kind):
    root = write_handwritten(tmp_path / "dataset")
    shutil.copytree(root / "test", root / "validation")
    special_file(root / "validation/label.bin", kind)
    assert set(read_all(root).splits) == {"train", "test"}


def test_a_dataset_directory_that_is_a_circle_of_links_is_refused(tmp_path):
    (tmp_path / "data").symlink_to("data")
    refusal(tmp_path / "data")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").symlink_to("b")
    (tmp_path / "folder/b").symlink_to("a")
    refusal(tmp_path / "folder", "a")


@pytest.mark.parametrize("filename", ["a\0b", "\ud800", "x" * 300, ".", ""])
def test_a_name_that_no_spec_can_have_is_refused(tmp_path, filename):
    refusal(write_handwritten(tmp_path / "dataset"), filename)


PARQUET_SPEC: dict[str, Any] = {
    "channel_spec": {"categorical": ["c", "l"], "label": ["y"], "numerical": ["x"]},
    "feature_spec": {
        "c": {"cardinality": 9, "dtype": "int8"},
        "l": {"cardinality": 9, "dtype": "int8", "hotness": "ragged"},
        "x": {"dtype": "float32"},
        "y": {"dtype": "bool"},
    },
    "source_spec": {
        split: [{"type": "parquet", "features": ["y", "x", "c", "l"], "files": [f"{split}.pq"]}]
        for split in ("train", "test")
    },
}
COLUMNS = {"c": [1, 2, 3], "l": [[1], [], [2, 3]], "x": [0.5, 1, 2], "y": [0, 1, 1]}


def write_parquet(root: Path, names: list[str], arrays: list[Any]) -> Path:
    root.mkdir()
    (root / SPEC_NAME).write_text(yaml.safe_dump(PARQUET_SPEC))
    for split in ("train", "test"):
        table = pa.Table.from_arrays([pa.array(values) for values in arrays], names=names)
        pq.write_table(table, root / f"{split}.pq", row_group_size=2)
    return root


@pytest.fixture
def parquet(tmp_path) -> Path:
    return write_parquet(tmp_path / "data", list(COLUMNS), list(COLUMNS.values()))


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_twice_is_refused(tmp_path, name):
    names, arrays = [*COLUMNS, name], [*COLUMNS.values(), COLUMNS[name]]
    message = refusal(write_parquet(tmp_path / "data", names, arrays))
    assert f"got 'several columns {name}', want every feature once" in message


def test_another_column_twice_is_not_read(tmp_path):
    names, arrays = [*COLUMNS, "z", "z"], [*COLUMNS.values(), [1, 2, 3], [1, 2, 3]]
    read_all(write_parquet(tmp_path / "data", names, arrays))


@pytest.mark.parametrize("name", ["./train.pq", "a/../train.pq", ".//train.pq"])
def test_a_file_under_two_names_is_refused(parquet, name):
    (parquet / "a").mkdir()
    text = (parquet / SPEC_NAME).read_text().replace("- train.pq", f"- train.pq\n    - {name}")
    (parquet / SPEC_NAME).write_text(text)
    assert "want every file once" in refusal(parquet)


@pytest.mark.parametrize("kind", ["FIFO", "device", "circle"])
def test_only_regular_parquet_files_are_read(parquet, kind):
    special_file(parquet / "train.pq", kind)
    assert "train.pq" in refusal(parquet)


def test_a_number_beyond_float32_is_refused_with_its_row(tmp_path):
    columns = COLUMNS | {"x": [0.5, 1.0, -1e300]}
    message = refusal(write_parquet(tmp_path / "data", list(columns), list(columns.values())))
    assert "'x' is -1e+300 at row 2 of" in message


def test_a_damaged_parquet_file_is_read_or_refused(parquet):
    path = parquet / "train.pq"
    original = path.read_bytes()
    refused = 0
    generator = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(original)
        for at in generator.integers(0, len(data), 3):
            data[at] = generator.integers(0, 256)
        path.write_bytes(data)
        try:
            read_all(parquet)
        except ValueError as error:
            refused += 1
            checked(error, parquet)
    assert refused
