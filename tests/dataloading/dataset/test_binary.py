"""Split binary: NVIDIA's bytes are written and read, and a wrong value is named with its row and file.

pytest tests/dataloading/dataset/test_binary.py
"""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import yaml

from dataloading.dataset.binary import BinarySource
from dataloading.dataset.dataset_directory import check_output, verify_checksums, write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.source import BatchTarget, read_with_keys
from dataloading.dataset.split_files import Lengths
from tests.helpers.handwritten import ROWS, SPEC, ids, label, numericals, write_handwritten

RUNS = {
    "one run": [[0, 50]],
    "two runs": [[40, 50], [3, 7]],
    "blocks": [[start, start + 5] for start in (35, 0, 20, 10, 45)],
    "uneven runs": [[41, 48], [0, 3], [3, 4], [20, 33], [7, 9]],
    "single rows": [[row, row + 1] for row in (13, 49, 0, 7, 7, 21)],
    "no run": [],
}


def runs_of(pairs: list[list[int]]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


def mixed_columns(num_rows: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    lengths = generator.integers(0, 4, num_rows)
    return {
        "numerical": generator.standard_normal((num_rows, 3)).astype(np.float32),
        "labels": generator.integers(0, 2, num_rows),
        "one": generator.integers(0, 300, num_rows),
        "three": generator.integers(0, 2**31 + 5, (num_rows, 3)),
        "lengths": lengths,
        "tags": generator.integers(0, 19, lengths.sum()),
    }


MIXED = [
    CategoricalFeature.of("one", 300),
    CategoricalFeature.of("three", 2**31 + 5, 3),
    CategoricalFeature.of("tags", 19, None),
]
NUMERICAL = ("a", "b", "c")


def write_mixed(root: Path, num_rows: int = 50) -> dict[str, np.ndarray]:
    """Write one-hot, three-hot and ragged ids in two chunks per split; return the columns."""
    columns = mixed_columns(num_rows)
    half, split_at = num_rows // 2, columns["lengths"][: num_rows // 2].sum()
    with write_dataset(
        root, categorical=MIXED, numerical=NUMERICAL, numerical_dtype="float32"
    ) as dataset:
        for split in ("train", "test"):
            for rows, flat in (
                (slice(half), slice(split_at)),
                (slice(half, None), slice(split_at, None)),
            ):
                dataset[split].append(
                    numerical=columns["numerical"][rows],
                    labels=columns["labels"][rows],
                    ids={
                        "one": columns["one"][rows],
                        "three": columns["three"][rows],
                        "tags": columns["tags"][flat],
                    },
                    lengths={"tags": columns["lengths"][rows]},
                )
    return columns


def write_small(root: Path, **columns: object) -> None:
    """Write two rows of one numerical and one feature of ten rows, with `columns` replaced."""
    arguments_of_writer = {
        "numerical": [[0.5], [1.0]],
        "labels": [0, 1],
        "ids": {"x": np.array([0, 9])},
    } | columns
    with write_dataset(
        root, categorical=[CategoricalFeature.of("x", 10)], numerical=["n"]
    ) as dataset:
        for split in ("train", "test"):
            dataset[split].append(**arguments_of_writer)


def test_a_dataset_by_nvidias_description_is_read(tmp_path):
    source = BinarySource(FeatureSpec.load(write_handwritten(tmp_path / "d")))
    for split, num_rows in ROWS.items():
        columns = source.read(split, runs_of([[0, num_rows]]))
        assert columns.numerical.tolist() == [list(numericals(row)) for row in range(num_rows)]
        assert columns.labels.tolist() == [label(row) for row in range(num_rows)]
        assert [column.tolist() for column in columns.ids] == [
            [ids(row)[f] for row in range(num_rows)] for f in (0, 1)
        ]
        assert columns.numerical.dtype == columns.labels.dtype == np.float32
        assert {c.dtype for c in columns.ids} == {np.dtype(np.int32)}


def test_wider_dtypes_are_read(tmp_path):
    root = write_handwritten(
        tmp_path / "d",
        SPEC.replace("int8", "int64").replace("40000, dtype: int32", "40000, dtype: int64"),
    )
    for split, num_rows in ROWS.items():
        for f in (0, 1):
            packed = b"".join(struct.pack("<q", ids(row)[f]) for row in range(num_rows))
            (root / split / f"cat_{f}.bin").write_bytes(packed)
    columns = BinarySource(FeatureSpec.load(root)).read("train", runs_of([[2, 5]]))
    assert [column.tolist() for column in columns.ids] == [
        [ids(row)[f] for row in (2, 3, 4)] for f in (0, 1)
    ]


def test_the_written_bytes_are_nvidias(tmp_path):
    by_hand, ours = write_handwritten(tmp_path / "by_hand"), tmp_path / "ours"
    features = [CategoricalFeature.of("cat_0.bin", 10), CategoricalFeature.of("cat_1.bin", 40000)]
    with write_dataset(ours, categorical=features, numerical=("num_0", "num_1")) as dataset:
        for split, num_rows in ROWS.items():
            rows = range(num_rows)
            dataset[split].append(
                numerical=np.array([numericals(row) for row in rows]),
                labels=np.array([label(row) for row in rows]),
                ids={f"cat_{f}.bin": np.array([ids(row)[f] for row in rows]) for f in (0, 1)},
            )
    files = sorted(path.relative_to(by_hand) for path in by_hand.rglob("*.bin"))
    assert sorted(path.relative_to(ours) for path in ours.rglob("*.bin")) == files
    assert all((ours / file).read_bytes() == (by_hand / file).read_bytes() for file in files)
    written, wanted = yaml.safe_load((ours / "feature_spec.yaml").read_text()), yaml.safe_load(SPEC)
    assert written["feature_spec"] == wanted["feature_spec"]
    assert written["channel_spec"] == wanted["channel_spec"]
    assert written["source_spec"] == wanted["source_spec"]


@pytest.mark.parametrize("pairs", RUNS.values(), ids=RUNS)
def test_rows_come_back_in_the_order_of_the_runs(tmp_path, pairs):
    wrote = write_mixed(tmp_path / "d")
    source = BinarySource(FeatureSpec.load(tmp_path / "d"))
    rows = np.concatenate([np.arange(*pair) for pair in pairs] or [np.arange(0)])
    columns = source.read("train", runs_of(pairs), into=BatchTarget(len(rows) + 2))
    ends = np.cumsum(wrote["lengths"])
    tags = [
        wrote["tags"][end - count : end] for end, count in zip(ends, wrote["lengths"], strict=True)
    ]
    assert columns.numerical[: len(rows)].tolist() == wrote["numerical"][rows].tolist()
    assert columns.labels[: len(rows)].tolist() == wrote["labels"][rows].tolist()
    assert columns.ids[0].tolist() == wrote["one"][rows].tolist()
    assert columns.ids[1].tolist() == wrote["three"][rows].reshape(-1).tolist()
    assert columns.ids[2].tolist() == [tag for row in rows for tag in tags[row]]
    assert columns.lengths[2].tolist() == [*wrote["lengths"][rows], 0, 0]
    assert columns.lengths[:2] == [None, None]
    assert columns.ids[0].dtype == np.int64  # one table has more than 2**31 rows
    assert not columns.numerical[len(rows) :].any()
    assert not columns.labels[len(rows) :].any()


def test_a_ragged_mean_is_measured_and_hotness_written(tmp_path):
    wrote = write_mixed(tmp_path / "d")
    features = {f.name: f for f in FeatureSpec.load(tmp_path / "d").categorical}
    assert features["tags"].hotness is None
    assert features["tags"].mean_hotness == pytest.approx(wrote["lengths"].mean())
    assert features["three"].hotness == features["three"].mean_hotness == 3
    path = tmp_path / "d/feature_spec.yaml"
    path.write_text("".join(line for line in path.open() if "mean_hotness" not in line))
    assert FeatureSpec.load(tmp_path / "d").categorical[2] == features["tags"]


def test_one_long_row_does_not_set_the_mean():
    lengths = np.arange(3000) % 3
    usual, one, few = Lengths(), Lengths(), Lengths()
    usual.add(lengths)
    one.add(lengths[:1000])
    one.add(np.append(lengths[1000:], 60_000))
    few.add(np.array([0, 1, 900]))
    assert usual.mean == pytest.approx(1)
    assert one.mean == pytest.approx(1, abs=0.001)
    # A few rows are no base for what is usual; and a feature that few rows have is not nothing.
    assert few.mean == pytest.approx(901 / 3)
    rare = Lengths()
    rare.add(np.append(np.zeros(9999, int), 7))
    assert rare.mean == pytest.approx(1 / 10_000)


def test_ragged_offsets_are_as_described(tmp_path):
    wrote = write_mixed(tmp_path / "d")
    offsets = (tmp_path / "d/train/tags.offsets.bin").read_bytes()
    assert struct.unpack("<51q", offsets) == (0, *np.cumsum(wrote["lengths"]))


def test_a_ragged_feature_may_have_no_ids_at_all(tmp_path):
    with write_dataset(
        tmp_path / "d", categorical=[CategoricalFeature.of("g", 5, None)]
    ) as dataset:
        for split in ("train", "test"):
            dataset[split].append(labels=[0, 1], ids={"g": np.zeros(0, int)}, lengths={"g": [0, 0]})
    source = BinarySource(FeatureSpec.load(tmp_path / "d"))
    columns = source.read("train", runs_of([[0, 2]]))
    assert columns.numerical.shape == (2, 0)
    assert columns.lengths[0].tolist() == [0, 0]
    assert not (tmp_path / "d/train/numerical.bin").exists()


def test_columns_may_be_appended_one_after_another(tmp_path):
    with write_dataset(
        tmp_path / "d", categorical=[CategoricalFeature.of("x", 10)], numerical=["n"]
    ) as dataset:
        for split in ("train", "test"):
            dataset[split].append(labels=[0, 1, 1])
            dataset[split].append(ids={"x": np.array([3])})
            dataset[split].append(ids={"x": np.array([4, 5])})
            dataset[split].append(numerical=[[0.0], [1.0], [2.0]])
    columns = BinarySource(FeatureSpec.load(tmp_path / "d")).read("test", runs_of([[0, 3]]))
    assert columns.ids[0].tolist() == [3, 4, 5]


@pytest.mark.parametrize("value", [10, -1, -128])
@pytest.mark.parametrize("pairs", [[[0, 7]], [[2, 4], [6, 7], [4, 5], [5, 6]]])
def test_an_id_outside_its_table_is_named(tmp_path, value, pairs):
    root = write_handwritten(tmp_path / "d")
    data = bytearray((root / "train/cat_0.bin").read_bytes())
    data[5:6] = struct.pack("<b", value)
    (root / "train/cat_0.bin").write_bytes(data)
    source = BinarySource(FeatureSpec.load(root))
    with pytest.raises(ValueError, match="lies outside its table") as caught:
        source.read("train", runs_of(pairs))
    assert str(caught.value) == (
        f"feature 'cat_0.bin': id {value} at row 5 of {root}/train/cat_0.bin lies outside its table of 10 rows; "
        "correct it, or the cardinality in feature_spec.yaml"
    )
    source.read("train", runs_of([[0, 5], [6, 7]]))


@pytest.mark.parametrize("hotness", [1, 2, None])
def test_the_key_that_stands_for_no_value_is_refused_by_writer_and_reader(tmp_path, hotness):
    keys = np.array([[5, -2], [2**62, 0], [-(2**63), 2**63 - 1]])
    keys = keys[:, 0] if hotness == 1 else keys.ravel() if hotness is None else keys
    lengths = {"k": [2, 2, 2]} if hotness is None else None

    def write(root, ids) -> None:
        with write_dataset(
            root, categorical=[CategoricalFeature.of_keys("k", 9, hotness)], splits=["train"]
        ) as dataset:
            dataset["train"].append(labels=[0, 1, 1], ids={"k": ids}, lengths=lengths)

    wrong, at = keys.copy(), (1,) if hotness == 1 else (2,) if hotness is None else (1, 0)
    wrong[at] = -1
    message = r"^feature 'k': key -1 at row 1 of {} stands for no value; write 0 for a missing one"
    with pytest.raises(ValueError, match=message.format("split 'train'")):
        write(tmp_path / "d", wrong)
    write(tmp_path / "d", keys)
    source = BinarySource(FeatureSpec.load(tmp_path / "d"))
    assert (
        read_with_keys(source, "train", runs_of([[0, 3]])).ids[0].tolist() == keys.ravel().tolist()
    )
    path = tmp_path / "d/train/k.bin"
    path.write_bytes(wrong.astype("<i8").tobytes())
    source = BinarySource(FeatureSpec.load(tmp_path / "d"))
    with pytest.raises(ValueError, match=message.format(path)):
        source.read("train", runs_of([[0, 3]]))
    source.read("train", runs_of([[0, 1], [2, 3]]))


def test_an_id_too_wide_for_memory_is_caught_before_it_wraps(tmp_path):
    root = write_handwritten(
        tmp_path / "d", SPEC.replace("40000, dtype: int32", "40000, dtype: int64")
    )
    for split, num_rows in ROWS.items():
        (root / split / "cat_1.bin").write_bytes(
            struct.pack(f"<{num_rows}q", *[2**32 + 1] * num_rows)
        )
    with pytest.raises(ValueError, match="id 4294967297 at row 0 of"):
        BinarySource(FeatureSpec.load(root)).read("train", runs_of([[0, 7]]))


def test_the_row_of_a_wrong_id_is_right_for_bags(tmp_path):
    write_mixed(tmp_path / "d")
    path = tmp_path / "d/train/three.bin"
    data = np.fromfile(path, np.int64)
    data[3 * 30 + 2] = -1
    data.tofile(path)
    source = BinarySource(FeatureSpec.load(tmp_path / "d"))
    for pairs in ([[0, 50]], [[25, 50], [1, 20]]):
        with pytest.raises(ValueError, match=f"feature 'three': id -1 at row 30 of {path} lies"):
            source.read("train", runs_of(pairs))


def test_the_row_of_a_wrong_id_is_right_for_ragged_rows(tmp_path):
    lengths = write_mixed(tmp_path / "d")["lengths"]
    path = tmp_path / "d/train/tags.bin"
    data = path.read_bytes()
    row = int(np.flatnonzero((lengths[1:] > 1) & (lengths[:-1] == 0))[0]) + 1
    for nth in (0, 1):
        at_byte = lengths[:row].sum() + nth
        path.write_bytes(data[:at_byte] + bytes([19]) + data[at_byte + 1 :])
        source = BinarySource(FeatureSpec.load(tmp_path / "d"))
        for pairs in ([[0, 50]], [[1, 50], [0, 1]]):
            with pytest.raises(
                ValueError, match=f"feature 'tags': id 19 at row {row} of {path} lies"
            ):
                source.read("train", runs_of(pairs))


def test_a_label_that_is_neither_0_nor_1_is_named(tmp_path):
    root = write_handwritten(tmp_path / "d")
    (root / "train/label.bin").write_bytes(bytes([0, 1, 0, 2, 0, 1, 0]))
    with pytest.raises(ValueError, match=r"label 2 at row 3 of .*/train/label\.bin; want 0 or 1"):
        BinarySource(FeatureSpec.load(root)).read("train", runs_of([[1, 7]]))


def change_offset(root: Path, entry: int, value: int) -> None:
    path = root / "train/tags.offsets.bin"
    offsets = np.fromfile(path, np.int64)
    offsets[entry] = value
    offsets.tofile(path)


@pytest.mark.parametrize("value", [-1, 10_000])
@pytest.mark.parametrize("row", [19, 20])
def test_offsets_that_decrease_or_leave_the_file_are_named(tmp_path, value, row):
    write_mixed(tmp_path / "d")
    change_offset(tmp_path / "d", 20, value)
    source = BinarySource(FeatureSpec.load(tmp_path / "d"))
    message = (
        rf"feature 'tags': row {row} runs from .* want offsets that do not decrease, up to \d+"
    )
    with pytest.raises(ValueError, match=message):
        source.read("train", runs_of([[row, row + 1]]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pairs", [[[0, 7]], [[2, 4], [6, 7], [4, 5], [5, 6]]])
def test_a_numerical_value_that_is_not_finite_is_named(tmp_path, value, pairs):
    root = tmp_path / "d"
    with write_dataset(
        root, categorical=[CategoricalFeature.of("x", 10)], numerical=["n", "m"]
    ) as dataset:
        for split in ("train", "test"):
            numbers, ids = np.zeros((8, 2)), {"x": np.zeros(8, int)}
            dataset[split].append(labels=[0] * 8, ids=ids, numerical=numbers)
    path = root / "train/numerical.bin"
    source = BinarySource(FeatureSpec.load(root))
    dtype = source.spec.numerical_dtype
    values = np.fromfile(path, dtype)
    values[2 * 5 + 1] = value
    values.tofile(path)
    with pytest.raises(ValueError, match="is not finite") as caught:
        source.read("train", runs_of(pairs))
    assert str(caught.value) == (
        f"numerical feature 'm': {value} at row 5 of {path} is not finite; correct the file, or fill missing values when "
        "preprocessing"
    )
    source.read("train", runs_of([[0, 5], [6, 8]]), into=BatchTarget(9))


@pytest.mark.parametrize(("entry", "value"), [(0, 1), (-1, 10_000)])
def test_offsets_that_do_not_span_the_ids_are_named_at_open(tmp_path, entry, value):
    write_mixed(tmp_path / "d")
    change_offset(tmp_path / "d", entry, value)
    with pytest.raises(
        ValueError, match=r"tags\.offsets\.bin runs from .* want 0 to the \d+ ids of .*tags\.bin"
    ):
        FeatureSpec.load(tmp_path / "d")


def test_offsets_of_the_wrong_length_are_named_at_open(tmp_path):
    write_mixed(tmp_path / "d")
    path = tmp_path / "d/train/tags.offsets.bin"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(
        ValueError, match=r"tags\.offsets\.bin is truncated: got 400 bytes, want 408 = 51 x 8 bytes"
    ):
        FeatureSpec.load(tmp_path / "d")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"ids": {"x": np.array([0, 10])}}, "feature 'x': id 10 at row 1 of split 'train' lies outside its table of 10"),
        ({"ids": {"x": np.array([-1, 0])}}, "feature 'x': id -1 at row 0 of split 'train' lies outside its table"),
        ({"ids": {"x": np.array([0.0, 1.0])}}, "feature 'x': got ids of dtype float64, want integers"),
        ({"ids": {"x": np.zeros((2, 2), int)}}, r"feature 'x': got ids of shape \(2, 2\), want \[rows, 1\]"),
        ({"ids": {"y": np.array([0, 1])}}, "no categorical feature 'y', only x"),
        ({"ids": {"x": np.array([0])}}, r"split 'train': x\.bin holds 1 rows and label\.bin 2; append the same rows"),
        ({"labels": [0, 2]}, "label: 2 at row 1 of split 'train'; want 0 or 1"),
        ({"labels": [0.5, 0]}, "label: 0.5 at row 0 of split 'train'; want 0 or 1"),
        ({"labels": [[0, 1]]}, r"labels: got shape \(1, 2\), want \[rows\]"),
        ({"numerical": [[0.0], [np.nan]]}, "numerical feature 'n': nan at row 1 of split 'train' is not finite as float16"),
        ({"numerical": [[1e6], [0]]}, "1000000.0 at row 0 of split 'train' is not finite as float16; fill or scale it"),
        ({"numerical": [0.0, 1.0]}, r"numerical: got shape \(2,\), want \[rows, 1\]"),
        ({"numerical": [[1j], [0]]}, "numerical: got dtype complex128, want numbers"),
        ({"numerical": [["1"], ["0"]]}, "numerical: got dtype <U1, want numbers"),
        ({"numerical": np.ma.array([[1.0], [2.0]], mask=[[0], [1]])}, "numerical: some are masked; fill them"),
        ({"ids": {"x": np.ma.array([0, 1], mask=[0, 1])}}, "feature 'x': some are masked; fill them"),
        ({"ids": {"x": np.array([0, 1])}, "lengths": {"x": [1, 1]}}, "'x' has 1 ids in every row; leave its lengths out"),
        ({"labels": [], "numerical": np.zeros((0, 1)), "ids": {"x": np.zeros(0, int)}}, "split 'train' has no rows"),
    ],
)  # fmt: skip
def test_a_value_that_a_file_cannot_hold_is_refused_and_no_file_is_left(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        write_small(tmp_path / "d", **columns)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([0, 1], None, "feature 'g' is ragged: want lengths beside its ids"),
        (
            [0, 1],
            [1, 2],
            r"ids of shape \(2,\) for 2 lengths that sum to 3; want flat ids and one length per row",
        ),
        ([0, 1], [3, -1], "want flat ids and one length per row that add up to them"),
        ([0, 1], [2**63 - 1, 2**63 - 1, 4], "lengths that sum to 2; want flat ids and one length"),
        (
            [0, 1],
            np.array([2**64 - 1, 3], np.uint64),
            "lengths of 'g': got 18446744073709551615, which int64 does not hold",
        ),
        ([0, 1], [1.0, 1.0], "lengths of 'g': got dtype float64, want integers"),
        (
            [0, 4],
            [0, 2],
            "feature 'g': id 4 at row 1 of split 'train' lies outside its table of 4 rows",
        ),
    ],
)
def test_ragged_ids_must_fit_their_lengths(tmp_path, ids, lengths, message):
    with (
        pytest.raises(ValueError, match=message),
        write_dataset(tmp_path / "d", categorical=[CategoricalFeature.of("g", 4, None)]) as dataset,
    ):
        dataset["train"].append(
            ids={"g": np.array(ids)}, lengths=None if lengths is None else {"g": np.array(lengths)}
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"categorical": [CategoricalFeature.of("a", 2), CategoricalFeature.of("a.bin", 2)]},
            r"share the file a\.bin",
        ),
        (
            {"categorical": [CategoricalFeature.of("a/b", 2)]},
            "feature name 'a/b' cannot name a file: no slash",
        ),
        ({"numerical": ["a"]}, "feature 'a' is named twice; names are unique over all channels"),
        ({"splits": ["learn"]}, r"splits: got \['learn'\], want at least one of train, test"),
        ({"splits": ["train", "test", "../x"]}, "'../x' cannot name a file"),
        (
            {"numerical_dtype": "float64"},
            "numerical_dtype: got 'float64', want one of float16, float32",
        ),
        (
            {"metadata": {"rows": 1}},
            r"metadata: got the keys \['rows'\], which the writer fills in",
        ),
        ({"metadata": {"x": np.int64(1)}}, "metadata: want plain yaml values"),
    ],
)
def test_a_dataset_that_cannot_be_written_is_refused_at_the_start(tmp_path, arguments, message):
    arguments_of_writer = {"categorical": [CategoricalFeature.of("a", 2)]} | arguments
    with (
        pytest.raises(ValueError, match=message),
        write_dataset(tmp_path / "d", **arguments_of_writer),
    ):
        pytest.fail("the block was entered")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [">i8", object])
def test_numbers_in_another_order_of_bytes_and_those_of_pandas_are_written(tmp_path, dtype):
    write_small(tmp_path / "d", ids={"x": np.array([3, 9]).astype(dtype)})
    assert np.fromfile(tmp_path / "d/train/x.bin", "i1").tolist() == [3, 9]


@pytest.mark.parametrize("cardinality", [1.5, "3", None])
def test_a_cardinality_that_is_no_integer_is_refused(cardinality):
    with pytest.raises(ValueError, match=r"x\.cardinality: got .*, want an integer of at least 1"):
        CategoricalFeature.of("x", cardinality)


def interrupt_a_write(root: Path) -> None:
    with write_dataset(root, categorical=[CategoricalFeature.of("x", 10)]) as dataset:
        dataset["train"].append(labels=[0])
        assert not root.exists()
        raise KeyboardInterrupt


def test_an_interrupted_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupt_a_write(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_the_spec_is_written_after_all_data(tmp_path, monkeypatch):
    def die(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("dataloading.dataset.dataset_directory.write_spec", die)
    with pytest.raises(OSError, match="disk full"):
        write_small(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_files_put_beside_the_data_become_part_of_the_dataset(tmp_path):
    with write_dataset(
        tmp_path / "deep/d", categorical=[CategoricalFeature.of("x", 10)], metadata={"a": 1}
    ) as dataset:
        (dataset.directory / "vocabulary.txt").write_text("x")
        for split in ("train", "test"):
            dataset[split].append(labels=[0], ids={"x": np.array([1])})
    assert (tmp_path / "deep/d/vocabulary.txt").read_text() == "x"
    assert FeatureSpec.load(tmp_path / "deep/d").metadata["a"] == 1


def test_a_complete_dataset_is_replaced_only_on_demand(tmp_path):
    write_small(tmp_path / "d")
    with pytest.raises(
        ValueError, match="holds a complete dataset; name another directory, or ask to overwrite it"
    ):
        write_small(tmp_path / "d")
    features = [CategoricalFeature.of("y", 10)]
    with (
        pytest.raises(ZeroDivisionError),
        write_dataset(tmp_path / "d", categorical=features, overwrite=True),
    ):
        raise ZeroDivisionError
    assert FeatureSpec.load(tmp_path / "d").categorical[0].name == "x"
    with write_dataset(tmp_path / "d", categorical=features, overwrite=True) as dataset:
        for split in ("train", "test"):
            dataset[split].append(labels=[0], ids={"y": np.array([1])})
    assert FeatureSpec.load(tmp_path / "d").categorical[0].name == "y"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_only_an_empty_directory_is_accepted(tmp_path):
    (tmp_path / "d").mkdir()
    write_small(tmp_path / "d")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"home is not empty and holds no feature_spec\.yaml"):
        check_output(tmp_path / "home", overwrite=True)
    with pytest.raises(
        ValueError, match=r"thesis\.tex is a file; name a directory that is new or empty"
    ):
        check_output(tmp_path / "home/thesis.tex")
    with pytest.raises(ValueError, match="is a mount point"):
        check_output("/", overwrite=True)


def test_checksums_find_a_changed_byte(tmp_path):
    write_small(tmp_path / "d")
    spec = FeatureSpec.load(tmp_path / "d")
    assert verify_checksums(spec) == 6
    (tmp_path / "d/train/x.bin").write_bytes(bytes([0, 8]))
    with pytest.raises(
        ValueError,
        match=r"train/x\.bin has changed since it was written: got .* want .*; copy it again",
    ):
        verify_checksums(spec)


def test_checksums_need_a_spec_that_has_them(tmp_path):
    spec = FeatureSpec.load(write_handwritten(tmp_path / "d"))
    with pytest.raises(
        ValueError, match=r"lists no checksums \(metadata.files\); nothing to compare with"
    ):
        verify_checksums(spec)


def test_the_documented_example_writes_a_dataset(tmp_path, monkeypatch):
    text = (Path(__file__).parents[3] / "docs/data_format.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(text.split("```python\n")[1].split("```")[0], {})
    spec = FeatureSpec.load(tmp_path / "data" / "mine")
    columns = BinarySource(spec).read("test", runs_of([[998, 1000]]))
    assert columns.ids[0].tolist() == [998, 999]
    assert columns.ids[1].tolist() == [48, 48, 49, 49]


def test_the_documented_row_has_the_documented_bytes():
    text = (Path(__file__).parents[3] / "docs/data_format.md").read_text()
    assert "numericals (0.5, -0.25) and ids 7 and 39,999" in text
    for number, dtype in ((0.5, "<f2"), (-0.25, "<f2"), (7, "i1"), (39_999, "<i4")):
        assert np.array(number, dtype).tobytes().hex(" ") in text


def test_the_documented_spec_is_read(tmp_path):
    text = (Path(__file__).parents[3] / "docs/data_format.md").read_text()
    spec = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    spec["source_spec"]["test"] = [
        chunk | {"files": [name.replace("train", "test") for name in chunk["files"]]}
        for chunk in spec["source_spec"]["train"]
    ]
    for split, num_rows in (("train", 1000), ("test", 100)):
        (tmp_path / split).mkdir()
        sizes = {
            "numerical": 4,
            "label": 1,
            "cat_0": 1,
            "cat_1": 12,
            "genres": 1,
            "genres.offsets": 8,
        }
        for name, row_bytes in sizes.items():
            (tmp_path / split / f"{name}.bin").write_bytes(bytes(num_rows * row_bytes))
        np.arange(num_rows + 1).tofile(tmp_path / split / "genres.offsets.bin")
    (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(spec))
    loaded = FeatureSpec.load(tmp_path)
    assert [feature.hotness for feature in loaded.categorical] == [1, 3, None]
    assert BinarySource(loaded).read("train", runs_of([[0, 5]])).ids[2].tolist() == [0] * 5


def test_leftovers_of_a_killed_writer_are_cleared_and_files_of_a_running_one_are_not(tmp_path):
    leftover = tmp_path / ".data.partial-0"
    leftover.mkdir()
    (leftover / "label.bin").write_bytes(b"1")
    features = [CategoricalFeature.of("user", 2)]

    def write(name: str) -> None:
        with write_dataset(tmp_path / name, categorical=features) as dataset:
            for split in ("train", "test"):
                dataset[split].append(labels=[1], ids={"user": [0]})

    with write_dataset(tmp_path / "data", categorical=features) as first:
        assert not leftover.exists()
        with pytest.raises(ValueError, match=r"process \d+ on \S+ is writing .*data; wait for it"):
            write("data")
        assert first.directory.exists()
        for split in ("train", "test"):
            first[split].append(labels=[1], ids={"user": [1]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_dataset_stays_when_its_successor_cannot_take_its_place(tmp_path, monkeypatch):
    features = [CategoricalFeature.of("user", 2)]

    def write(user: int, overwrite: bool) -> None:
        with write_dataset(tmp_path / "data", categorical=features, overwrite=overwrite) as dataset:
            for split in ("train", "test"):
                dataset[split].append(labels=[1], ids={"user": [user]})

    write(0, overwrite=False)
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if ".partial-" in source.name:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        write(1, overwrite=True)
    assert (tmp_path / "data" / "train" / "user.bin").read_bytes() == b"\0"
