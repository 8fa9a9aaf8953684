"""The benchmark beside FuxiCTR: settings that exist, its columns, the buckets of integers, and results that are kept."""

import math
import sys
from unittest.mock import patch

import pytest
import torch

from benchmarks.peers import with_fuxictr
from benchmarks.peers.fuxictr_job import LABEL, Batches, read_columns
from benchmarks.peers.with_fuxictr import COMMON, PAIRS, Results
from dataloading.dataset.feature_spec import FeatureSpec
from nn.models.registry import build_dense
from tests.helpers.composed import compose_config
from tests.helpers.forks import python
from tests.helpers.preproc_command import raw_line, write_lines

pytestmark = pytest.mark.doors


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Preprocess 200 lines for both libraries; return the lines' first integer and the directory."""
    folder = tmp_path_factory.mktemp("peer")
    integers = [value % 12 for value in range(200)]
    lines = [
        raw_line(row % 2, i1=value, c1="ab" if row % 3 else "cd")
        for row, value in enumerate(integers)
    ]
    source = write_lines(folder / "logs.tsv", lines)
    with patch.object(sys, "executable", python()):
        return integers, with_fuxictr.preprocess(source, folder, validate=False)


@pytest.mark.parametrize("name", PAIRS)
def test_settings_are_those_of_a_model_that_can_be_built(name, data):
    config = compose_config(f"experiment={name}_criteo_buckets", *COMMON)
    spec = FeatureSpec.load(data[1])
    assert config.model.name == name
    assert config.train.epochs == with_fuxictr.EPOCHS
    assert sum(parameter.numel() for parameter in build_dense(config.model, spec).parameters()) > 0


def test_integers_become_buckets_and_train_rows_are_the_first(data):
    integers, directory = data
    columns = read_columns(directory, "train")
    assert len(columns[LABEL]) == 180
    assert columns[LABEL].tolist() == [float(row % 2) for row in range(180)]
    buckets = [value if value < 3 else 3 + math.floor(math.log(value) ** 2) for value in integers]
    pairs = set(zip(buckets, columns["I1"].tolist(), strict=False))
    assert len(pairs) == len(set(buckets)) == len({identifier for _, identifier in pairs})
    assert len(read_columns(directory, "test")[LABEL]) == 20


def test_validation_reads_training_lines_only(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python())
    lines = [raw_line(row % 2, c1="ab", i1=row // 180) for row in range(200)]
    source = write_lines(tmp_path / "logs.tsv", lines)
    directory = with_fuxictr.preprocess(source, tmp_path, validate=True)
    assert (tmp_path / "training_lines.tsv").read_text().splitlines() == lines[:180]
    assert len(read_columns(directory, "test")[LABEL]) == 18


def test_batches_hold_every_row_once_in_another_order():
    columns = {"a": torch.arange(10), LABEL: torch.arange(10).float()}
    torch.manual_seed(1)
    batches = Batches(columns, 4, shuffle=True)
    seen = [batch["a"] for batch in batches]
    assert [len(part) for part in seen] == [4, 4, 2]
    assert len(batches) == 3
    assert torch.cat(seen).tolist() != list(range(10))
    assert sorted(torch.cat(seen).tolist()) == list(range(10))


def test_results_are_kept_by_settings(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for key, auc in ((["data", "a", {"lr": 0.1}], 0.7), (["data", "b"], 0.6)):
        assert results.auc(key, lambda auc=auc: {"auc": auc}) == auc
    assert results.auc(["data", "a", {"lr": 0.1}], lambda: {"auc": 0.5}) == 0.7
    assert results.auc(["data", "a", {"lr": 0.2}], lambda: {"auc": 0.5}) == 0.5


def test_table_has_means_of_both_libraries_and_repeats_no_run(tmp_path, monkeypatch, capsys):
    runs = []

    def train_ours(data, run_dir, overrides):
        seed = int(overrides[-1].removeprefix("seed="))
        runs.append(("ours", seed))
        return {"auc": 0.75 + seed / 100, "log_loss": 0.5}

    def train_peer(python, folder, pair, data, settings, seed):
        runs.append((pair.model_class, seed))
        return {"auc": 0.74 + seed / 100, "log_loss": 0.5}

    monkeypatch.setattr(with_fuxictr, "preprocess", lambda source, out, validate: out / "data")
    monkeypatch.setattr(with_fuxictr, "train_ours", train_ours)
    monkeypatch.setattr(with_fuxictr, "train_peer", train_peer)
    paths = [f"--{name}={tmp_path}" for name in ("source", "out", "python", "zoo")]
    monkeypatch.setattr(sys, "argv", ["with_fuxictr", "deepfm", *paths])
    for _ in range(2):
        with_fuxictr.main()
        row = (
            "| deepfm | .7600 .7700 .7800 | **0.7700** | .7500 .7600 .7700 | **0.7600** | +0.0100 |"
        )
        assert capsys.readouterr().out.splitlines()[-1] == row
    assert runs == [(who, seed) for seed in (1, 2, 3) for who in ("ours", "DeepFM")]


def test_an_unknown_model_is_refused(monkeypatch, capsys):
    paths = [f"--{name}=x" for name in ("source", "out", "python", "zoo")]
    monkeypatch.setattr(sys, "argv", ["with_fuxictr", "fm", *paths])
    with pytest.raises(SystemExit):
        with_fuxictr.main()
    assert "got models ['fm'], want some of wide_deep" in capsys.readouterr().err
