"""`python -m preproc mode=verify`: each kind of damage is found, named by file and row, and counted."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.verify import run as verify
from tests.helpers.datasets import plant
from tests.helpers.handwritten import write_handwritten
from tests.helpers.preproc_command import Refused, preproc, raw_line, write_lines

ROWS = 50


@pytest.fixture
def dataset(tmp_path) -> Path:
    """Write a dataset of a one-hot, a two-hot and a ragged feature, and two numericals."""
    features = [
        CategoricalFeature.of("user", 40),
        CategoricalFeature.of("pair", 9, hotness=2),
        CategoricalFeature.of("tags", 300, hotness=None),
    ]
    rows = np.arange(ROWS)
    with write_dataset(
        tmp_path / "data", categorical=features, numerical=("x", "y"), splits=("train", "test")
    ) as writer:
        for split in ("train", "test"):
            writer[split].append(
                numerical=np.stack([rows, -rows], axis=1) / 8,
                labels=rows % 2,
                ids={
                    "user": rows % 40,
                    "pair": rows[:, None] % 9 + [0, 0],
                    "tags": np.repeat(rows, 2),
                },
                lengths={"tags": np.full(ROWS, 2)},
            )
    return tmp_path / "data"


def found(path: Path, capsys) -> tuple[int, list[str]]:
    """Return the exit status of the command and its lines `wrong: ...`, paths shortened."""
    try:
        preproc("mode=verify", f"path={path}")
        status = 0
    except SystemExit as end:
        status = end.code
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    return status, [line.removeprefix(f"wrong: {path}/") for line in lines]


def forget_checksums(path: Path) -> None:
    """Make the spec one without metadata, like NVIDIA's."""
    spec = path / "feature_spec.yaml"
    document = yaml.safe_load(spec.read_text())
    del document["metadata"]
    spec.write_text(yaml.safe_dump(document))


def test_a_complete_dataset_passes_with_its_label_rates(dataset, capsys):
    preproc("mode=verify", f"path={dataset}")
    out = capsys.readouterr().out
    assert "nothing wrong" in out
    assert "50.000" in out
    assert "no checksums" not in out


def test_a_dataset_of_nvidias_passes_without_checksums(tmp_path, capsys):
    preproc("mode=verify", f"path={write_handwritten(tmp_path)}")
    out = capsys.readouterr().out
    assert "nothing wrong" in out
    assert "lists no checksums" in out


def test_a_flipped_byte_is_found_by_the_checksum(dataset, capsys):
    plant(dataset / "train/user.bin", 7, 8, "int8")  # was 7, fits the table too
    status, lines = found(dataset, capsys)
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith("train/user.bin: its bytes have changed since it was written")


def test_a_truncated_file_is_named_and_the_others_are_still_read(dataset, capsys):
    path = dataset / "train/numerical.bin"
    path.write_bytes(path.read_bytes()[:-3])
    plant(dataset / "test/label.bin", 4, 2, "uint8")
    status, lines = found(dataset, capsys)
    assert status == 1
    assert "train/numerical.bin: truncated: 197 bytes, want 200" in lines
    assert "test/label.bin: 1 labels other than 0 and 1, the first 2 at row 4" in lines


@pytest.mark.parametrize("damaged", ["label.bin", "user.bin", "tags.offsets.bin"])
def test_without_metadata_the_file_that_differs_from_most_is_named(dataset, damaged, capsys):
    forget_checksums(dataset)
    path = dataset / "train" / damaged
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 2])
    _, lines = found(dataset, capsys)
    assert any(line.startswith(f"train/{damaged}: truncated") for line in lines)
    assert {line.split(":")[0] for line in lines} <= {f"train/{damaged}", "train/tags.bin"}


def test_all_wrong_ids_are_counted_and_the_first_is_located(dataset, capsys):
    for row, value in ((12, 40), (30, -1), (31, 99)):
        plant(dataset / "train/user.bin", row, value, "int8")
    _, lines = found(dataset, capsys)
    assert "train/user.bin: 3 ids of 'user' outside [0, 40), the first 40 at row 12" in lines


def test_an_id_of_a_multi_hot_feature_is_located_by_its_row(dataset, capsys):
    plant(dataset / "test/pair.bin", 2 * 33 + 1, 9, "int8")
    assert any("the first 9 at row 33" in finding for finding in found(dataset, capsys)[1])


def test_an_id_of_a_ragged_feature_is_located_by_its_row(dataset, capsys):
    plant(dataset / "test/tags.bin", 2 * 21 + 1, 300, "<i2")
    assert any("the first 300 at row 21" in finding for finding in found(dataset, capsys)[1])


def test_places_are_right_behind_the_first_chunk(dataset, capsys, monkeypatch):
    monkeypatch.setattr(verify, "CHUNK_BYTES", 16)
    plant(dataset / "train/user.bin", 41, 77, "int8")
    plant(dataset / "train/tags.offsets.bin", 30, 50, "<i8")
    _, lines = found(dataset, capsys)
    assert "train/user.bin: 1 ids of 'user' outside [0, 40), the first 77 at row 41" in lines
    assert any("decrease, the first 50 at row 29" in line for line in lines)


def test_an_offset_that_decreases_is_located(dataset, capsys):
    plant(dataset / "train/tags.offsets.bin", 30, 10, "<i8")
    _, lines = found(dataset, capsys)
    want = "train/tags.offsets.bin: 1 offsets that do not start at 0 or decrease, the first 10 at row 29"
    assert want in lines


def test_offsets_beyond_the_ids_blame_the_file_of_ids(dataset, capsys):
    plant(dataset / "train/tags.offsets.bin", ROWS, 120, "<i8")
    _, lines = found(dataset, capsys)
    assert "train/tags.bin: truncated: 200 bytes, want 240" in lines


def test_offsets_start_at_zero(dataset, capsys):
    plant(dataset / "train/tags.offsets.bin", 0, 1, "<i8")
    assert any("decrease, the first 1 at row 0" in finding for finding in found(dataset, capsys)[1])


def test_a_numerical_that_is_no_number_is_located(dataset, capsys):
    plant(dataset / "train/numerical.bin", 2 * 17 + 1, np.nan, "<f2")
    _, lines = found(dataset, capsys)
    want = "train/numerical.bin: 1 numericals that are not finite, the first nan at row 17 of y"
    assert want in lines


def test_labels_that_are_all_the_same_are_a_mistake(dataset, capsys):
    (dataset / "test/label.bin").write_bytes(bytes(ROWS))
    forget_checksums(dataset)
    status, lines = found(dataset, capsys)
    assert status == 1
    assert lines == ["test/label.bin: every label is 0; nothing to learn or score"]


def test_a_file_that_only_the_checksums_name_is_read_too(dataset, capsys):
    spec = dataset / "feature_spec.yaml"
    document = yaml.safe_load(spec.read_text())
    document["metadata"]["files"]["notes.txt"] = {"bytes": 2, "crc32": "00000000"}
    spec.write_text(yaml.safe_dump(document))
    (dataset / "notes.txt").write_text("ab")
    assert found(dataset, capsys)[1][0].startswith("notes.txt: its bytes have changed")


def test_files_of_preprocessing_beside_the_splits_are_read_too(tmp_path, capsys):
    lines = [raw_line(row % 2, c1=f"{row:08x}") for row in range(40)] + ["no line"]
    source, output = write_lines(tmp_path / "raw.tsv", lines), tmp_path / "out"
    options = ["plot=true", "on_bad=quarantine"]
    preproc(f"source={source}", f"output={output}", *options)
    assert found(output, capsys) == (0, [])
    # Not of the picture and the rejected lines, which hold times and paths.
    others = ["preproc.json", "report.json", "vocabulary/cat_0.parquet"]
    for name in others:
        data = bytearray((output / name).read_bytes())
        data[len(data) // 2] ^= 1
        (output / name).write_bytes(data)
    status, wrong = found(output, capsys)
    assert status == 1
    assert [line.partition(": its bytes have changed")[0] for line in wrong] == others


def test_a_missing_file_is_reported_before_anything_is_read(dataset):
    (dataset / "test/user.bin").unlink()
    with pytest.raises(Refused, match=r"test/user.bin' is missing"):
        preproc("mode=verify", f"path={dataset}")


@pytest.fixture
def in_parquet(tmp_path) -> Path:
    """Two splits of 50 rows in row groups of 50, with a float label so that any number can be put there."""
    features = [CategoricalFeature.of("user", 40), CategoricalFeature.of("tags", 300, hotness=None)]
    rows = np.arange(ROWS)
    with write_dataset(
        tmp_path / "data", categorical=features, numerical=("x",), file_format="parquet"
    ) as writer:
        for split in ("train", "test"):
            writer[split].append(
                numerical=rows[:, None] / 8,
                labels=rows % 2,
                ids={"user": rows % 40, "tags": np.repeat(rows, 2)},
                lengths={"tags": np.full(ROWS, 2)},
            )
    return tmp_path / "data"


def replace_column(path: Path, name: str, row: int, value: object) -> None:
    """Rewrite a Parquet file with one value changed, in row groups of 8 rows."""
    table = pq.read_table(path)
    index = table.schema.get_field_index(name)
    values = table.column(name).to_pylist()
    values[row] = value
    kind = table.schema.field(name).type
    table = table.set_column(index, name, pa.array(values, kind))
    pq.write_table(table, path, row_group_size=8)


def test_a_complete_parquet_dataset_passes(in_parquet, capsys):
    preproc("mode=verify", f"path={in_parquet}")
    out = capsys.readouterr().out
    assert "nothing wrong" in out
    assert out.count("50.000") == 2


def test_a_flipped_byte_of_parquet_is_found_by_the_checksum(in_parquet, capsys):
    plant(in_parquet / "train/part_0.parquet", 40, 9, "uint8")
    status, lines = found(in_parquet, capsys)
    assert status == 1
    assert lines[0].startswith("train/part_0.parquet: its bytes have changed")


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("user", 40, "1 ids of 'user' outside [0, 40), the first 40 at row 27"),
        ("user", None, "1 missing values of 'user', the first None at row 27"),
        ("tags", [4, 300], "1 ids of 'tags' outside [0, 300), the first 300 at row 27"),
        ("tags", [4, None], "1 missing ids of 'tags', the first None at row 27"),
        ("x", float("inf"), "1 numericals of 'x' that are not finite, the first inf at row 27"),
        ("label", 2, "1 labels other than 0 and 1, the first 2 at row 27"),
    ],
)
def test_a_wrong_value_in_parquet_is_located(in_parquet, column, value, text, capsys):
    forget_checksums(in_parquet)
    replace_column(in_parquet / "test/part_0.parquet", column, 27, value)
    status, lines = found(in_parquet, capsys)
    assert (status, lines) == (1, [f"test/part_0.parquet: {text}"])


def test_a_truncated_parquet_file_is_named_and_the_others_are_still_read(in_parquet, capsys):
    forget_checksums(in_parquet)
    path = in_parquet / "train/part_0.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    replace_column(in_parquet / "test/part_0.parquet", "user", 3, 99 - 50)
    _, lines = found(in_parquet, capsys)
    assert any(
        line.startswith("train/part_0.parquet: not a complete Parquet file") for line in lines
    )
    assert any("the first 49 at row 3" in line for line in lines)


def test_a_missing_path_is_refused():
    with pytest.raises(Refused, match="set path=DIR"):
        preproc("mode=verify")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "files",
            {"train/label.bin": [7]},
            "metadata.files.train/label.bin: got [7], want a mapping",
        ),
        ("files", {"train/label.bin": {"bytes": "x"}}, "label.bin.bytes: got 'x', want an integer"),
        (
            "files",
            {"train/label.bin": {"crc32": 7}},
            "label.bin.crc32: got 7, want a text of eight",
        ),
        ("files", {"../x": {"bytes": 1}}, "metadata.files: got '../x', want paths of files in the"),
        ("files", {7: {"bytes": 1}}, "metadata.files: got 7, want paths of files in the dataset"),
        ("rows", {"train": "x"}, "metadata.rows.train: got 'x', want an integer that is not neg"),
        (
            "rows",
            {"train": -1},
            "metadata.rows.train: got -1, want an integer that is not negative",
        ),
    ],
)
def test_metadata_of_another_shape_is_refused_with_its_key(dataset, key, value, message):
    spec = yaml.safe_load((dataset / "feature_spec.yaml").read_text())
    spec["metadata"][key] = value
    (dataset / "feature_spec.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(Refused, match=re.escape(message)):
        preproc("mode=verify", f"path={dataset}")


@pytest.mark.parametrize("file_format", ["binary", "parquet"])
def test_a_key_that_stands_for_no_value_is_located(tmp_path, file_format, capsys, monkeypatch):
    keys = np.arange(1, ROWS + 1) * 2**40
    keys[[7, 9]] = -1
    # The writer refuses it.
    monkeypatch.setattr(CategoricalFeature, "has_wrong", lambda *_: False)
    with write_dataset(
        tmp_path / "data",
        categorical=[CategoricalFeature.of_keys("user", 40)],
        numerical=(),
        splits=("train", "test"),
        file_format=file_format,
    ) as writer:
        for split, first in (("train", 0), ("test", 10)):
            of_split = keys[first:]
            writer[split].append(labels=np.arange(len(of_split)) % 2, ids={"user": of_split})
    status, lines = found(tmp_path / "data", capsys)
    assert (status, len(lines)) == (1, 1)
    assert "train" in lines[0]
    assert "2 keys of 'user' that are -1" in lines[0]
