"""A small HTTP/1.1 client for engines: POST or GET, an answer whole or as it comes, connections that are kept.

A node asks its engines on every call, and a general client's requests cost more than all that the node itself does to a
short one. What engines do not need is not here: no redirects, proxies, cookies, compression or pipelining. A connection
whose answer was not read to its end is closed, which is what cancels a call in the engine.

Errors are OSErrors (`ConnectionError`, `TimeoutError`), or `HttpBroken` for what is no HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import unquote, urlsplit

import gangline
from gangline.engines.http_body import BodyReader, body_reader_of

__all__ = ["HttpAnswer", "HttpBroken", "HttpClient"]

_MAX_HEAD_BYTES = 64 << 10
_MAX_IDLE = 1024
_MAX_IDLE_S = 4.0
"""vLLM closes what is idle for five seconds, maybe in the moment of the next request."""
_WRONG_LENGTH = "its answer ended before it was whole"


class HttpBroken(Exception):
    """What came is no HTTP/1.1 answer."""


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport | None = None
        self._news: asyncio.Future[None] | None = None
        """Waited for by who reads."""
        self._head: bytes = b""
        """Of an answer whose header has not come whole."""
        self._body: BodyReader | None = None
        self._error: Exception | None = None
        self._last_news_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_asked = False
        self.status = 0
        self.is_open = False
        self.idle_since = 0.0
        """On the loop's clock."""
        self._is_kept = False

    # -- asyncio's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if not self._is_asked:
            self.close()  # nobody asked: what it sends would be taken for the next answer
            return
        self._last_news_at = self._loop.time()
        try:
            if self._body is None:
                self._read_head(data)
            else:
                self._body.feed(data)
        except ValueError as error:
            self._fail(HttpBroken(f"it does not speak HTTP/1.1: {error}"))
        self._tell()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._is_asked and not self.is_answered:
            if self._body is not None and exc is None:
                self._body.feed_end()
            if not self.is_answered:
                began = self._body is not None or self._head
                self._fail(exc or ConnectionResetError(_WRONG_LENGTH if began else "it closed the connection"))
        self._tell()

    def _read_head(self, data: bytes) -> None:
        """Raises: ValueError when it is none."""
        data = self._head + data if self._head else data
        while self._body is None and (end := data.find(b"\r\n\r\n")) >= 0:
            head, data = data[:end], data[end + 4 :]
            status, self._is_kept, body = body_reader_of(head)
            if status >= 200:  # else "continue", "early hints": the answer is still to come
                self.status, self._body = status, body
        self._head = data if self._body is None else b""
        if len(self._head) > _MAX_HEAD_BYTES:
            raise ValueError("its header has no end")
        if self._body is not None and data:
            self._body.feed(data)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.close()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _check_silence(self) -> None:
        left_s = self._last_news_at + self._timeout_s - self._loop.time()
        if left_s <= 0:
            self._fail(TimeoutError(f"nothing came for {self._timeout_s:g} s"))
            self._tell()
        else:
            self._timer = self._loop.call_later(left_s, self._check_silence)

    # -- the client's side ---------------------------------------------------------------------------------------

    def ask(self, request: list[bytes]) -> None:
        assert self._transport is not None
        self._is_asked, self._head, self._body, self._error = True, b"", None, None
        self._last_news_at = self._loop.time()
        self._timer = self._loop.call_later(self._timeout_s, self._check_silence)
        self._transport.writelines(request)

    @property
    def is_answered(self) -> bool:
        return self._body is not None and self._body.is_whole

    @property
    def has_begun(self) -> bool:
        return self._body is not None

    async def wait(self) -> None:
        """Until something came. Raises: OSError, HttpBroken."""
        if self._error is not None:
            raise self._error
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None
        if self._error is not None and not self.is_answered:
            raise self._error

    def take(self) -> bytes:
        """What came of the body since the last time."""
        return b"" if self._body is None else self._body.take()

    def end(self) -> bool:
        """No more of this answer is wanted. True: the connection may be asked again."""
        if self._timer is not None:
            self._timer.cancel()
        may_go_on = self.is_answered and self._is_kept and self.is_open
        self.idle_since = self._loop.time()
        self._is_asked, self._body = False, None
        if not may_go_on:
            self.close()
        return may_go_on

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class HttpAnswer:
    """An answer whose header has come."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status

    async def read(self) -> bytes:
        """All of the body. Raises: OSError, HttpBroken."""
        while not self._connection.is_answered:
            await self._connection.wait()
        return self._connection.take()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, all that is there each time. Raises: OSError, HttpBroken."""
        while True:
            if piece := self._connection.take():
                yield piece
            elif self._connection.is_answered:
                return
            else:
                await self._connection.wait()


class HttpClient:
    """Of one origin. `headers` go with every request."""

    def __init__(self, url: str, *, headers: Mapping[str, str], timeout_s: float, connect_timeout_s: float) -> None:
        """timeout_s: longest silence of the other side. Raises: ValueError when `url` is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        self._host, self._is_secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._path = parts.path.rstrip("/")
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        fields = {
            "Host": parts.netloc.rpartition("@")[2],
            "User-Agent": f"gangline/{gangline.__version__}",
            "Accept-Encoding": "identity",  # without it a server may compress as it likes
            **headers,
        }
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            fields["Authorization"] = f"Basic {base64.b64encode(login).decode()}"
        if any("\r" in value or "\n" in value for value in fields.values()):
            raise ValueError("a header with a line break")
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("latin-1")
        self._tls: ssl.SSLContext | None = None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes | None) -> AsyncGenerator[HttpAnswer]:
        """Leave it early to cancel the request. Raises: OSError, HttpBroken."""
        connection = self._known() or await self._connect()
        self._busy.add(connection)
        try:
            connection.ask(self._message(method, path, body))
            while not connection.has_begun:
                await connection.wait()
            yield HttpAnswer(connection)
        finally:
            self._busy.discard(connection)
            if connection.end() and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)

    async def close(self) -> None:
        """Requests in flight fail with a ConnectionError."""
        connections, self._idle = [*self._idle, *self._busy], []
        for connection in connections:
            connection.close()
        await asyncio.sleep(0)  # the transports end in the loop's next turn

    def _known(self) -> _Connection | None:
        """The one used last that was not closed meanwhile."""
        oldest = asyncio.get_running_loop().time() - _MAX_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        if self._is_secure and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._timeout_s), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise TimeoutError(f"no connection within {self._connect_timeout_s:g} s") from None
        return connection

    def _message(self, method: str, path: str, body: bytes | None) -> list[bytes]:
        """A GET has no body, and so no length and no type."""
        line = f"{method} {self._path}{path} HTTP/1.1\r\n".encode()
        if body is None:
            return [line, self._fields, b"\r\n"]
        return [line, self._fields, b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body), body]
