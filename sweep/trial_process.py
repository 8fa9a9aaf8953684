"""The process of one trial: the ordinary command, its records as they are written, and its end."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from nn.distributed.launcher import PR_SET_PDEATHSIG
from sweep.gpus import VISIBLE

SAVE_SECONDS = 300
"""Time that a process has, after SIGTERM, to save a checkpoint and exit."""
LAST_LINE_BYTES = 8192


class Process(Protocol):
    """A process that has been started, such as `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, -N after signal N; None while it runs."""


Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""(command, environment, log) -> its process, whose output is appended to the log."""


def start_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start a command that ends with this process, also when this one is killed (Linux).

    It has a session of its own, so that Ctrl-C on the terminal reaches this process alone, which then stops its trials.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def end_with_parent() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def environment_of(gpu: str | None, parallel: int) -> dict[str, str]:
    """Return the environment of a trial: its GPU, if any, and its share of the CPU cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // parallel)), **os.environ}
    # Reports to a tuning service are of its own trials, which this sweep's are not.
    for name in ("CLOUD_ML_HP_METRIC_FILE", "CLOUD_ML_TRIAL_ID"):
        environment.pop(name, None)
    return environment if gpu is None else environment | {VISIBLE: gpu}


def stop(processes: Sequence[Process], seconds: float = SAVE_SECONDS) -> None:
    """Ask processes to save a checkpoint and exit, and kill those that have not after some time."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            for process in processes:
                _signal(process, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.05)


def _signal(process: Process, signum: signal.Signals) -> None:
    if process.poll() is None:
        os.kill(process.pid, signum)


def last_line(log: Path) -> str:
    """Return the last line of a log, which is the error of a command that failed; empty without one."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - LAST_LINE_BYTES))
            lines = stream.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    filled = [line.strip() for line in lines if line.strip()]
    return filled[-1].rpartition("\r")[2].removeprefix("error: ") if filled else ""
