"""Resumed runs: bitwise equality with uninterrupted runs, records without gaps, and refusals."""

import errno
import fcntl
import io
import json
import logging
import os
import random
import re
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml

from configs.option_values import plain_values
from configs.schema import Config
from dataloading.dataset import durable_files
from nn.checkpoint.directory import _crc32, list_checkpoints, read_facts
from nn.distributed.process_group import Ranks
from nn.early_checks import check_inputs
from nn.library.loaded_run import Run
from nn.modes.train import train as train_run
from nn.observability import run_directory
from nn.resume import ResumePoint, finished_run
from nn.saved_config import config_of
from nn.session import _complete_results
from tests.helpers.command import Ended, run_command
from tests.helpers.composed import DCNV2, TINY, compose_config
from tests.helpers.datasets import write_clicks
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import (
    Killed,
    at_step,
    differences,
    killed_at,
    records,
    stored_bytes,
    summary,
    unreadable,
    wait_for_writer,
)

RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}
# The optimizers do not depend on the model.
CASES = [*product(["dlrm"], RATES), ("dcnv2", "adam")]
# Records, evaluations and saves are at unrelated steps; the last batch of an epoch is partial.
RUN = [
    *TINY,
    *("data.synthetic.train_rows=730", "log.every=5", "log.loggers=[]", "train.epochs=2"),
    *("eval.per_epoch=2", "eval.at_start=true", "checkpoint.save_every=4", "train.tf32=false"),
]
LAST_STEP = 24
ONE_RANK = Ranks(0, 0, 1, 1, torch.device("cpu"))
ON_FILES = [option for option in RUN if not option.startswith("data.")]


@pytest.fixture(autouse=True)
def without_curves(monkeypatch) -> None:
    """Skip curves.png, which takes longer than the training."""
    monkeypatch.setattr("nn.observability.run_directory.draw_curves", lambda *_: None)


def train(run_dir: Path, *overrides: str) -> Ended:
    return run_command(*RUN, f"run_dir={run_dir}", *overrides)


def train_and_kill(after_step: int, run_dir: Path) -> None:
    with killed_at(after_step):
        train(run_dir)


def train_case(recipe: str, rule: str, run_dir: Path, kill_at: int | None) -> None:
    """Start a run without the command line, whose parsing would take longer than the training."""
    config = configuration(recipe, rule)
    # The second epoch begins after step 12.
    train = replace(config.train, max_steps=16)
    config = replace(config, run_dir=str(run_dir), train=train)
    with (
        patch("nn.observability.run_directory.draw_curves"),
        nullcontext() if kill_at is None else killed_at(kill_at),
        redirect_stdout(io.StringIO()),
    ):
        train_run(config, "")


@cache
def configuration(recipe: str, rule: str) -> Config:
    rates = [f"optimizer.name={rule}", f"optimizer.lr={RATES[rule]}", "optimizer.eps=0.01"]
    return compose_config(*RUN, *rates, *(DCNV2 if recipe == "dcnv2" else []), recipe=recipe)


# That each rule's state comes back on two ranks, tests/nn/checkpoint/test_state.py proves.
@pytest.mark.parametrize(
    ("num_ranks", "recipe", "rule"),
    [*((1, *case) for case in CASES), (2, "dlrm", "rowwise_adagrad"), (2, "dcnv2", "adam")],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(num_ranks, recipe, rule, tmp_path):
    def start(name: str, kill_at: int | None = None) -> None:
        arguments = (recipe, rule, tmp_path / name, kill_at)
        if num_ranks == 1:
            train_case(*arguments)
        else:
            run_distributed(train_case, num_ranks, *arguments)

    start("uninterrupted")
    start("resumed", kill_at=11)
    assert list_checkpoints(tmp_path / "resumed" / "checkpoints")[0].name == "step_8"
    start("resumed")
    assert len((tmp_path / "resumed" / "restarts.jsonl").read_text().splitlines()) == 1
    assert differences(tmp_path / "uninterrupted", tmp_path / "resumed") == []


def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    case = ("dlrm", "adam")
    train_case(*case, tmp_path / "uninterrupted", None)
    run_distributed(train_case, 2, *case, tmp_path / "run", 11)
    train_case(*case, tmp_path / "run", None)
    uninterrupted, run = (records(tmp_path / name) for name in ("uninterrupted", "run"))
    assert [record["step"] for record in run] == [record["step"] for record in uninterrupted]
    for key in ("loss", "test_auc", "test_log_loss", "train_auc"):
        one, other = (
            [record[key] for record in run_records if key in record]
            for run_records in (uninterrupted, run)
        )
        assert other == pytest.approx(one, rel=1e-5), key


def test_a_run_resumes_from_a_checkpoint_before_its_first_step(tmp_path):
    # A chain of deltas begins with one. Torch creates Adam's state in the first step.
    chain = (
        "optimizer.name=adam",
        "optimizer.lr=0.005",
        "checkpoint.delta_every=2",
        "checkpoint.save_every=20",
        "eval.per_epoch=1",
    )
    assert train(tmp_path / "uninterrupted", *chain).err == ""
    with killed_at(7):
        train(tmp_path / "run", *chain)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_0"]
    assert train(tmp_path / "run", *chain).err == ""
    assert differences(tmp_path / "uninterrupted", tmp_path / "run") == []


def test_the_best_model_may_be_that_before_the_first_step(tmp_path):
    options = ("optimizer.name=adam", "optimizer.lr=1e-12", "checkpoint.delta_every=2")
    ended = train(tmp_path / "run", *options, "eval.patience=1")
    assert (ended.exit_code, ended.err) == (0, "")
    found = summary(tmp_path / "run")
    assert (found["best_step"], found["result_step"]) == (0, 0)
    assert found["test_auc"] == found["untrained_test_auc"] == found["best_test_auc"]


def test_a_resumed_run_prints_and_records_its_checkpoint(run_dir):
    ended = train(run_dir)
    assert f"resumes    {run_dir / 'checkpoints' / 'step_20'}, 20 steps" in ended.out
    (line,) = (run_dir / "restarts.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 20
    assert len(list((run_dir / "checkpoints").glob(".step*"))) == 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert train(run_dir).err == ""
    return run_dir


def test_a_run_killed_before_its_first_checkpoint_restarts(uninterrupted, tmp_path):
    train_and_kill(3, tmp_path / "run")
    assert records(tmp_path / "run")
    assert train(tmp_path / "run").err == ""
    assert differences(uninterrupted, tmp_path / "run") == []


def test_a_clock_that_was_set_back_changes_nothing(uninterrupted, tmp_path, monkeypatch):
    run_dir, events = tmp_path / "run", ["log.loggers=[tensorboard]"]
    with monkeypatch.context() as late:
        late.setattr(time, "time", lambda: 4e9)
        with killed_at(22):
            train(run_dir, *events)
    for path in run_dir.rglob("*"):
        os.utime(path, (4e9, 4e9), follow_symlinks=False)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert train(run_dir, *events).err == ""
    assert differences(uninterrupted, run_dir) == []
    # TensorBoard reads them in this order.
    for folder in {path.parent for path in run_dir.rglob("*tfevents*")}:
        times = [name.split(".")[3] for name in sorted(os.listdir(folder)) if "tfevents" in name]
        assert times == ["4000000000", "4000000001"]


def test_a_run_killed_after_its_last_checkpoint_writes_its_summary(
    uninterrupted, tmp_path, monkeypatch
):
    def end(*_, **__):
        wait_for_writer()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("nn.session.RunDirectory.finish", end)
        with pytest.raises(Killed):
            train(tmp_path / "run")
    # It was killed while it added the line of that checkpoint; no later save removes the rest of it.
    saved = tmp_path / "run" / "checkpoints" / "saved.jsonl"
    whole = saved.read_text()
    saved.write_text(whole + '{"step": 2')
    assert train(tmp_path / "run").err == ""
    assert summary(tmp_path / "run") == summary(uninterrupted)
    assert saved.read_text() == whole


STATES = {
    "config.yaml only": {"config.yaml": "seed: 7\n"},
    "empty records": {"metrics.jsonl": ""},
    "torn environment": {"metrics.jsonl": '{"recipe": "dl'},
    "no record, no configuration": {"metrics.jsonl": '{"recipe": "dlrm"}\n'},
    "no record, other settings": {
        "config.yaml": "seed: 7\n",
        "metrics.jsonl": '{"recipe": "dlrm"}\n',
    },
}
RECORDS = {"metrics.jsonl": '{"recipe": "dlrm"}\n{"step": 1}\n'}
USED = {
    "records without configuration": RECORDS,
    "records of other settings": RECORDS | {"config.yaml": "seed: 7\n"},
    "records, damaged configuration": RECORDS | {"config.yaml": "{"},
    "finished": RECORDS | {"config.yaml": "same", "summary.json": '{"steps": 24}'},
    "records of an evaluation": RECORDS | {"config.yaml": "mode: eval"},
}
UNFINISHED = {
    "killed": RECORDS | {"config.yaml": "same"},
    "no room for its checkpoint": RECORDS
    | {"config.yaml": "same", "summary.json": '{"steps": 24, "checkpoint_problem": "no room"}'},
    "torn summary": RECORDS | {"config.yaml": "same", "summary.json": '{"ste'},
}


def in_state(run_dir: Path, files: dict[str, str]) -> Config:
    """Write the files of a run directory; "same" and "mode: eval" stand for complete configurations."""
    config = replace(configuration("dlrm", "sgd"), run_dir=str(run_dir))
    settings = {
        "same": plain_values(config),
        "mode: eval": plain_values(config) | {"mode": "eval"},
    }
    for name, text in files.items():
        content = yaml.safe_dump(settings[text]) if text in settings else text
        (run_dir / name).write_text(content)
    return config


@pytest.mark.parametrize("state", [*STATES, *UNFINISHED])
def test_a_start_that_left_no_result_is_started_again(tmp_path, state):
    config = in_state(tmp_path, (STATES | UNFINISHED)[state])
    assert finished_run(config, None, ONE_RANK, ResumePoint()) is None


@pytest.mark.parametrize("state", USED)
def test_records_of_another_run_are_not_written_over(tmp_path, state):
    config = in_state(tmp_path, USED[state])
    with pytest.raises(ValueError, match=r"already holds the metrics\.jsonl of an"):
        finished_run(config, None, ONE_RANK, ResumePoint())


def with_old_names(options):
    options["stage"] = options.pop("day")
    options["sharding"]["staged_gib"] = options["sharding"].pop("read_ahead_gib")
    return options


@pytest.mark.parametrize("recorded", [lambda options: options, with_old_names])
def test_a_finished_run_without_checkpoints_is_not_repeated(tmp_path, recorded):
    config = in_state(tmp_path, {})
    config = replace(config, checkpoint=replace(config.checkpoint, save=False))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded(plain_values(config))))
    for name in ("summary.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}\n")
    message = finished_run(config, None, ONE_RANK, ResumePoint())
    assert message.startswith(
        f"run_dir={tmp_path} holds the complete result of this command already"
    )


def test_an_unreadable_configuration_is_not_another_run(tmp_path):
    config = in_state(tmp_path, UNFINISHED["killed"])
    with (
        unreadable(tmp_path / "config.yaml", errno.EACCES),
        pytest.raises(
            ValueError, match=r"^Permission denied: .*/config\.yaml; change its permissions "
        ),
    ):
        finished_run(config, None, ONE_RANK, ResumePoint())


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "plan.json"])
def test_a_disk_that_is_full_at_the_start_is_named_and_costs_nothing(
    uninterrupted, tmp_path, monkeypatch, name
):
    def replace_text(path: Path, text: str) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        original(path, text)

    run_dir = tmp_path / "run"
    original = run_directory.replace_text
    with monkeypatch.context() as patched:
        for module in (run_directory, durable_files):
            patched.setattr(module, "replace_text", replace_text)
        ended = train(run_dir)
    assert ended.exit_code == 2
    assert ended.err == (
        f"error: No space left on device: {run_dir / name}; free some space and rerun the same command\n"
    )
    if name == "plan.json":
        assert train(run_dir).err == ""
        assert differences(uninterrupted, run_dir) == []


def test_a_finished_run_resumes_for_more_epochs(uninterrupted, tmp_path):
    assert train(tmp_path / "run", "train.epochs=1").err == ""
    assert train(tmp_path / "run").err == ""
    assert stored_bytes(tmp_path / "run") == stored_bytes(uninterrupted)


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
def test_changed_settings_are_refused_by_name(uninterrupted, change, difference):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    ended = train(uninterrupted, "optimizer.lr=24", "train.epochs=3", change)
    assert ended.exit_code == 2
    lr = json.loads((uninterrupted / "checkpoints/step_24/run.json").read_text())["config"][
        "optimizer"
    ]["lr"]
    assert difference.replace("24.0", str(lr)) in ended.err
    assert "Set another run_dir" in ended.err
    assert "checkpoint.allow_changes=true to resume with the new ones" in ended.err
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == before


def test_a_run_that_is_shortened_evaluates_the_model_that_it_ends_with(run_dir, tmp_path):
    # Its latest checkpoint is of step 20, the latest evaluation before it of step 18.
    assert train(run_dir, "train.max_steps=20").err == ""
    found = summary(run_dir)
    assert (found["steps"], found["stopped"]) == (20, "all steps done")
    last = records(run_dir)[-1]
    assert (last["step"], last["test_auc"]) == (20, found["test_auc"])
    facts = read_facts(run_dir / "checkpoints" / "step_20")["trainer"]
    assert facts["test"]["step"] == 20
    assert facts["best_step"] == found["best_step"]
    config = ("mode=eval", f"checkpoint.restore={run_dir / 'checkpoints' / 'step_20'}")
    assert train(tmp_path / "eval", *config).err == ""
    assert summary(tmp_path / "eval")["test_auc"] == found["test_auc"]
    assert "nothing to do" in train(run_dir, "train.max_steps=20").out


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory) -> Callable[..., Path]:
    """Return a function that returns a run with these options that was killed at step 14, once for equal ones."""

    @cache
    def killed(*options: str) -> Path:
        run_dir = tmp_path_factory.mktemp("killed_at_14") / "run"
        with patch("nn.observability.run_directory.draw_curves"), killed_at(14):
            train(run_dir, "eval.per_epoch=3", *options)
        return run_dir

    return killed


def test_the_result_of_a_shortened_run_is_of_the_rows_that_it_asks_for(killed_runs, tmp_path):
    # Step 12 was evaluated before it was saved.
    shutil.copytree(killed_runs(), tmp_path / "run", symlinks=True)
    before = read_facts(tmp_path / "run" / "checkpoints" / "step_12")["trainer"]["test"]
    assert before["step"] == 12
    shorter = ("eval.per_epoch=3", "train.max_steps=12", "eval.batch_size=100", "eval.max_steps=1")
    threshold = f"eval.auc_threshold={before['test_auc'] - 1e-4}"
    ended = train(tmp_path / "run", *shorter, threshold)
    assert "of 256 rows of split 'test': the best one" in ended.out
    found = summary(tmp_path / "run")
    assert (found["test_rows"], found["best_step"]) == (100, 12)
    assert found["test_auc"] != before["test_auc"]


def test_other_groups_are_measured_again_where_they_decide_nothing(killed_runs, tmp_path):
    shutil.copytree(killed_runs("eval.group=cat_0"), tmp_path / "run", symlinks=True)
    shorter = ("eval.per_epoch=3", "train.max_steps=12", "eval.group=cat_2")
    ended = train(tmp_path / "run", *shorter)
    assert (ended.err, "the best one is chosen among" in ended.out) == ("", False)
    restore = f"checkpoint.restore={tmp_path / 'run' / 'checkpoints' / 'step_12'}"
    assert train(tmp_path / "eval", "mode=eval", restore, "eval.group=cat_2").err == ""
    assert summary(tmp_path / "run")["test_gauc"] == summary(tmp_path / "eval")["test_gauc"]


def test_a_note_names_no_groups_that_were_not_there(killed_runs, tmp_path):
    shutil.copytree(killed_runs("eval.group=cat_0"), tmp_path / "run", symlinks=True)
    ended = train(tmp_path / "run", "eval.per_epoch=3", "eval.group=cat_0", "eval.best_metric=gauc")
    assert "by auc of 256 rows of split 'test': the best one is chosen among" in ended.out


def test_a_run_whose_newest_checkpoint_is_damaged_is_loaded_at_its_best(killed_runs, tmp_path):
    shutil.copytree(killed_runs(), tmp_path / "run", symlinks=True)
    best = os.readlink(tmp_path / "run" / "checkpoints" / "best")
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    if newest.name == best:
        shutil.copytree(newest, newest.with_name("step_20"))
        newest = newest.with_name("step_20")
    (newest / "run.json").write_text("{")
    assert f"step_{Run.load(tmp_path / 'run').num_steps}" == best


def test_other_groups_have_another_best(tmp_path):
    groups = ("eval.per_epoch=3", "eval.best_metric=gauc")
    with killed_at(14):
        train(tmp_path / "run", *groups, "eval.group=cat_0")
    ended = train(tmp_path / "run", *groups, "eval.group=cat_2")
    assert "by gauc of 256 rows of split 'test' in groups by cat_0: the best one" in ended.out
    assert summary(tmp_path / "run")["best_step"] > 12


def test_the_best_evaluation_of_other_rows_is_no_longer_the_best(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run", symlinks=True)
    before = summary(tmp_path / "run")
    ended = train(tmp_path / "run", "train.epochs=3", "eval.max_steps=1")
    assert ended.err == ""
    assert (
        "by auc of 256 rows of split 'test': the best one is chosen among the coming ones"
        in ended.out
    )
    found = summary(tmp_path / "run")
    assert found["best_step"] > before["steps"]
    coming = [r for r in records(tmp_path / "run") if r["step"] > LAST_STEP and "test_auc" in r]
    assert found["best_test_auc"] == max(record["test_auc"] for record in coming)


def test_changed_settings_are_accepted_with_allow_changes(run_dir):
    more = ["train.max_steps=22", "data.shuffle_block=0", "checkpoint.allow_changes=true"]
    assert train(run_dir, *more).err == ""
    assert summary(run_dir)["steps"] == 22


def test_records_after_the_checkpoint_are_replaced(run_dir):
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 23, "lo')
    assert train(run_dir).err == ""
    steps = [(record["step"], "loss" in record) for record in records(run_dir)]
    assert len(set(steps)) == len(steps)
    assert [step for step, is_train in steps if is_train] == [5, 10, 15, 20, 24]
    assert [step for step, is_train in steps if not is_train] == [0, 6, 12, 18, 24]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def plant_byte(path: Path, line: int) -> None:
    """Put a byte that is no text into a line, counted from 1."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace(b":", b"\xff", 1)
    path.write_bytes(b"".join(lines))


def test_a_damaged_record_is_refused_with_its_line_and_changes_nothing(run_dir):
    plant_byte(run_dir / "metrics.jsonl", 4)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    ended = train(run_dir)
    assert ended.exit_code == 2
    assert ended.err.startswith(f"error: {run_dir / 'metrics.jsonl'}, line 4: not UTF-8 text: ")
    assert "remove this line to do without it" in ended.err
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_missing_records_are_reported_and_cost_no_step(uninterrupted, run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines[:-2]))
    (run_dir / "restarts.jsonl").write_text('{"torn')
    ended = train(run_dir)
    assert (ended.exit_code, ended.err) == (0, "")
    assert re.search(
        r"warning: .*metrics\.jsonl ends at step 15, but the checkpoint of step 20 was saved after a",
        ended.out,
    )
    assert stored_bytes(run_dir) == stored_bytes(uninterrupted)
    (line,) = (run_dir / "restarts.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 20


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Return a run that was killed after its checkpoints of steps 18 (the best) and 20."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    with patch("nn.observability.run_directory.draw_curves"):
        train_and_kill(22, run_dir)
    return run_dir


@pytest.fixture
def run_dir(killed, tmp_path) -> Path:
    """Return a copy of that run."""
    return Path(shutil.copytree(killed, tmp_path / "run", symlinks=True))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip, "rank_00000.bin"),
        (truncate, "rank_00000.bin"),
        (flip, "tensors.json"),
        (truncate, "run.json"),
        (Path.unlink, "tensors.json"),
        (Path.unlink, "run.json"),
    ],
)
def test_a_damaged_checkpoint_costs_the_steps_since_the_previous_one(
    uninterrupted, run_dir, damage, name
):
    damage(run_dir / "checkpoints" / "step_20" / name)
    ended = train(run_dir)
    assert (ended.exit_code, ended.err) == (0, "")
    assert "warning: the checkpoint of step 20 is not used: " in ended.out
    assert "step_18, 18 steps" in ended.out
    assert (run_dir / "checkpoints" / "step_20.damaged").is_dir()
    assert differences(uninterrupted, run_dir) == []


def test_an_unreadable_file_is_not_damage_and_costs_no_step(uninterrupted, run_dir):
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    for name, number in (
        ("step_20/run.json", errno.EACCES),
        ("step_20/tensors.json", errno.ESTALE),
        ("step_20/rank_00000.bin", errno.EIO),
        ("", errno.EACCES),
    ):
        path = run_dir / "checkpoints" / name
        with unreadable(path, number):
            ended = train(run_dir)
        assert ended.exit_code == 2
        assert ended.err == (
            f"error: run_dir={run_dir}: {path} cannot be read ({os.strerror(number)}); nothing was changed there. Make it "
            "readable and rerun the same command, or set another run_dir\n"
        )
        assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    ended = train(run_dir)
    assert "step_20, 20 steps" in ended.out
    assert differences(uninterrupted, run_dir) == []


def test_a_run_with_only_damaged_checkpoints_restarts_as_at_first(tmp_path):
    """Restart from the checkpoint of `checkpoint.restore`, not from the seed's weights."""
    assert train(tmp_path / "before", "train.max_steps=4").err == ""
    first = f"checkpoint.restore={tmp_path / 'before' / 'checkpoints' / 'step_4'}"
    assert train(tmp_path / "uninterrupted", first, "train.max_steps=8").err == ""
    shutil.copytree(tmp_path / "uninterrupted", tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "summary.json").unlink()
    damaged = list_checkpoints(tmp_path / "run" / "checkpoints")
    for path in damaged:
        flip(path / "rank_00000.bin")
    ended = train(tmp_path / "run", first, "train.max_steps=8")
    assert (ended.exit_code, ended.err) == (0, "")
    assert ended.out.count("is not used: ") == len(damaged) > 0
    assert differences(tmp_path / "uninterrupted", tmp_path / "run") == []


def test_a_finished_run_with_only_damaged_checkpoints_is_refused(tmp_path):
    run_dir = tmp_path / "run"
    assert train(run_dir, "train.max_steps=4").err == ""
    (run_dir / "checkpoints" / "step_4" / "run.json").unlink()
    for _ in range(2):
        ended = train(run_dir)
        assert ended.exit_code == 2
        assert ended.err == (
            f"error: run_dir={run_dir} already holds the metrics.jsonl of an earlier run, but no complete "
            "checkpoint to resume from (step_4.damaged cannot be used); set another run_dir, or none for a new "
            f"runs/<recipe>/<time>, or delete {run_dir / 'metrics.jsonl'} to restart there\n"
        )
    (run_dir / "metrics.jsonl").unlink()
    assert train(run_dir, "train.max_steps=4").err == ""


def test_the_best_checkpoint_is_kept_beside_the_latest(uninterrupted):
    tests = [record for record in records(uninterrupted) if "test_auc" in record]
    best = max(tests, key=lambda each: each["test_auc"])["step"]
    assert (uninterrupted / "checkpoints" / "best").resolve().name == f"step_{best}"
    names = {path.name for path in (uninterrupted / "checkpoints").glob("step_*")}
    assert names == {f"step_{best}", "step_20", "step_24"}


def test_a_newer_format_is_refused(run_dir):
    path = run_dir / "checkpoints" / "step_20" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    ended = train(run_dir)
    assert ended.exit_code == 2
    assert "step_20: it has format 2, and this version reads up to 1" in ended.err
    assert path.exists()


@pytest.fixture
def on_files(tmp_path) -> tuple[Path, list[str]]:
    """Return a dataset and the command of a run on it that ended after step 4."""
    root = write_clicks(tmp_path / "clicks")
    files = [*ON_FILES, f"data.path={root}", "train.epochs=3", f"run_dir={tmp_path / 'run'}"]
    assert run_command(*files, "train.max_steps=4").err == ""
    return root, files


def test_a_changed_dataset_file_is_named(on_files):
    root, files = on_files
    path = root / "train" / "item.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    ended = run_command(*files)
    assert ended.exit_code == 2
    assert f"files of {root} have changed since the checkpoint of step 4" in ended.err
    assert (
        "train/item.bin (the same size, other bytes); restore the same bytes (their times may "
        "differ) or set data.path to a copy of the dataset it was trained on, or" in ended.err
    )
    assert run_command(*files, "checkpoint.allow_changes=true").exit_code == 0


def test_a_restored_dataset_is_accepted(on_files):
    """The remedy in the message of a changed dataset must work."""
    root, files = on_files
    path = root / "train" / "item.bin"
    data = path.read_bytes()
    path.write_bytes(data[::-1])
    assert run_command(*files).exit_code == 2
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    ended = run_command(*files)
    assert (ended.exit_code, ended.err) == (0, "")
    assert f"note: files of {root} were touched or restored since the checkpoint of" in ended.out
    assert "step 4; their sizes and samples are the same. python -m preproc mode=v" in ended.out


def rewrite_facts(checkpoint: Path, facts: dict[str, object]) -> None:
    """Write run.json with a right checksum of itself."""
    (checkpoint / "run.json").write_text(json.dumps(facts | {"crc32": _crc32(facts)}))


def test_other_bytes_between_the_samples_are_found(on_files, tmp_path, monkeypatch):
    """Samples saw nothing of 334,464 labels of 400,000 that were inverted."""
    root, files = on_files
    monkeypatch.setattr("dataloading.dataset.file_states._sample", lambda path: 0)
    checkpoint = tmp_path / "run/checkpoints/step_4"
    facts = read_facts(checkpoint)
    for entry in facts["data_samples"].values():
        entry[1] = 0
    rewrite_facts(checkpoint, facts)
    path = root / "train/label.bin"
    before = path.stat()
    inverted = (1 - np.fromfile(path, np.uint8)).tobytes()
    original = path.read_bytes()
    path.write_bytes(inverted)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    ended = run_command(*files)
    assert ended.exit_code == 2
    assert f"error: {path} has changed since it was written: got " in ended.err
    # Another dataset has a spec of its own.
    spec = root / "feature_spec.yaml"
    text = spec.read_text()
    crc32 = f"{zlib.crc32(original):08x}"
    assert crc32 in text
    spec.write_text(text.replace(crc32, f"{zlib.crc32(inverted):08x}"))
    ended = run_command(*files)
    assert ended.exit_code == 2
    assert "train/label.bin (another checksum in the spec); restore the same bytes" in ended.err
    # A checkpoint of 0.1.0 has samples alone.
    del facts["data_checksums"]
    rewrite_facts(checkpoint, facts)
    assert run_command(*files).exit_code == 0


def test_a_copy_of_the_dataset_is_accepted(on_files, tmp_path):
    _, files = on_files
    copy = write_clicks(tmp_path / "copy")
    moved = [f"data.path={copy}" if option.startswith("data.path=") else option for option in files]
    assert run_command(*moved).err == ""


def test_larger_tables_need_a_new_run_as_the_message_explains(on_files, tmp_path):
    _, files = on_files
    grown = write_clicks(tmp_path / "grown", num_items=120)
    path = tmp_path / "run" / "checkpoints" / "step_4"
    files = [
        f"data.path={grown}" if option.startswith("data.path=") else option for option in files
    ]
    asked = [*files, "checkpoint.grow=true"]
    ended = run_command(*asked)
    assert ended.exit_code == 2
    assert ended.err == (
        f"error: run_dir={tmp_path / 'run'} has tables with fewer rows than this dataset (item 100 instead of "
        "120); if the ids that both have mean the same, start a new run with larger tables: "
        f"checkpoint.restore={path} checkpoint.grow=true and another run_dir; the additional rows are "
        "initialized from the seed\n"
    )
    ended = run_command(*asked, "checkpoint.allow_changes=true")
    assert ended.exit_code == 2
    assert f"error: {path} holds another model or optimizer: tables.item.weight (100, " in ended.err
    assert (
        f"start a new run: checkpoint.restore={path} with another run_dir and checkpoint.grow=true"
        in ended.err
    )
    remedy = [f"checkpoint.restore={path}", f"run_dir={tmp_path / 'larger'}"]
    assert run_command(*asked, *remedy).err == ""


def test_a_dataset_file_that_changes_during_a_run_ends_it_before_the_next_save(
    on_files, monkeypatch
):
    root, files = on_files
    item = root / "train" / "item.bin"
    at_step(monkeypatch, 6, lambda: os.utime(item, ns=(1, 1)))
    ended = run_command(*files)
    assert ended.exit_code == 2
    assert ended.err.startswith(
        f"error: files of {root} were changed while the run was reading them: train/item.bin (touched or "
        "rewritten); nothing was saved since. Restore the files (their times may differ), and rerun "
    )
    checkpoints = Path(files[-1].removeprefix("run_dir=")) / "checkpoints"
    assert not (checkpoints / "step_8").exists()
    assert (checkpoints / "step_6").exists() or (checkpoints / "step_4").exists()


def test_a_smaller_keep_removes_checkpoints_at_the_start(tmp_path, monkeypatch):
    """Removal must not wait for the next save, since the disk may be full."""
    checkpoints = tmp_path / "run" / "checkpoints"
    with killed_at(11):
        train(tmp_path / "run", "checkpoint.keep=9")
    assert len(list_checkpoints(checkpoints)) > 2
    best = (checkpoints / "best").resolve().name
    seen = []
    at_step(
        monkeypatch, 9, lambda: seen.extend(path.name for path in list_checkpoints(checkpoints))
    )
    assert train(tmp_path / "run", "checkpoint.keep=1").exit_code == 0
    assert set(seen) == {"step_8", best}


@pytest.mark.parametrize("saves", [True, False])
def test_a_finished_run_removes_checkpoints_only_if_it_saves_some(tmp_path, saves):
    checkpoints = tmp_path / "checkpoints"
    for step in (8, 16, 24):
        (checkpoints / f"step_{step}").mkdir(parents=True)
    facts = {"num_steps": 24, "trainer": {"best_step": 16}}
    start = ResumePoint(checkpoints / "step_24", facts, is_continuation=True)
    save = f"checkpoint.save={saves}".lower()
    config = compose_config(*TINY, f"run_dir={tmp_path}", "checkpoint.keep=1", save)
    _complete_results(config, start, logging.getLogger())
    left = [path.name for path in list_checkpoints(checkpoints)]
    assert left == (["step_24", "step_16"] if saves else ["step_24", "step_16", "step_8"])


def test_a_run_directory_is_locked(run_dir):
    descriptor = os.open(run_dir, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    flip(run_dir / "checkpoints" / "step_20" / "rank_00000.bin")
    before = (run_dir / "metrics.jsonl").read_text()
    ended = train(run_dir)
    os.close(descriptor)
    # The damage of the latest checkpoint would be found, and the checkpoint renamed, beside the run that holds the lock.
    assert "is not used" not in ended.out
    assert list_checkpoints(run_dir / "checkpoints")[0].name == "step_20"
    assert ended.exit_code == 2
    assert f"is in use: process {os.getpid()} is writing to it; wait until it ends" in ended.err
    assert (run_dir / "metrics.jsonl").read_text() == before


def test_restarts_need_a_named_run_directory(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    ended = run_command(*TINY)
    assert ended.exit_code == 2
    assert "run_dir must be named under --max-restarts=3" in ended.err


def test_training_does_not_advance_any_random_generator(tmp_path, monkeypatch):
    """No generator has state to save. (Building a model advances torch's, but its numbers are overwritten.)"""
    states = []

    def look() -> None:
        name, keys, *rest = np.random.get_state()  # noqa: NPY002, since libraries use this generator
        numbers = [torch.get_rng_state().tolist(), name, bytes(keys), rest]
        states.append([random.getstate(), *numbers])

    for step in range(1, LAST_STEP):
        at_step(monkeypatch, step, look)
    assert train(tmp_path / "run").err == ""
    assert len(states) == LAST_STEP - 1
    assert all(state == states[0] for state in states)


def test_evaluation_requires_a_checkpoint(tmp_path):
    config = compose_config(*TINY, "mode=eval", f"run_dir={tmp_path}")
    remedy = "set checkpoint.restore to a run's checkpoints/step_N, and another run_dir, or none"
    with pytest.raises(ValueError, match=f"^mode=eval needs a trained model: {remedy}"):
        check_inputs(config)


def test_a_run_with_the_old_names_of_options_resumes(run_dir):
    path = run_dir / "checkpoints" / "step_20" / "run.json"
    facts = json.loads(path.read_text())
    del facts["crc32"]
    config = config_of(facts)
    with_old_names(facts["config"])
    assert config_of(facts) == config
    crc32 = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    path.write_text(json.dumps(facts | {"crc32": crc32}))
    ended = train(run_dir)
    assert ended.exit_code == 0
    assert "step_20, 20 steps" in ended.out
    assert "is not used" not in ended.out


def test_a_result_whose_last_checkpoint_is_doubtful_is_not_complete(tmp_path):
    """An error after the rename of a checkpoint, as of its sync, leaves it and a summary that denies it."""
    config = in_state(tmp_path, UNFINISHED["no room for its checkpoint"])
    start = ResumePoint(
        tmp_path,
        {"num_steps": 24, "trainer": {"test": {}, "evals_since_best": 0}},
        is_continuation=True,
    )
    loader = SimpleNamespace(steps_per_epoch=12)
    assert finished_run(config, loader, ONE_RANK, start) is None
    (tmp_path / "summary.json").write_text('{"steps": 24, "checkpoint_problem": null}')
    assert "holds the complete run already (24 steps)" in finished_run(
        config, loader, ONE_RANK, start
    )
