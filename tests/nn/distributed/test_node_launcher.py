"""`python -m nn.distributed.node_launcher` with ranks that end in different ways: exit codes, restarts and logs."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from nn.distributed import node_launcher
from nn.distributed.node_agent import exit_code
from nn.distributed.node_launcher import (
    count_start,
    main,
    newest_step,
    numa_options,
    shows_progress,
)
from tests.helpers.command import kept_signals
from tests.helpers.forks import fork_context

# Rank that ends by its arguments: `exit N`, `bind` to the store's port, `kill` once within a group, `wait` for the signal. It
# prints each start.
RANK = """\
import os, signal, socket, sys, time
rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("rank", rank, "start", start, flush=True)
print("to stderr", file=sys.stderr, flush=True)
how, *numbers = sys.argv[1:]
if how == "bind":
    socket.socket().bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
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
def started(directory: Path, *how: str, flags: Sequence[str] = ("--standalone",)) -> Iterator[Node]:
    """Start two ranks under `nn.distributed.node_launcher`, with one restart."""
    (directory / "rank.py").write_text(RANK)
    flags = [*flags, "--nproc-per-node=2", "--max-restarts=1"]
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


@pytest.mark.parametrize(
    ("binding", "option", "message"),
    [
        (
            *("node", "--nproc-per-node=gpu"),
            "no GPU is visible; ask for GPUs (sbatch --gpus-per-node 8), or set RANKS_PER_NODE to train on CPUs",
        ),
        (
            *("nodes", "--nproc-per-node=2"),
            "NUMA_BINDING=nodes: expected one of node, socket, exclusive, core-complex, none",
        ),
        ("node", "--nproc-per-node=two", "Unsupported nproc_per_node value: two"),
    ],
)
def test_what_cannot_heal_ends_with_2_and_one_line(
    binding, option, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with kept_signals():
        assert main([str(tmp_path), binding, option, "dlrm.py"]) == 2
    assert capsys.readouterr().err == f"error: node gpu07: {message}\n"
    assert (tmp_path / "ended_with").read_text() == "2\n"


def test_a_missing_module_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(node_launcher, "find_spec", lambda name: None)
    with kept_signals():
        assert main([str(tmp_path), "node", "--nproc-per-node=1", "dlrm.py"]) == 2
    assert f"{sys.executable} has no module hydra; install the project" in capsys.readouterr().err


def test_starts_that_train_nothing_are_counted(tmp_path):
    run_dir = tmp_path / "a run"
    arguments = ["--nnodes=2", "dlrm.py", f"run_dir='{run_dir}'"]
    assert newest_step(["dlrm.py"]) == newest_step(arguments) == 0
    for name in ("step_90", "step_120", ".step_130.unfinished", "step_130.damaged"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
    assert newest_step(arguments) == 120
    assert newest_step([*arguments[:-1], f"++{arguments[-1]}"]) == 120
    for step in (0, 0, 60, 60):
        count_start(tmp_path / "job", step, max_requeues=2)
    count_start(tmp_path / "job", 120, 2)
    for _ in range(2):
        count_start(tmp_path / "job", 120, 2)
    with pytest.raises(
        ValueError, match="3 starts in a row ended at step 120, at which they began"
    ):
        count_start(tmp_path / "job", 120, 2)


@pytest.mark.parametrize(
    ("arguments", "saved", "counts"),
    [
        ([], "", True),
        (["mode=train", "checkpoint.mirror=null"], "", True),
        (["checkpoint.mirror=s3://b/a"], "", False),
        (["+checkpoint.mirror='s3://b/a'"], "", False),
        (["mode=eval"], "", False),
        (["mode=predict", "output=a.csv"], "", False),
        ([], "mode: train\ncheckpoint:\n  mirror: null\n", True),
        ([], "mode: train\ncheckpoint:\n  mirror: s3://b/a\n", False),
        (["checkpoint.mirror=null"], "checkpoint:\n  mirror: s3://b/a\n", True),
        ([], "mode: eval\n", False),
    ],
)
def test_starts_whose_progress_is_not_in_the_run_directory_are_not_counted(
    arguments, saved, counts, tmp_path
):
    (tmp_path / "config.yaml").write_text(saved)
    named = ["--nnodes=2", "dlrm.py", f"config={tmp_path}/config.yaml", *arguments]
    assert shows_progress(named) == counts


def test_a_port_that_is_held_ends_the_start_at_once(tmp_path):
    """The holder accepts and is silent: a client of the store would wait for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{holder.getsockname()[1]}"
        code, out = ended(tmp_path, "end", flags=["--nnodes=1", "--rdzv-backend=c10d", endpoint])
    assert code == 1
    assert "gpu07: the ranks cannot meet (" in out
    assert "EADDRINUSE" in out


def test_a_warning_before_there_are_ranks_ends_the_launcher(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(node_launcher, "_run", lambda *_: signal.raise_signal(signal.SIGUSR1))
    with kept_signals(), pytest.raises(SystemExit, match="75"):
        main(["logs", "node", "dlrm.py"])
    assert capfd.readouterr().err == "stopped by SIGUSR1 before the ranks were started\n"


def run_node(arguments: list[str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ |= {"OMP_NUM_THREADS": "1", "SLURMD_NODENAME": "gpu07", "SLURM_NODEID": "0"}
    sys.exit(main(arguments))


def ended(directory: Path, *how: str, **options: Sequence[str]) -> tuple[int | None, str]:
    """Return exit code and output of a node."""
    with started(directory, *how, **options) as node:
        return node.ended()


def test_a_node_of_successful_ranks_exits_with_0_and_has_logs_per_rank(tmp_path):
    code, out = ended(tmp_path, "end")
    assert code == 0, out
    for rank in range(2):
        (log,) = (tmp_path / "logs" / "gpu07").glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == f"rank {rank} start 0\n"
        assert log.with_name("stderr.log").read_text() == "to stderr\n"
        assert f"rank {rank} start 0" in out, "the job's own log has it too"


def test_nobody_else_gets_the_port_of_the_store_before_it_listens(tmp_path):
    code, out = ended(tmp_path, "bind")
    assert code == 1
    assert "Address already in use" in out


def test_a_final_error_is_not_restarted(tmp_path):
    code, out = ended(tmp_path, "exit", "2")
    assert code == 2
    assert "gpu07: rank 1 ended with exit code 2" in out
    assert "start 1" not in out
    assert (tmp_path / "logs" / "ended_with").read_text() == "2\n", (
        "srun may report 137 of another node"
    )


@pytest.mark.doors
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
        # A step hung; the launcher ends the other rank.
        ([76, -15], False, 76),
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
