"""Datasets with several labels, a weight and a keep rate: their files, both formats, all readers, and refusals."""

import numpy as np
import pytest
import torch

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import SPEC_NAME, CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.loader import Loader, LoaderSettings
from tests.helpers.datasets import plant
from tests.helpers.preproc_command import preproc

ROWS = 100
LABELS = (
    RowColumn("click"),
    RowColumn("rating", dtype=np.dtype(np.float32)),
    RowColumn("seconds", dtype=np.dtype(np.float16)),
)
FEATURES = [CategoricalFeature.of("user", 20), CategoricalFeature.of("tags", 9, hotness=2)]


def drawn(seed=1):
    generator = np.random.default_rng(seed)
    click = generator.integers(0, 2, ROWS)
    rating = generator.normal(size=ROWS).astype(np.float32)
    seconds = generator.uniform(-9, 9, ROWS).astype(np.float16)
    return {
        "labels": np.stack([click, rating, seconds], axis=1),
        "weights": generator.choice([0, 0.5, 1, 3], ROWS),
        "keep_rates": generator.choice([0.1, 1], ROWS),
        "numerical": generator.normal(size=(ROWS, 1)),
        "ids": {
            "user": generator.integers(0, 20, ROWS),
            "tags": generator.integers(0, 9, (ROWS, 2)),
        },
    }


def write(root, rows=None, **options):
    arguments = {"label": LABELS, "weight": "importance", "keep_rate": "kept"} | options
    with write_dataset(
        root, categorical=FEATURES, numerical=("n",), numerical_dtype="float32", **arguments
    ) as dataset:
        for split in ("train", "test"):
            dataset[split].append(**(drawn() if rows is None else rows))
    return root


@pytest.fixture(params=["binary", "parquet"])
def root(request, tmp_path):
    return write(tmp_path / "data", file_format=request.param)


def test_a_column_has_a_file_of_its_name_and_its_dtype(tmp_path):
    root, rows = write(tmp_path / "data"), drawn()
    for index, (name, dtype) in enumerate([("click", "u1"), ("rating", "<f4"), ("seconds", "<f2")]):
        stored = np.fromfile(root / f"train/{name}.bin", dtype)
        assert np.array_equal(stored, rows["labels"][:, index].astype(dtype))
    for name, key in (("importance", "weights"), ("kept", "keep_rates")):
        assert np.array_equal(
            np.fromfile(root / f"train/{name}.bin", "<f4"), rows[key].astype("f4")
        )
    assert not (root / "train/label.bin").exists()


def test_one_binary_label_keeps_its_file_its_spec_and_its_fingerprint(tmp_path):
    root = write(
        tmp_path / "one",
        drawn() | {"labels": drawn()["labels"][:, 0], "weights": None, "keep_rates": None},
        label="click",
        weight=None,
        keep_rate=None,
    )
    assert (root / "train/label.bin").read_bytes() == bytes(drawn()["labels"][:, 0].astype("u1"))
    text = (root / SPEC_NAME).read_text()
    assert "  label:\n  - click\n  numerical:" in text
    assert "weight" not in text
    spec = FeatureSpec.load(root)
    assert spec.labels == (RowColumn("click"),)
    # Of the version before: checkpoints hold it.
    assert spec.fingerprint() == "76386d35bb035e86abfa630548e3330bc983b89f091c6c3ea838cc9f8edfb3dd"


def test_the_spec_of_several_labels_is_read_as_it_was_written(root):
    spec = FeatureSpec.load(root)
    assert spec.labels == LABELS
    assert spec.weight == RowColumn.of("importance", Channel.weight)
    assert spec.keep_rate == RowColumn.of("kept", Channel.keep_rate)
    assert [column.name for column in spec.row_columns] == [
        *("click", "rating", "seconds"),
        *("importance", "kept"),
    ]
    assert spec.rows_of("train") == ROWS


def test_the_loader_pads_labels_and_weights_with_zeros(root):
    loader = Loader(open_dataset(FeatureSpec.load(root)), "train", LoaderSettings(batch_size=64))
    rows = drawn()
    first, last = loader.batch(0), loader.batch(1)
    assert first.labels.shape == (64, 3)
    assert torch.equal(first.labels, torch.tensor(rows["labels"][:64], dtype=torch.float32))
    assert last.num_valid == 36
    for batch, at in ((first, slice(0, 64)), (last, slice(64, 100))):
        valid = slice(0, batch.num_valid)
        for values, key in ((batch.weights, "weights"), (batch.keep_rates, "keep_rates")):
            assert torch.equal(values[valid], torch.tensor(rows[key][at], dtype=torch.float32))
        assert not batch.labels[batch.num_valid :].any()
        assert not batch.weights[batch.num_valid :].any()
        assert (batch.keep_rates[batch.num_valid :] == 1).all()


def test_reader_processes_give_the_same_batches(root):
    loader = Loader(
        open_dataset(FeatureSpec.load(root)),
        "train",
        LoaderSettings(batch_size=32, shuffle_block=4, prefetch=2, workers=2),
        world_size=2,
        rank=1,
    )
    alone = [loader.batch(step) for step in range(6)]
    loader.fork_readers()
    try:
        for batch, wanted in zip(loader.batches(0, 6), alone, strict=True):
            for name in ("numerical", "labels", "weights", "keep_rates"):
                assert torch.equal(getattr(batch, name), getattr(wanted, name))
            assert torch.equal(batch.ids.values(), wanted.ids.values())
    finally:
        loader.close()


def test_a_batch_copies_its_weights(root):
    loader = Loader(open_dataset(FeatureSpec.load(root)), "train", LoaderSettings(batch_size=64))
    batch = loader.batch(0)
    copy = batch.to(torch.device("cpu"))
    assert torch.equal(copy.weights, batch.weights)
    assert torch.equal(copy.keep_rates, batch.keep_rates)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "weights",
            -0.5,
            r"weight 'importance': -0.5 at row 7 of split 'train'; want a finite number that is not negative",
        ),
        (
            "weights",
            np.nan,
            r"weight 'importance': nan at row 7 of split 'train'; want a finite number",
        ),
        (
            "weights",
            np.inf,
            r"weight 'importance': inf at row 7 of split 'train'; want a finite number",
        ),
        (
            "keep_rates",
            0,
            r"keep_rate 'kept': 0.0 at row 7 of split 'train'; want a number above 0 and at most 1",
        ),
        (
            "keep_rates",
            1e-50,  # 0 in float32
            r"keep_rate 'kept': 1e-50 at row 7 of split 'train'; want a number above 0 and at most 1",
        ),
        (
            "keep_rates",
            1.5,
            r"keep_rate 'kept': 1.5 at row 7 of split 'train'; want a number above 0 and at most 1",
        ),
        ("click", 2, r"label 'click': 2.0 at row 7 of split 'train'; want 0 or 1"),
        (
            "rating",
            np.nan,
            r"label 'rating': nan at row 7 of split 'train'; want a finite number of float32",
        ),
        (
            "seconds",
            1e6,
            r"label 'seconds': 1000000.0 at row 7 of split 'train'; want a finite number of float16",
        ),
    ],
)
def test_the_writer_refuses_invalid_numbers(tmp_path, key, value, message):
    rows = drawn()
    names = [label.name for label in LABELS]
    if key in names:
        rows["labels"][7, names.index(key)] = value
    else:
        rows[key][7] = value
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "data", rows)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "value", "dtype", "message"),
    [
        (
            "importance",
            -1,
            "<f4",
            r"weight 'importance' -1.0 at row 7 of .*train/importance.bin; want a finite number that is not negative",
        ),
        (
            "importance",
            np.nan,
            "<f4",
            r"weight 'importance' nan at row 7 of .*train/importance.bin",
        ),
        (
            "kept",
            0,
            "<f4",
            r"keep_rate 'kept' 0.0 at row 7 of .*train/kept.bin; want a number above 0 and at most 1",
        ),
        ("click", 2, "u1", r"label 'click' 2 at row 7 of .*train/click.bin; want 0 or 1"),
        (
            "seconds",
            np.inf,
            "<f2",
            r"label 'seconds' inf at row 7 of .*train/seconds.bin; want a finite number of float16",
        ),
    ],
)
def test_the_reader_names_file_and_row_of_invalid_numbers(tmp_path, name, value, dtype, message):
    root = write(tmp_path / "data")
    plant(root / f"train/{name}.bin", 7, value, dtype)
    source = open_dataset(FeatureSpec.load(root))
    with pytest.raises(ValueError, match=message):
        source.read("train", np.array([[0, ROWS]]))


@pytest.mark.parametrize(("name", "value"), [("importance", -1.0), ("kept", 2.0), ("click", 3.0)])
def test_parquet_names_file_and_row_of_invalid_numbers(tmp_path, name, value):
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = write(tmp_path / "data", file_format="parquet")
    path = root / "train/part_0.parquet"
    table = pq.read_table(path)
    numbers = table.column(name).to_numpy().astype(np.float64)
    numbers[7] = value
    index = table.schema.names.index(name)
    pq.write_table(table.set_column(index, name, pa.array(numbers)), path)
    source = open_dataset(FeatureSpec.load(root))
    with pytest.raises(ValueError, match=rf"'{name}' {value} at row 7 of .*part_0.parquet; want "):
        source.read("train", np.array([[0, ROWS]]))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  rating:\n    dtype: float32",
            "  rating:\n    dtype: int32",
            r"feature_spec.rating.dtype: got 'int32', want bool or float16 or float32",
        ),
        (
            "  importance:\n    dtype: float32",
            "  importance:\n    dtype: bool",
            r"feature_spec.importance.dtype: got 'bool', want float32",
        ),
        (
            "  weight:\n  - importance",
            "  weight:\n  - importance\n  - rating",
            r"channel_spec.weight: got \['importance', 'rating'\], want at most one",
        ),
        (
            "  weight:\n",
            "  weights:\n",
            r"channel_spec: got \['weights'\], want no channels but .*weight, keep_rate",
        ),
        (
            "  - importance\n  keep_rate",
            "  keep_rate",
            r"channel_spec: got \['importance'\], want a channel for every feature",
        ),
    ],
)
def test_a_contradictory_spec_is_refused(tmp_path, old, new, message):
    path = write(tmp_path / "data") / SPEC_NAME
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        FeatureSpec.load(path.parent)


def test_a_truncated_regression_label_is_refused(tmp_path):
    path = write(tmp_path / "data") / "train/rating.bin"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        ValueError, match=r"rating.bin is truncated: got 397 bytes, want 400 = 100 x 4"
    ):
        FeatureSpec.load(path.parents[1])


def test_labels_of_another_shape_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"labels: got shape \(100, 2\), want \[rows, 3\]"):
        write(tmp_path / "a", drawn() | {"labels": drawn()["labels"][:, :2]})
    with pytest.raises(ValueError, match=r"weights: the dataset has no weight column; name one"):
        write(tmp_path / "b", weight=None)


@pytest.mark.parametrize("to", ["binary", "parquet"])
def test_conversion_keeps_labels_weights_and_keep_rates(root, tmp_path, to):
    output = tmp_path / "converted"
    preproc("mode=convert", f"path={root}", f"output={output}", f"to={to}")
    before, after = (open_dataset(FeatureSpec.load(path)) for path in (root, output))
    assert before.spec.row_columns == after.spec.row_columns
    rows = np.array([[0, ROWS]])
    for one, other in zip(
        before.read("test", rows).row_columns(before.spec),
        after.read("test", rows).row_columns(after.spec),
        strict=True,
    ):
        assert np.array_equal(one[1], other[1])


def test_verify_counts_invalid_numbers(root, capsys):
    if not (root / "train/click.bin").exists():
        preproc("mode=verify", f"path={root}")
        out = capsys.readouterr().out
        assert "nothing wrong" in out
        mean = drawn()["labels"][:, 2].mean()
        assert f"seconds - mean {mean:.4g}" in " ".join(out.split())
        return
    for name, value, dtype in (
        *(("importance", -1, "<f4"), ("kept", 0, "<f4")),
        *(("click", 2, "u1"), ("rating", np.nan, "<f4")),
    ):
        plant(root / f"test/{name}.bin", 7, value, dtype)
    with pytest.raises(SystemExit):
        preproc("mode=verify", f"path={root}")
    out = capsys.readouterr().out
    for text in (
        "importance.bin: 1 weights of 'importance' other than a finite number that is not negative",
        "1 keep_rates of 'kept' other than a number above 0",
        "1 labels of 'click' other than 0 and 1, the first 2 at row 7",
        "1 labels of 'rating' other than a finite number of float32, the first nan at row 7",
    ):
        assert text in out
