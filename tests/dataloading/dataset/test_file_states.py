"""Comparison of dataset states: every file counts, a copy is equal, and differing files are named."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.file_states import (
    SAMPLE_BYTES,
    changed_data,
    changed_files,
    changed_samples,
    data_identity,
    data_state,
    file_samples,
    file_states,
    verify_small_files,
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


def test_the_listed_checksums_tell_data_apart_that_samples_do_not(tmp_path):
    features = [CategoricalFeature.of("item", 100)]
    labels = np.arange(200_000) % 2
    specs = []
    for name, label in (("one", labels), ("same", labels), ("inverted", 1 - labels)):
        with write_dataset(tmp_path / name, categorical=features, splits=("train",)) as dataset:
            dataset["train"].append(labels=label, ids={"item": labels})
        specs.append(FeatureSpec.load(tmp_path / name))
    states = [data_state(spec) for spec in specs]
    # As if only bytes between the samples had changed.
    for state in states:
        state["data_samples"] = states[0]["data_samples"]
    before = states[0]
    assert changed_data(before, states[1]) == []
    assert changed_data(before, states[2]) == ["train/label.bin (another checksum in the spec)"]
    assert data_identity(specs[0]) == data_identity(specs[1]) != data_identity(specs[2])
    earlier = {"data_samples": before["data_samples"]}
    assert changed_data(earlier, states[2]) == []
    unlisted = replace(specs[2], metadata={})
    assert changed_data(before, data_state(unlisted) | earlier) == []
    verify_small_files(unlisted)


def test_small_files_are_compared_whole(spec, monkeypatch):
    verify_small_files(spec)
    path = max(spec.splits["train"].paths(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="has changed since it was written"):
        verify_small_files(spec)
    monkeypatch.setattr("dataloading.dataset.file_states.WHOLE_BYTES", len(data) - 1)
    verify_small_files(spec)
