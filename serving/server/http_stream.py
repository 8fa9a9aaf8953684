"""Bytes of one connection: heads in a small buffer, bodies straight into memory of their own.

A connection takes `HEAD_BYTES` whatever its client sends. The memory of a body is that of its declared length, but the system
provides it page by page as the bytes arrive.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from serving.server.coroutines import Result, Runner

HEAD_BYTES = 16 << 10
"""Most of request line and headers."""
ALIGNMENT = 64


class CutBodyError(Exception):
    """A connection ended within a body.

    Args:
        received: bytes that came.
    """

    def __init__(self, received: int) -> None:
        super().__init__(f"{received} bytes")
        self.received = received


class HttpStream(asyncio.BufferedProtocol):
    """One connection, which one coroutine reads and writes; bytes that come resume it at once.

    A time limit takes no timer of its own: a connection has one, which looks once per limit whether a wait has lasted as long.

    Args:
        serve: serves the connection; it lets no error out.
    """

    def __init__(self, serve: "Callable[[HttpStream], Coroutine[Any, Any, None]]") -> None:
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._head = bytearray(HEAD_BYTES)
        self._buffer = memoryview(self._head)
        self._first = self._last = 0  # unread bytes in the buffer
        self._body: memoryview | None = None
        self._received = 0
        self._is_ended = self._is_lost = self._is_discarding = False
        self._is_reading = self._is_writable = True
        self._waiter: Result[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expires = 0.0

    async def read_head(self, limit_s: float) -> bytes:
        """Return the bytes to the first empty line.

        Raises:
            IncompleteReadError: the connection ends before; `partial` has what came.
            LimitOverrunError: there are more than `HEAD_BYTES`.
            TimeoutError: they take longer than `limit_s`.
        """
        expires, searched = self._loop.time() + limit_s, self._first
        while True:
            end = self._head.find(b"\r\n\r\n", searched, self._last)
            if end >= 0:
                return self._take(end + 4 - self._first).tobytes()
            if self._last - self._first == HEAD_BYTES:
                raise asyncio.LimitOverrunError("no empty line", HEAD_BYTES)
            if self._is_ended:
                partial = self._take(self._last - self._first).tobytes()
                raise asyncio.IncompleteReadError(partial, None)
            self._move_to_front()
            searched = max(0, self._last - 3)
            await self._wait_for_bytes(expires)

    async def read_body(self, size: int, first: int, limit_s: float) -> memoryview:
        """Return the next `size` bytes, of which byte `first` is aligned as arrays want it.

        Raises:
            CutBodyError: the connection ends before.
            TimeoutError: they take longer than `limit_s`.
        """
        memory = np.empty(size + ALIGNMENT, np.uint8)
        offset = -(memory.ctypes.data + first) % ALIGNMENT
        body = memoryview(memory)[offset : offset + size]  # type: ignore[arg-type]
        self._received = min(self._last - self._first, size)
        body[: self._received] = self._take(self._received)
        if self._received < size:
            self._body = body
            expires = self._loop.time() + limit_s
            try:
                while self._received < size and not self._is_ended:
                    await self._wait_for_bytes(expires)
            finally:
                self._body = None
        if self._received < size:
            raise CutBodyError(self._received)
        return body

    async def write(self, data: bytes, limit_s: float) -> None:
        """Write all bytes; return when the system has them.

        Raises:
            ConnectionResetError: the client has gone.
            TimeoutError: it takes longer than `limit_s`.
        """
        self._transport.write(data)
        expires = self._loop.time() + limit_s
        while not self._is_writable and not self._is_lost:
            await self._wait(expires)
        if self._is_lost:
            raise ConnectionResetError("the client has gone")

    async def finish(self, limit_s: float) -> None:
        """End the answers, and drop what comes until the client closes.

        A connection that is closed while bytes of its client are unread takes the last answer back.

        Raises:
            TimeoutError: the client takes longer than `limit_s`.
        """
        self._is_discarding = True
        if self._is_lost:
            return
        self._transport.write_eof()
        expires = self._loop.time() + limit_s
        while not self._is_ended:
            await self._wait_for_bytes(expires)

    def cancel(self) -> None:
        """End what serves the connection."""
        self._runner.cancel()

    def close(self) -> None:
        """Close the connection; what has not been written is dropped."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to serve."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # Writers wait until the system has everything, so no answer is kept here beyond its time.
        transport.set_write_buffer_limits(0)
        self._runner = Runner(self._serve(self))
        self._runner.run()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        if self._body is not None:
            return self._body[self._received :]
        return self._buffer if self._is_discarding else self._buffer[self._last :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count bytes that have come."""
        if self._is_discarding:
            return
        if self._body is not None:
            self._received += nbytes
            if self._received < len(self._body):
                return
            self._body = None
        else:
            self._last += nbytes
        self._wake()
        # After the reader, which has most often made room.
        self._pause_if_full()

    def eof_received(self) -> bool:
        """Note that the client sends nothing more; return that it may still read."""
        self._is_ended = True
        self._wake()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        """Resume what waits for bytes, or until all are written."""
        self._is_ended = self._is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def pause_writing(self) -> None:
        """Note that the system takes no more bytes for now."""
        self._is_writable = False

    def resume_writing(self) -> None:
        """Note that the system has all bytes."""
        self._is_writable = True
        self._wake()

    def _pause_if_full(self) -> None:
        is_full = self._last == HEAD_BYTES and self._body is None and not self._is_discarding
        if is_full and self._is_reading and not self._is_lost:
            self._is_reading = False
            self._transport.pause_reading()

    def _take(self, count: int) -> memoryview:
        """Return the first unread bytes, which are valid until the next wait."""
        taken = self._buffer[self._first : self._first + count]
        self._first += count
        if self._first == self._last:
            self._first = self._last = 0
        return taken

    def _move_to_front(self) -> None:
        """Make room behind the unread bytes."""
        if self._first:
            unread = self._buffer[self._first : self._last].tobytes()
            self._first, self._last = 0, len(unread)
            self._buffer[: self._last] = unread

    async def _wait_for_bytes(self, expires: float) -> None:
        if not self._is_reading and not self._is_lost:
            self._is_reading = True
            self._transport.resume_reading()
        await self._wait(expires)

    async def _wait(self, expires: float) -> None:
        """Wait for any change of the connection.

        Raises:
            TimeoutError: there is none until the loop's time `expires`.
        """
        self._expires = expires
        if self._timer is not None and self._timer.when() > expires:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(expires, self._look_at_time)
        self._waiter = Result()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look_at_time(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.is_done:
            return
        if self._loop.time() < self._expires:
            self._timer = self._loop.call_at(self._expires, self._look_at_time)
        else:
            self._waiter.fail(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.is_done:
            self._waiter.set(None)
