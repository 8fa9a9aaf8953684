"""Several processes for the tests of one pytest command: forks of the process that has imported and collected all.

A worker of pytest-xdist imports torch and collects seven thousand tests again, which costs some 30 seconds of CPU time each.
Workers here take whole files, in order, and send their reports to the process that prints them.
"""

import multiprocessing as mp
import os
import pickle
import signal
import struct
import sys
import warnings
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

FILE = struct.Struct("H")
"""Number of a file in the queue; it and the queue's 64 KiB allow for 32,768 files."""
GRACE_S = 20
"""Time for workers to tear their fixtures down after an interruption."""


def run_files(session: pytest.Session, num_workers: int) -> None:
    """Run the collected tests in `num_workers` processes; a file's tests stay in one of them."""
    files = [list(tests) for _, tests in groupby(session.items, key=lambda item: item.path)]
    # A write and the reads of few bytes are atomic, so a pipe is the queue of all workers.
    queue, filled = os.pipe()
    os.write(filled, b"".join(FILE.pack(number) for number in range(len(files))))
    os.close(filled)
    base = session.config._tmp_path_factory.getbasetemp()
    left = {item.nodeid for item in session.items}
    sys.stdout.flush()
    workers = []
    for number in range(num_workers):
        pipe, theirs = mp.Pipe(duplex=False)
        directory = base / f"worker{number}"
        process = mp.get_context("fork").Process(
            target=_work, args=(session, files, queue, theirs, directory)
        )
        process.start()
        theirs.close()
        workers.append(_Worker(process, pipe))
    os.close(queue)
    try:
        _print_reports(session, workers, left)
    finally:
        _stop(workers)
    if left:
        session.shouldfail = f"{len(left)} tests did not run, since their worker died"
        raise session.Failed(session.shouldfail)


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    running: list[tuple[str, Any]] = field(default_factory=list)


def _print_reports(session: pytest.Session, workers: list[_Worker], left: set[str]) -> None:
    """Hand on what workers report until all have ended."""
    hook = session.config.hook
    open_pipes = {worker.pipe: worker for worker in workers}
    while open_pipes:
        for pipe in wait(list(open_pipes)):
            worker = open_pipes[pipe]
            try:
                name, values = pickle.loads(pipe.recv_bytes())
            except EOFError:
                del open_pipes[pipe]
                worker.process.join()
                if worker.running:
                    _report_death(session, worker, left)
                continue
            if name == "start":
                worker.running = [values]
                hook.pytest_runtest_logstart(nodeid=values[0], location=values[1])
            elif name == "finish":
                worker.running = []
                left.discard(values[0])
                hook.pytest_runtest_logfinish(nodeid=values[0], location=values[1])
            elif name == "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=values)
            else:
                report = hook.pytest_report_from_serializable(config=session.config, data=values)
                hook.pytest_runtest_logreport(report=report)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


def _report_death(session: pytest.Session, worker: _Worker, left: set[str]) -> None:
    """Let the test fail during which a worker died."""
    nodeid, location = worker.running[0]
    text = f"the worker died with exit code {worker.process.exitcode} (negative: a signal) during {nodeid}"
    report = pytest.TestReport(nodeid, location, {}, "failed", text, "call")
    session.config.hook.pytest_runtest_logreport(report=report)
    left.discard(nodeid)


def _stop(workers: list[_Worker]) -> None:
    """Interrupt the workers that still run, so that they tear down their fixtures, and kill those that do not end."""
    running = [worker.process for worker in workers if worker.process.is_alive()]
    for process in running:
        os.kill(process.pid, signal.SIGINT)
    for process in running:
        process.join(GRACE_S)
        process.kill()


class _Sender:
    """Plugin of a worker: sends what the terminal would print to the first process."""

    def __init__(self, pipe: Connection, config: pytest.Config) -> None:
        self.pipe, self.config = pipe, config

    def send(self, name: str, values: Any) -> None:
        self.pipe.send_bytes(pickle.dumps((name, values)))

    def pytest_runtest_logstart(self, nodeid: str, location: tuple) -> None:
        self.send("start", (nodeid, location))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple) -> None:
        self.send("finish", (nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self.send("report", hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        text = warnings.WarningMessage(
            f"{warning_message.category.__name__}: {warning_message.message}",
            UserWarning,
            warning_message.filename,
            warning_message.lineno,
        )
        values = {"when": when, "nodeid": nodeid, "location": location}
        self.send("warning", values | {"warning_message": text})


def _work(
    session: pytest.Session,
    files: list[list[pytest.Item]],
    queue: int,
    pipe: Connection,
    directory: Any,
) -> None:
    """Run the files that the queue gives, as pytest's own loop does."""
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    # The files of captured output are shared with the first process; so are the names of temporary directories.
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    directory.mkdir()
    config._tmp_path_factory._basetemp = directory
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(pipe, config), "sender")
    tests = _next_file(files, queue)
    while tests:
        following = []
        for index, item in enumerate(tests):
            if index + 1 == len(tests):
                following = _next_file(files, queue)
            next_item = (tests[index + 1 :] or following or [None])[0]
            config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        tests = following


def _next_file(files: list[list[pytest.Item]], queue: int) -> list[pytest.Item]:
    number = os.read(queue, FILE.size)
    return files[FILE.unpack(number)[0]] if number else []
