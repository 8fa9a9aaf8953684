"""Process of a sweep that imports what runs need, once, and forks a process for each trial: `sweep.trial_process` starts it."""

import os
import runpy
import sys
from functools import partial
from multiprocessing.connection import Connection

from nn.multirun import end_process
from nn.shared_imports import import_for_runs
from sweep.trial_process import end_with_parent


def serve(pipe: Connection) -> None:
    """Start commands and tell exit codes until the sweep ends the connection; `TrialServer.ask` describes the requests."""
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            pipe.send(os.waitstatus_to_exitcode(status) if pid else None)
        elif pid := os.fork():
            pipe.send(pid)
        else:
            end_process(partial(_run, *request))


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Run a script as Python does, in a session of its own."""
    import torch

    end_with_parent()
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(log, "ab") as output:
        for descriptor, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"].split(",")[0]))
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import_for_runs()
    serve(Connection(sys.stdin.fileno()))
