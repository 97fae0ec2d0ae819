"""Server-sent events: all events in order, with resume.

    id: 42
    event: session.ended
    data: {"seq":42, ...}

With `calls=1`, for pages, `session.calls` reports new recorded calls of sessions being viewed. It has no id: it is not
stored, and a client that missed one receives the newest state when it reconnects. Such a stream reads stored events at
most once a second, to limit the load of watching a busy service.

A stream begins with a bare `id:` line, so that a client that loses the connection before any event still resumes at its
start.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import NamedTuple

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest, StoreError, TooMany
from gangline.domain.views import Event
from gangline.server.access import TENANT, refuse_foreign, tenant_of
from gangline.server.service.core import CALLS, EVENTS, RolloutService
from gangline.server.service.known_tokens import KNOWN_FOR_S
from gangline.server.service.running import RunningSessions
from gangline.wire.http.query import Flag, Text, Whole
from gangline.wire.http.routes import PRINCIPAL, Route
from gangline.wire.http.visitors import share_of

_PAGE = 500
_REST_S = 1.0
"""Interval of reading stored events for a stream with `calls=1`."""
MAX_STREAMS = 1000
"""Maximum number of event streams of a server. A tenant's tokens and pages have at most a tenth of them."""


class EventForm(NamedTuple):
    """The format of a stream. Each function returns whole events, or nothing."""

    begin: Callable[[int], bytes]
    """`after`: the last event before the stream."""
    event: Callable[[Event], bytes]
    still_here: Callable[[], bytes]
    """Sent while there are no events."""


class EventRoutes:
    def __init__(self, service: RolloutService, running: RunningSessions, *, keep_alive_s: float) -> None:
        self._service = service
        self._running = running
        self._keep_alive_s = keep_alive_s
        self._open = Counter[str | None]()
        """tenant -> its streams; None: of those who are bound to none"""

    async def events(self, request: web.Request) -> web.StreamResponse:
        after, task_id, with_calls = _resume_point(request), _TASK_ID.read(request), _CALLS.read(request)
        if task_id:
            store = self._service.store
            refuse_foreign(await store.query(store.tenant_of_task, task_id), f"task {task_id!r}")
        return await self.stream(request, _OWN, after, task_id, with_calls=with_calls)

    async def stream(
        self,
        request: web.Request,
        form: EventForm,
        after: int | None = None,
        task_id: str | None = None,
        *,
        with_calls: bool = False,
    ) -> web.StreamResponse:
        """Stream until the client leaves or the server stops. `after`: None starts with new events. Raises: TooMany."""
        tenant, bound = tenant_of(request), PRINCIPAL.get().bound_to
        for num, most in ((self._open.total(), MAX_STREAMS), (self._open[bound], share_of(MAX_STREAMS, bound))):
            if num >= most:
                raise TooMany(f"{most} event streams are open; end some.", limit=most)
        self._open[bound] += 1
        try:
            if after is None:
                after = await self._service.store.query(self._service.store.last_event)
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            )
            await response.prepare(request)
            # Without its database the stream ends, and the client resumes where it stopped.
            with contextlib.suppress(ConnectionError, StoreError):
                await response.write(form.begin(after))
                await self._stream(response, form, after, task_id, tenant, with_calls=with_calls)
            return response
        finally:
            self._open[bound] -= 1

    async def _stream(
        self,
        response: web.StreamResponse,
        form: EventForm,
        after: int,
        task_id: str | None,
        tenant: str | None,
        *,
        with_calls: bool,
    ) -> None:
        store, told_at = self._service.store, time.monotonic()
        reported: Mapping[str, tuple[int, int]] = {}
        read_at = 0.0
        notifier = self._service.notifier
        with notifier.listen(EVENTS, CALLS) as news, notifier.listen(CALLS) as new_calls:
            while not self._service.stopping and await self._service.tokens.still(PRINCIPAL.get()):
                page: Sequence[Event] = ()
                rest_s = read_at + _REST_S - time.monotonic() if with_calls else 0.0
                if rest_s <= 0:
                    page = await store.query(partial(store.events, after=after, limit=_PAGE, task_id=task_id))
                    read_at, rest_s = time.monotonic(), 0.0
                before, reported = reported, self._running.num_calls() if with_calls else reported
                news_of = page if tenant is None else await self._of_tenant(page, tenant)
                grown = {one: counts for one, counts in reported.items() if before.get(one) != counts}
                if grown and tenant is not None:
                    mine = await store.query(store.tasks_of, tenant, {_task_of(one) for one in grown})
                    grown = {one: counts for one, counts in grown.items() if _task_of(one) in mine}
                if page or grown:
                    told_now = b"".join([*map(form.event, news_of), *starmap(_calls, grown.items())])
                    if not told_now and time.monotonic() - told_at > self._keep_alive_s:
                        told_now = form.still_here()
                    if told_now:
                        await response.write(told_now)
                        told_at = time.monotonic()
                    after = page[-1].seq if page else after
                elif rest_s > 0:
                    await new_calls.wait(rest_s)
                elif (
                    not await news.wait(min(self._keep_alive_s, KNOWN_FOR_S))  # so that a revoked token's stream ends
                    and time.monotonic() - told_at >= self._keep_alive_s
                ):
                    await response.write(form.still_here())
                    told_at = time.monotonic()

    async def _of_tenant(self, page: Sequence[Event], tenant: str) -> Sequence[Event]:
        store = self._service.store
        mine = await store.query(store.tasks_of, tenant, {one.task_id for one in page if one.task_id is not None})
        return [one for one in page if one.task_id in mine]

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/events", self.events, "Server-sent events; resumes after `Last-Event-ID` or `after`.",
                  answer=Event, answer_types=("text/event-stream",), query=(_AFTER, _TASK_ID, _CALLS, TENANT)),
        ]  # fmt: skip


_AFTER = Whole("after", "Events after this one; 0 starts with the first.", high=10**18)
_TASK_ID = Text("task_id", "Only events of this task.")
_CALLS = Flag("calls", "1: also `session.calls`, of running sessions that somebody looks at.")


def _resume_point(request: web.Request) -> int | None:
    """Where to resume; None starts with new events. A reconnecting client's header is newer than its URL."""
    text = request.headers.get("Last-Event-ID") or _AFTER.text(request)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"after must be the number of an event, got {text[:40]!r}.")
    return int(text)


def _task_of(session_id: str) -> str:
    return session_id.rpartition(".")[0]


def _render(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), msgspec.json.encode(event))


def _begin(after: int) -> bytes:
    return b"retry: 1000\nid: %d\n\n" % after


def _still_here() -> bytes:
    return b": still here\n\n"


_OWN = EventForm(_begin, _render, _still_here)


def _calls(session_id: str, counts: tuple[int, int]) -> bytes:
    attempt, num_calls = counts
    news = {"session_id": session_id, "attempt": attempt, "num_calls": num_calls}
    return b"event: session.calls\ndata: %s\n\n" % msgspec.json.encode(news)
