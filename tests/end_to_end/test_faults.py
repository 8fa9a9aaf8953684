"""Real faults: exit codes, messages, and the loss of only the steps since the last checkpoint."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.launch import children
from nn.checkpoint.directory import find_damage, list_checkpoints, read_facts, step_of
from tests.helpers.command import ROOT, run_command
from tests.helpers.composed import TINY
from tests.helpers.datasets import plant, write_clicks
from tests.helpers.rank_processes import RUN, has_ended, start, trains, wait_until
from tests.helpers.runs import at_step, differences, records, stored_bytes, wait_for_writer
from tests.helpers.slurm_cluster import missing_commands

pytestmark = pytest.mark.doors

SHORT = [*TINY, "log.loggers=[]", "train.tf32=false", "checkpoint.save_every=4"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """Run on two ranks without a fault; return the run directory."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    ranks = start([*RUN, f"run_dir={directory / 'run'}"], 2, directory / "log")
    assert ranks.wait(300) == [0, 0], ranks.log.read_text()
    return directory / "run"


@dataclass(frozen=True, slots=True)
class FaultyStart:
    """One start of the run that meets all faults in turn.

    Attributes:
        codes: exit codes of the ranks.
        output: output of all ranks.
        latest: step of the latest checkpoint at its end.
        reason: what the run directory says of the end, empty if nothing.
    """

    codes: list[int]
    output: str
    latest: int
    reason: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(("error", "stopped"))]


class Faults:
    """Repeated starts of one run; each start writes a new checkpoint and then meets a fault."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "run"
        self.starts: dict[str, FaultyStart] = {}

    def latest(self) -> int:
        return max((step_of(path) for path in list_checkpoints(self.checkpoints)), default=0)

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def meet(
        self,
        name: str,
        fault: Callable[[list[int], Path], None],
        *,
        saves: bool = True,
        ends_within_s: float = 60,
    ) -> None:
        """Start the run, and call `fault` with process ids and log after a new checkpoint; store the result.

        Without saves `fault` is called after the first record.
        """
        log = self.run_dir.with_name(f"{name}.log")
        before = self.latest()
        overrides = [f"run_dir={self.run_dir}", *([] if saves else ["checkpoint.save_every=null"])]
        ranks = start([*RUN, *overrides], 2, log)

        def is_ready() -> bool:
            return self.latest() > before if saves else trains(ranks)

        try:
            assert wait_until(is_ready, 120), log.read_text()
            fault([process.pid for process in ranks.processes], log)
            codes, ended = ranks.wait(ends_within_s), self.run_dir / "ended.json"
            reason = json.loads(ended.read_text())["message"] if ended.exists() else ""
            self.starts[name] = FaultyStart(codes, log.read_text(), self.latest(), reason)
        finally:
            ranks.kill()


def send(signum: int, rank: int) -> Callable[[list[int], Path], None]:
    return lambda pids, _: os.kill(pids[rank], signum)


def hang(pids: list[int], log: Path) -> None:
    """Emulate NCCL, which does not notice a lost rank: the launcher's SIGTERM arrives while the loop is in a collective."""
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGTERM)
    assert wait_until(lambda: "stopped because another rank has exited" in log.read_text(), 60), (
        log.read_text()
    )
    os.kill(pids[0], signal.SIGKILL)


def fill_disk_of_rank_1_then_be_slow(pids: list[int], log: Path) -> None:
    """Limit the file size of one rank, as a full disk would; then stop a rank twice for a while."""
    _, hard = resource.prlimit(pids[1], resource.RLIMIT_FSIZE)
    resource.prlimit(pids[1], resource.RLIMIT_FSIZE, (8_000, hard))
    assert wait_until(lambda: "could not be written" in log.read_text(), 120), log.read_text()
    resource.prlimit(pids[1], resource.RLIMIT_FSIZE, (hard, hard))
    for _ in range(2):
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pids[1], signal.SIGCONT)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Faults:
    """Run on two ranks through all faults to the end."""
    faults = Faults(tmp_path_factory.mktemp("faults"))
    faults.meet("SIGTERM", send(signal.SIGTERM, rank=1))
    faults.meet("SIGUSR1", send(signal.SIGUSR1, rank=0))
    faults.meet("kill rank 0", send(signal.SIGKILL, rank=0))
    faults.meet("kill rank 1", send(signal.SIGKILL, rank=1))
    # A loop that waits for a checkpoint may wait long, and only the launcher's SIGKILL ends it. So this start saves nothing.
    faults.meet("hang", hang, saves=False)
    faults.meet("to the end", fill_disk_of_rank_1_then_be_slow, ends_within_s=300)
    return faults


def test_a_run_that_met_every_fault_ends_bit_by_bit_as_an_uninterrupted_one(uninterrupted, faults):
    assert faults.starts["to the end"].codes == [0, 0], faults.starts["to the end"].output
    assert differences(uninterrupted, faults.run_dir) == []
    assert len((faults.run_dir / "restarts.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_leaves_a_checkpoint_and_ends_with_75(name, faults):
    start = faults.starts[name]
    assert start.codes == [75, 75], start.output
    (line,) = start.errors
    message = rf"stopped by {name} after step (\d+); a checkpoint was saved; the same command with run_dir="
    assert int(re.match(message, line)[1]) == start.latest


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_with_one_message_when_a_rank_is_killed(rank, faults):
    start = faults.starts[f"kill rank {rank}"]
    assert (start.codes[rank], start.codes[1 - rank]) == (-signal.SIGKILL, 1), start.output
    (line,) = start.errors
    assert line.startswith(f"error: rank {1 - rank} stopped because another rank has exited")
    assert "Traceback" not in start.output
    # Rank 0 writes it.
    assert start.reason.startswith("another rank has exited; the same" if rank == 1 else "")


def test_a_rank_that_waits_for_one_that_hangs_ends_soon_after_sigterm(faults):
    start = faults.starts["hang"]
    assert start.codes == [-signal.SIGKILL, 75]
    (line,) = start.errors
    assert line.startswith("error: rank 1 stopped because another rank has exited")


def test_a_full_disk_of_one_rank_is_reported_once_and_the_run_continues(faults):
    output = faults.starts["to the end"].output
    warnings = [line for line in output.splitlines() if "could not be written" in line]
    for line in warnings:
        assert "rank 1: [Errno 27] File too large; the latest is of step" in line
    steps = [int(re.search(r"of step (\d+) could", line)[1]) for line in warnings]
    assert len(set(steps)) == len(steps) > 0
    assert not list(faults.checkpoints.glob(".step*"))


def start_torchrun(run_dir: Path, log: Path, *options: str) -> subprocess.Popen:
    """Start the run on two ranks under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", *options]
    command = [sys.executable, *torchrun, str(ROOT / "dlrm.py"), *RUN, f"run_dir={run_dir}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w") as stream:
        return subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, cwd=log.parent
        )


@pytest.mark.skipif(
    not missing_commands(),
    reason="tests/end_to_end/test_slurm_cluster.py kills and preempts ranks under torchrun",
)
def test_torchrun_restarts_killed_ranks_but_not_preempted_ones(uninterrupted, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    launcher = start_torchrun(run_dir, log, "--max-restarts=3")

    def saved_since(step: int) -> bool:
        return any(step_of(path) > step for path in list_checkpoints(run_dir / "checkpoints"))

    def restarts() -> list[str]:
        path = run_dir / "restarts.jsonl"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    try:
        assert wait_until(lambda: saved_since(0), 120), log.read_text()
        os.kill(children(launcher.pid)[1], signal.SIGKILL)
        assert wait_until(restarts, 120), log.read_text()
        began_at = json.loads(restarts()[0])["step"]
        assert wait_until(lambda: saved_since(began_at), 120), log.read_text()
        os.kill(children(launcher.pid)[1], signal.SIGUSR1)
        assert launcher.wait(120) != 0
    finally:
        launcher.terminate()
        launcher.wait()
    assert log.read_text().count("stopped by SIGUSR1 after step") == 1
    assert len(restarts()) == 1
    ranks = start([*RUN, f"run_dir={run_dir}"], 2, tmp_path / "second.log")
    assert ranks.wait(120) == [0, 0], ranks.log.read_text()
    assert differences(uninterrupted, run_dir) == []


def is_intact(path: Path) -> bool:
    return find_damage(path, read_facts(path), 0, 1) is None


def test_ranks_without_a_launcher_leave_a_checkpoint_and_end(uninterrupted, tmp_path):
    """SIGUSR1 kills torchrun, which has no handler for it."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    launcher = start_torchrun(run_dir, log)
    try:
        assert wait_until(lambda: list_checkpoints(run_dir / "checkpoints"), 120), log.read_text()
        ranks = children(launcher.pid)
    finally:
        launcher.send_signal(signal.SIGUSR1)
        launcher.wait()
    assert len(ranks) == 2
    assert wait_until(lambda: all(map(has_ended, ranks)), 60)
    output = log.read_text()
    left_at = re.search(r"stopped by SIGTERM after step (\d+); a checkpoint was saved", output)
    assert left_at, output
    assert f"step_{left_at[1]}" in {path.name for path in list_checkpoints(run_dir / "checkpoints")}
    again = start([*RUN, f"run_dir={run_dir}"], 2, tmp_path / "second.log")
    assert again.wait(120) == [0, 0], again.log.read_text()
    assert differences(uninterrupted, run_dir) == []


def test_a_signal_during_the_start_ends_the_run_with_75(tmp_path):
    command = [sys.executable, str(ROOT / "dlrm.py"), *SHORT, f"run_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def has_a_handler() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
        return bool(caught >> (signal.SIGUSR1 - 1) & 1)

    assert wait_until(has_a_handler, 60)
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75
    assert stderr == ("stopped by SIGUSR1 before training started; rerun the same command\n")


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a file system of 600 KiB at `directory`; needs root."""
    directory.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "recsys-test", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_costs_only_the_checkpoint(tmp_path, monkeypatch):
    with small_disk(tmp_path / "run" / "checkpoints") as directory:
        filler = directory / "filler"

        def fill() -> None:
            wait_for_writer()
            with filler.open("wb", buffering=0) as stream, suppress(OSError):
                while stream.write(b"x" * 4096):
                    pass

        def make_room() -> None:
            wait_for_writer()
            filler.unlink()

        at_step(monkeypatch, 6, fill)
        at_step(monkeypatch, 10, make_room)
        ended = run_command(*SHORT, f"run_dir={tmp_path / 'run'}", "checkpoint.keep=1")
        assert (ended.exit_code, ended.err) == (0, "")
        warning = (
            "warning: the checkpoint of step 8 could not be written: [Errno 28] No space left on device; the "
            "latest is of step 4. The run continues, and the next save tries again"
        )
        assert ended.out.count(warning) == 1
        assert ended.out.count("could not be written") == 1
        lines = (directory / "saved.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [4, 12, 16, 20, 24, 28, 32]
        assert is_intact(directory / "step_32")


def test_a_file_size_limit_costs_only_the_checkpoint(tmp_path, monkeypatch):
    directory = tmp_path / "run" / "checkpoints"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        wait_for_writer()
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
        "step 4. The run continues, and the next save tries again"
    )
    assert ended.out.count(warning) == 1
    steps = [path.name for path in list_checkpoints(directory)]
    assert steps == ["step_32", "step_28", "step_24", "step_20", "step_16", "step_12", "step_4"]
    assert not list(directory.glob(".step*"))


def test_a_preempted_run_that_cannot_save_names_the_step_it_resumes_from(tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def stop_without_room() -> None:
        wait_for_writer()
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
        os.kill(os.getpid(), signal.SIGTERM)

    at_step(monkeypatch, 10, stop_without_room)
    try:
        ended = run_command(*SHORT, f"run_dir={tmp_path / 'run'}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.exit_code == 75
    message = re.fullmatch(
        r"stopped by SIGTERM after step (\d+); no checkpoint could be written; the same command with "
        rf"run_dir={tmp_path / 'run'} resumes from step 8\n",
        ended.err,
    )
    assert message, ended.err
    assert f"checkpoint of step {message[1]} could not be written" in ended.out
    assert "tries again" not in ended.out


def test_out_of_memory_is_reported_and_costs_the_steps_since_the_checkpoint(tmp_path, monkeypatch):
    at_step(monkeypatch, 6, lambda: torch.empty(2**46))
    ended = run_command(*SHORT, f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 2
    assert re.fullmatch(
        r"error: rank 0 is out of memory: .*; lower train\.batch_size, or .*\n", ended.err
    )
    path, *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert (path.name, is_intact(path)) == ("step_4", True)


def test_a_nan_in_the_data_ends_the_run_and_is_in_no_checkpoint(tmp_path):
    root = write_clicks(tmp_path / "clicks")
    on_files = [option for option in SHORT if not option.startswith("data.")]
    run = [*on_files, f"data.path={root}", "data.shuffle_block=0", "train.batch_size=32"]
    assert run_command(*run, f"run_dir={tmp_path / 'uninterrupted'}").exit_code == 0
    numbers = root / "train" / "numerical.bin"
    before = numbers.read_bytes()
    plant(numbers, 2 * 170, float("nan"), "float32")  # step 5 reads row 170
    ended = run_command(*run, f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 2
    assert ended.err == (
        f"error: numerical feature 'n': nan at row 170 of {numbers} is not finite; correct the file, or fill missing values "
        "when preprocessing\n"
    )
    path, *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert (path.name, is_intact(path)) == ("step_4", True)
    numbers.write_bytes(before)
    again = [*run, f"run_dir={tmp_path / 'run'}", "checkpoint.allow_changes=true"]
    assert run_command(*again).exit_code == 0
    assert stored_bytes(tmp_path / "uninterrupted") == stored_bytes(tmp_path / "run")
    assert records(tmp_path / "uninterrupted") == records(tmp_path / "run")


def test_checkpoints_are_saved_by_the_clock(tmp_path, monkeypatch):
    monkeypatch.setattr("nn.distributed.preemption.SYNC_EVERY_S", 0.01)
    clock = [
        "checkpoint.save_every=null",
        "checkpoint.save_every_minutes=0.0005",
        "checkpoint.keep=99",
    ]
    at_step(monkeypatch, 16, lambda: time.sleep(0.05))
    assert run_command(*SHORT, *clock, f"run_dir={tmp_path / 'run'}").exit_code == 0
    saved = (tmp_path / "run" / "checkpoints" / "saved.jsonl").read_text().splitlines()
    assert any(json.loads(line)["step"] not in (8, 16, 24, 32) for line in saved)
