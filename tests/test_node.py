"""`python -m nn.node` with ranks that end in every way: what it ends with, whether it starts them again, where they write."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nn.node import exit_code, numa_options

ROOT = Path(__file__).resolve().parents[1]
# A rank that ends as it is told to: `exit N`, `kill` once amid a group, `wait` for the warning. It says when it starts.
RANK = """\
import os, signal, sys, time
rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("rank", rank, "start", start, flush=True)
print("to stderr", file=sys.stderr, flush=True)
how, *numbers = sys.argv[1:]
if how == "exit" and rank == 1:
    sys.exit(int(numbers[0]))
if how == "kill":
    import torch.distributed
    torch.distributed.init_process_group("gloo")
    if rank == int(numbers[0]) and start == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()
time.sleep(60 if how == "wait" or (how == "exit" and rank == 0 and start == 0) else 0)
"""


@contextmanager
def started(directory: Path, *how: str) -> Iterator[subprocess.Popen]:
    """Two ranks under `nn.node`, with one restart."""
    (directory / "rank.py").write_text(RANK)
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    arguments = [directory / "logs", "node", *flags, directory / "rank.py", *how]
    process = subprocess.Popen(
        [sys.executable, "-m", "nn.node", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SLURMD_NODENAME": "gpu07"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(directory: Path, *how: str) -> tuple[int, str]:
    """Exit code and output of a node."""
    with started(directory, *how) as process:
        out, _ = process.communicate(timeout=120)
        return process.returncode, out


def test_a_node_whose_ranks_end_well_ends_well_and_each_rank_has_its_logs(tmp_path):
    code, out = ended(tmp_path, "end")
    assert code == 0, out
    for rank in range(2):
        (log,) = (tmp_path / "logs" / "gpu07").glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == f"rank {rank} start 0\n"
        assert log.with_name("stderr.log").read_text() == "to stderr\n"
        assert f"rank {rank} start 0" in out, "the job's own log has it too"


def test_an_error_that_would_come_again_is_not_tried_again(tmp_path):
    code, out = ended(tmp_path, "exit", "2")
    assert code == 2
    assert "gpu07: rank 1 ended with exit code 2" in out
    assert "start 1" not in out


def test_a_rank_that_was_killed_is_started_again_and_meets_the_others(tmp_path):
    """Rank 0 is where the others meet."""
    code, out = ended(tmp_path, "kill", "0")
    assert code == 0, out
    assert {f"rank {rank} start {start}" for rank in (0, 1) for start in (0, 1)} <= {
        line.split("]:")[-1] for line in out.splitlines()
    }


def test_ranks_that_lost_others_are_started_again_and_the_node_says_1(tmp_path):
    code, out = ended(tmp_path, "exit", "75")
    assert code == 1
    assert "rank 1 start 1" in out


def test_a_warning_reaches_the_ranks_and_is_waited_for(tmp_path):
    with started(tmp_path, "wait") as process:
        logs = tmp_path / "logs"
        deadline = time.monotonic() + 60
        while sum(each.stat().st_size > 0 for each in logs.glob("**/stderr.log")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # To the node's process alone, as where SLURM follows processes by cgroups.
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert "start 1" not in out


@pytest.mark.parametrize(
    ("codes", "was_warned", "expected"),
    [
        ([-9], False, 1),
        ([75, -9], False, 1),
        ([75, 2], False, 2),
        ([75, 3], True, 3),
        ([75, 75], True, 75),
        # Warned while it was still importing.
        ([-10], True, 75),
    ],
)
def test_the_code_of_a_node_is_the_most_telling_of_its_ranks(codes, was_warned, expected):
    assert exit_code(codes, was_warned=was_warned) == expected


def test_ranks_are_bound_where_they_can_be(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert numa_options("node", "gpu07") == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/numactl")
    assert numa_options("exclusive", "gpu07") == ["--numa-binding=exclusive"]
    assert numa_options("none", "gpu07") == []
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert numa_options("node", "gpu07") == []
    assert capsys.readouterr().err == "gpu07: no numactl here, so ranks are not bound to CPUs\n"
