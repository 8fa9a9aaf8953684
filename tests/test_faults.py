"""Faults, each provoked for real: how the run ends, what it says, and that only steps since the last checkpoint are lost."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from nn.checkpoint_files import find_damage, newest_first, read_facts
from nn.checkpointer import THREAD_NAME
from nn.step import Step
from tests.command import ROOT, run_command
from tests.composed import TINY
from tests.crash import NUM_STEPS, RUN, Ranks, crash, differences, records, start, wait_until
from tests.datasets import plant, write_clicks
from tests.distributed import run_distributed

SHORT = [*TINY, "log.tensorboard=false", "train.tf32=false", "checkpoint.save_every=4"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The crash test's run on two ranks, left alone."""
    directory = tmp_path_factory.mktemp("faults")
    ranks = start([*RUN, f"run_dir={directory / 'run'}"], 2, directory / "log")
    assert ranks.wait(120) == [0, 0], ranks.log.read_text()
    return directory / "run"


def started(directory: Path, *overrides: str) -> tuple[Ranks, Path]:
    """The same run on two ranks, once its first checkpoint stands."""
    run_dir = directory / "run"
    ranks = start([*RUN, f"run_dir={run_dir}", *overrides], 2, directory / "log")
    assert wait_until(lambda: newest_first(run_dir / "checkpoints"), 120), ranks.log.read_text()
    return ranks, run_dir


def goes_on_to_the_end(run_dir: Path, whole: Path) -> bool:
    ranks = start([*RUN, f"run_dir={run_dir}"], 2, run_dir.with_name("second.log"))
    assert ranks.wait(120) == [0, 0], ranks.log.read_text()
    assert differences(whole, run_dir) == []
    return True


def errors_in(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith(("error", "stopped"))]


def is_whole(path: Path) -> bool:
    return find_damage(path, read_facts(path), 0, 1) is None


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_leaves_a_checkpoint_and_asks_for_a_requeue(name, whole, tmp_path):
    ranks, run_dir = started(tmp_path)
    os.kill(ranks.processes[1].pid, getattr(signal, name))
    assert ranks.wait(60) == [75, 75], ranks.log.read_text()
    (line,) = errors_in(ranks.log)
    step = int(
        re.match(rf"stopped by {name} after step (\d+), where a checkpoint was left", line)[1]
    )
    assert newest_first(run_dir / "checkpoints")[0].name == f"step_{step}"
    assert not (run_dir / "summary.json").exists()
    assert goes_on_to_the_end(run_dir, whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_at_once_when_a_rank_is_killed(rank, whole, tmp_path):
    ranks, run_dir = started(tmp_path)
    os.kill(ranks.processes[rank].pid, signal.SIGKILL)
    codes = ranks.wait(60)
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 2), ranks.log.read_text()
    (line,) = errors_in(ranks.log)
    assert line.startswith(f"error: rank {1 - rank} stopped, since another rank has ended")
    assert "Traceback" not in ranks.log.read_text()
    assert goes_on_to_the_end(run_dir, whole)


def test_a_rank_that_waits_for_one_that_hangs_ends_soon_after_sigterm(tmp_path, whole):
    """As under NCCL, which does not notice that a rank is gone: the launcher's SIGTERM finds the loop in a collective."""
    ranks, run_dir = started(tmp_path)
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(ranks.processes[1].pid, signal.SIGTERM)
    ranks.processes[1].join(30)
    assert ranks.processes[1].exitcode == 75
    (line,) = errors_in(ranks.log)
    assert line.startswith("error: rank 1 stopped, since another rank has ended")
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    assert goes_on_to_the_end(run_dir, whole)


def test_a_rank_that_is_slow_is_waited_for(whole, tmp_path):
    ranks, run_dir = started(tmp_path)
    for _ in range(2):
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        time.sleep(0.2)
    assert ranks.wait(120) == [0, 0], ranks.log.read_text()
    assert differences(whole, run_dir) == []


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_torchrun_starts_the_ranks_again_and_they_go_on(whole, tmp_path):
    run_dir = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command = [sys.executable, *torchrun, str(ROOT / "dlrm.py"), *RUN, f"run_dir={run_dir}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
    saved = wait_until(lambda: newest_first(run_dir / "checkpoints"), 120)
    assert saved, (tmp_path / "log").read_text()
    os.kill(children(launcher.pid)[1], signal.SIGKILL)
    assert launcher.wait(120) == 0, (tmp_path / "log").read_text()
    assert len((run_dir / "restarts.jsonl").read_text().splitlines()) == 1
    assert differences(whole, run_dir) == []


def test_torchrun_does_not_start_ranks_again_that_a_signal_has_ended(whole, tmp_path):
    run_dir = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    command = [sys.executable, *torchrun, str(ROOT / "dlrm.py"), *RUN, f"run_dir={run_dir}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
    assert wait_until(lambda: newest_first(run_dir / "checkpoints"), 120)
    os.kill(children(launcher.pid)[1], signal.SIGUSR1)
    assert launcher.wait(120) != 0
    assert "stopped by SIGUSR1 after step" in (tmp_path / "log").read_text()
    assert not (run_dir / "restarts.jsonl").exists()
    assert goes_on_to_the_end(run_dir, whole)


def at_step(monkeypatch, step: int, do) -> None:
    """Call `do` when a run comes to a step."""
    whole_step = Step.train

    def train(self, number, feed):
        if number == step:
            do()
        return whole_step(self, number, feed)

    monkeypatch.setattr(Step, "train", train)


def test_a_disk_that_is_full_costs_no_more_than_the_checkpoint(tmp_path, monkeypatch):
    directory = tmp_path / "run" / "checkpoints"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        for thread in threading.enumerate():
            if thread.name == THREAD_NAME:
                thread.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))

    at_step(monkeypatch, 6, lambda: limit(60_000))
    at_step(monkeypatch, 10, lambda: limit(limits[0]))
    try:
        ended = run_command(*SHORT, f"run_dir={tmp_path / 'run'}", "checkpoint.keep=9")
    finally:
        limit(limits[0])
    assert (ended.exit_code, ended.err) == (0, "")
    warning = (
        "warning: the checkpoint of step 8 could not be written: [Errno 27] File too large; the latest is of "
        "step 4. The run goes on, and the next save tries again"
    )
    assert ended.out.count(warning) == 1
    steps = [each.name for each in newest_first(directory)]
    assert steps == ["step_32", "step_28", "step_24", "step_20", "step_16", "step_12", "step_4"]
    assert not list(directory.glob(".step*"))


def full_on_rank_1(run_dir: Path) -> tuple[int, str, str]:
    """No room on the second rank, for one checkpoint."""
    at = [step for step in (8,) if os.environ["RANK"] == "1"]
    whole_pwrite = os.pwrite
    os.pwrite = lambda descriptor, data, start: (
        _no_room()
        if at and f".step_{at[0]}." in os.readlink(f"/proc/self/fd/{descriptor}")
        else whole_pwrite(descriptor, data, start)
    )
    try:
        ended = run_command(*SHORT, f"run_dir={run_dir}", "checkpoint.keep=9")
    finally:
        os.pwrite = whole_pwrite
    return ended.exit_code, ended.out, ended.err


def _no_room() -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_is_full_on_one_rank_is_said_once_and_all_go_on(tmp_path):
    ends = run_distributed(full_on_rank_1, 2, tmp_path / "run")
    assert [(code, err) for code, _, err in ends] == [(0, ""), (0, "")]
    said = (
        "the checkpoint of step 8 could not be written: rank 1: [Errno 28] No space left on device"
    )
    assert [out.count(said) for _, out, _ in ends] == [1, 0]
    steps = [each.name for each in newest_first(tmp_path / "run" / "checkpoints")]
    assert steps == ["step_32", "step_28", "step_24", "step_20", "step_16", "step_12", "step_4"]


def test_running_out_of_memory_says_so_and_costs_the_steps_since(tmp_path, monkeypatch):
    at_step(monkeypatch, 6, lambda: torch.empty(2**46))
    ended = run_command(*SHORT, f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 2
    assert re.fullmatch(
        r"error: rank 0 is out of memory: .*; lower train\.batch_size, or .*\n", ended.err
    )
    path, *_ = newest_first(tmp_path / "run" / "checkpoints")
    assert (path.name, is_whole(path)) == ("step_4", True)


def test_a_bad_number_in_the_data_ends_the_run_and_is_in_no_checkpoint(tmp_path):
    root = write_clicks(tmp_path / "clicks")
    on_files = [each for each in SHORT if not each.startswith("data.")]
    run = [*on_files, f"data.path={root}", "data.shuffle_block=0", "train.batch_size=32"]
    assert run_command(*run, f"run_dir={tmp_path / 'whole'}").exit_code == 0
    numbers = root / "train" / "numerical.bin"
    before = numbers.read_bytes()
    plant(numbers, 2 * 170, float("nan"), "float32")  # row 170 is of step 5
    ended = run_command(*run, f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 3
    assert ended.err.startswith("error: the loss is nan at step 5 ")
    path, *_ = newest_first(tmp_path / "run" / "checkpoints")
    assert (path.name, is_whole(path)) == ("step_4", True)
    numbers.write_bytes(before)
    again = [*run, f"run_dir={tmp_path / 'run'}", "checkpoint.allow_changes=true"]
    assert run_command(*again).exit_code == 0
    last = [
        tmp_path / name / "checkpoints" / "step_8" / "rank_00000.bin" for name in ("whole", "run")
    ]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert records(tmp_path / "whole") == records(tmp_path / "run")


def test_the_clock_saves_too(tmp_path, monkeypatch):
    monkeypatch.setattr("nn.agreement.ASK_EVERY_S", 0.01)
    clock = [
        "checkpoint.save_every=null",
        "checkpoint.save_every_minutes=0.0005",
        "checkpoint.keep=99",
    ]
    at_step(monkeypatch, 16, lambda: time.sleep(0.05))
    assert run_command(*SHORT, *clock, f"run_dir={tmp_path / 'run'}").exit_code == 0
    saved = (tmp_path / "run" / "checkpoints" / "saved.jsonl").read_text().splitlines()
    assert any(json.loads(each)["step"] not in (8, 16, 24, 32) for each in saved)


def test_three_kills_cost_nothing(tmp_path):
    assert crash(tmp_path, seed=2, kills=3, num_ranks=2) >= 0
    assert NUM_STEPS == 300
