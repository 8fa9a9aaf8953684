"""Load on a server: so many requests at a time, or so many per second; the latency of each request."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from serving.client.connection import Address, Connection, Reply, ServerError

MOST_CONNECTIONS = 512


@dataclass(frozen=True, slots=True)
class Body:
    """A request that is sent as it is."""

    content: bytes
    header_length: int | None  # bytes of JSON before binary tensors; None if there are none


@dataclass(slots=True)
class Measured:
    """Requests of a load."""

    latencies: list[float] = field(default_factory=list)  # seconds of each answered request
    failed: int = 0
    error: str | None = None
    seconds: float = 0.0
    client_seconds: float = 0.0  # of CPU that this process took

    def add(self, reply: Reply | ServerError, seconds: float) -> None:
        """Count a request."""
        if isinstance(reply, Reply) and reply.status == 200:
            self.latencies.append(seconds)
            return
        self.failed += 1
        if self.error is None:
            message = f"{reply.status}, {reply.message}" if isinstance(reply, Reply) else str(reply)
            self.error = message


async def closed_load(
    address: Address, path: str, bodies: Sequence[Body], concurrency: int, seconds: float
) -> Measured:
    """Keep `concurrency` requests under way for some seconds: each connection sends the next one when it has an answer."""
    measured, order = Measured(), itertools.cycle(bodies)
    end = time.perf_counter() + seconds

    async def send(connection: Connection) -> None:
        while (started := time.perf_counter()) < end:
            reply = await _reply(connection, path, next(order))
            measured.add(reply, time.perf_counter() - started)

    async with _Pool(address, concurrency) as pool:
        await _timed(measured, lambda: asyncio.gather(*map(send, pool.connections)))
    return measured


async def open_load(
    address: Address, path: str, bodies: Sequence[Body], rate: float, seconds: float
) -> Measured:
    """Send `rate` requests per second, whether or not the earlier ones are answered.

    A latency begins when its request is due, so that requests which wait for a slow server count as slow.
    """
    measured, order = Measured(), itertools.cycle(bodies)
    count = max(1, round(rate * seconds))
    async with _Pool(address, min(MOST_CONNECTIONS, count)) as pool:
        free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
        for connection in pool.connections:
            free.put_nowait(connection)

        async def send(due: float, body: Body) -> None:
            connection = await free.get()
            reply = await _reply(connection, path, body)
            measured.add(reply, time.perf_counter() - due)
            free.put_nowait(connection)

        async def all_requests() -> None:
            started, tasks = time.perf_counter(), []
            for index in range(count):
                due = started + index / rate
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(send(due, next(order))))
            await asyncio.gather(*tasks)

        await _timed(measured, all_requests)
    return measured


class _Pool:
    """Connections that are closed at the end."""

    def __init__(self, address: Address, count: int) -> None:
        self.connections = [Connection(address) for _ in range(count)]

    async def __aenter__(self) -> "_Pool":
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self.connections:
            connection.close()


async def _timed(measured: Measured, run: Callable) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    await run()
    measured.seconds = time.perf_counter() - started
    measured.client_seconds = time.process_time() - cpu


async def _reply(connection: Connection, path: str, body: Body) -> Reply | ServerError:
    try:
        return await connection.call(path, body.content, body.header_length)
    except ServerError as error:
        return error


def loads(
    concurrency: Sequence[int], rates: Sequence[float]
) -> Iterator[tuple[int | None, float | None]]:
    """Yield the loads of a batch size: each concurrency, then each rate."""
    yield from ((number, None) for number in concurrency)
    yield from ((None, rate) for rate in rates)
