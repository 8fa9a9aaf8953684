"""Coroutines that resume where their result is set: a wait takes no task, no future and no turn of the event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Result(Generic[T]):
    """A value that one coroutine of a `Runner` waits for; it is set in the thread of that coroutine.

    `is_done`: whether it is set, or nobody waits for it any more.
    """

    __slots__ = ("_error", "_resume", "_value", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._value: T
        self._error: Exception | None = None
        self._resume: Callable[[], None] | None = None

    def set(self, value: T) -> None:
        """Set the value, and run the coroutine that waits to its next wait."""
        self._value = value
        self._end()

    def fail(self, error: Exception) -> None:
        """Raise an error where the coroutine waits."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self.is_done = True
        if self._resume is not None:
            self._resume()

    def __await__(self) -> Generator["Result[T]", None, T]:
        if not self.is_done:
            try:
                yield self
            finally:
                self.is_done = True
        error, self._error = self._error, None
        if error is not None:
            # Its traceback has the frames, and so the bodies, of all that handled the request: neither this frame nor the
            # result may hold it, or they would live until the next collection of circles.
            try:
                raise error
            finally:
                del error
        return self._value


class Runner:
    """A coroutine that runs until it ends or is cancelled."""

    def __init__(self, coroutine: Coroutine[Result[Any], None, None]) -> None:
        self._coroutine = coroutine

    def run(self) -> None:
        """Run to the next wait."""
        self._run(self._coroutine.send, None)

    def cancel(self) -> None:
        """Raise `asyncio.CancelledError` where the coroutine waits."""
        self._run(self._coroutine.throw, asyncio.CancelledError())

    def _run(self, step: Callable[[Any], Result[Any]], value: object) -> None:
        try:
            waited = step(value)
        except StopIteration:
            return
        waited._resume = self.run
