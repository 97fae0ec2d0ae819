"""Sessions being viewed: each result is read and divided once, and the last few stay in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import ChainMap, OrderedDict
from collections.abc import Sequence

from gangline.domain.completion import Completion
from gangline.domain.errors import BuilderError, Conflict, NotFound, ServerUnavailable
from gangline.domain.session import SessionResult
from gangline.server.service.core import RolloutService
from gangline.server.service.running import RunningSessions
from gangline.server.service.token_texts import TokenTexts
from gangline.server.web.alignment import AlignedSamples, align
from gangline.server.web.outline import OpenedSession, open_session
from gangline.server.web.tokens import TokenBytes, of_one_tokenizer, recorded_texts

_MAX_SESSIONS = 8


class OpenedSessions:
    """Bound to one event loop; `close` ends following."""

    def __init__(self, service: RolloutService, running: RunningSessions, texts: TokenTexts) -> None:
        self._service = service
        self._running = running
        self._texts = texts
        self._opened: OrderedDict[tuple[str, int, float], asyncio.Task[OpenedSession]] = OrderedDict()
        """(session id, attempt, when it was submitted) -> the session, most recently used last. A forgotten id is free.
        """

    async def find(self, session_id: str, attempt: int | None = None) -> OpenedSession:
        """The session of one attempt, of the accepted attempt, or of the running one.

        Raises: NotFound, Conflict if it is still queued, BuilderError, ServerUnavailable if its node is unreachable.
        """
        view = await self._service.store.query(self._service.store.session, session_id)
        if attempt is None and view.state == "leased":
            return await self._running.find(view)
        reference = await self._service.session_reference(session_id, attempt)
        key = (session_id, reference.attempt, view.created_at)
        task = self._opened.get(key)
        if task is None or (task.done() and task.exception() is not None):
            task = self._opened[key] = asyncio.create_task(self._open(session_id, attempt), name="opened session")
        self._opened.move_to_end(key)
        while len(self._opened) > _MAX_SESSIONS:
            self._opened.popitem(last=False)
        return await asyncio.shield(task)

    async def aligned(self, task_id: str, first: int, limit: int) -> AlignedSamples:
        """Samples `first` to `first + limit` of a task side by side, if they have calls. Raises: NotFound."""
        task = await self._service.store.query(self._service.store.task, task_id)
        group: list[tuple[int, OpenedSession, TokenBytes]] = []
        for view in task.sessions[first : first + limit]:
            with contextlib.suppress(NotFound, Conflict, ServerUnavailable):  # the task's view reports their states
                session = await self.find(view.session_id)
                group.append((view.sample_index, session, await self.bytes_of_tokens(session.calls)))
        return await asyncio.to_thread(align, task_id, group)

    async def beside(self, *session_ids: str) -> AlignedSamples:
        """Sessions side by side, in this order. Raises: as `find`."""
        opened = [await self.find(session_id) for session_id in session_ids]
        known = [await self.bytes_of_tokens(session.calls) for session in opened]
        group = list(zip(range(len(opened)), opened, known, strict=True))
        return await asyncio.to_thread(align, opened[0].outline.task_id, group)

    async def tenant_of(self, session_id: str) -> str | None:
        return await self._service.store.query(self._service.store.tenant_of_session, session_id)

    async def bytes_of_tokens(self, calls: Sequence[Completion]) -> TokenBytes:
        """Bytes of the token ids of calls with the first one's tokenizer, which an engine or the calls report."""
        if not calls:
            return {}
        alike = of_one_tokenizer(calls)
        return ChainMap(await self._texts.of(alike), await asyncio.to_thread(recorded_texts, alike))

    async def close(self) -> None:
        await self._running.close()

    async def _open(self, session_id: str, attempt: int | None) -> OpenedSession:
        result = await self._service.session_result(session_id, attempt)
        return await asyncio.to_thread(_divided, result)


def _divided(result: SessionResult) -> OpenedSession:
    try:
        return open_session(result)
    except ValueError as error:
        raise BuilderError(f"the calls of session {result.session_id} are not a tree: {error}") from error
