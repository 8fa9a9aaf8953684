"""Starts a launcher of ranks, and leaves nothing of it running: ranks on a GPU would spoil the next measurement."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def launched(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """Start a command whose output goes to `log`; if it is still there at the end, it and all it has started are killed.

    SIGKILL, because ranks that are told to end would first save, and a launcher that is killed does not end its ranks.
    """
    with log.open("a") as stream:
        launcher = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            # So that it starts nothing while it is looked at.
            launcher.send_signal(signal.SIGSTOP)
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
    """Return the processes that one has started, the last one last; none if it has ended."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            found += [int(each) for each in path.read_text().split()]
    return sorted(found)
