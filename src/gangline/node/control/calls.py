"""The route for following the model calls of a session that runs here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from gangline.domain.completion import RecordedCalls
from gangline.node.calls.session import ModelSession
from gangline.wire.http.negotiation import answer, path_id
from gangline.wire.http.query import Number, Whole
from gangline.wire.http.routes import Route


class CallRoutes:
    """find: returns an open session by its id, of any origin. Raises NotFound."""

    def __init__(self, find: Callable[[str], ModelSession]) -> None:
        self._find = find

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/sessions/{session}/calls", self.calls,
                  "Recorded calls of an open session, with their tokens; can wait for the next.", answer=RecordedCalls,
                  query=(_AFTER, _WAIT), errors=(400, 401, 404)),
        ]  # fmt: skip

    async def calls(self, request: web.Request) -> web.StreamResponse:
        session = self._find(path_id(request, "session"))
        found = await session.committed(_AFTER.read(request), _WAIT.read(request))
        record = RecordedCalls(attempt=session.spec.attempt, completions=tuple(found))
        return await asyncio.to_thread(answer, request, record)  # may be large


_AFTER = Whole("after", "How many calls are known: those behind them are answered.", high=2**31 - 1)
_WAIT = Number("wait_s", "Seconds to wait where there are none.")
