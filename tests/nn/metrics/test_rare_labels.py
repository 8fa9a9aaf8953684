"""PR-AUC: measured without being named where a label is rare, and defined where precision is."""

import json
import math

import numpy as np
import pytest
import torch

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from nn.metrics.measures import average_precision
from tests.helpers.command import run_command
from tests.helpers.composed import TINY


def test_it_is_not_defined_without_a_positive_or_with_a_nan():
    scores = torch.tensor([0.1, 0.4, 0.3])
    assert math.isnan(average_precision(scores, torch.zeros(3, dtype=torch.bool)))
    assert math.isnan(average_precision(scores * math.nan, torch.ones(3, dtype=torch.bool)))
    assert math.isnan(average_precision(scores[:0], torch.zeros(0, dtype=torch.bool)))
    assert average_precision(scores, torch.tensor([False, True, False])) == 1


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_a_run_measures_it_where_labels_are_rare(tmp_path, rate):
    draw = np.random.default_rng(0)
    features = [CategoricalFeature.of(f"cat_{n}", 20) for n in range(2)]
    with write_dataset(tmp_path / "data", categorical=features, numerical=("n",)) as dataset:
        for split, rows in (("train", 512), ("test", 2048)):
            dataset[split].append(
                numerical=draw.normal(size=(rows, 1)),
                labels=draw.random(rows) < rate,
                ids={f.name: draw.integers(0, 20, rows) for f in features},
            )
    options = ("checkpoint.save=false", "log.pictures=false", "train.max_steps=2")
    ended = run_command(
        *TINY, f"data.path={tmp_path / 'data'}", *options, f"run_dir={tmp_path / 'run'}"
    )
    assert ended.exit_code == 0, ended.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert ("test_pr_auc" in summary) == (rate == 0.02)
    assert ("PR-AUC 0." in ended.out) == (rate == 0.02)
    assert summary["best_test_auc"] is not None
