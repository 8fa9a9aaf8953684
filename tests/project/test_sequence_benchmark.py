"""The comparison of sequence models: datasets and their variants, the columns of its peer, its tables, the layers alone."""

import json
import math
import sys
from argparse import Namespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks.peers.fuxictr_job import read_columns
from benchmarks.sequences import datasets
from benchmarks.sequences.__main__ import MODELS, run_missing, tables
from benchmarks.sequences.job import PEERS, Job, peer
from benchmarks.sequences.next_item import train, windows
from dataloading.dataset.feature_spec import FeatureSpec
from nn.library.options import options
from tests.helpers.forks import python

pytestmark = pytest.mark.doors

EVENTS = [[3, 5, 7, 9], [4, 6, 3, 5, 8], [7, 9, 4]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    source = tmp_path_factory.mktemp("sequences")
    lines = [f"{user + 1} {' '.join(map(str, items))}\n" for user, items in enumerate(EVENTS)]
    (source / "Toys_and_Games.txt").write_text("".join(lines))
    with patch.object(sys, "executable", python()):
        return {
            variant: datasets.dataset("toys", variant, source, source / "out")
            for variant in datasets.VARIANTS
        }


def columns_of(root):
    return {split: read_columns(root, split) for split in ("train", "validation", "test")}


def test_every_next_item_has_a_row_and_a_drawn_one_with_the_items_before(made):
    slices = {
        split: np.fromfile(made["as_is"] / split / "history.slices.bin", np.int64).reshape(-1, 2)
        for split in ("train", "validation", "test")
    }
    lengths = [sorted((rows[:, 1] - rows[:, 0]).tolist()) for rows in slices.values()]
    assert lengths == [[1, 1, 1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [2, 2, 3, 3, 4, 4]]
    columns = columns_of(made["as_is"])
    assert all(part["label"].mean() == 0.5 for part in columns.values())
    assert [len(part["label"]) for part in columns.values()] == [6, 6, 6]


def test_shuffled_rows_have_the_same_events_and_times_in_another_order(made):
    before, after = columns_of(made["as_is"]), columns_of(made["shuffled"])
    changed = 0
    for split, part in before.items():
        for one, other in zip(part["history_item"], after[split]["history_item"], strict=True):
            assert sorted(one.tolist()) == sorted(other.tolist())
            changed += one.tolist() != other.tolist()
        assert torch.equal(part["item"], after[split]["item"])
    assert changed > 0
    assert not columns_of(made["without"])["test"]["history_item"].any()


def test_the_variants_are_read_by_the_loader(made):
    spec = FeatureSpec.load(made["shuffled"])
    assert [group.time for group in spec.sequences] == ["history_time"]


def test_the_layers_alone_learn_lists_that_repeat():
    lists = [np.array([1 + (start + step) % 20 for step in range(8)]) for start in range(20)] * 4
    torch.manual_seed(1)
    _, _, test = list(train(lists, 20, 20, 16, "cpu"))[-1]
    assert test["HR@10 all"] > 0.9
    assert [piece.tolist() for piece in windows([np.arange(5), np.arange(3)])] == [[0, 1, 2]]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_an_experiment(model, made):
    config = options(
        f"{model}_movielens_events", "model.item_features=[item]", f"data.path={made['as_is']}"
    )
    assert config.model.name == model


def test_a_finished_job_is_not_run_again_and_tables_have_differences(tmp_path):
    args = Namespace(out=tmp_path, set=[], validate=False, datasets=[], variants=[], workers=1)
    (tmp_path / "results").mkdir()
    aucs = {"as_is": (0.7, 0.72), "shuffled": (0.69, 0.7)}
    jobs = [Job("toys", "din", variant, seed, args) for variant in aucs for seed in (1, 2)]
    for job in jobs:
        job.file.write_text(f'{{"auc": {aucs[job.variant][job.seed - 1]}}}')
    run_missing(jobs, args)
    lines = list(tables("toys", jobs))
    assert lines[2] == "| din | as_is | .7000 .7200 | 0.7100 | 0.0141 | 0.0100 |"
    assert lines[-1] == "| din, as_is - din, shuffled | +0.0150 | 0.0050 | 2 of 2 |"


def test_a_peer_is_evaluated_on_the_rows_of_its_job(made, tmp_path, monkeypatch):
    def train(python, zoo, pair, data, seed, splits):
        return [{split: {"auc": auc, "log_loss": seed} for split in splits} for auc in (0.6, 0.7)]

    monkeypatch.setattr("benchmarks.sequences.job.train_peer", train)
    monkeypatch.setattr("benchmarks.sequences.job.dataset", lambda *_: made["as_is"])
    (tmp_path / "results").mkdir()
    paths = {"source": tmp_path, "out": tmp_path, "fuxictr": tmp_path, "zoo": tmp_path}
    of_validation = Job(
        "toys", "din", "as_is", 3, Namespace(**paths, peer_lr=1e-3, validate=True), True
    )
    of_validation.run()
    assert json.loads(of_validation.file.read_text()) == {"auc": 0.7, "log_loss": 3}
    assert of_validation.file.stem == "toys-din, FuxiCTR-as_is-3-validation-lr=0.001"


def test_a_peer_has_fields_of_the_dataset():
    assert peer("bst", "liked", 1e-3).peer_settings["bst_sequence_field"] == [
        ("history_movieId", "history_genres")
    ]
    assert set(PEERS) <= set(MODELS)
    assert math.isclose(peer("din", "toys", 3e-3).peer_settings["learning_rate"], 3e-3)
