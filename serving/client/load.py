"""Load on a server: so many requests at a time, or so many per second; the latency of each request."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from serving.client.connection import Address, Connection, ServerError

MOST_CONNECTIONS = 512


@dataclass(frozen=True, slots=True)
class Body:
    content: bytes
    header_length: int | None  # bytes of JSON before binary tensors; None if there are none


@dataclass(slots=True)
class Measured:
    latencies: list[float] = field(default_factory=list)  # seconds of each answered request
    failed: int = 0
    error: str | None = None
    seconds: float = 0.0
    client_seconds: float = 0.0  # of CPU that this process took

    async def send(self, connection: Connection, path: str, body: Body, due: float) -> None:
        try:
            reply = await connection.call(path, body.content, body.header_length)
            error = None if reply.status == 200 else f"{reply.status}, {reply.message}"
        except ServerError as failure:
            error = str(failure)
        if error is None:
            self.latencies.append(time.perf_counter() - due)
            return
        self.failed += 1
        self.error = self.error or error


async def closed_load(
    address: Address, path: str, bodies: Sequence[Body], concurrency: int, seconds: float
) -> Measured:
    """Keep `concurrency` requests under way for some seconds: each connection sends the next one when it has an answer."""
    measured, order = Measured(), itertools.cycle(bodies)
    connections = [Connection(address) for _ in range(concurrency)]
    end = time.perf_counter() + seconds

    async def send(connection: Connection) -> None:
        while (started := time.perf_counter()) < end:
            await measured.send(connection, path, next(order), started)

    with _timed(measured, connections):
        await asyncio.gather(*map(send, connections))
    return measured


async def open_load(
    address: Address, path: str, bodies: Sequence[Body], rate: float, seconds: float
) -> Measured:
    """Send `rate` requests per second, whether or not the earlier ones are answered.

    A latency begins when its request is due, so that requests which wait for a slow server count as slow.
    """
    measured, order = Measured(), itertools.cycle(bodies)
    count = max(1, round(rate * seconds))
    connections = [Connection(address) for _ in range(min(MOST_CONNECTIONS, count))]
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
    for connection in connections:
        free.put_nowait(connection)

    async def send(due: float, body: Body) -> None:
        connection = await free.get()
        await measured.send(connection, path, body, due)
        free.put_nowait(connection)

    with _timed(measured, connections):
        started, tasks = time.perf_counter(), []
        for index in range(count):
            due = started + index / rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(send(due, next(order))))
        await asyncio.gather(*tasks)
    return measured


@contextmanager
def _timed(measured: Measured, connections: Sequence[Connection]) -> Iterator[None]:
    started, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        measured.seconds = time.perf_counter() - started
        measured.client_seconds = time.process_time() - cpu
        for connection in connections:
            connection.close()
