"""HTTP of the server: uvicorn and its C parser speak it; here are the limits of everything that a client decides.

`App` has those of a request: its token, its length before its body is read, and all bodies together until their answers are
written. `Connection` has those of bytes that are no request yet. A client that sends half a request, a huge body or nothing at
all gets a status and one line, or is closed after a time-out.
"""

import asyncio
import hmac
import json
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import numpy as np
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from configs.messages import on_one_line

HEAD_BYTES = 16 << 10
"""Most of request line and headers."""
LINGER_S = 2.0
"""Longest time that a client which sends on may take to read its refusal."""
LOOKS = 4
"""How often in `timeout_s` a connection is looked at."""
ALIGNMENT = 64
HEADER_LENGTH = "inference-header-content-length"
"""Of the JSON before binary tensors."""
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""Paths without a token, for probes."""
REST = "serving.rest"
"""Of a request's scope: the memory of what has not come of its body."""
READ_BYTES = 64 << 10
"""Most bytes of one read: allocations of more come from fresh memory, whose page faults cost more than reads."""
ONCE = ("authorization", "host", HEADER_LENGTH)
"""Headers that a request has at most once."""
TOO_MANY = "too many connections; try again"
_LENGTH = re.compile(r"[0-9]{1,15}")


class RequestError(Exception):
    """A request that is refused; `is_last`: whether the connection is closed, since the rest of the request is unread."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        is_last: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.is_last, self.headers = status, is_last, headers or {}

    def response(self) -> "Response":
        """Return the response of the refusal: `{"error": line}`."""
        body = json.dumps({"error": str(self)}).encode()
        return Response(self.status, body, headers=self.headers)


@dataclass(frozen=True, slots=True)
class Request:
    """A complete request; names of headers are in lower case. The method of HEAD is GET: uvicorn omits the body."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class Response:
    """A response; `headers` without the length."""

    status: HTTPStatus = HTTPStatus.OK
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)

    def head(self, *, is_last: bool) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": self.content_type,
            "content-length": str(len(self.body)),
            **self.headers,
        }
        if is_last:
            headers["connection"] = "close"
        return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of what a client decides: bytes, connections, and the time to send a request or to read its response.

    `max_memory` is that of all bodies together; `token`, if there is one, must come with every request.
    """

    max_body: int
    max_memory: int
    max_connections: int
    timeout_s: float
    token: str | None = None


Handler = Callable[[Request], Awaitable[Response]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class HttpServer:
    def __init__(self, app: "App") -> None:
        self.app = app
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=60,  # nothing: `log` gets the errors
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=1024,
                # `Connection` closes what is idle.
                timeout_keep_alive=2**31,
            )
        )

    @property
    def num_connections(self) -> int:
        return min(len(self._server.server_state.connections), self.app.limits.max_connections)

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port. Raises OSError: the address cannot be used."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's algorithm off for sockets that say that they are TCP; with it an answer waits 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError:
            listener.close()
            raise
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.sleep(0)
        return listener.getsockname()[1]

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, close idle connections, and answer the requests that have begun."""
        # uvicorn declares whole seconds; asyncio takes any.
        self._server.config.timeout_graceful_shutdown = timeout_s  # type: ignore[assignment]
        self._server.should_exit = True
        await self._serving
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


class App:
    """The ASGI application: a handler behind the limits of a request.

    A handler's error that is no `RequestError` is logged and answered with 500. `count`: gets the status of every response.
    """

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits,
        count: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        self.limits, self.count = limits, count
        self._handler, self._log = handler, log
        self.body_bytes = 0
        # Of all connections: what is read is parsed before the next read.
        self.received = memoryview(bytearray(READ_BYTES))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = _Body(self, receive)
        is_last = False
        try:
            try:
                response = await self._handler(await self._request(scope, body))
            except RequestError as error:
                is_last = error.is_last
                response = error.response()
            except _GoneError:
                return
            except Exception as error:  # a fault of this program, which must not end the server
                self._log(on_one_line(f"error while a request was answered: {error!r}"))
                failure = RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
                response = failure.response()
            with suppress(TimeoutError):
                await self._answer(response, send, body, is_last=is_last)
        finally:
            self.body_bytes -= body.held

    async def refuse_connection(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        error = RequestError(HTTPStatus.SERVICE_UNAVAILABLE, TOO_MANY)
        with suppress(TimeoutError):
            await self._answer(error.response(), send, _Body(self, receive), is_last=True)

    async def _request(self, scope: dict[str, Any], body: "_Body") -> Request:
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1")
            if key in headers and key in ONCE:
                raise _last(HTTPStatus.BAD_REQUEST, f"the header {key} is there twice")
            headers[key] = value.decode("latin-1")
        if scope["http_version"] not in ("1.0", "1.1"):
            raise _last(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "want HTTP/1.1")
        # RFC 9112, 3.2, which the parser does not ask for.
        if "host" not in headers and scope["http_version"] == "1.1":
            raise _last(HTTPStatus.BAD_REQUEST, "want the header Host")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        request = Request(method, scope["path"], headers)
        self._check_token(request)
        if "content-encoding" in headers:
            raise _last(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the body without compression")
        size = int(headers.get("content-length", "0"))
        is_chunked = "transfer-encoding" in headers
        if not size and not is_chunked:
            return request
        if request.path in OPEN_PATHS:
            # It would be held for anybody, without a token.
            allow = {"Allow": "GET"}
            raise _last(HTTPStatus.METHOD_NOT_ALLOWED, "want GET without a body", allow)
        self.reserve(body, size)
        length = headers.get(HEADER_LENGTH, "")
        first = int(length) if _LENGTH.fullmatch(length) else 0
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                content = await (
                    body.chunks(first) if is_chunked else body.read(size, first, scope)
                )
        except TimeoutError:
            text = f"the body did not arrive within {self.limits.timeout_s:g} s"
            raise _last(HTTPStatus.REQUEST_TIMEOUT, text) from None
        return Request(method, request.path, headers, content)

    def reserve(self, body: "_Body", size: int) -> None:
        """Count bytes of a body among those in memory, before they are there. Raises RequestError: they are too many."""
        if body.held + size > self.limits.max_body:
            raise _last(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a body of {body.held + size:,} bytes; want at most {self.limits.max_body:,} (max_body_mib)",
            )
        if self.body_bytes + size > self.limits.max_memory:
            text = "the bodies of other requests fill the memory (max_memory_mib); try again"
            raise _last(HTTPStatus.SERVICE_UNAVAILABLE, text, {"Retry-After": "1"})
        self.body_bytes += size
        body.held += size

    def _check_token(self, request: Request) -> None:
        if self.limits.token is None or request.path in OPEN_PATHS:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        wanted, got = self.limits.token.encode(), token.lstrip(" ").encode("latin-1")
        # The name of a scheme has no case (RFC 9110, 11.1).
        if not (hmac.compare_digest(wanted, got) and scheme.lower() == "bearer"):
            text = "want the header Authorization: Bearer TOKEN with the server's token"
            raise _last(HTTPStatus.UNAUTHORIZED, text, {"WWW-Authenticate": "Bearer"})

    async def _answer(
        self, response: Response, send: Send, body: "_Body", *, is_last: bool
    ) -> None:
        """Send a response; a client that still sends its body gets it at once, and a while to read it.

        A connection that is closed while bytes of its client are unread takes the last answer back.
        """
        self.count(response.status.value)
        head = response.head(is_last=is_last)
        async with asyncio.timeout(self.limits.timeout_s):
            await send(
                {"type": "http.response.start", "status": response.status.value, "headers": head}
            )
            content = {"type": "http.response.body", "body": response.body, "more_body": is_last}
            await send(content)
        if is_last:
            with suppress(TimeoutError, _GoneError):
                async with asyncio.timeout(LINGER_S):
                    await body.drop()
            await send({"type": "http.response.body"})


class _GoneError(Exception):
    """The client has gone."""


class _Body:
    """The body of a request, as it comes; `held` bytes of it are counted."""

    def __init__(self, app: App, receive: Receive) -> None:
        self._app, self._receive = app, receive
        self._is_complete = False
        self.held = 0

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _GoneError
        self._is_complete = not message.get("more_body", False)
        return message.get("body", b"")

    async def read(self, size: int, first: int, scope: dict[str, Any]) -> memoryview:
        """Return `size` bytes, of which byte `first` is aligned as arrays want it."""
        body = _aligned(size, first)
        chunk = await self._next()
        body[: len(chunk)] = chunk
        scope[REST] = body[len(chunk) :]
        try:
            while not self._is_complete:
                await self._next()
        finally:
            # A connection keeps its scope until its next request, which would keep the body.
            del scope[REST]
        return body

    async def chunks(self, first: int) -> memoryview:
        """Return a body whose length comes with its parts."""
        parts = bytearray()
        while not self._is_complete:
            chunk = await self._next()
            self._app.reserve(self, len(chunk))
            parts += chunk
        body = _aligned(len(parts), first)
        body[:] = parts
        return body

    async def drop(self) -> None:
        while not self._is_complete:
            await self._next()


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to the command."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A connection, with limits for what uvicorn does not limit: connections, heads, and time in which nothing moves."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_heads = self._head_bytes = 0
        self._is_refused = False
        self._moved, self._moved_at = (-1, -1), 0.0
        self._limited = cast(App, self.config.app)
        limit = self._limited.limits.max_connections
        if len(self.connections) > limit:
            self.app = self._limited.refuse_connection
        self._look: asyncio.TimerHandle | None = None
        if len(self.connections) > 2 * limit:
            # None of these is kept until it has sent a request.
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, TOO_MANY, linger_s=0)
        else:
            self._look_at_time()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._limited.received

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._limited.received[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        if self._is_refused:
            return
        before = self._num_heads
        super().data_received(data)  # type: ignore[arg-type]
        if self._is_refused or self._num_heads > before or not self._is_idle:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"headers of more than {HEAD_BYTES:,} bytes",
            )

    def on_headers_complete(self) -> None:
        self._num_heads += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Copy bytes to the request's memory, if it has some: uvicorn's own buffer stops reading at every 64 KiB."""
        scope = cast(dict[str, Any], self.cycle.scope)
        rest = scope.get(REST)
        if rest is None or self.cycle.response_complete:
            super().on_body(body)
        else:
            rest[: len(body)] = body
            scope[REST] = rest[len(body) :]

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "the request is malformed")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: the client may still read the answers of complete requests."""
        return not self._is_idle and not self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: HTTPStatus, message: str, linger_s: float = LINGER_S) -> None:
        """Answer what is no request, and close when the client has had time to read why."""
        self._limited.count(status.value)
        response = RequestError(status, message).response()
        lines = [name + b": " + value for name, value in response.head(is_last=True)]
        first = f"HTTP/1.1 {status.value} {status.phrase}".encode()
        self.transport.write(b"\r\n".join([first, *lines, b"", response.body]))
        self._is_refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(linger_s, self.transport.close)

    def _look_at_time(self) -> None:
        """Close the connection if no head has come and no byte of an answer was read for `timeout_s`."""
        if self.transport.is_closing():
            return
        now, limit_s = self.loop.time(), self._limited.limits.timeout_s
        unread = self.transport.get_write_buffer_size()
        if not (self._is_idle or unread) or (self._num_heads, unread) != self._moved:
            self._moved, self._moved_at = (self._num_heads, unread), now
        elif now - self._moved_at >= limit_s:
            self.transport.abort()
            return
        self._look = self.loop.call_later(limit_s / LOOKS, self._look_at_time)


def _aligned(size: int, first: int) -> memoryview:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    offset = -(memory.ctypes.data + first) % ALIGNMENT
    return memoryview(memory)[offset : offset + size]  # type: ignore[arg-type]


def _last(status: HTTPStatus, message: str, headers: dict[str, str] | None = None) -> RequestError:
    """Return the refusal of a request whose rest is unread."""
    return RequestError(status, message, is_last=True, headers=headers)
