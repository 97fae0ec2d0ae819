"""Server-sent events: everything that happened, in order, with resume.

    id: 42
    event: session.ended
    data: {"seq":42, ...}

A stream begins with a bare `id:` line, so that a client which lost it before any event still resumes where it began.
"""

from __future__ import annotations

import contextlib
from functools import partial

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest, StoreError, TooMany
from gangline.domain.views import Event
from gangline.http.query import Text, Whole
from gangline.http.routes import Route
from gangline.server.service.core import EVENTS, RolloutService

__all__ = ["EventRoutes"]

_PAGE = 500
MAX_STREAMS = 1000
"""Event streams of one server."""


class EventRoutes:
    def __init__(self, service: RolloutService, *, keep_alive_s: float) -> None:
        self._service = service
        self._keep_alive_s = keep_alive_s
        self._num_streams = 0

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Streams until the client leaves or the server stops. Raises: InvalidRequest, TooMany."""
        if self._num_streams >= MAX_STREAMS:
            raise TooMany(f"{MAX_STREAMS} event streams are open; end some.", limit=MAX_STREAMS)
        self._num_streams += 1
        try:
            return await self._opened(request)
        finally:
            self._num_streams -= 1

    async def _opened(self, request: web.Request) -> web.StreamResponse:
        store = self._service.store
        after = _resume_point(request)
        if after is None:
            after = await store.query(store.last_event)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        # Without its database the stream ends; the client resumes where it broke.
        with contextlib.suppress(ConnectionError, StoreError):
            await response.write(f"retry: 1000\nid: {after}\n\n".encode())
            await self._stream(response, after, _TASK_ID.read(request))
        return response

    async def _stream(self, response: web.StreamResponse, after: int, task_id: str | None) -> None:
        store = self._service.store
        with self._service.notifier.listen(EVENTS) as listener:
            while not self._service.stopping:
                page = await store.query(partial(store.events, after=after, limit=_PAGE, task_id=task_id))
                if page:
                    await response.write(b"".join(map(_render, page)))
                    after = page[-1].seq
                elif not await listener.wait(self._keep_alive_s):
                    await response.write(b": still here\n\n")

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/events", self.events, "Server-sent events; resumes after `Last-Event-ID` or `after`.",
                  answer=Event, answer_types=("text/event-stream",), query=(_AFTER, _TASK_ID)),
        ]  # fmt: skip


_AFTER = Whole("after", "Events after this one; 0 starts with the first.", high=10**18)
_TASK_ID = Text("task_id", "Only events of this task.")


def _resume_point(request: web.Request) -> int | None:
    """Where to go on; None is from now on. A reconnecting client's header is newer than its URL."""
    text = request.headers.get("Last-Event-ID") or _AFTER.text(request)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"after must be the number of an event, got {text[:40]!r}.")
    return int(text)


def _render(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), msgspec.json.encode(event))
