"""The benchmark beside FuxiCTR: the columns that it reads, its sweep, resuming, and what it refuses."""

import json
import math
import shutil
import subprocess
import sys
from collections import OrderedDict
from subprocess import CalledProcessError
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml

from benchmarks.peers import fuxictr_job, with_fuxictr
from benchmarks.peers.fuxictr_job import LABEL, Batches, read_columns
from benchmarks.peers.with_fuxictr import Pair, pair_of, train_peer, trials_of
from tests.helpers.command import ROOT
from tests.helpers.forks import python
from tests.helpers.preproc_command import raw_line, write_lines

pytestmark = pytest.mark.doors

INTEGERS = [value % 12 for value in range(200)]
FIRST_BY_SEED_1 = {0: 0.70, 1: 0.71, 2: 0.73, 3: 0.74, 4: 0.72}
"""Validation AUC by trial."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peer")
    lines = [
        raw_line(row % 2, i1=value, c1="ab" if row % 3 else "cd")
        for row, value in enumerate(INTEGERS)
    ]
    source = write_lines(folder / "logs.tsv", lines)
    command = [python(), "-m", "preproc", "dataset=criteo_buckets", f"source={source}"]
    made = folder / "data"
    subprocess.run([*command, f"output={made}"], check=True, cwd=ROOT)
    # The last rows are validation rows too.
    shutil.copytree(made / "test", made / "validation")
    spec = yaml.safe_load((made / "feature_spec.yaml").read_text())
    test = json.dumps(spec["source_spec"]["test"])
    spec["source_spec"]["validation"] = json.loads(test.replace("test/", "validation/"))
    (made / "feature_spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return made


def test_integers_become_buckets_and_train_rows_are_the_first(data):
    columns = read_columns(data, "train")
    assert columns[LABEL].tolist() == [float(row % 2) for row in range(180)]
    buckets = [value if value < 3 else 3 + math.floor(math.log(value) ** 2) for value in INTEGERS]
    pairs = set(zip(buckets, columns["I1"].tolist(), strict=False))
    assert len(pairs) == len(set(buckets)) == len({identifier for _, identifier in pairs})
    assert [len(read_columns(data, split)[LABEL]) for split in ("validation", "test")] == [20, 20]


def test_batches_hold_every_row_once_in_another_order():
    columns = {"a": torch.arange(10), LABEL: torch.arange(10).float()}
    torch.manual_seed(1)
    batches = Batches(columns, 4, shuffle=True)
    seen = [batch["a"] for batch in batches]
    assert [len(part) for part in seen] == [4, 4, 2]
    assert len(batches) == 3
    assert torch.cat(seen).tolist() != list(range(10))
    assert sorted(torch.cat(seen).tolist()) == list(range(10))


class StandIn(torch.nn.Module):
    """FuxiCTR's interface of a model: its metrics are the rows that it was shown."""

    def __init__(self, feature_map, embedding_dim, **settings):
        super().__init__()
        assert feature_map.default_emb_dim == embedding_dim == 4
        assert settings["field"] == [("I1", "C1")]
        self.trained = 0

    def train_epoch(self, batches):
        self.trained += sum(len(batch[LABEL]) for batch in batches)

    def evaluate(self, batches):
        return OrderedDict(AUC=len(batches.columns[LABEL]), logloss=self.trained)


def test_a_job_prints_each_split_after_each_epoch(data, monkeypatch, capsys):
    described = SimpleNamespace(get_num_fields=lambda: 2, set_column_index=lambda: None)
    parts = {
        "fuxictr.features": {"FeatureMap": lambda *_: described},
        "fuxictr.pytorch.torch_utils": {"seed_everything": torch.manual_seed},
        "src": {"StandIn": StandIn},
    }
    for name in ("fuxictr", "fuxictr.pytorch", *parts):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(parts.get(name, {}))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    settings = '{"embedding_dim": 4, "field": [["I1", "C1"]]}'
    arguments = ["x", "StandIn", str(data), settings, "2", "64", "1", "validation", "test"]
    monkeypatch.setattr(sys, "argv", ["fuxictr_job", *arguments])
    fuxictr_job.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {split: {"auc": 20.0, "log_loss": rows} for split in ("validation", "test")}
        for rows in (180.0, 360.0)
    ]


def test_the_program_of_the_other_environment_gets_the_run(tmp_path):
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\necho a warning\nfor epoch in 1 2; do echo "[$epoch, $OMP_NUM_THREADS, $6, $7, $8, $9]"; done\n'
    )
    program.chmod(0o700)
    pair = Pair("DIN", "DIN", {"a": [1]}, batch_size=512)
    epochs = train_peer(program, tmp_path, pair, tmp_path, 3, ['"test"'])
    assert epochs == [[epoch, 1, {"a": [1]}, 2, 512, 3] for epoch in (1, 2)]


def test_trials_are_the_same_ones_each_time():
    # As in the measurements of benchmarks/README.md.
    trials = trials_of("dcnv2", 20)
    assert pair_of("dcnv2", trials[1]).batch_size == 256
    assert pair_of("dcnv2", trials[1]).peer_settings == {
        **{"learning_rate": 0.000787, "embedding_dim": 8, "embedding_regularizer": 0.0001},
        **{"model_structure": "parallel", "num_cross_layers": 2, "net_dropout": 0.0},
        "parallel_dnn_hidden_units": [256, 128],
    }
    assert trials_of("dcnv2", 2) == trials[:2]


@pytest.mark.parametrize("name", ["wide_deep", "dlrm", "finalmlp", "masknet", "wukong", "autoint"])
def test_every_model_has_settings_that_fuxictr_knows(name):
    pairs = [pair_of(name, values) for values in trials_of(name, 20)]
    names = set().union(*(pair.peer_settings for pair in pairs))
    assert not names & {"dnn", "blocks", "dropout", "batch_size"}
    assert {pair.folder.split("/")[0] for pair in pairs} == {pairs[0].model_class}
    if name == "masknet":
        serial = next(p for p in pairs if p.peer_settings["model_type"] == "SerialMaskNet")
        assert set(serial.peer_settings["dnn_hidden_units"]) == {64}
        assert pairs[0].peer_settings["parallel_num_blocks"] == 3


@pytest.fixture
def command(data, tmp_path, monkeypatch):
    """Run the command with a stand-in for FuxiCTR's training; yield the function and the runs that it trained."""
    trained = []
    numbers = {
        pair_of("deepfm", v).peer_settings["learning_rate"]: i
        for i, v in enumerate(trials_of("deepfm", 5))
    }

    def stand_in(python, zoo, pair, data, seed, splits):
        trial = numbers[pair.peer_settings["learning_rate"]]
        trained.append((trial, seed, *splits))
        auc = FIRST_BY_SEED_1[trial] if seed == 1 else {2: 0.735, 3: 0.71, 4: 0.73}[trial]
        epochs = [{"validation": {"auc": auc}}, {"validation": {"auc": auc - 0.01}}]
        if "test" in splits:
            epochs[0]["test"], epochs[1]["test"] = {"auc": 0.75 + seed / 1000}, {"auc": 0.9}
        return epochs

    def run(*arguments):
        paths = [
            f"--data={data}",
            f"--out={tmp_path / 'out'}",
            f"--python={sys.executable}",
            f"--zoo={tmp_path}",
        ]
        monkeypatch.setattr(sys, "argv", ["with_fuxictr", "--trials=5", *paths, *arguments])
        with_fuxictr.main()

    monkeypatch.setattr(with_fuxictr, "train_peer", stand_in)
    return run, trained


def test_the_best_mean_of_three_seeds_is_tested_and_no_run_repeated(command, tmp_path, capsys):
    run, trained = command
    ours = tmp_path / "results.json"
    ours.write_text(
        json.dumps({"deepfm": {"tested": [{"test_auc": 0.754 + i / 1000} for i in range(5)]}})
    )
    run("deepfm", "deepfm", f"--ours={ours}")
    table = capsys.readouterr().out
    assert trained == [
        *((trial, 1, "validation") for trial in range(5)),
        *((trial, seed, "validation") for trial in (3, 2, 4) for seed in (2, 3)),
        *((2, seed, "validation", "test") for seed in (1, 2, 3, 4, 5)),
    ]
    values = json.dumps(trials_of("deepfm", 5)[2])
    assert table.splitlines()[2:] == [
        f"| deepfm | `{values}` | 0.7510 0.7520 0.7530 0.7540 0.7550 | 0.7530 ± 0.0016 | +0.0030 (0.0010) |"
    ]
    (tmp_path / "out/results/deepfm-2-5-test.json").rename(
        tmp_path / "out/results/deepfm-2-5-test.partial"
    )
    run("deepfm", f"--ours={ours}")
    assert capsys.readouterr().out == table
    assert len(trained) == 17
    assert trained[-1] == (2, 5, "validation", "test")


def test_what_cannot_be_swept_is_refused(command, data, tmp_path, monkeypatch, capsys):
    run, trained = command
    for arguments, wanted in (
        (["fm"], "no space of fm; "),
        (["deepfm", f"--data={tmp_path}"], f"{tmp_path}/validation does not exist"),
        (["deepfm", f"--zoo={tmp_path}/none"], f"{tmp_path}/none does not exist"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(*arguments)
        assert f"error: {wanted}" in capsys.readouterr().err
    assert not trained
    results = tmp_path / "out/results"
    results.mkdir(parents=True)
    (results / "deepfm-0-1-validation.json").write_text('{"run": {"data": "other"}, "epochs": []}')
    with pytest.raises(
        SystemExit, match=r"is of {'data': 'other'}, this run of .*: set another --out"
    ):
        run("deepfm")

    def fail(*_):
        raise CalledProcessError(3, ["python", "-m", "job"])

    monkeypatch.setattr(with_fuxictr, "train_peer", fail)
    with pytest.raises(
        SystemExit, match="error: dlrm-0-1-validation: exit code 3 of python -m job"
    ):
        run("dlrm")
    assert not [*results.glob("dlrm*")]
