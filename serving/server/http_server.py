"""HTTP/1.1 of the server, on asyncio: small, with a limit for everything that a client decides.

A client that sends half a request, a huge body or nothing at all gets a status and one line, or is closed after a time-out.
Bodies are counted before they are read and until their answers are written: all together never exceed `max_memory`.
"""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus

from configs.messages import on_one_line
from serving.server.http_stream import HEAD_BYTES, CutBodyError, HttpStream

BACKLOG = 1024
LINGER_S = 2.0
"""Longest time that a client which sends on may take to read its refusal."""
HEADER_LENGTH = "inference-header-content-length"
"""Of the JSON before binary tensors."""
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""Paths without a token, for probes."""
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LENGTH = re.compile(r"[0-9]{1,15}")
_CLOSING = {"Connection": "close"}
KNOWN_HEADS = 64
"""Heads whose meaning is remembered: a client sends the same one again and again."""


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: of the response.
        message: one line.
        is_last: whether the connection is closed, since the rest of the request is unread.
        headers: of the response.
    """

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


@dataclass(frozen=True, slots=True)
class Request:
    """A complete request; names of headers are in lower case."""

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


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of what a client decides.

    Attributes:
        max_body: bytes of a body.
        max_memory: bytes of all bodies together.
        max_connections: connections at a time.
        timeout_s: time to send a request or to read its response.
        token: that requests must bear; None if none.
    """

    max_body: int
    max_memory: int
    max_connections: int
    timeout_s: float
    token: str | None = None


Handler = Callable[[Request], Awaitable[Response]]
Refusal = Callable[[RequestError], Response]


class HttpServer:
    """Server of one handler.

    Args:
        handler: answers a request; a `RequestError` is answered by `refuse`, any other error with 500.
        refuse: makes the response of an error.
        limits: of what a client decides.
        log: called with one line about an error of the handler.
    """

    def __init__(
        self, handler: Handler, refuse: Refusal, limits: HttpLimits, log: Callable[[str], None]
    ) -> None:
        self._handler, self._refuse, self._limits, self._log = handler, refuse, limits, log
        self._server: asyncio.Server | None = None
        # Whether each has begun a request; refused connections are open too.
        self._connections: dict[HttpStream, bool] = {}
        self._open: set[HttpStream] = set()
        self._all_closed = asyncio.Event()
        self._body_bytes = self._num_finishing = 0
        self._draining = False

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises:
            OSError: the address cannot be used.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HttpStream(self._accept), host, port, backlog=BACKLOG
        )
        return self._server.sockets[0].getsockname()[1]

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, close idle connections, and answer the requests that have begun."""
        self._draining = True
        if self._server is not None:
            self._server.close()
        for stream, is_busy in list(self._connections.items()):
            if not is_busy:
                stream.cancel()
        if self._connections:
            self._all_closed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), timeout_s)
        for stream in list(self._open):
            stream.cancel()

    async def _accept(self, stream: HttpStream) -> None:
        self._open.add(stream)
        try:
            if len(self._connections) >= self._limits.max_connections or self._draining:
                error = RequestError(
                    HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; try again", is_last=True
                )
                await self._send(stream, self._refuse(error), is_last=True)
                await self._finish(stream)
                return
            self._connections[stream] = False
            while await self._serve_one(stream):
                self._connections[stream] = False
        except (OSError, asyncio.CancelledError, TimeoutError):
            pass  # the client has gone, is too slow, or the server ends
        except Exception as error:  # a fault of this program, which must not end the server
            self._log(on_one_line(f"error on a connection: {error!r}"))
        finally:
            self._connections.pop(stream, None)
            self._open.discard(stream)
            stream.close()
            if not self._connections:
                self._all_closed.set()

    async def _serve_one(self, stream: HttpStream) -> bool:
        """Answer one request; return whether the connection stays open."""
        held = 0
        is_last = is_unread = False
        try:
            try:
                head = await self._read_head(stream)
                if head is None:
                    return False
                self._connections[stream] = True
                request = _parse_head(head)
                is_last = request.headers.get("connection", "").lower() == "close"
                self._check_token(request)
                held = self._reserve(request)
                if held:
                    request = await self._with_body(stream, request, held)
                response = await self._handler(request)
            except RequestError as error:
                is_unread = error.is_last
                response = self._refuse(error)
            except (asyncio.CancelledError, OSError):
                raise
            except Exception as error:  # a fault of this program, which must not end the server
                self._log(on_one_line(f"error while a request was answered: {error!r}"))
                failure = RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
                response = self._refuse(failure)
            is_last = is_last or is_unread or self._draining
            await self._send(stream, response, is_last=is_last)
        finally:
            self._body_bytes -= held
        if is_unread:
            await self._finish(stream)
        return not is_last

    async def _finish(self, stream: HttpStream) -> None:
        """Let a client read its refusal before the connection is closed, for a while and for so many."""
        if self._num_finishing >= self._limits.max_connections:
            return
        self._num_finishing += 1
        try:
            await stream.finish(LINGER_S)
        finally:
            self._num_finishing -= 1

    async def _read_head(self, stream: HttpStream) -> bytes | None:
        """Return the request line and headers; None if the client has closed the connection or sends nothing."""
        try:
            return await stream.read_head(self._limits.timeout_s)
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise RequestError(
                HTTPStatus.BAD_REQUEST, "the request ends within its headers", is_last=True
            ) from None
        except asyncio.LimitOverrunError:
            raise RequestError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"headers of more than {HEAD_BYTES:,} bytes",
                is_last=True,
            ) from None
        except TimeoutError:
            return None

    async def _with_body(self, stream: HttpStream, request: Request, num_bytes: int) -> Request:
        """Return a request with its body."""
        length = request.headers.get(HEADER_LENGTH, "")
        first = int(length) if _LENGTH.fullmatch(length) else 0
        limit_s = self._limits.timeout_s
        try:
            if request.headers.get("expect", "").lower() == "100-continue":
                await stream.write(b"HTTP/1.1 100 Continue\r\n\r\n", limit_s)
            body = await stream.read_body(num_bytes, first, limit_s)
        except CutBodyError as error:
            raise RequestError(
                HTTPStatus.BAD_REQUEST,
                f"the body ends after {error.received:,} of {num_bytes:,} bytes",
                is_last=True,
            ) from None
        except TimeoutError:
            raise RequestError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the body did not arrive within {self._limits.timeout_s:g} s",
                is_last=True,
            ) from None
        return Request(request.method, request.path, request.headers, body)

    def _reserve(self, request: Request) -> int:
        """Return the length of the body, after counting it among the bytes in memory."""
        if "transfer-encoding" in request.headers:
            raise RequestError(
                HTTPStatus.LENGTH_REQUIRED,
                "send the body with Content-Length; Transfer-Encoding is not supported",
                is_last=True,
            )
        if "content-encoding" in request.headers:
            raise RequestError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the body without compression", is_last=True
            )
        text = request.headers.get("content-length", "" if request.method == "POST" else "0")
        if not text:
            raise RequestError(
                HTTPStatus.LENGTH_REQUIRED, "want the header Content-Length", is_last=True
            )
        if not _LENGTH.fullmatch(text):
            raise RequestError(
                HTTPStatus.BAD_REQUEST, "Content-Length is no number of bytes", is_last=True
            )
        length = int(text)
        if length and request.path in OPEN_PATHS:
            # It would be held for anybody, without a token.
            raise RequestError(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "want GET without a body",
                is_last=True,
                headers={"Allow": "GET"},
            )
        if length > self._limits.max_body:
            raise RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a body of {length:,} bytes; want at most {self._limits.max_body:,} (max_body_mib)",
                is_last=True,
            )
        if self._body_bytes + length > self._limits.max_memory:
            raise RequestError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the bodies of other requests fill the memory (max_memory_mib); try again",
                is_last=True,
                headers={"Retry-After": "1"},
            )
        self._body_bytes += length
        return length

    def _check_token(self, request: Request) -> None:
        if self._limits.token is None or request.path in OPEN_PATHS:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        wanted, got = self._limits.token.encode(), token.lstrip(" ").encode("latin-1")
        # The name of a scheme has no case (RFC 9110, 11.1).
        if not (hmac.compare_digest(wanted, got) and scheme.lower() == "bearer"):
            raise RequestError(
                HTTPStatus.UNAUTHORIZED,
                "want the header Authorization: Bearer TOKEN with the server's token",
                is_last=True,
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _send(self, stream: HttpStream, response: Response, *, is_last: bool) -> None:
        status, headers = response.status, response.headers
        if is_last:
            headers = headers | _CLOSING
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {response.content_type}\r\n"
            f"Content-Length: {len(response.body)}\r\n{lines}\r\n"
        ).encode("latin-1")
        await stream.write(head + response.body, self._limits.timeout_s)


@lru_cache(KNOWN_HEADS)
def _parse_head(head: bytes) -> Request:
    """Return the request of a request line and headers."""
    bad = HTTPStatus.BAD_REQUEST
    first, *lines = head[:-4].split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not parts[1].startswith(b"/"):
        raise RequestError(bad, "the request line is malformed", is_last=True)
    if parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise RequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "want HTTP/1.1", is_last=True)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise RequestError(bad, "a header is malformed", is_last=True)
        key = name.decode("ascii").lower()
        if key in headers and key in ("content-length", "transfer-encoding", "authorization"):
            raise RequestError(bad, f"the header {key} is there twice", is_last=True)
        headers[key] = value.strip(b" \t").decode("latin-1")
    if parts[2] == b"HTTP/1.0":
        headers.setdefault("connection", "close")
    path = parts[1].partition(b"?")[0].decode("latin-1")
    return Request(parts[0].decode("ascii"), path, headers)
