"""Comparison of dataset states: every file counts, a copy is equal, and differing files are named."""

import os
import shutil

import numpy as np
import pytest

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.file_states import (
    SAMPLE_BYTES,
    changed_files,
    changed_samples,
    file_samples,
    file_states,
)


@pytest.fixture(params=["binary", "parquet"])
def spec(request, tmp_path) -> FeatureSpec:
    """Write a dataset of a numerical, a one-hot and a ragged feature, and return its spec."""
    features = [CategoricalFeature.of("item", 100), CategoricalFeature.of("tags", 50, hotness=None)]
    root = tmp_path / "clicks"
    with write_dataset(
        root, categorical=features, numerical=("n",), file_format=request.param
    ) as dataset:
        for split in ("train", "test"):
            dataset[split].append(
                numerical=np.ones((2, 1)),
                labels=np.array([0, 1]),
                ids={"item": np.array([1, 2]), "tags": np.array([3, 4, 5])},
                lengths={"tags": np.array([1, 2])},
            )
    return FeatureSpec.load(root)


def test_every_file_of_a_dataset_counts(spec):
    files = {path.relative_to(spec.root).as_posix() for path in spec.root.rglob("*.*")}
    assert set(file_states(spec)) == files - {"feature_spec.yaml"}
    assert set(file_samples(spec)) == set(file_states(spec))


def test_a_copy_has_other_times_and_the_same_samples(spec, tmp_path):
    shutil.copytree(spec.root, tmp_path / "copy", copy_function=shutil.copyfile)
    copy = FeatureSpec.load(tmp_path / "copy")
    assert changed_samples(file_samples(spec), file_samples(copy)) == []
    changed = changed_files(file_states(spec), file_states(copy))
    assert [name.split()[0] for name in changed] == sorted(file_states(spec))


def test_a_file_that_was_written_to_or_replaced_is_named(spec):
    states, samples = file_states(spec), file_samples(spec)
    name = sorted(states)[0]
    path = spec.root / name
    data = bytearray(path.read_bytes())
    assert len(data) < SAMPLE_BYTES, "a sample is the complete file"
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    (state,) = changed_files(states, file_states(spec))
    assert state == (f"{name} (touched or rewritten)")
    (sample,) = changed_samples(samples, file_samples(spec))
    assert sample == f"{name} (the same size, other bytes)"


def test_a_file_that_is_gone_and_one_that_is_new_and_one_of_another_size_are_named():
    before = {"a": [1, 2], "b": [1, 2], "d": [1000, 2]}
    now = {"b": [1, 2], "c": [1, 2], "d": [999, 3]}
    wanted = ["a (gone)", "c (new)", "d (999 bytes instead of 1,000)"]
    assert changed_files(before, now) == changed_samples(before, now) == wanted
