"""Loggers that run beside the training: each has a thread of its own, and its errors end the logger only."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from logging import Logger
from queue import SimpleQueue
from threading import Thread
from typing import Any

from configs.messages import on_one_line, shortened
from nn.loggers.run_logger import LoggedRun, RunLogger

CLOSE_WITHIN_S = 20.0
"""Time in which all loggers of a run must write their last records; torchrun kills ranks 30 s after a signal."""


class Loggers:
    """The loggers of a run, which training calls without waiting for them; only rank 0 has any.

    Each that fails gives one warning. They must write their last records within `close_within_s`.
    """

    def __init__(
        self,
        loggers: Mapping[str, RunLogger],
        logger: Logger,
        close_within_s: float = CLOSE_WITHIN_S,
    ) -> None:
        self._workers = [_Worker(name, target) for name, target in loggers.items()]
        self._logger = logger
        self._close_within_s = close_within_s

    def start(self, run: LoggedRun) -> None:
        self._call(lambda target: target.start(run))

    def record(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        self._call(lambda target: target.record(group, step, numbers))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._call(lambda target: target.finish(summary))

    def close(self) -> None:
        """Wait until all records are written, and close the loggers."""
        for worker in self._workers:
            worker.calls.put(None)
        end = time.monotonic() + self._close_within_s
        for worker in self._workers:
            worker.thread.join(max(end - time.monotonic(), 0))
        self._report_errors()
        late = [worker.name for worker in self._workers if worker.thread.is_alive()]
        if late:
            self._logger.warning(
                f"log.loggers: {', '.join(late)} did not end within {self._close_within_s:g} s; the last records may be "
                "missing there"
            )
        self._workers = []

    def _call(self, function: Callable[[RunLogger], None]) -> None:
        for worker in self._workers:
            worker.calls.put(function)
        self._report_errors()

    def _report_errors(self) -> None:
        """Print a warning for each logger that has failed since, in the thread that prints everything else."""
        for worker in self._workers:
            error, worker.error = worker.error, None
            if error is not None:
                self._logger.warning(
                    f"log.loggers: {worker.name} has failed and gets no more records, training continues: {error}"
                )


class _Worker:
    """Thread of one logger; it ends with the process, whatever the logger waits for."""

    def __init__(self, name: str, target: RunLogger) -> None:
        self.name = name
        self.calls: SimpleQueue[Callable[[RunLogger], None] | None] = SimpleQueue()
        self.error: str | None = None
        self._target = target
        self.thread = Thread(target=self._run, name=f"logger-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        has_failed = False
        while (call := self.calls.get()) is not None:
            if has_failed:
                continue
            try:
                call(self._target)
            # A library's SystemExit would end the thread without a word.
            except BaseException as error:
                has_failed = True
                self.error = _text(error)
        try:
            self._target.close()
        except BaseException as error:
            if not has_failed:
                self.error = _text(error)


def _text(error: BaseException) -> str:
    lines: Iterable[str] = (line.strip() for line in str(error).splitlines())
    text = next(filter(None, lines), "")
    with suppress(Exception):
        text = shortened(on_one_line(text), 300)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
