"""Dynamic batching: requests that arrive while a batch is scored share the next one."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

import numpy as np

from serving.inference.model_rows import Rows
from serving.inference.versions import Version
from serving.server.http_server import RequestError


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of batches and of the queue.

    Attributes:
        max_batch: rows of a batch.
        max_queue: rows that may wait.
        delay_s: longest time that a request waits for others.
        deadline_s: longest time that a request may wait at all.
    """

    max_batch: int
    max_queue: int
    delay_s: float
    deadline_s: float


@dataclass(slots=True)
class _Waiting:
    """A part of a request, of at most one batch."""

    version: Version
    rows: Rows
    arrived: float
    answer: "asyncio.Future[np.ndarray]" = field(repr=False)


class Batcher:
    """Queue of one executor thread, which scores one batch at a time.

    A batch has the rows of one version, so a response is that of the version it names.

    Args:
        limits: of batches and of the queue.
        executor: of a single thread.
        measure: called with the rows and the seconds of every batch.
    """

    def __init__(
        self, limits: BatchLimits, executor: Executor, measure: Callable[[int, float], None]
    ) -> None:
        self._limits, self._executor, self._measure = limits, executor, measure
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self.queued_rows = 0

    async def scores(self, version: Version, rows: Rows) -> np.ndarray:
        """Return the scores of rows, float32 [B, O]; more rows than a batch has are split.

        Raises:
            RequestError: the queue is full, or the rows have waited too long.
        """
        num_rows, limits = len(rows), self._limits
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
        now, loop = time.monotonic(), asyncio.get_running_loop()
        size = limits.max_batch
        parts = (
            [rows]
            if num_rows <= size
            else [
                rows.part(first, min(first + size, num_rows)) for first in range(0, num_rows, size)
            ]
        )
        waiting = [_Waiting(version, part, now, loop.create_future()) for part in parts]
        self._waiting.extend(waiting)
        self.queued_rows += num_rows
        self._arrived.set()
        if len(waiting) == 1:
            return await waiting[0].answer
        answers = await asyncio.gather(*(part.answer for part in waiting), return_exceptions=True)
        scores = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            scores.append(answer)
        return np.concatenate(scores)

    async def run(self) -> None:
        """Score batches until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._next_batch()
            if not batch:
                continue
            started = time.monotonic()
            score = partial(_score, batch[0].version, [part.rows for part in batch])
            try:
                scores = await loop.run_in_executor(self._executor, score)
            except Exception as error:
                for part in batch:
                    _fail(part, error)
                continue
            self._measure(len(scores), time.monotonic() - started)
            first = 0
            for part in batch:
                last = first + len(part.rows)
                if not part.answer.done():
                    part.answer.set_result(scores[first:last])
                first = last

    async def _next_batch(self) -> list[_Waiting]:
        """Wait for rows; return those of the next batch, which may be none if all of them have waited too long."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        limits = self._limits
        end = self._waiting[0].arrived + limits.delay_s
        while self.queued_rows < limits.max_batch and (left := end - time.monotonic()) > 0:
            self._arrived.clear()
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                break
        batch: list[_Waiting] = []
        num_rows, latest = 0, time.monotonic() - limits.deadline_s
        while self._waiting:
            part = self._waiting[0]
            if batch and (
                part.version is not batch[0].version or num_rows + len(part.rows) > limits.max_batch
            ):
                break
            self._waiting.popleft()
            self.queued_rows -= len(part.rows)
            if part.answer.done():
                continue  # the client has gone, or another part of its request was refused
            if part.arrived < latest:
                _fail(
                    part,
                    RequestError(
                        HTTPStatus.SERVICE_UNAVAILABLE,
                        f"the request has waited longer than {limits.deadline_s * 1000:g} ms (deadline_ms); try again",
                        headers={"Retry-After": "1"},
                    ),
                )
                continue
            batch.append(part)
            num_rows += len(part.rows)
        return batch


def _score(version: Version, rows: list[Rows]) -> np.ndarray:
    return version.model.scores(Rows.joined(rows)).numpy()


def _fail(part: _Waiting, error: Exception) -> None:
    if not part.answer.done():
        part.answer.set_exception(error)
