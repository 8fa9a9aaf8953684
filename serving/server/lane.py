"""A thread for the Python objects of requests, so that the event loop answers others meanwhile."""

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

from serving.server.http_server import RequestError

T = TypeVar("T")
LONGEST_TURN_S = 1.0
"""A loop that has ended makes no turn."""


def too_late(deadline_s: float) -> RequestError:
    return RequestError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"the request has waited longer than {deadline_s * 1000:g} ms (deadline_ms); try again",
        headers={"Retry-After": "1"},
    )


@dataclass(slots=True)
class _Work:
    function: Callable[[], Any]
    arrived: float
    answer: asyncio.Future[Any]


class Lane:
    """One thread that works on one request at a time, so the objects of one are in memory.

    The interpreter runs one thread. A JSON decoder keeps it until it has ended, and the loop gives it away at each read of a
    socket. So the loop makes a turn between two requests, in which all who wait for it are served. `switch_s`: time after
    which other threads get the interpreter while this one works; None for Python's 5 ms.
    """

    def __init__(self, name: str, deadline_s: float, switch_s: float | None = None) -> None:
        self._name, self._deadline_s, self._switch_s = name, deadline_s, switch_s
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._is_ended = False
        self._has_turned = Event()

    def start(self) -> None:
        """Work in a thread until `stop`; answers belong to the running loop."""
        self._loop = asyncio.get_running_loop()
        Thread(target=self._run, name=self._name).start()

    def stop(self) -> None:
        """End after the request at work; what waits is dropped."""
        self._is_ended = True
        self._waiting.put(None)

    async def run(self, function: Callable[[], T]) -> T:
        """Return the result of a function, called in the thread of the lane.

        Raises RequestError: the request has waited too long. Raises Exception: as the function.
        """
        answer = self._loop.create_future()
        self._waiting.put(_Work(function, time.monotonic(), answer))
        try:
            return await answer
        finally:
            del answer  # an error has this frame, and so would hold itself

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None and not self._is_ended:
            # An answer that is done: the client has gone.
            if not work.answer.done():
                self._do(work)
            # Not until the next one: it holds the request.
            del work

    def _do(self, work: _Work) -> None:
        if time.monotonic() - work.arrived > self._deadline_s:
            self._finish(fail, work.answer, too_late(self._deadline_s))
            return
        try:
            value = self._call(work.function)
        except Exception as error:
            # Its frames have the request, which would live until the next collection of circles.
            self._finish(fail, work.answer, error.with_traceback(None))
        else:
            self._finish(settle, work.answer, value)

    def _call(self, function: Callable[[], Any]) -> Any:
        # The interval belongs to the process: a second thread that set it back would keep what this one had set.
        if self._switch_s is None:
            return function()
        before = sys.getswitchinterval()
        sys.setswitchinterval(self._switch_s)
        try:
            return function()
        finally:
            sys.setswitchinterval(before)

    def _finish(self, function: Callable[..., None], *args: object) -> None:
        """Call a function in the loop, and wait until its turn has ended."""
        self._has_turned.clear()
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(function, *args)
            # Who waits is resumed in the turn after the one that sets its answer.
            self._loop.call_soon_threadsafe(self._loop.call_soon, self._has_turned.set)
            self._has_turned.wait(LONGEST_TURN_S)


def settle(answer: asyncio.Future[Any], value: object) -> None:
    if not answer.done():
        answer.set_result(value)


def fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
