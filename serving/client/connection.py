"""A client's connection to a server of KServe's v2 protocol: HTTP/1.1 on asyncio, kept alive."""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from configs.messages import shown
from dataloading.dataset.documents import decode_json, parse_json
from serving.http_address import authority

HEAD_BYTES = 64 << 10
TIMEOUT_S = 120.0


class ServerError(ValueError):
    """A server that cannot be reached, or refuses a request."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    is_secure: bool = False  # whether the connection is encrypted
    prefix: str = ""  # path before that of the protocol
    token: str | None = None  # that requests bear; None if none

    @classmethod
    def of(cls, url: str, token: str | None = None) -> "Address":
        """Return the address of a URL. Raises ValueError: it is none of http or https."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError(f"url={shown(url)} is malformed; want http://HOST:PORT") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={shown(url)}; want http://HOST:PORT")
        is_secure = parts.scheme == "https"
        port = port or (443 if is_secure else 80)
        return cls(parts.hostname, port, is_secure, parts.path.rstrip("/"), token)


@dataclass(frozen=True, slots=True)
class Reply:
    """A response; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        try:
            return str(decode_json(self.body)["error"])
        except (ValueError, LookupError, TypeError):
            return shown(self.body[:200].decode("utf-8", "replace"))


class Connection:
    """A connection, opened at the first request and again after a failure."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(
        self, path: str, body: bytes | None = None, header_length: int | None = None
    ) -> Reply:
        """Send GET, or POST if there is a body, and return the response.

        `header_length`: bytes of JSON before binary tensors. Raises ServerError: the server cannot be reached, or answers
        nothing.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._call(self.head(path, body, header_length), body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            self.close()
            reason = str(error) or type(error).__name__
            where = authority(self._address.host, self._address.port)
            raise ServerError(f"no answer from {where}: {reason}; is the server ready?") from None

    def head(self, path: str, body: bytes | None, header_length: int | None = None) -> bytes:
        address = self._address
        lines = [
            f"{'GET' if body is None else 'POST'} {address.prefix}{path} HTTP/1.1",
            f"Host: {authority(address.host, address.port)}",
        ]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        if header_length is not None:
            lines.append(f"Inference-Header-Content-Length: {header_length}")
        if address.token is not None:
            lines.append(f"Authorization: Bearer {address.token}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _call(self, head: bytes, body: bytes | None) -> Reply:
        if self._streams is None:
            address = self._address
            context = ssl.create_default_context() if address.is_secure else None
            self._streams = await asyncio.open_connection(
                address.host, address.port, ssl=context, limit=HEAD_BYTES
            )
        reader, writer = self._streams
        writer.write(head)
        if body is not None:
            writer.write(body)
            await writer.drain()
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        status = int(first.split(" ")[1])
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection", "").lower() == "close":
            self.close()
        return Reply(status, headers, content)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def get_json(connection: Connection, path: str) -> Any:
    """Return the JSON of a path. Raises ServerError: the server refuses it, or answers something else."""
    reply = await connection.call(path)
    if reply.status != 200:
        raise ServerError(f"{path}: the server answers {reply.status}, {reply.message}")
    try:
        return parse_json(reply.body, path)
    except ValueError as error:
        raise ServerError(f"the server answers no JSON: {error}") from None
