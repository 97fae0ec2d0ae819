"""How server and nodes listen: everything is bounded that a stranger sends before a route knows who it is.

Connections, heads and silence are bounded here for every route; bodies by `read_body`, with the limit of their route.
docs/reference/limits.md lists all limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from gangline.content_codings import BODY_UNREADABLE, checked_coding, decompressed
from gangline.domain.errors import InvalidRequest, LimitExceeded, RequestTimeout
from gangline.domain.ids import new_id
from gangline.telemetry.logs import request_in_logs, stays_request_in_logs

__all__ = ["LIMITS", "ListenLimits", "listening", "read_body"]

log = logging.getLogger("gangline.listening")

_BACKLOG = 1024


class _NotOfStrangers(logging.Filter):
    """What is no HTTP is answered, and no fault of ours: it must not fill the log with tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


_http_log = logging.getLogger("gangline.http")
_http_log.addFilter(_NotOfStrangers())
_TOLD_WITHIN_S = 1.0
"""How long who is turned away has to read why."""


class ListenLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one listening address."""

    max_connections: int = 8192
    max_line_bytes: int = 8190
    """Of a request's first line: method, path and query."""
    max_header_bytes: int = 8190
    """Of one header."""
    max_headers: int = 128
    idle_s: float = 300.0
    """How long a connection may be without a request, and how long the head of one may take. Longer than the proxies in
    front, and the clients, keep theirs."""
    body_idle_s: float = 60.0
    """How long nothing of a body may come."""
    body_s: float = 900.0
    """How long a body may take in all."""


LIMITS = ListenLimits()


@asynccontextmanager
async def listening(
    app: web.Application, *, shutdown_s: float, limits: ListenLimits = LIMITS, **address: Any
) -> AsyncGenerator[tuple[str, int]]:
    """Serve `app` inside the block; gives the address that it listens on.

    shutdown_s: at the end, for requests under way.
    address: `sock`, or `host` and `port`, as for `loop.create_server`. Raises: OSError.
    """
    app.middlewares.insert(0, _numbered)
    app.on_response_prepare.append(_tell_number)
    # A handler is cancelled when its client leaves: a node that is gone must not be given sessions. What comes
    # compressed is decompressed by `read_body`, off the event loop; here it would also go on once it was refused.
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_http_log,
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=shutdown_s,
        keepalive_timeout=limits.idle_s,
        max_line_size=limits.max_line_bytes,
        max_field_size=limits.max_header_bytes,
        max_headers=limits.max_headers,
    )
    await runner.setup()
    try:
        server = await asyncio.get_running_loop().create_server(
            _Door(runner, limits.max_connections), backlog=_BACKLOG, **address
        )
        try:
            yield server.sockets[0].getsockname()[:2]
        finally:
            server.close()
    finally:
        await runner.cleanup()


@web.middleware
async def _numbered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Each request has an id of ours, which its log lines and its answer carry; a client's own is not taken."""
    stays_request_in_logs(new_id("req"))
    return await handler(request)


async def _tell_number(request: web.Request, response: web.StreamResponse) -> None:
    request_id = request_in_logs() or new_id("req")
    response.headers["x-request-id"] = request_id
    if "/v1/messages" in request.path or "anthropic-version" in request.headers:
        response.headers["request-id"] = request_id


class _Door:
    """Makes the protocol of each new connection."""

    def __init__(self, runner: web.AppRunner, max_connections: int) -> None:
        self._runner = runner
        self._max_connections = max_connections
        self._is_full = False

    def __call__(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        was_full, self._is_full = self._is_full, len(server.connections) >= self._max_connections
        if not self._is_full:
            return server()
        if not was_full:
            log.warning("connections.refused max=%d: more are not taken until some have ended", self._max_connections)
        return _TurnedAway(self._max_connections)


class _TurnedAway(asyncio.Protocol):
    """One connection too many: told so, whatever it asks."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        problem: dict[str, Any] = {
            "type": "about:blank",
            "title": "Service Unavailable",
            "status": 503,
            "detail": f"{self._max_connections} connections are open here, and more are not taken; try again later.",
            "code": "too_many",
            "boundary": "caller",
            "retryable": True,
            "details": {},
        }
        body = msgspec.json.encode(problem)
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nX-Request-Id: {new_id('req')}\r\n"
            "Connection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        asyncio.get_running_loop().call_later(_TOLD_WITHIN_S, transport.close)


async def read_body(
    request: web.Request,
    max_bytes: int,
    *,
    idle_s: float = LIMITS.body_idle_s,
    body_s: float = LIMITS.body_s,
    on_piece: Callable[[int], None] = lambda _num_bytes: None,
) -> bytes:
    """The whole body, decompressed.

    on_piece: called with the length of each piece that comes, and of what a compressed body has more than came; what it
    raises ends the reading.

    Raises: LimitExceeded, before much more than `max_bytes` are held; RequestTimeout when nothing comes for `idle_s`,
    or not all within `body_s`; InvalidRequest for a body that is not compressed as its head says; UnsupportedMediaType,
    before anything is read, for a coding that is not known.
    """
    coding = checked_coding(", ".join(request.headers.getall("Content-Encoding", ())))
    if (request.content_length or 0) > max_bytes:
        raise _too_long(max_bytes)
    pieces, num_bytes = list[bytes](), 0

    def take(piece: bytes) -> None:
        nonlocal num_bytes
        pieces.append(piece)
        num_bytes += len(piece)
        on_piece(len(piece))
        if num_bytes > max_bytes:
            raise _too_long(max_bytes)

    content, loop = request.content, asyncio.get_running_loop()
    if content.is_eof():  # a short one is here already
        take(content.read_nowait())
    ends_at = loop.time() + body_s
    try:
        while not content.at_eof():
            async with asyncio.timeout_at(min(loop.time() + idle_s, ends_at)):
                take(await content.readany())
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the request body cannot be read: {error}.", error_code=BODY_UNREADABLE) from error
    except TimeoutError:
        if loop.time() >= ends_at:
            raise RequestTimeout(f"the request body took longer than {body_s:g} s; {num_bytes} bytes came.") from None
        raise RequestTimeout(
            f"the request body stalled: nothing came for {idle_s:g} s after {num_bytes} bytes"
        ) from None
    body = b"".join(pieces)
    if coding == "identity" or not body:
        return body
    # In a thread: decoders let others run meanwhile.
    decoded = await asyncio.to_thread(decompressed, body, coding, max_bytes)
    on_piece(max(len(decoded) - num_bytes, 0))
    return decoded


def _too_long(max_bytes: int) -> LimitExceeded:
    return LimitExceeded(f"the body has more than {max_bytes} bytes.", max_bytes=max_bytes)
