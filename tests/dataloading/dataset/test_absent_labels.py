"""A split may have no labels: its rows are read, converted and verified, and refused where labels are needed."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.kept_columns import KeptColumns, KeptWriter
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.source import BatchTarget
from tests.helpers.preproc_command import preproc

ROWS = 30
LABELS = [RowColumn("click"), RowColumn("price", dtype=np.dtype(np.float32))]
RAGGED = CategoricalFeature.of("tags", 50, hotness=None)


def write(
    root: Path, absent: set[str], file_format: str = "binary", features=(RAGGED,), numerical=("x",)
) -> FeatureSpec:
    """Write a dataset whose one split `test` lacks `absent`."""
    draw = np.random.default_rng(3)
    lengths = draw.integers(1, 4, ROWS)
    labels = np.stack([draw.integers(0, 2, ROWS), draw.normal(size=ROWS)], axis=1)
    with write_dataset(
        root,
        categorical=features,
        numerical=numerical,
        label=LABELS,
        weight="w",
        keep_rate="rate",
        file_format=file_format,
        splits=("test",),
        absent={"test": absent},
    ) as dataset:
        dataset["test"].append(
            numerical=draw.normal(size=(ROWS, 1)) if numerical else None,
            labels=None if absent else labels,
            weights=None if "w" in absent else draw.random(ROWS),
            keep_rates=None if "rate" in absent else draw.random(ROWS) / 2 + 0.5,
            ids={"tags": draw.integers(0, 50, lengths.sum())},
            lengths={"tags": lengths},
        )
    return FeatureSpec.load(root)


@pytest.mark.parametrize("file_format", ["binary", "parquet"])
def test_rows_without_labels_are_read(tmp_path, file_format):
    spec = write(tmp_path / "data", {"click", "price", "w"}, file_format)
    labelled = write(tmp_path / "labelled", set(), file_format)
    # A model depends on the names of the labels, which the spec has all the same.
    assert spec.fingerprint() == labelled.fingerprint()
    assert spec.rows_of("test") == ROWS
    assert spec.splits["test"].absent == {"click", "price", "w"}
    runs = np.array([[4, 9], [20, ROWS]])
    got = open_dataset(spec).read("test", runs, into=BatchTarget(20))
    want = open_dataset(labelled).read("test", runs, into=BatchTarget(20))
    assert not got.labels.any()
    assert (got.weights == np.r_[np.ones(15), np.zeros(5)]).all()
    np.testing.assert_array_equal(got.keep_rates[:15] <= 1, True)
    np.testing.assert_array_equal(got.lengths[0], want.lengths[0])
    labelled.require_labels("test")
    with pytest.raises(ValueError, match=r"rows of split 'test' have no labels \(click, price\)"):
        spec.require_labels("test")


def test_rows_are_counted_by_any_file(tmp_path):
    absent = {"click", "price", "w", "rate"}
    assert write(tmp_path / "numbers", absent).rows_of("test") == ROWS
    spec = write(tmp_path / "ragged", absent, numerical=())
    assert spec.rows_of("test") == ROWS
    (tmp_path / "ragged/test/tags.offsets.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"tags\.offsets\.bin is empty"):
        FeatureSpec.load(tmp_path / "ragged")


def test_a_split_lacks_all_labels_or_none(tmp_path):
    write(tmp_path / "data", {"click", "price", "w", "rate"})
    path = tmp_path / "data/feature_spec.yaml"
    (tmp_path / "data/test/price.bin").write_bytes(bytes(4 * ROWS))
    path.write_text(
        path.read_text().replace(
            "  test:\n",
            "  test:\n  - {type: split_binary, features: [price], files: [test/price.bin]}\n",
        )
    )
    with pytest.raises(
        ValueError, match=r"source_spec\.test: got \['click', 'w', 'rate'\], want a"
    ):
        FeatureSpec.load(tmp_path / "data")


def test_convert_and_verify(tmp_path):
    spec = write(tmp_path / "data", {"click", "price", "w"})
    kept = pa.table({"order": pa.array([f"o{i}" for i in range(ROWS)])})
    with KeptWriter(tmp_path / "data", "test", kept.schema) as writer:
        writer.append(kept)
    for source, name, to in (("data", "parquet", "parquet"), ("parquet", "binary", "binary")):
        preproc(
            "mode=convert", f"path={tmp_path / source}", f"output={tmp_path / name}", f"to={to}"
        )
        converted = FeatureSpec.load(tmp_path / name)
        assert converted.splits["test"].absent == spec.splits["test"].absent
        assert "kept/test.parquet" in converted.metadata["files"]
        assert KeptColumns(tmp_path / name, "test", ROWS).read(0, ROWS, ["order"]).equals(kept)
        preproc("mode=verify", f"path={tmp_path / name}")
    for path in (tmp_path / "data/test").iterdir():
        assert path.read_bytes() == (tmp_path / "binary/test" / path.name).read_bytes()
