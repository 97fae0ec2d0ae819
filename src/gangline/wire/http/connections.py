"""One connection of a client: its requests are numbered, and all that is no HTTP is answered as errors of routes are.

aiohttp answers a request that it cannot parse by itself, before any application sees it. Here that answer has an id and
the shape that the path's clients read, and a body whose chunks are broken fails the request that is reading it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gangline.domain.errors import CallerError, GanglineError, InvalidRequest, MethodNotAllowed, NotFound
from gangline.domain.ids import new_id
from gangline.machine.telemetry.logs import request_in_logs, stays_request_in_logs
from gangline.wire.http.problems import log_refused

__all__ = ["Connection", "Shape", "numbered", "with_request_id"]

Shape = Callable[[str, str, GanglineError], web.Response]
"""(method, path, error) -> an answer in the format of that path's clients; both are empty where they are unknown."""

_FIRST_LINE = re.compile(rb"([A-Z]{1,20}) ([!-~]+)")
_PEEKED_BYTES = 1024
"""Bytes of the last data received, kept to find the path of a request that cannot be parsed."""
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
        # aiohttp queues the error behind the request, whose handler would wait for the rest of the body in vain.
        error = getattr(self._messages[-1][0], "exc", None)
        if isinstance(error, HttpProcessingError):
            self._messages.pop()
            request.content.set_exception(web.RequestPayloadError(_why(error)))
            self._lingering_time = 0.0  # nothing more of that body is read
            self.close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to a request that is no HTTP, or whose handler failed outside of all middlewares."""
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
    """Each request gets an id of ours, which its log lines and its answer carry; a client's own is not taken."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        stays_request_in_logs(new_id("req"))
        try:
            return await handle(request)
        except web.HTTPException as error:  # of aiohttp itself: no handler of ours saw the request
            if error.status < 400:
                raise
            return _refused(shape, request.method, request.path, _known(request, error))

    return answer


def with_request_id(response: web.StreamResponse, path: str, *, speaks_anthropic: bool = False) -> web.StreamResponse:
    """The same answer, with the id under the names that SDKs read."""
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
