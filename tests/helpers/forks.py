"""Processes that start at once: forks of one process that has imported what the commands need."""

import multiprocessing as mp
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.helpers.forking.forked_python import serve

PYTHON_VARIABLE = "FORKED_PYTHON"
COMPOSED_VARIABLE = "COMPOSED_CONFIGURATIONS"
"""Directory of the configurations that the processes of a session have composed, each once."""
IMPORTS = [
    "nn.run",
    "preproc.criteo.pipeline",
    "preproc.table.pipeline.build",
    "tests.helpers.preproc_command",
]
"""What the server imports if no test that was collected has."""


def start_servers(directory: Path) -> None:
    """Fork Python's fork server, and the one of `forked_python`, from this process, which has imported what tests need.

    They serve it and all its forks, and end when those have. Python itself would start a server per process, which imports all
    again. What forks print goes to `forks.log` in `directory`.
    """
    resource_tracker.ensure_running()
    composed = directory / "composed"
    composed.mkdir()
    os.environ[COMPOSED_VARIABLE] = str(composed)
    alive, held = os.pipe()
    address = _fork_server(partial(_serve_ranks, alive), directory, held)
    _fork_server(partial(serve, alive=alive, python=directory / "python"), directory, held)
    os.environ[PYTHON_VARIABLE] = str(directory / "python")
    os.close(alive)
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, held
    # It would look for the server among this process's children and start another in a fork, which has none.
    server.ensure_running = resource_tracker.ensure_running


def _fork_server(run: Callable[[socket.socket], object], directory: Path, held: int) -> str:
    """Run a server in a fork and return its address."""
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")
    listener.bind(address)
    listener.listen(64)
    if os.fork() == 0:
        os.close(held)
        log = os.open(directory / "forks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        try:
            run(listener)
        finally:
            os._exit(0)
    listener.close()
    return address


def _serve_ranks(alive: int, listener: socket.socket) -> None:
    forkserver.main(listener.fileno(), alive, IMPORTS)


def other_threads() -> list[str]:
    """Return the names of this process's threads that a fork would lack while they may hold locks."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    names.remove(Path("/proc/self/comm").read_text().strip())
    # The allocator of PyArrow starts it again in a fork.
    return [name for name in names if name != "jemalloc_bg_thd"]


def python() -> str:
    """Return the program that starts commands as forks; Python itself on GPUs, whose processes must not fork."""
    return os.environ.get(PYTHON_VARIABLE, sys.executable)


def fork_context() -> ForkServerContext:
    """Return the start method of processes that are forks."""
    return mp.get_context("forkserver")
