"""Loggers of a user: they keep what they get, fail, or wait."""

from threading import Event
from typing import Any, ClassVar


class Recording:
    """Logger that keeps all calls of the process."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def start(self, run):
        self.calls.append(("start", run))

    def record(self, group, step, numbers):
        self.calls.append((group, step, numbers))

    def finish(self, summary):
        self.calls.append(("finish", summary))

    def close(self):
        self.calls.append(("close",))


class Failing(Recording):
    """Logger whose second record cannot be sent."""

    def record(self, group, step, numbers):
        super().record(group, step, numbers)
        if len(self.calls) > 2:
            raise ConnectionError("the server is gone\nsecond line")


class Waiting(Recording):
    """Logger that waits until `may_go_on`."""

    may_go_on = Event()

    def record(self, group, step, numbers):
        self.may_go_on.wait(60)
        super().record(group, step, numbers)


class NoLogger:
    """It lacks three of the four methods."""

    def start(self, run):
        pass


class NotMade(Recording):
    """Logger that needs what its environment lacks."""

    def __init__(self) -> None:
        raise KeyError("TOKEN")
