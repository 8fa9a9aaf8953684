"""Dynamic batching: requests that arrive while a batch is scored share the next one."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np

from serving.inference.model_rows import Rows
from serving.inference.versions import Version
from serving.server.http_server import RequestError
from serving.server.lane import fail, settle, too_late


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_batch: int
    max_queue: int  # rows that may wait
    delay_s: float  # longest time that a request waits for others
    deadline_s: float  # longest time that a request may wait at all


@dataclass(slots=True)
class _Waiting:
    """A part of a request, of at most one batch."""

    version: Version
    num_rows: int
    read: Callable[[], Rows]
    arrived: float
    answer: asyncio.Future[np.ndarray]


class Batcher:
    """Queue of one thread, which scores one batch at a time.

    A batch has the rows of one version of one model, so a response is that of the version it names. The thread takes what
    waits as soon as it is free, without a turn of the event loop: a batch is handed over twice, once from the loop and once
    back. `measure`: called in the loop with the rows and the seconds of every batch.
    """

    def __init__(self, limits: BatchLimits, measure: Callable[[int, float], None]) -> None:
        self._limits, self._measure = limits, measure
        self._waiting: SimpleQueue[_Waiting | None] = SimpleQueue()
        # Taken from there, and left to later batches; oldest first.
        self._left: deque[_Waiting] = deque()
        # Each is counted by one thread: the loop, and the one that scores.
        self._rows_put = self._rows_taken = 0
        self._is_ended = False

    @property
    def queued_rows(self) -> int:
        return self._rows_put - self._rows_taken

    def start(self) -> None:
        """Score in a thread until `stop`; answers belong to the running loop."""
        self._loop = asyncio.get_running_loop()
        Thread(target=self._run, name="scorer").start()

    def stop(self) -> None:
        """End after the batch that is scored; what waits is dropped."""
        self._is_ended = True
        self._waiting.put(None)

    def check(self, num_rows: int) -> None:
        """Refuse rows for which the queue has no room; any thread may ask before it works on them.

        Raises RequestError: the queue is full, or can never hold so many.
        """
        limits = self._limits
        if num_rows > limits.max_queue:
            raise RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{num_rows:,} rows, want at most {limits.max_queue:,} (max_queue); send several requests",
            )
        if self.queued_rows + num_rows > limits.max_queue:
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.queued_rows:,} rows wait already, of at most {limits.max_queue:,} (max_queue); try again",
                headers={"Retry-After": "1"},
            )

    async def scores(self, version: Version, num_rows: int, read: Callable[[], Rows]) -> np.ndarray:
        """Return the scores of rows, float32 [B, O]; more rows than a batch has are split.

        B is `num_rows`. `read`: returns the rows. It is called in the thread that scores: checks of every id are a third of
        the loop's time. Raises RequestError: the queue is full, or the rows have waited too long. Raises Exception: as `read`.
        """
        self.check(num_rows)
        size = self._limits.max_batch
        if num_rows <= size:
            return await self._put(version, num_rows, read)
        rows = read()
        parts = [rows.part(i, min(i + size, num_rows)) for i in range(0, num_rows, size)]
        waiting = [self._put(version, len(part), partial(Rows.joined, [part])) for part in parts]
        # Of all parts, even after an error: their rows are in memory until then.
        found = await asyncio.gather(*waiting, return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return np.concatenate([result for result in found if isinstance(result, np.ndarray)])

    def _put(
        self, version: Version, num_rows: int, read: Callable[[], Rows]
    ) -> asyncio.Future[np.ndarray]:
        part = _Waiting(version, num_rows, read, time.monotonic(), self._loop.create_future())
        self._rows_put += num_rows
        self._waiting.put(part)
        return part.answer

    def _run(self) -> None:
        while not self._is_ended:
            self._score_batch()

    def _score_batch(self) -> None:
        """Wait for a batch, score it and give its answers to the loop; keep nothing of it, so a version can end."""
        batch = self._without_late(self._next_batch(), time.monotonic())
        timely, rows = self._read(batch)
        if not timely:
            return
        started = time.monotonic()
        try:
            scores = timely[0].version.model.scores(*rows).numpy()
        except Exception as error:
            self._refuse(timely, error)
        else:
            self._call(self._answer, timely, scores, time.monotonic() - started)

    def _next_batch(self) -> list[_Waiting]:
        """Wait for rows; return those of the next batch, which are none at the end: of the version that has waited longest."""
        part = self._left.popleft() if self._left else self._waiting.get()
        batch, others = list[_Waiting](), deque[_Waiting]()
        num_rows, limits = 0, self._limits
        while part is not None:
            if batch and part.version is not batch[0].version:
                others.append(part)
            elif num_rows + part.num_rows > limits.max_batch:
                self._left.appendleft(part)
                break
            else:
                batch.append(part)
                num_rows += part.num_rows
                self._rows_taken += part.num_rows
                if num_rows == limits.max_batch:
                    break
            end = batch[0].arrived + limits.delay_s
            part = self._left.popleft() if self._left else self._next(end)
        self._left.extendleft(reversed(others))
        return batch

    def _next(self, end: float) -> _Waiting | None:
        """Return what waits, or comes until `end`; None if nothing does."""
        left = end - time.monotonic()
        try:
            return self._waiting.get_nowait() if left <= 0 else self._waiting.get(timeout=left)
        except Empty:
            return None

    def _without_late(self, batch: list[_Waiting], now: float) -> list[_Waiting]:
        """Refuse the parts that have waited too long; return the others whose answers are wanted."""
        deadline_s = self._limits.deadline_s
        # An answer that is done: the client has gone, or another part of its request was refused.
        wanted = [part for part in batch if not part.answer.done()]
        late = [part for part in wanted if part.arrived < now - deadline_s]
        if late:
            self._refuse(late, too_late(deadline_s))
        return [part for part in wanted if part.arrived >= now - deadline_s]

    def _read(self, batch: list[_Waiting]) -> tuple[list[_Waiting], list[Rows]]:
        """Return the parts whose inputs are valid, with their rows; refuse the others."""
        read, rows = [], []
        for part in batch:
            try:
                rows.append(part.read())
            except Exception as error:
                self._refuse([part], error)
            else:
                read.append(part)
        return read, rows

    def _refuse(self, parts: list[_Waiting], error: Exception) -> None:
        for part in parts:
            # Its frames have the request, which would live until the next collection of circles.
            self._call(fail, part.answer, error.with_traceback(None))

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(function, *args)

    def _answer(self, batch: list[_Waiting], scores: np.ndarray, seconds: float) -> None:
        self._measure(len(scores), seconds)
        first = 0
        for part in batch:
            last = first + part.num_rows
            settle(part.answer, scores[first:last])
            first = last
