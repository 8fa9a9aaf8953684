"""The process of one trial: the ordinary command, its records as they are written, and its end."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nn.distributed.launcher import PR_SET_PDEATHSIG
from sweep.gpus import VISIBLE

SAVE_SECONDS = 300
"""Time that a process has, after SIGTERM, to save a checkpoint and exit."""
LAST_LINE_BYTES = 8192


Start = Callable[[Sequence[str], Mapping[str, str], Path], "TrialProcess"]
"""(command, environment, log) -> its process, whose output is appended to the log."""


ROOT = Path(__file__).resolve().parents[1]


class TrialServer:
    """Starts the commands of trials as forks of one process, `sweep.trial_server`, which has imported what runs need.

    They are no forks of this process, which has Optuna and its threads.
    """

    def __init__(self) -> None:
        self._pipe: Connection | None = None

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> "TrialProcess":
        """Start `python SCRIPT ...`, which ends with this process, also when this one is killed (Linux)."""
        if self._pipe is None:
            self._pipe, theirs = Pipe()
            # A session of its own: Ctrl-C on the terminal reaches this process alone, which then stops its trials.
            # Where the packages of this process lie, which in an installed copy is no folder of the path.
            folders = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sweep.trial_server"],
                env={**environment, "PYTHONPATH": os.pathsep.join(folders)},
                stdin=theirs.fileno(),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            theirs.close()
        return TrialProcess(self, self.ask((command[1:], dict(environment), str(log))))

    def close(self) -> None:
        """End the server, whose processes must have ended."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.wait()

    def ask(self, request: Any) -> Any:
        """Return the id of a process that it starts, or the exit code of the process with an id, None while it runs."""
        assert self._pipe is not None
        try:
            self._pipe.send(request)
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            text = "the process that starts trials has ended; the same command resumes"
            raise ChildProcessError(text) from None


@dataclass(slots=True)
class TrialProcess:
    server: TrialServer
    pid: int
    _exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, -N after signal N; None while it runs."""
        if self._exit_code is None:
            self._exit_code = self.server.ask(self.pid)
        return self._exit_code


def end_with_parent() -> None:
    """Let this process end when its parent does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def environment_of(gpu: str | None, parallel: int) -> dict[str, str]:
    """Return the environment of a trial: its GPU, if any, and its share of the CPU cores."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // parallel))
    # As every run sets the second one, before torch is imported.
    environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    # Reports to a tuning service are of its own trials, which this sweep's are not.
    for name in ("CLOUD_ML_HP_METRIC_FILE", "CLOUD_ML_TRIAL_ID"):
        environment.pop(name, None)
    return environment if gpu is None else environment | {VISIBLE: gpu}


def stop(processes: Sequence["TrialProcess"], seconds: float = SAVE_SECONDS) -> None:
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


def _signal(process: TrialProcess, signum: signal.Signals) -> None:
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
