"""The trainer's side of a chaos run: it submits, follows the events, and is called back, at times badly."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import web

from gangline.domain.errors import ServerUnavailable, StoreError
from gangline.domain.views import Event
from gangline.wire.client.server import ServerClient
from support.chaos.faults import Manner

__all__ = ["Receiver", "Trainer", "persistently"]

T = TypeVar("T")


async def persistently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until the server answers, as a trainer does."""
    while True:
        try:
            return await ask()
        except (ServerUnavailable, StoreError):
            await asyncio.sleep(0.1)


class Receiver:
    """Takes callbacks, and remembers each body by its key."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, list[bytes]] = defaultdict(list)
        self.num_turned_away = 0
        self.url = ""
        self._port = 0
        self._site: web.TCPSite | None = None
        self._manners: list[Manner] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Receiver]:
        app = web.Application()
        app.router.add_post("/done", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        try:
            await self._open()
            self._port = self._runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{self._port}/done"
            yield self
        finally:
            await self._runner.cleanup()

    async def _open(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await self._site.start()

    async def misbehave(self, manner: Manner, until: Awaitable[None]) -> None:
        """Several times may overlap: the latest manner holds, and being down goes before all others."""
        self._manners.append(manner)
        if manner == "down" and self._site is not None:
            site, self._site = self._site, None
            await site.stop()
        await until
        self._manners.remove(manner)
        if self._site is None and "down" not in self._manners:
            await self._open()

    async def _take(self, call: web.Request) -> web.Response:
        body = await call.read()
        manner = self._manners[-1] if self._manners else None
        if manner in ("down", "refuses"):  # a connection from before it went down is still open
            self.num_turned_away += 1
            return web.Response(status=500)
        self.taken[call.headers["Idempotency-Key"]].append(body)
        if manner == "forgets" and call.transport is not None:
            self.num_turned_away += 1
            call.transport.abort()
        return web.Response(status=204)


class Trainer:
    """Submits tasks a little ahead of what has ended, and hears of every event."""

    def __init__(self, client: ServerClient, tasks: Sequence[dict[str, Any]], *, ahead: int, after: int = 0) -> None:
        """
        ahead: so many sessions are submitted at most that have not ended.
        after: of events up to this one it hears nothing.
        """
        self.events: list[Event] = []
        """As they were heard, through all that happened to the server."""
        self.num_ended = 0
        """Sessions."""
        self.num_tasks_submitted = 0
        self.num_tasks_ended = 0
        self._client = client
        self._tasks = tasks
        self._ahead = ahead
        self._after = after
        self._leased: set[str] = set()
        self._moved = asyncio.Condition()

    async def submit(self) -> None:
        """All tasks."""
        num_sessions = 0
        for task in self._tasks:
            num_sessions += task["num_samples"]
            await self.ended(num_sessions - self._ahead)
            await persistently(lambda task=task: self._client.submit(task))
            async with self._moved:
                self.num_tasks_submitted += 1
                self._moved.notify_all()

    async def submitted(self, num_tasks: int) -> None:
        """When so many tasks have been submitted."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.num_tasks_submitted >= num_tasks)

    async def follow(self) -> None:
        """Until cancelled."""
        async for event in self._client.events(after=self._after, retry_s=0.2):
            self.events.append(event)
            if event.kind == "session.leased" and event.task_id is not None:
                self._leased.add(event.task_id)
            self.num_ended += event.kind == "session.ended"
            self.num_tasks_ended += event.kind == "task.ended"
            async with self._moved:
                self._moved.notify_all()

    async def leased(self, task_id: str) -> None:
        """When a session of it has been leased, or all is over."""
        async with self._moved:
            await self._moved.wait_for(lambda: task_id in self._leased or self.is_over)

    async def ended(self, num_sessions: int) -> None:
        """When so many sessions have ended."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.num_ended >= num_sessions)

    async def one_more_task_ended(self, and_s: float) -> None:
        """When another task has ended, and so long after that."""
        num = self.num_tasks_ended
        async with self._moved:
            await self._moved.wait_for(lambda: self.num_tasks_ended > num)
        await asyncio.sleep(and_s)

    @property
    def is_over(self) -> bool:
        return self.num_tasks_ended >= len(self._tasks)

    async def all_ended(self) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.is_over)
