"""`--multirun`: a process and a run directory per job, which do not end each other."""

import json
import os
import signal

import pytest
from omegaconf import OmegaConf

from nn.multirun import Jobs, named
from tests.helpers.command import run_command
from tests.helpers.composed import TINY

QUIET = ["log.loggers=[]", "train.max_steps=2", "eval.at_start=false", "--multirun"]


def test_a_job_that_diverges_ends_neither_the_others_nor_the_command(tmp_path):
    folder = tmp_path / "many"
    values = ["optimizer.lr=1e30,0.1", f"run_dir={folder}"]
    ended = run_command(*TINY, *QUIET, *values)
    names = ["00-lr=1e+30", "01-lr=0.1"]
    assert sorted(path.name for path in folder.iterdir()) == [*names, "multirun.yaml"]
    assert json.loads((folder / names[0] / "ended.json").read_text())["kind"] == "DivergedError"
    assert (folder / names[1] / "summary.json").exists()
    assert ended.exit_code == 3
    assert ended.err == f"error: 1 of 2 jobs were unsuccessful: {folder / names[0]} (exit code 3)\n"
    header = json.loads((folder / names[1] / "metrics.jsonl").read_text().splitlines()[0])
    assert "optimizer.lr=0.1" in header["command"]
    assert "--multirun" not in header["command"]


def test_the_default_folder_names_recipe_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_command(*TINY, *QUIET, "seed=1,2", "train.max_steps=1")
    assert (ended.exit_code, ended.err) == (0, "")
    [folder] = (tmp_path / "multirun/dlrm").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["00-seed=1", "01-seed=2", "multirun.yaml"]
    assert not (tmp_path / "runs").exists()


def test_a_launcher_is_refused(monkeypatch):
    monkeypatch.setattr("nn.multirun.is_launched", lambda: True)
    with pytest.raises(ValueError, match=r"^--multirun starts one process per job, and a launcher"):
        Jobs().run(OmegaConf.create(), print)


def test_a_killed_job_has_the_exit_code_of_its_signal():
    jobs = Jobs()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.kill(pid, signal.SIGKILL)
    assert jobs._wait(pid) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"optimizer.lr": "0.01", "model.dropout": "0.5"}, "03-lr=0.01,dropout=0.5"),
        (
            {"train.batch_size": "8", "eval.batch_size": "9"},
            "03-train.batch_size=8,eval.batch_size=9",
        ),
        ({"+data": "a/../b c"}, "03-data=a_.._bc"),
        ({"model.top_mlp": "[8,1]"}, "03-top_mlp=8,1"),
        ({}, "03"),
    ],
)
def test_a_name_carries_what_differs(values, name):
    assert named(3, values) == name
