"""Find: the index of all ended sessions, kept up to date by a separate process after the first search."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from functools import partial
from pathlib import Path

from gangline.domain.errors import GanglineError
from gangline.domain.views import SessionView
from gangline.server.service.core import EVENTS, RolloutService
from gangline.server.web.finding import FindAnswer, Wanted, find, indexed_attempts
from gangline.server.web.indexing import frame, session_frame

log = logging.getLogger("gangline.server")

_PAGE = 1000
_REST_S = 1.0
_LISTEN_S = 60.0
_FIRST_S = 2.0


class Finder:
    """Bound to one event loop; `close` ends the process. Nothing runs before the first search.

    path: of the index; None keeps no index and finds nothing.
    """

    def __init__(self, service: RolloutService, path: Path | None) -> None:
        self._service = service
        self._path = path
        self._task: asyncio.Task[None] | None = None
        self._num_sent = 0
        self._num_done = 0
        self._task_facts = ("", "", "")
        """(task id, its harness, its tenant) of the last session sent; a group's sessions are consecutive."""
        self._is_listed = asyncio.Event()
        """Set once the missing sessions are known."""

    async def find(self, wanted: Wanted) -> FindAnswer:
        """Searches the sessions that are already in the index."""
        if self._path is None:
            return FindAnswer(sessions=(), has_more=False, num_indexed=0, num_waiting=0)
        if self._task is None or self._task.done():
            self._is_listed.clear()
            self._task = asyncio.create_task(self._keep_up(self._path), name="find.index")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await self._is_listed.wait()
        num_waiting = self._num_sent - self._num_done
        if wanted.tenant is not None:
            num_waiting = min(num_waiting, 1)
        return await asyncio.to_thread(find, self._path, wanted, num_waiting)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_up(self, path: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gangline.server.web.indexing", str(path)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        self._num_sent = self._num_done = 0
        counting = asyncio.create_task(self._count(process.stdout))
        try:
            after = await self._service.store.query(self._service.store.last_event)
            await self._catch_up(path, process.stdin)
            with self._service.notifier.listen(EVENTS) as listener:
                while process.returncode is None:
                    after = await self._send_ended(after, process.stdin)
                    await listener.wait(_LISTEN_S)
                    await asyncio.sleep(_REST_S)
        except (GanglineError, ConnectionError) as error:
            log.error("index.stopped message=%s: the next search starts it again", error)
        finally:
            counting.cancel()
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _count(self, done: asyncio.StreamReader | None) -> None:
        assert done is not None
        while await done.readline():
            self._num_done += 1

    async def _catch_up(self, path: Path, index: asyncio.StreamWriter) -> None:
        """Send sessions missing in the index, newest first, and remove deleted ones."""
        known = await asyncio.to_thread(indexed_attempts, path)
        missing: list[SessionView] = []
        before: int | None = None
        store = self._service.store
        while True:
            page = await store.query(partial(store.sessions, limit=_PAGE, before=before, state="ended"))
            missing += [one for one in page.sessions if known.pop(one.session_id, None) != one.result_attempt]
            before = page.next
            if before is None:
                break
        self._num_sent += len(missing)
        self._is_listed.set()
        for session_id in known:
            self._num_sent += 1
            index.write(frame(b"-", session_id.encode()))
        for session in missing:
            await self._send(session, index)

    async def _send_ended(self, after: int, index: asyncio.StreamWriter) -> int:
        """Send sessions that ended after this event. Returns the last event seen."""
        store = self._service.store
        while events := await store.query(partial(store.events, after=after, limit=_PAGE)):
            for event in events:
                if event.kind == "session.ended" and event.session_id is not None:
                    self._num_sent += 1
                    await self._send(await store.query(store.session, event.session_id), index)
            after = events[-1].seq
        return after

    async def _send(self, session: SessionView, index: asyncio.StreamWriter) -> None:
        """The session was already counted as sent."""
        attempt = session.result_attempt
        try:
            if attempt is None:
                raise FileNotFoundError
            read = partial(self._service.results.read_bytes, session.task_id, session.session_id, attempt)
            data = await asyncio.to_thread(read)
            harness, tenant = await self._facts_of(session.task_id)
        except (GanglineError, FileNotFoundError):  # cancelled before its first attempt, or deleted meanwhile
            self._num_sent -= 1
            return
        index.write(session_frame(harness, tenant, data))
        await index.drain()

    async def _facts_of(self, task_id: str) -> tuple[str, str]:
        """Raises: NotFound."""
        if self._task_facts[0] != task_id:
            task = await self._service.store.query(self._service.store.task_summary, task_id)
            self._task_facts = (task_id, task.harness, task.tenant)
        return self._task_facts[1:]
