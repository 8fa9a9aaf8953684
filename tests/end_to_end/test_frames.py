"""The way from the command to a training step stays short: a stack trace shows it without a detour."""

import traceback
from pathlib import Path

import pytest

from nn.models.dlrm import DLRM
from nn.training.train_step import TrainStep
from tests.helpers.command import ROOT, run_command
from tests.helpers.composed import TINY

QUIET = ["log.loggers=[]", "checkpoint.save=false", "train.max_steps=1", "eval.max_steps=1"]
MOST_TO_THE_STEP = 5
MOST_TO_THE_MODEL = 10


def frames_of_ours() -> list[str]:
    """File and function of every frame of the project that is not of its tests."""
    frames = []
    for frame in traceback.extract_stack():
        path = Path(frame.filename)
        if path.is_relative_to(ROOT):
            file = path.relative_to(ROOT)
            if file.parts[0] not in ("tests", ".venv"):
                frames.append(f"{file}:{frame.name}")
    return frames


@pytest.fixture
def stacks(monkeypatch) -> dict[str, list[str]]:
    """The frames above the first training step, and above the first forward pass in it."""
    found: dict[str, list[str]] = {}
    train, forward = TrainStep.train, DLRM.forward

    def noting_train(self, *arguments):
        found.setdefault("step", [*frames_of_ours(), "TrainStep.train"])
        return train(self, *arguments)

    def noting_forward(self, *arguments):
        if "step" in found:
            found.setdefault("model", [*frames_of_ours(), "DLRM.forward"])
        return forward(self, *arguments)

    monkeypatch.setattr(TrainStep, "train", noting_train)
    monkeypatch.setattr(DLRM, "forward", noting_forward)
    return found


def test_few_frames_lead_from_the_command_to_a_step(stacks, tmp_path):
    ended = run_command(*TINY, *QUIET, f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 0, ended.err
    assert stacks["step"][0] == "dlrm.py:<module>"
    assert len(stacks["step"]) <= MOST_TO_THE_STEP, stacks["step"]
    assert len(stacks["model"]) <= MOST_TO_THE_MODEL, stacks["model"]


def test_several_jobs_of_one_command_know_their_number(tmp_path):
    runs = [f"run_dir={tmp_path}/run_${{hydra:job.num}}", "seed=1,2"]
    runs += [f"hydra.sweep.dir={tmp_path}/sweep", "--multirun"]
    ended = run_command(*TINY, *QUIET, *runs)
    assert ended.exit_code == 0, ended.err
    assert {"run_0", "run_1"} <= {path.name for path in tmp_path.iterdir()}


def test_an_interpolation_of_a_missing_key_is_an_error_in_one_line():
    ended = run_command(*TINY, "run_dir=${nowhere}")
    assert ended.exit_code == 2
    assert ended.err.startswith("error: ")
    assert "nowhere" in ended.err
    assert ended.err.count("\n") == 1
