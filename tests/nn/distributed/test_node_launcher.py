"""`python -m nn.distributed.node_launcher` with ranks that end in different ways: exit codes, restarts and logs."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from nn.distributed.node_launcher import exit_code, main, numa_options
from tests.helpers.forks import fork_context

# Rank that ends by its arguments: `exit N`, `kill` once within a group, `wait` for the signal. It prints each start.
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


@dataclass(frozen=True, slots=True)
class Node:
    """A running `python -m nn.distributed.node_launcher`, with the log of its output and its ranks' output."""

    process: BaseProcess
    log: Path

    def ended(self) -> tuple[int | None, str]:
        """Wait for its end; return exit code and output."""
        self.process.join(120)
        return self.process.exitcode, self.log.read_text()


@contextmanager
def started(directory: Path, *how: str) -> Iterator[Node]:
    """Start two ranks under `nn.distributed.node_launcher`, with one restart."""
    (directory / "rank.py").write_text(RANK)
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    arguments = [directory / "logs", "node", *flags, directory / "rank.py", *how]
    log = directory / "log"
    # Forked from a process that has imported torch.
    context = fork_context()
    process = context.Process(target=run_node, args=(list(map(str, arguments)), str(log)))
    process.start()
    try:
        yield Node(process, log)
    finally:
        # Its ranks end with it: torchrun ends them at SIGTERM.
        process.terminate()
        process.join(60)
        process.kill()


def run_node(arguments: list[str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ |= {"OMP_NUM_THREADS": "1", "SLURMD_NODENAME": "gpu07"}
    sys.exit(main(arguments))


def ended(directory: Path, *how: str) -> tuple[int | None, str]:
    """Return exit code and output of a node."""
    with started(directory, *how) as node:
        return node.ended()


def test_a_node_of_successful_ranks_exits_with_0_and_has_logs_per_rank(tmp_path):
    code, out = ended(tmp_path, "end")
    assert code == 0, out
    for rank in range(2):
        (log,) = (tmp_path / "logs" / "gpu07").glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == f"rank {rank} start 0\n"
        assert log.with_name("stderr.log").read_text() == "to stderr\n"
        assert f"rank {rank} start 0" in out, "the job's own log has it too"


def test_a_final_error_is_not_restarted(tmp_path):
    code, out = ended(tmp_path, "exit", "2")
    assert code == 2
    assert "gpu07: rank 1 ended with exit code 2" in out
    assert "start 1" not in out


def test_a_killed_rank_is_restarted_with_the_others(tmp_path):
    """Rank 0 holds the rendezvous of the process group."""
    code, out = ended(tmp_path, "kill", "0")
    assert code == 0, out
    assert {f"rank {rank} start {start}" for rank in (0, 1) for start in (0, 1)} <= {
        line.split("]:")[-1] for line in out.splitlines()
    }


def test_ranks_that_lost_others_are_restarted_and_the_node_exits_with_1(tmp_path):
    code, out = ended(tmp_path, "exit", "75")
    assert code == 1
    assert "rank 1 start 1" in out


def test_a_preemption_signal_is_forwarded_and_the_node_waits(tmp_path):
    with started(tmp_path, "wait") as node:
        logs = tmp_path / "logs"
        deadline = time.monotonic() + 60
        while sum(path.stat().st_size > 0 for path in logs.glob("**/stderr.log")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # To the node's process alone, as where SLURM follows processes by cgroups.
        os.kill(node.process.pid, signal.SIGUSR1)
        code, out = node.ended()
    assert code == 75, out
    assert "start 1" not in out


@pytest.mark.parametrize(
    ("codes", "was_preempted", "expected"),
    [
        ([-9], False, 1),
        ([75, -9], False, 1),
        ([75, 2], False, 2),
        ([75, 3], True, 3),
        ([75, 75], True, 75),
        # Preempted during imports.
        ([-10], True, 75),
    ],
)
def test_the_exit_code_of_a_node_is_the_most_specific_of_its_ranks(codes, was_preempted, expected):
    assert exit_code(codes, was_preempted=was_preempted) == expected


def test_help_and_missing_arguments_print_the_usage(capsys):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith(
        "usage: python -m nn.distributed.node_launcher LOG_DIR NUMA_BINDING "
    )
    assert main(["logs"]) == 2
    wanted = "error: got 1 arguments, want at least 3\nusage: python -m nn.distributed.node_launcher LOG_DIR "
    assert capsys.readouterr().err.startswith(wanted)


def test_ranks_are_bound_to_cpus_if_possible(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert numa_options("node", "gpu07") == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/numactl")
    assert numa_options("exclusive", "gpu07") == ["--numa-binding=exclusive"]
    assert numa_options("none", "gpu07") == []
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert numa_options("node", "gpu07") == []
    assert (
        capsys.readouterr().err
        == "gpu07: numactl is not installed, so ranks are not bound to CPUs\n"
    )
