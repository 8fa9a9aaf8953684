"""A run that was ended and started again ends as if nothing had happened, bit by bit, and its records have no seam."""

import fcntl
import json
import os
import random
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from nn.checkpointer import THREAD_NAME
from nn.step import Step
from tests.command import Ended, run_command
from tests.composed import TINY
from tests.datasets import write_clicks
from tests.distributed import run_distributed

RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}
CASES = list(product(["dlrm", "dcnv2"], RATES))
# Records, evaluations and saves at steps that have nothing to do with each other; the epoch's last batch is partial.
RUN = [
    *TINY,
    *("data.synthetic.train_rows=730", "log.every=5", "log.tensorboard=false", "train.epochs=2"),
    *("eval.per_epoch=2", "eval.at_start=true", "checkpoint.save_every=4", "train.tf32=false"),
]
LAST_STEP = 24
ON_FILES = [each for each in RUN if not each.startswith("data.")]
OF_A_START = {"samples_per_s", "step_ms", "data_wait_ms", "eval_s"}


class Killed(BaseException):
    """Stands for SIGKILL, which would end the tests too: nothing of ours catches it."""


def train(run_dir: Path, *overrides: str, recipe: str = "dlrm") -> Ended:
    return run_command(*RUN, f"run_dir={run_dir}", *overrides, recipe=recipe)


def train_and_break_off(after_step: int, run_dir: Path, *overrides: str, recipe="dlrm") -> None:
    """Train and leave in the middle of a step, with nothing closed in good order."""
    whole_step = Step.train

    def step_or_end(self, step, feed):
        if step == after_step:
            raise Killed
        return whole_step(self, step, feed)

    Step.train = step_or_end
    try:
        with pytest.raises(Killed):
            train(run_dir, *overrides, recipe=recipe)
    finally:
        Step.train = whole_step
        for thread in threading.enumerate():
            if thread.name == THREAD_NAME:
                thread.join(20)


def records(run_dir: Path) -> list[dict]:
    """What metrics.jsonl says, but for times."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in OF_A_START}
        for line in lines[1:]
    ]


def summary(run_dir: Path) -> dict:
    found = json.loads((run_dir / "summary.json").read_text())
    return {key: value for key, value in found.items() if key not in OF_A_START}


def stored_bytes(run_dir: Path) -> dict[str, bytes]:
    """Weights and optimizer states of the last checkpoint, as they lie on disk."""
    path = run_dir / "checkpoints" / f"step_{LAST_STEP}"
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != "run.json"}


def ends_alike(whole: Path, parts: Path) -> bool:
    assert records(parts) == records(whole)
    assert summary(parts) == summary(whole)
    assert stored_bytes(parts) == stored_bytes(whole)
    return True


def train_in_parts(world_size: int, directory: Path) -> None:
    """Each case as a whole, and as one that breaks off at step 11 and at 18, on all ranks alike."""

    def on_ranks(function, *args):
        if world_size == 1:
            return [function(*args)]
        return run_distributed(function, world_size, *args)

    for recipe, rule in CASES:
        rates = [f"optimizer.name={rule}", f"optimizer.lr={RATES[rule]}", "optimizer.eps=0.01"]
        whole, parts = (directory / f"{recipe}_{rule}_{kind}" for kind in ("whole", "parts"))
        errors = on_ranks(error_of, recipe, whole, *rates)
        for step in (11, 18):
            on_ranks(break_off, step, recipe, parts, *rates)
        errors += on_ranks(error_of, recipe, parts, *rates)
        assert not any(errors), errors


def error_of(recipe: str, run_dir: Path, *overrides: str) -> str:
    return train(run_dir, *overrides, recipe=recipe).err


def break_off(after_step: int, recipe: str, run_dir: Path, *overrides: str) -> None:
    train_and_break_off(after_step, run_dir, *overrides, recipe=recipe)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def in_parts(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("resume")
    train_in_parts(request.param, directory)
    return directory


@pytest.mark.parametrize(("recipe", "rule"), CASES)
def test_a_run_in_three_parts_ends_bit_by_bit_where_the_whole_one_does(in_parts, recipe, rule):
    name = f"{recipe}_{rule}"
    assert ends_alike(in_parts / f"{name}_whole", in_parts / f"{name}_parts")


def test_a_start_says_where_it_goes_on_and_leaves_a_line_of_it(tmp_path):
    run_dir = tmp_path / "run"
    train_and_break_off(11, run_dir)
    ended = train(run_dir)
    assert f"goes on    {run_dir / 'checkpoints' / 'step_8'}, 8 steps" in ended.out
    (line,) = (run_dir / "restarts.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 8
    assert len(list((run_dir / "checkpoints").glob(".step*"))) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert train(run_dir).err == ""
    return run_dir


def test_a_run_killed_before_its_first_checkpoint_begins_anew(whole, tmp_path):
    train_and_break_off(3, tmp_path / "run")
    assert records(tmp_path / "run")
    assert train(tmp_path / "run").err == ""
    assert ends_alike(whole, tmp_path / "run")


def test_a_run_killed_after_its_last_checkpoint_writes_its_summary(whole, tmp_path, monkeypatch):
    def end(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("nn.run.Recorder.finish", end)
        # The writer is a thread of this process and goes on.
        with pytest.raises(Killed):
            train(tmp_path / "run")
    assert train(tmp_path / "run").err == ""
    assert summary(tmp_path / "run") == summary(whole)


def test_a_finished_run_is_trained_on_for_more_epochs(whole, tmp_path):
    assert train(tmp_path / "run", "train.epochs=1").err == ""
    assert train(tmp_path / "run").err == ""
    assert stored_bytes(tmp_path / "run") == stored_bytes(whole)
    assert (tmp_path / "run" / "curves.png").exists()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("optimizer.lr=0.25", "optimizer.lr=24.0 instead of 0.25"),
        ("seed=7", "seed=1 instead of 7"),
        ("model.top_mlp=[8,1]", r"model.top_mlp=[16, 1] instead of [8, 1]"),
        ("train.batch_size=32", "train.batch_size=64 instead of 32"),
        (
            "data.synthetic.cardinalities=[500,40,7,300,1001]",
            "data.synthetic.cardinalities=[500, 40, 7, 300, 1000] instead of",
        ),
    ],
)
def test_another_run_in_its_directory_is_refused_with_what_differs(whole, change, difference):
    before = {each: each.stat().st_mtime_ns for each in whole.rglob("*")}
    ended = train(whole, "optimizer.lr=24", "train.epochs=3", change)
    assert ended.exit_code == 2
    lr = json.loads((whole / "checkpoints/step_24/run.json").read_text())["config"]["optimizer"][
        "lr"
    ]
    assert difference.replace("24.0", str(lr)) in ended.err
    assert "Set another run_dir" in ended.err
    assert "checkpoint.allow_changes=true to go on with the new ones" in ended.err
    assert {each: each.stat().st_mtime_ns for each in whole.rglob("*")} == before


def test_changed_settings_are_taken_when_that_is_asked_for(tmp_path):
    assert train(tmp_path / "run", "train.max_steps=6").err == ""
    more = ["train.max_steps=8", "data.shuffle_block=0", "checkpoint.allow_changes=true"]
    assert train(tmp_path / "run", *more).err == ""
    assert summary(tmp_path / "run")["steps"] == 8


def test_records_of_the_second_start_replace_those_after_the_checkpoint(tmp_path):
    train_and_break_off(23, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    with path.open("a") as stream:
        stream.write('{"step": 23, "lo')
    assert train(tmp_path / "run").err == ""
    steps = [(each["step"], "loss" in each) for each in records(tmp_path / "run")]
    assert len(set(steps)) == len(steps)
    assert [step for step, is_train in steps if is_train] == [5, 10, 15, 20, 24]
    assert [step for step, is_train in steps if not is_train] == [0, 6, 12, 18, 24]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("name", ["run.json", "tensors.json", "rank_00000.bin"])
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path, name, damage):
    run_dir = tmp_path / "run"
    train_and_break_off(22, run_dir)
    damage(run_dir / "checkpoints" / "step_20" / name)
    ended = train(run_dir)
    assert (ended.exit_code, ended.err) == (0, "")
    assert "warning: the checkpoint of step 20 is not used: " in ended.out
    assert "step_18, 18 steps" in ended.out
    assert (run_dir / "checkpoints" / "step_20.damaged").is_dir()
    assert ends_alike(whole, run_dir)


def test_the_best_checkpoint_stays_beside_the_latest(whole):
    tests = [each for each in records(whole) if "test_auc" in each]
    best = max(tests, key=lambda each: each["test_auc"])["step"]
    assert (whole / "checkpoints" / "best").resolve().name == f"step_{best}"
    names = {each.name for each in (whole / "checkpoints").glob("step_*")}
    assert names == {f"step_{best}", "step_20", "step_24"}


def test_a_newer_format_is_not_gone_on_from(tmp_path):
    assert train(tmp_path / "run", "train.max_steps=4").err == ""
    path = tmp_path / "run" / "checkpoints" / "step_4" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    ended = train(tmp_path / "run")
    assert ended.exit_code == 2
    assert (
        "step_4 cannot be gone on from: it has format 2, and this version reads up to 1"
        in ended.err
    )
    assert path.exists()


@pytest.fixture
def on_files(tmp_path) -> tuple[Path, list[str]]:
    """A dataset and a run on it that was broken off after its checkpoint of step 4."""
    root = write_clicks(tmp_path / "clicks")
    files = [*ON_FILES, f"data.path={root}", "train.epochs=3", f"run_dir={tmp_path / 'run'}"]
    assert run_command(*files, "train.max_steps=4").err == ""
    return root, files


def test_a_dataset_file_that_changed_since_is_named(on_files):
    root, files = on_files
    path = root / "train" / "item.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    ended = run_command(*files)
    assert ended.exit_code == 2
    assert f"files of {root} have changed since the checkpoint of step 4" in ended.err
    assert "train/item.bin; set data.path to the dataset it was trained on, or" in ended.err
    assert run_command(*files, "checkpoint.allow_changes=true").exit_code == 0


def test_a_copy_of_the_dataset_is_the_same_dataset(on_files, tmp_path):
    _, files = on_files
    copy = write_clicks(tmp_path / "copy")
    moved = [f"data.path={copy}" if each.startswith("data.path=") else each for each in files]
    assert run_command(*moved).err == ""


def test_a_dataset_file_that_changes_under_a_run_ends_it_before_the_next_save(
    on_files, monkeypatch
):
    root, files = on_files
    whole_step = Step.train

    def step_and_touch(self, step, feed):
        if step == 6:
            os.utime(root / "train" / "item.bin", ns=(1, 1))
        return whole_step(self, step, feed)

    monkeypatch.setattr(Step, "train", step_and_touch)
    ended = run_command(*files)
    assert ended.exit_code == 2
    assert ended.err.startswith(
        f"error: files of {root} were changed while the run was reading them: train/item.bin; nothing was "
    )
    checkpoints = Path(files[-1].removeprefix("run_dir=")) / "checkpoints"
    assert not (checkpoints / "step_8").exists()
    assert (checkpoints / "step_6").exists() or (checkpoints / "step_4").exists()


def test_one_run_directory_serves_one_process_at_a_time(tmp_path):
    train_and_break_off(11, tmp_path / "run")
    descriptor = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    ended = train(tmp_path / "run")
    os.close(descriptor)
    assert ended.exit_code == 2
    assert "is in use: another process is writing into it; wait for its end" in ended.err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_restarts_need_a_named_run_directory(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    ended = run_command(*TINY)
    assert ended.exit_code == 2
    assert "run_dir must be named under --max-restarts=3" in ended.err


def test_training_leaves_every_generator_where_it_was(tmp_path, monkeypatch):
    """So there is none to save. (Building a model moves torch's, whose numbers are then overwritten.)"""
    states = []
    whole_step = Step.train

    def step_and_look(self, step, feed):
        trained = whole_step(self, step, feed)
        name, keys, *rest = np.random.get_state()  # noqa: NPY002, it is what a library would use
        numbers = [torch.get_rng_state().tolist(), name, keys.tolist(), rest]
        states.append([random.getstate(), *numbers])
        return trained

    monkeypatch.setattr(Step, "train", step_and_look)
    assert train(tmp_path / "run").err == ""
    assert len(states) == LAST_STEP
    assert all(each == states[0] for each in states)
