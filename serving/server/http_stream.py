"""Bytes of one connection: heads in a small buffer, bodies straight into memory of their own.

A connection takes `HEAD_BYTES` whatever its client sends. The memory of a body is that of its declared length, but the system
provides it page by page as the bytes arrive.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

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
    """One connection, of which one task reads and writes.

    Args:
        serve: serves the connection, which is closed when it returns.
    """

    def __init__(self, serve: "Callable[[HttpStream], Coroutine[Any, Any, None]]") -> None:
        self._serve = serve
        self._head = bytearray(HEAD_BYTES)
        self._buffer = memoryview(self._head)
        self._filled = 0
        self._body: memoryview | None = None
        self._received = 0
        self._is_ended = self._is_lost = self._is_discarding = False
        self._is_reading = self._is_writable = True
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    async def read_head(self) -> bytes:
        """Return the bytes to the first empty line.

        Raises:
            IncompleteReadError: the connection ends before; `partial` has what came.
            LimitOverrunError: there are more than `HEAD_BYTES`.
        """
        searched = 0
        while True:
            text = self._head.find(b"\r\n\r\n", searched, self._filled)
            if text >= 0:
                return bytes(self._take(text + 4))
            if self._filled == HEAD_BYTES:
                raise asyncio.LimitOverrunError("no empty line", HEAD_BYTES)
            if self._is_ended:
                raise asyncio.IncompleteReadError(bytes(self._take(self._filled)), None)
            searched = max(0, self._filled - 3)
            await self._wait_for_bytes()

    async def read_body(self, size: int, first: int) -> memoryview:
        """Return the next `size` bytes, of which byte `first` is aligned as arrays want it.

        Raises:
            CutBodyError: the connection ends before.
        """
        memory = np.empty(size + ALIGNMENT, np.uint8)
        offset = -(memory.ctypes.data + first) % ALIGNMENT
        body = memoryview(memory)[offset : offset + size]  # type: ignore[arg-type]
        self._received = min(self._filled, size)
        body[: self._received] = self._take(self._received)
        if self._received < size:
            self._body = body
            try:
                while self._received < size and not self._is_ended:
                    await self._wait_for_bytes()
            finally:
                self._body = None
        if self._received < size:
            raise CutBodyError(self._received)
        return body

    async def write(self, data: bytes) -> None:
        """Write all bytes; return when the system has them.

        Raises:
            ConnectionResetError: the client has gone.
        """
        self._transport.write(data)
        while not self._is_writable and not self._is_lost:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable
        if self._is_lost:
            raise ConnectionResetError("the client has gone")

    async def finish(self) -> None:
        """End the answers, and drop what comes until the client closes.

        A connection that is closed while bytes of its client are unread takes the last answer back.
        """
        self._is_discarding = True
        if self._is_lost:
            return
        self._transport.write_eof()
        while not self._is_ended:
            await self._wait_for_bytes()

    def close(self) -> None:
        """Close the connection; what has not been written is dropped."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to serve."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # Writers wait until the system has everything, so no answer is kept here beyond its time.
        transport.set_write_buffer_limits(0)
        self._task = asyncio.get_running_loop().create_task(self._serve(self))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        if self._body is not None:
            return self._body[self._received :]
        return self._buffer if self._is_discarding else self._buffer[self._filled :]

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
            self._filled += nbytes
        _wake(self._readable)
        if self._filled == HEAD_BYTES:
            # After the reader, which has most often made room by then.
            asyncio.get_running_loop().call_soon(self._pause_if_full)

    def eof_received(self) -> bool:
        """Note that the client sends nothing more; return that it may still read."""
        self._is_ended = True
        _wake(self._readable)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        """Wake the task, which waits for bytes or until all are written."""
        self._is_ended = self._is_lost = True
        _wake(self._readable)
        _wake(self._writable)

    def pause_writing(self) -> None:
        """Note that the system takes no more bytes for now."""
        self._is_writable = False

    def resume_writing(self) -> None:
        """Note that the system has all bytes."""
        self._is_writable = True
        _wake(self._writable)

    def _pause_if_full(self) -> None:
        is_full = self._filled == HEAD_BYTES and self._body is None and not self._is_discarding
        if is_full and self._is_reading and not self._is_lost:
            self._is_reading = False
            self._transport.pause_reading()

    def _take(self, count: int) -> memoryview:
        """Return the first bytes of the buffer, and move the others to its beginning."""
        taken = memoryview(bytes(self._buffer[:count]))
        self._filled -= count
        self._buffer[: self._filled] = bytes(self._buffer[count : count + self._filled])
        return taken

    async def _wait_for_bytes(self) -> None:
        if not self._is_reading and not self._is_lost:
            self._is_reading = True
            self._transport.resume_reading()
        self._readable = asyncio.get_running_loop().create_future()
        await self._readable


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
