"""Server-sent events of one response."""

from __future__ import annotations

import logging
from types import TracebackType

from aiohttp import ClientConnectionResetError, web

from gangline.domain.errors import GanglineError
from gangline.models.engine_server.wire import ApiError, encode

_log = logging.getLogger(__name__)


class EventStream:
    """Sends `data: {json}` per event, and `data: [DONE]` at the end. An error in between is an event too.

    Events may be sent from several tasks: each is written as a whole.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    async def __aenter__(self) -> EventStream:
        await self.response.prepare(self._request)
        return self

    async def send(self, event: object) -> None:
        await self.response.write(b"data: " + encode(event) + b"\n\n")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, ClientConnectionResetError):
            return True  # the client has left
        if isinstance(error, BaseException) and not isinstance(error, Exception):
            return False
        if isinstance(error, Exception):
            _log.error("engine.stream_failed", exc_info=error)
            await self.send(as_api_error(error).body())
        await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()
        return True


def as_api_error(error: Exception) -> ApiError:
    """The response that reports `error` to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GanglineError):
        kind = "BadRequestError" if error.status < 500 else "InternalServerError"
        param = error.details.get("param")
        if isinstance(param, str):
            return ApiError(error.message, status=error.status, type=kind, param=param)
        return ApiError(error.message, status=error.status, type=kind, code=error.code)
    return ApiError(f"{type(error).__name__}: {error}", status=500, type="InternalServerError")
