"""`python -m preproc dataset=synthetic` writes the rows that training makes in memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from dataloading.dataset.binary import BinarySource
from dataloading.dataset.feature_spec import FeatureSpec
from preproc.convert import rows as rows_module
from tests.helpers.datasets import synthetic_source
from tests.helpers.preproc_command import data_files, preproc

STREAM = [
    "dataset=synthetic",
    "data.synthetic.train_rows=1000",
    "data.synthetic.test_rows=90",
    "data.synthetic.num_numerical=3",
    "data.synthetic.cardinalities=[5,40000,300]",
    "data.synthetic.hotness=[1,1,4]",
    "seed=7",
]


def test_the_dataset_holds_the_rows_of_the_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "CHUNK_ROWS", 64)
    preproc(*STREAM, f"output={tmp_path / 'out'}", "numerical_dtype=float32", "threads=3")
    stream = synthetic_source(
        train_rows=1000,
        test_rows=90,
        num_numerical=3,
        cardinalities=[5, 40000, 300],
        hotness=[1, 1, 4],
        seed=7,
    )
    written = BinarySource(FeatureSpec.load(tmp_path / "out"))
    for split, num_rows in (("train", 1000), ("test", 90)):
        rows = np.array([[0, num_rows]])
        want, got = stream.read(split, rows), written.read(split, rows)
        assert written.num_rows(split) == num_rows
        assert np.array_equal(got.labels, want.labels)
        assert np.array_equal(got.numerical, want.numerical)
        assert all(np.array_equal(*ids) for ids in zip(got.ids, want.ids, strict=True))


def test_the_number_of_threads_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "CHUNK_ROWS", 64)
    for threads in (1, 4):
        preproc(*STREAM, f"output={tmp_path / str(threads)}", f"threads={threads}")
    assert data_files(tmp_path / "1") == data_files(tmp_path / "4")


def test_a_stream_may_have_no_numericals(tmp_path):
    preproc(*STREAM, f"output={tmp_path / 'out'}", "data.synthetic.num_numerical=0")
    assert FeatureSpec.load(tmp_path / "out").numerical == ()


def test_the_default_tables_are_those_of_criteo_1tb(tmp_path):
    preproc(
        "dataset=synthetic",
        "data.synthetic.train_rows=10",
        "data.synthetic.test_rows=10",
        f"output={tmp_path / 'out'}",
    )
    spec = FeatureSpec.load(tmp_path / "out")
    assert len(spec.categorical) == 26
    assert sum(feature.cardinality for feature in spec.categorical) == 32_709_138


def test_it_does_not_need_duckdb(tmp_path):
    without = (
        "import runpy, sys; sys.modules['duckdb'] = None; "
        "runpy.run_module('preproc', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", without, *STREAM, f"output={tmp_path / 'out'}"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert FeatureSpec.load(tmp_path / "out").rows_of("train") == 1000
