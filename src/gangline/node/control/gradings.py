"""The route that grades a recorded session again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from gangline.domain.session import Grading, GradingRequest
from gangline.domain.tokens import decode_msgpack
from gangline.wire.http.listening import read_body
from gangline.wire.http.negotiation import MSGPACK, answer
from gangline.wire.http.routes import SUBJECT, Route

_MAX_BYTES = 1024**3
"""Largest result that the server stores."""


class GradingRoutes:
    def __init__(self, regrade: Callable[[GradingRequest], Awaitable[Grading]]) -> None:
        self._regrade = regrade

    async def grade(self, request: web.Request) -> web.Response:
        data = await read_body(request, _MAX_BYTES)
        wanted = await asyncio.to_thread(decode_msgpack, data, GradingRequest)
        SUBJECT.set(wanted.result.session_id)
        return answer(request, await self._regrade(wanted))

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/gradings", self.grade, "Grade a recorded session again; answered when it is graded.",
                  body=GradingRequest, body_type=MSGPACK, answer=Grading, errors=(400, 401, 409, 413)),
        ]  # fmt: skip
