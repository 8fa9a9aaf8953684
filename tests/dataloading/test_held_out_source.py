"""The last training rows as a validation split."""

import json

import numpy as np
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.held_out_source import HeldOutSource
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.datasets import ROWS, synthetic_source, write_clicks


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root = write_clicks(tmp_path_factory.mktemp("clicks") / "data")
    return open_dataset(FeatureSpec.load(root))


def test_the_last_rows_are_held_out_and_no_row_is_in_both(stored):
    source = HeldOutSource(stored, 0.25)
    assert [source.num_rows(split) for split in ("train", "validation", "test")] == [192, 64, 128]
    all_rows = stored.read("train", np.array([[0, ROWS["train"]]]))
    held = source.read("validation", np.array([[0, 2], [10, 12]]))
    np.testing.assert_array_equal(held.numerical, all_rows.numerical[[192, 193, 202, 203]])
    np.testing.assert_array_equal(held.ids[1], all_rows.ids[1][[192, 193, 202, 203]])
    trained = source.read("train", np.array([[190, 192]]))
    np.testing.assert_array_equal(trained.numerical, all_rows.numerical[190:192])
    with pytest.raises(ValueError, match="no split 'other'"):
        source.num_rows("other")


def test_the_border_lies_between_row_groups(stored, monkeypatch):
    monkeypatch.setattr(type(stored), "granule", lambda self, split: 100)
    assert HeldOutSource(stored, 0.1).num_rows("train") == 200
    with pytest.raises(ValueError, match=r"in row groups of 100 leaves none to train on; lower it"):
        HeldOutSource(stored, 0.7)


def test_a_dataset_with_a_validation_split_is_refused():
    source = synthetic_source(cardinalities=[10])
    source.spec.splits["validation"] = source.spec.splits["test"]
    with pytest.raises(ValueError, match=r"^data.validation_fraction=0.5: the dataset has a split"):
        HeldOutSource(source, 0.5)


def test_a_run_trains_on_the_others_and_evaluates_on_these(tmp_path):
    options = ["data.validation_fraction=0.25", "eval.split=validation", "log.loggers=[]"]
    ended = run_command(*TINY, *options, "eval.at_start=false", f"run_dir={tmp_path}/run")
    assert (ended.exit_code, ended.err) == (0, "")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["steps"], summary["test_rows"]) == (2048 * 3 // 4 // 64, 2048 // 4)
    assert summary["split"] == "validation"  # of its metrics, whose keys begin with test_
    ended = run_command(*TINY, *options[1:], f"run_dir={tmp_path}/other")
    assert ended.exit_code == 2
    assert "no split 'validation'" in ended.err
