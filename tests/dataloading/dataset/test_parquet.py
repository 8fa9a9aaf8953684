"""A Parquet dataset directory gives the rows of the split binary, and mistakes in it are named."""

import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dataloading.dataset import parquet_writer
from dataloading.dataset.dataset_directory import verify_checksums, write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.row_groups import SplitGroups
from dataloading.dataset.source import BatchTarget
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.datasets import make_loader

ROWS = {"train": 103, "test": 21}
FEATURES = [
    CategoricalFeature.of("cat_0.bin", 100),  # NVIDIA's names hold a dot
    CategoricalFeature.of("pair", 50_000, hotness=2),
    CategoricalFeature.of("tags", 300, hotness=None),
]


def write(root: Path, file_format: str) -> Path:
    """Write the same rows in either format, in chunks that do not match the row groups."""
    generator = np.random.default_rng(5)
    with write_dataset(
        root, categorical=FEATURES, numerical=("x", "y"), file_format=file_format
    ) as dataset:
        for split, num_rows in ROWS.items():
            for start in range(0, num_rows, 17):
                count = min(17, num_rows - start)
                lengths = generator.integers(0, 4, count)
                dataset[split].append(
                    numerical=generator.normal(size=(count, 2)),
                    labels=generator.integers(0, 2, count),
                    ids={
                        "cat_0.bin": generator.integers(0, 100, count),
                        "pair": generator.integers(0, 50_000, (count, 2)),
                        "tags": generator.integers(0, 300, lengths.sum()),
                    },
                    lengths={"tags": lengths},
                )
    return root


@pytest.fixture(scope="module")
def binary(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("binary") / "data", "binary")


@pytest.fixture(scope="module")
def parquet(tmp_path_factory) -> Path:
    """Write row groups of 8 rows, three per file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_writer, "ROW_GROUP_ROWS", 8)
        patch.setattr(parquet_writer, "PART_ROWS", 24)
        return write(tmp_path_factory.mktemp("parquet") / "data", "parquet")


@pytest.fixture(params=["in memory", "by row groups"])
def kept(request, monkeypatch) -> None:
    """Let a split of this size stay decoded or not."""
    if request.param == "by row groups":
        monkeypatch.setattr("dataloading.dataset.parquet.KEPT_BYTES", 0)


@pytest.fixture
def by_groups(monkeypatch) -> None:
    """Treat every split as too large to stay decoded."""
    monkeypatch.setattr("dataloading.dataset.parquet.KEPT_BYTES", 0)


def same_columns(got, want) -> None:
    for ours, theirs in zip(got.ids, want.ids, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ("numerical", "labels"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    for ours, theirs in zip(got.lengths, want.lengths, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "runs", [[[0, 103]], [[5, 6]], [[40, 90], [0, 8], [100, 103]], [[7, 9], [7, 9]], [[23, 25]]]
)
@pytest.mark.usefixtures("kept")
def test_any_runs_of_rows_are_those_of_the_binary_format(binary, parquet, runs):
    runs = np.array(runs)
    want = open_dataset(FeatureSpec.load(binary)).read("train", runs, BatchTarget(128))
    same_columns(
        open_dataset(FeatureSpec.load(parquet)).read("train", runs, BatchTarget(128)), want
    )


def test_the_spec_differs_in_the_files_only(binary, parquet):
    ours, theirs = FeatureSpec.load(parquet), FeatureSpec.load(binary)
    assert ours.categorical == theirs.categorical
    assert ours.fingerprint() == theirs.fingerprint()
    assert ours.metadata["rows"] == ROWS
    assert [path.name for path in ours.splits["train"].parquet][-1] == "part_4.parquet"


@pytest.mark.usefixtures("by_groups")
def test_a_shuffled_epoch_keeps_complete_row_groups_and_loses_no_row(parquet):
    loader = make_loader(
        open_dataset(FeatureSpec.load(parquet)), "train", batch_size=20, seed=3, shuffle_block=3
    )
    assert loader.shuffle_block == 8
    runs = np.concatenate([loader.rows(step).runs for step in range(loader.steps_per_epoch)])
    assert all(first % 8 == 0 or first in runs[:, 1] for first in runs[:, 0])
    assert sorted(r for run in runs for r in range(*run)) == list(range(103))
    assert sum(batch.num_valid for batch in loader.batches(num_steps=6)) == 103


@pytest.mark.usefixtures("by_groups")
def test_a_row_group_of_two_batches_is_decoded_once(parquet, monkeypatch):
    # All row groups: one of two threads may fall behind by more than the fewest that are cached.
    monkeypatch.setattr("dataloading.dataset.parquet.LEAST_KEPT", 13)
    decoded = []
    decode = SplitGroups.decode

    def counted(self, spec, group):
        decoded.append(group)
        return decode(self, spec, group)

    monkeypatch.setattr(SplitGroups, "decode", counted)
    loader = make_loader(open_dataset(FeatureSpec.load(parquet)), "train", batch_size=5, workers=2)
    assert len(list(loader.batches(num_steps=21))) == 21
    assert sorted(decoded) == list(range(13))  # 103 rows by 8


def test_a_small_split_is_shuffled_by_rows_for_any_row_groups(parquet):
    loader = make_loader(
        open_dataset(FeatureSpec.load(parquet)), "train", batch_size=103, shuffle_block=1
    )
    assert loader.shuffle_block == 1
    assert (np.diff(loader.rows(0).runs[:, 0]) == 1).mean() < 0.2


def test_checksums_are_those_of_the_files(parquet):
    spec = FeatureSpec.load(parquet)
    assert verify_checksums(spec) == 6
    path = spec.splits["test"].parquet[0]
    listed = spec.metadata["files"]["test/part_0.parquet"]
    assert f"{zlib.crc32(path.read_bytes()):08x}" == listed["crc32"]


def test_a_model_trains_on_it(tmp_path):
    root = write(tmp_path / "data", "parquet")
    on_files = [option for option in TINY if not option.startswith("data.")]
    run = tmp_path / "run"
    ended = run_command(
        *on_files,
        f"data.path={root}",
        "train.batch_size=32",
        "eval.batch_size=32",
        f"run_dir={run}",
    )
    assert ended.exit_code == 0, ended.err
    assert json.loads((run / "summary.json").read_text())["steps"] == 4


SPEC = """
channel_spec: {categorical: [user, tags], label: [click], numerical: [price]}
feature_spec:
  user: {cardinality: 10, dtype: int64}
  tags: {cardinality: 5, dtype: int64, hotness: ragged}
  click: {dtype: bool}
  price: {dtype: float32}
source_spec:
  train: [{type: parquet, features: [click, price, user, tags], files: [a.parquet, b.parquet]}]
  test: [{type: parquet, features: [tags, click, price, user], files: [b.parquet]}]
"""


def foreign(root: Path, change=None, **columns: pa.Array) -> Path:
    """Write files as other tools do, with dictionaries, compression and a column that the spec does not name."""
    table = {
        "click": pa.array([0, 1, 1], pa.int32()),
        "text": pa.array(["a", None, "c"]),
        "price": pa.array([0.5, 1.5, 2.5], pa.float64()),
        "user": pa.array([1, 9, 3], pa.int64()),
        "tags": pa.array([[1, 2], [], [4]], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(table), root / "a.parquet", compression="zstd")
    pq.write_table(pa.table(table | columns), root / "b.parquet", row_group_size=2)
    document = yaml.safe_load(SPEC)
    if change:
        change(document)
    (root / "feature_spec.yaml").write_text(yaml.safe_dump(document))
    return root


@pytest.mark.usefixtures("kept")
def test_files_of_other_tools_are_read_where_they_lie(tmp_path):
    source = open_dataset(FeatureSpec.load(foreign(tmp_path)))
    columns = source.read("train", np.array([[1, 6]]), BatchTarget(6))
    assert columns.labels.tolist() == [1, 1, 0, 1, 1, 0]
    assert columns.numerical[:, 0].tolist() == [1.5, 2.5, 0.5, 1.5, 2.5, 0]
    assert columns.ids[0].tolist() == [9, 3, 1, 9, 3]
    assert columns.ids[1].tolist() == [4, 1, 2, 4]
    assert columns.lengths[1].tolist() == [0, 1, 2, 0, 1, 0]


def test_a_mean_that_the_spec_leaves_out_is_measured(tmp_path):
    mean = FeatureSpec.load(foreign(tmp_path)).categorical[1].mean_hotness
    assert mean == pytest.approx(8 / 6)  # an empty list counts as one id


def read_error(root: Path, split: str = "test") -> str:
    source = open_dataset(FeatureSpec.load(root))
    with pytest.raises(ValueError, match=r".") as caught:
        source.read(split, np.array([[0, source.num_rows(split)]]))
    return str(caught.value)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("user", pa.array([1, 2, 10]), "feature 'user': id 10 at row 2 of {b} lies outside"),
        ("user", pa.array([1, 2, -1]), "feature 'user': id -1 at row 2 of {b} lies outside"),
        ("user", pa.array([1, 2, None]), "'user' is missing at row 2 of {b}; want a value"),
        ("click", pa.array([1, 0, 2]), "label 2 at row 2 of {b}; want 0 or 1"),
        ("click", pa.array([1, 0, 0.5]), "label 0.5 at row 2 of {b}; want 0 or 1"),
        ("tags", pa.array([[1], [], [2, 5]]), "feature 'tags': id 5 at row 2 of {b} lies outside"),
        ("tags", pa.array([[1], [], [2, None]]), "'tags' misses an id at row 2 of {b}; want"),
        ("price", pa.array([1.0, 2.0, None]), "'price' is missing at row 2 of {b}; want a value"),
    ],
)
def test_a_wrong_value_is_named_with_row_and_file(tmp_path, column, values, message):
    root = foreign(tmp_path, **{column: values})
    for split in ("test", "train"):  # the file is the first of one and the second of the other
        assert read_error(root, split).startswith(message.format(b=root / "b.parquet"))


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("column", ["user", "tags"])
def test_a_negative_id_of_a_narrow_column_is_no_id_of_a_large_table(tmp_path, column):
    def enlarge(document):
        document["feature_spec"][column]["cardinality"] = 300

    kinds = {"user": pa.array([1, -1, 3], pa.int8())}
    kinds["tags"] = pa.array([[1], [-1], [2]], pa.list_(pa.int8()))
    error = read_error(foreign(tmp_path, enlarge, **{column: kinds[column]}))
    assert error.startswith(f"feature '{column}': id -1 at row 1 of {tmp_path / 'b.parquet'} lies")


def test_a_row_with_another_number_of_ids_is_named(tmp_path):
    def two(document):
        document["feature_spec"]["tags"]["hotness"] = 2

    tags = pa.array([[1, 2], [3, 4], [4]], pa.list_(pa.int64()))
    error = read_error(foreign(tmp_path, two, tags=tags))
    assert error.startswith(f"feature 'tags': 1 ids at row 2 of {tmp_path / 'b.parquet'}, want 2")


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("user", pa.array(["a", "b", "c"]), "column 'user': got 'string', want integers"),
        ("tags", pa.array([1, 2, 3]), "column 'tags': got 'int64', want a list of integers"),
        (
            "price",
            pa.array(["a", "b", "c"]),
            "column 'price': got 'string', want bool, integers or floats",
        ),
    ],
)
def test_a_column_of_another_type_is_named_when_the_dataset_is_opened(
    tmp_path, column, values, message
):
    foreign(tmp_path, **{column: values})
    with pytest.raises(ValueError, match=message):
        FeatureSpec.load(tmp_path)


def spec_error(root: Path, change) -> str:
    foreign(root, change)
    with pytest.raises(ValueError, match=r".") as caught:
        open_dataset(FeatureSpec.load(root))
    return str(caught.value)


def test_a_column_that_is_not_there_is_named(tmp_path):
    def rename(document):
        document["channel_spec"]["categorical"][0] = "who"
        document["feature_spec"]["who"] = document["feature_spec"].pop("user")
        for split in ("train", "test"):
            names = document["source_spec"][split][0]["features"]
            names[names.index("user")] = "who"

    assert "no column who" in spec_error(tmp_path, rename)


def test_a_chunk_names_every_feature(tmp_path):
    def drop(document):
        document["source_spec"]["test"][0]["features"].remove("user")

    assert "want every feature of the spec, once" in spec_error(tmp_path, drop)


def test_a_file_is_named_once(tmp_path):
    def twice(document):
        document["source_spec"]["test"][0]["files"] = ["b.parquet", "b.parquet"]

    assert "got ['b.parquet'], want every file once" in spec_error(tmp_path, twice)


def test_a_file_outside_is_refused(tmp_path):
    def outside(document):
        document["source_spec"]["test"][0]["files"] = ["../b.parquet"]

    assert "lies outside the dataset directory" in spec_error(tmp_path, outside)


def test_formats_are_not_mixed(tmp_path):
    root = foreign(tmp_path)
    document = yaml.safe_load((root / "feature_spec.yaml").read_text())
    for name in ("click", "price", "user", "tags", "tags.offsets"):
        size = {"click": 2, "price": 8, "user": 16, "tags": 8, "tags.offsets": 24}[name]
        (root / f"{name}.bin").write_bytes(bytes(size))
    (root / "tags.offsets.bin").write_bytes(np.array([0, 0, 1], "<i8").tobytes())
    document["source_spec"]["test"] = [
        {"type": "split_binary", "features": [name], "files": [f"{name}.bin"]}
        for name in ("click", "price", "user")
    ] + [{"type": "split_binary", "features": ["tags"], "files": ["tags.bin", "tags.offsets.bin"]}]
    (root / "feature_spec.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match="train in Parquet and the other splits in split_binary"):
        open_dataset(FeatureSpec.load(root))


def test_a_truncated_file_is_named(tmp_path):
    path = foreign(tmp_path) / "b.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b\.parquet: not a complete Parquet file"):
        FeatureSpec.load(tmp_path)


def test_columns_of_different_lengths_are_refused(tmp_path):
    with (  # noqa: PT012
        pytest.raises(ValueError, match="append the same rows to every column"),
        write_dataset(
            tmp_path / "d", categorical=[CategoricalFeature.of("a", 9)], file_format="parquet"
        ) as dataset,
    ):
        for split in ("train", "test"):
            dataset[split].append(labels=[1, 0], ids={"a": np.array([1])})
    assert not (tmp_path / "d").exists()


def test_another_format_is_refused(tmp_path):
    with (
        pytest.raises(ValueError, match="got 'csv', want binary or parquet"),
        write_dataset(tmp_path / "d", categorical=FEATURES, file_format="csv"),
    ):
        pass


def test_a_damaged_page_is_named_with_its_file(tmp_path):
    root = foreign(tmp_path)
    path = root / "b.parquet"
    content = bytearray(path.read_bytes())
    content[4:24] = b"\xff" * 20
    path.write_bytes(content)
    source = open_dataset(FeatureSpec.load(root))
    with pytest.raises(
        ValueError, match=r"b\.parquet: row group 0 cannot be read \(.*\); copy or write"
    ):
        source.read("train", np.array([[0, 6]]))
