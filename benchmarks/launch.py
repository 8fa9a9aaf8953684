"""Starts a launcher of ranks, and leaves nothing of it running: ranks on a GPU would spoil the next measurement."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def launched(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """Start a command whose output goes to `log`; at the end it and all it has started are killed.

    SIGKILL, because ranks that are told to end would first save, and a launcher that is killed does not end its ranks.
    """
    with log.open("a") as stream:
        launcher = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        yield launcher
    finally:
        started = started_by(launcher.pid)
        launcher.kill()
        launcher.wait()
        for each in started:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def started_by(pid: int) -> list[int]:
    """Return the processes that one has started, and those that they have."""
    own = children(pid)
    return own + [each for child in own for each in started_by(child)]


def children(pid: int) -> list[int]:
    """Return the processes that one has started, in their order."""
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []  # it has ended
