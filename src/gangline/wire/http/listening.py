"""Listening sockets of server and nodes: bounds everything that an unauthenticated client can send.

Connections, heads and idle times are bounded here for every route; bodies by `read_body`, with their route's limit.
docs/reference/limits.md lists all limits.

Also handles one client connection: numbers its requests, and answers invalid HTTP in the form of the routes' errors.

aiohttp itself answers a request that it cannot parse, before the application sees it. Here that answer gets an id and
the form that the path's clients expect, and a body with broken chunks fails the request that is reading it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import resource
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from gangline.domain.errors import (
    CallerError,
    GanglineError,
    InvalidRequest,
    LimitExceeded,
    MethodNotAllowed,
    NotFound,
    PortUnavailable,
    RequestTimeout,
    TooMany,
)
from gangline.domain.ids import new_id
from gangline.machine.telemetry.logs import request_in_logs, stays_request_in_logs
from gangline.wire.http.content_codings import BODY_UNREADABLE, checked_coding, decompressed
from gangline.wire.http.problems import log_refused, problem_body, problem_response

log = logging.getLogger("gangline.wire.http.listening")

_BACKLOG = 1024
_ACCEPT_TURNS = 4
"""Event-loop turns from an accepted connection to its protocol's `connection_made`, plus one."""


_http_log = logging.getLogger("gangline.wire.http")
_TOLD_WITHIN_S = 1.0
"""Seconds that a rejected client has to read the reason."""
_PIECE_BYTES = 128 << 10

Shape = Callable[[str, str, GanglineError], web.Response]
"""(method, path, error) -> an answer in the format of that path's clients; both are empty if unknown."""

_FIRST_LINE = re.compile(rb"([A-Z]{1,20}) ([!-~]+)")
_PEEKED_BYTES = 1024
"""Bytes of the last received data, kept to find the path of a request that cannot be parsed."""
_MAX_WHY_CHARS = 300


class Connection(web.RequestHandler):
    """aiohttp's protocol of one connection."""

    __slots__ = ("_came_last", "_shape")

    def __init__(self, server: web.Server, shape: Shape, **settings: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)
        self._shape = shape
        self._came_last = b""

    def data_received(self, data: bytes) -> None:
        self._came_last = data[:_PEEKED_BYTES]
        super().data_received(data)
        request = self._current_request
        if request is None or not self._messages or request.content.is_eof():
            return
        # aiohttp queues the error after the request, whose handler would wait in vain for the rest of the body.
        error = getattr(self._messages[-1][0], "exc", None)
        if isinstance(error, HttpProcessingError):
            self._messages.pop()
            request.content.set_exception(web.RequestPayloadError(_why(error)))
            self._lingering_time = 0.0  # nothing more of that body is read
            self.close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to invalid HTTP, or to an error outside of all middlewares."""
        if not isinstance(exc, HttpProcessingError):
            response = super().handle_error(request, status, exc, message)
            return with_request_id(response, request.path)
        first_line = _FIRST_LINE.match(self._came_last)
        method, path = ("", "") if first_line is None else (first_line[1].decode(), first_line[2].decode())
        stays_request_in_logs(new_id("req"))
        error = InvalidRequest(f"the request is malformed: {_why(exc)}")
        return with_request_id(_refused(self._shape, method, path.partition("?")[0], error), path)


def numbered(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], shape: Shape
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Give each request an id for its log lines and its answer; the client's own id is ignored."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        stays_request_in_logs(new_id("req"))
        try:
            return await handle(request)
        except web.HTTPException as error:  # raised by aiohttp itself, before any handler of ours
            if error.status < 400:
                raise
            return _refused(shape, request.method, request.path, _known(request, error))

    return answer


def with_request_id(response: web.StreamResponse, path: str, *, speaks_anthropic: bool = False) -> web.StreamResponse:
    """The same answer with the id in the headers that SDKs read."""
    request_id = request_in_logs() or new_id("req")
    response.headers["x-request-id"] = request_id
    if speaks_anthropic or "/v1/messages" in path:
        response.headers["request-id"] = request_id
    return response


def _refused(shape: Shape, method: str, path: str, error: GanglineError) -> web.Response:
    response = shape(method, path, error)
    response.force_close()
    log_refused(method, path, response.status, error.code)
    return response


def _known(request: web.BaseRequest, error: web.HTTPException) -> GanglineError:
    if isinstance(error, web.HTTPExpectationFailed):
        return InvalidRequest("the header `Expect` may say `100-continue` only.")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"{request.path} does not take {request.method}; it takes {allow}.", allow=allow)
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"no route {request.method} {request.path[:200]}.")
    return CallerError(f"{request.method} {request.path[:200]}: {error.reason}.")


def _why(error: HttpProcessingError) -> str:
    return " ".join(error.message.split())[:_MAX_WHY_CHARS]


class ListenLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one listening address."""

    max_connections: int = 8192
    """Beyond it, an idle connection is closed, preferably one that never had a request; if there is none, the new one
    is. At most a quarter of the process's limit of open files.
    """
    max_line_bytes: int = 8190
    """Bytes of a request's first line: method, path and query."""
    max_header_bytes: int = 8190
    """Bytes of one header."""
    max_headers: int = 128
    head_s: float = 30.0
    """Limit in seconds for the head of a connection's first request."""
    idle_s: float = 300.0
    """Seconds that a connection may wait for another request, and limit for that request's head. Longer than the idle
    times of proxies in front, and of clients.
    """
    answer_idle_s: float = 300.0
    """Seconds for which a client may read nothing of an answer. Only on Linux."""
    body_idle_s: float = 60.0
    """Seconds without any data of a body."""
    body_s: float = 900.0
    """Limit in seconds for a whole body."""


LIMITS = ListenLimits()


@asynccontextmanager
async def listening(
    app: web.Application,
    *,
    shutdown_s: float,
    limits: ListenLimits = LIMITS,
    shape: Shape | None = None,
    **address: Any,
) -> AsyncGenerator[tuple[str, int]]:
    """Serve `app` inside the block; yields the address that it listens on.

    shutdown_s: time for requests in progress at the end.
    shape: form of errors outside of routes, such as for invalid HTTP; None: problem+json.
    address: `sock`, or `host` and `port`, as for `loop.create_server`. Raises: PortUnavailable.
    """
    app.on_response_prepare.append(_tell_number)
    # A handler is cancelled when its client disconnects: a node that is gone must not be given sessions. Compressed
    # bodies
    # are decompressed by `read_body`, off the event loop; aiohttp would also continue after the body was rejected.
    settings = {
        "access_log": None,
        "logger": _http_log,
        "auto_decompress": False,
        "keepalive_timeout": limits.idle_s,
        "max_line_size": limits.max_line_bytes,
        "max_field_size": limits.max_header_bytes,
        "max_headers": limits.max_headers,
    }
    door = _Door(_fitted(limits.max_connections), shape or _problem, settings)
    app.middlewares.insert(0, door.attend)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_s)
    await runner.setup()
    try:
        assert runner.server is not None
        door.open(runner.server)
        async with accepting(door, **address) as listeners:
            for listener in listeners if hasattr(socket, "TCP_USER_TIMEOUT") else ():
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.answer_idle_s * 1000))
            watch = asyncio.create_task(door.watch_heads(limits.head_s), name="heads")
            try:
                yield listeners[0].getsockname()[:2]
            finally:
                watch.cancel()
    finally:
        await runner.cleanup()


@asynccontextmanager
async def accepting(
    protocol: Callable[[], asyncio.BaseProtocol], **address: Any
) -> AsyncGenerator[Sequence[socket.socket]]:
    """Accept connections inside the block. On exit, every accepted connection has its protocol.

    asyncio creates the protocol in a later turn of the event loop. A connection whose listener has gone by then would
    stay open without an owner.

    address: `sock`, or `host` and `port`, as for `loop.create_server`. Raises: PortUnavailable.
    """
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(protocol, backlog=_BACKLOG, **address)
    except OSError as error:
        at = address["sock"].getsockname() if "sock" in address else (address["host"], address["port"])
        raise port_unavailable(error, *at[:2]) from error
    try:
        yield server.sockets
    finally:
        for listener in server.sockets:
            loop.remove_reader(listener)
        try:
            for _ in range(_ACCEPT_TURNS):
                await asyncio.sleep(0)
        finally:
            server.close()


def port_unavailable(error: OSError, host: str, port: int) -> PortUnavailable:
    """The error for an address that cannot be bound."""
    why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return PortUnavailable(f"cannot listen on {host}:{port}: {why}. Choose another port, or 0 for any free one.")


async def _tell_number(request: web.Request, response: web.StreamResponse) -> None:
    with_request_id(response, request.path, speaks_anthropic="anthropic-version" in request.headers)


def _problem(_method: str, _path: str, error: GanglineError) -> web.Response:
    return problem_response(error)


def _fitted(max_connections: int) -> int:
    """Lower if the process may only have few open files: connections must not use up all of them."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_connections if max_files == resource.RLIM_INFINITY else min(max_connections, max(1, max_files // 4))


class _Door:
    """Creates the protocol of each new connection, and tracks which ones have a request in progress."""

    def __init__(self, max_connections: int, shape: Shape, settings: Mapping[str, Any]) -> None:
        """`settings`: for each connection, with aiohttp's names."""
        self._max_connections = max_connections
        self._shape = shape
        self._settings = settings
        self._server: web.Server | None = None
        self._busy = set[RequestHandler]()
        self._idle_since = WeakKeyDictionary[asyncio.BaseTransport, float]()
        """Keyed by the transports of connections that had a request."""
        self._num_changing = 0
        """Connections made in this turn of the event loop, minus connections that ended."""
        self._is_full = False

    def open(self, server: web.Server) -> None:
        self._server = server
        server.request_handler = numbered(server.request_handler, self._shape)

    @web.middleware
    async def attend(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        protocol = request.protocol
        self._busy.add(protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(protocol)
            if protocol.transport is not None:
                self._idle_since[protocol.transport] = asyncio.get_running_loop().time()

    async def watch_heads(self, head_s: float) -> None:
        """End connections without a first request, after between half of this time and all of it. Runs forever."""
        seen = set[RequestHandler]()
        while True:
            await asyncio.sleep(head_s / 2)
            waiting = {protocol for protocol, since in self._without_request() if since is None}
            for protocol in waiting & seen:
                self._end(protocol)
            seen = waiting

    def __call__(self) -> asyncio.Protocol:
        assert self._server is not None
        num_open = len(self._server.connections) + self._num_changing
        if num_open >= self._max_connections:
            num_open -= self._make_room()
        was_full, self._is_full = self._is_full, num_open >= self._max_connections
        if not self._is_full:
            self._changed(1)
            return Connection(self._server, self._shape, **self._settings)
        if not was_full:
            log.warning("connections.refused max=%d: more are not taken until some have ended", self._max_connections)
        return _TurnedAway(self._max_connections)

    def _make_room(self) -> int:
        """End several at once, so that a flood of connections does not search for each one separately."""
        waiting = sorted(self._without_request(), key=lambda pair: -1.0 if pair[1] is None else pair[1])
        num_ended = min(len(waiting), max(1, self._max_connections // 64))
        for protocol, _since in waiting[:num_ended]:
            self._end(protocol)
        return num_ended

    def _without_request(self) -> list[tuple[RequestHandler, float | None]]:
        """Open connections that wait for a request, oldest first, and since when; None if they never had one."""
        assert self._server is not None
        return [
            (protocol, self._idle_since.get(transport))
            for protocol in self._server.connections
            if (transport := protocol.transport) is not None
            and not transport.is_closing()
            and protocol not in self._busy
        ]

    def _end(self, protocol: RequestHandler) -> None:
        if isinstance(protocol.transport, asyncio.WriteTransport):
            protocol.transport.abort()
            self._changed(-1)

    def _changed(self, number: int) -> None:
        """The server's own list is updated in the next turn of the event loop."""
        self._num_changing += number
        asyncio.get_running_loop().call_soon(self._settle, number)

    def _settle(self, number: int) -> None:
        self._num_changing -= number


class _TurnedAway(asyncio.Protocol):
    """A connection above the limit: answers any request with an error."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        why = f"{self._max_connections} connections are open, which is the limit; try again later."
        body = problem_body(TooMany(why), 503)
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
    """As `read_pieces`, but as bytes. It copies, so use it only for short bodies."""
    return b"".join(await read_pieces(request, max_bytes, idle_s=idle_s, body_s=body_s, on_piece=on_piece))


async def read_pieces(
    request: web.Request,
    max_bytes: int,
    *,
    idle_s: float = LIMITS.body_idle_s,
    body_s: float = LIMITS.body_s,
    on_piece: Callable[[int], None] = lambda _num_bytes: None,
) -> Sequence[bytes | bytearray]:
    """The whole body, decompressed, in pieces: joining a long one would block the event loop.

    on_piece: called with the length of each piece that arrives, and with the additional length of a decompressed body;
    its errors end the reading.

    Raises: LimitExceeded before holding much more than `max_bytes`; RequestTimeout if nothing arrives for `idle_s`, or
    not everything within `body_s`; InvalidRequest for a body that does not match its Content-Encoding;
    UnsupportedMediaType for an unknown coding, before anything is read.
    """
    codings = request.headers.getall("Content-Encoding", ())
    coding = checked_coding(", ".join(codings)) if codings else "identity"
    if (request.content_length or 0) > max_bytes:
        raise _too_long(max_bytes)
    pieces, num_bytes = [bytearray()], 0

    def take(piece: bytes) -> None:
        nonlocal num_bytes
        if len(pieces[-1]) + len(piece) > _PIECE_BYTES:
            pieces.append(bytearray())
        pieces[-1] += piece
        num_bytes += len(piece)
        on_piece(len(piece))
        if num_bytes > max_bytes:
            raise _too_long(max_bytes)

    content, loop = request.content, asyncio.get_running_loop()
    if content.is_eof():  # a short one has already arrived
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
    if coding == "identity" or not num_bytes:
        return pieces
    # In a thread: decoders release the interpreter.
    decoded = await asyncio.to_thread(decompressed, pieces, coding, max_bytes)
    on_piece(max(sum(map(len, decoded)) - num_bytes, 0))
    return decoded


def _too_long(max_bytes: int) -> LimitExceeded:
    return LimitExceeded(f"the body has more than {max_bytes} bytes.", max_bytes=max_bytes)
