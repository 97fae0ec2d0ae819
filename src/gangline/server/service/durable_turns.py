"""Records of turns that nodes send while their sessions run, so that another node can continue them.

See `CaptureSpec.durable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from gangline.domain.errors import LeaseLost, StoreError
from gangline.domain.session import KeptTurns, SessionResult, Turns
from gangline.domain.views import Event
from gangline.store.sql.tasks import TaskStore

NODE_RESTARTED = "node_restarted"
"""Failure code with which a restarted node gives up its attempts."""

_FORGET_AFTER_S = 0.25
log = logging.getLogger("gangline.server")


class TurnRecords(Protocol):
    """Where the records are kept: `TurnStore` in a folder, `ObjectTurns` at a URL. Methods block and raise StoreError,
    DiskFull if there is no space, and InvalidRequest if an id is invalid."""

    def append(self, turns: Turns) -> None:
        """Durable on return. The same calls may arrive again if their node missed the confirmation."""
        ...

    def latest(self, session_id: str, before: int) -> KeptTurns:
        """Records with the most calls, or the latest of these, among leases with a fence below `before`."""
        ...

    def forget(self, session_id: str) -> None:
        """Idempotent."""
        ...

    def sessions(self) -> list[str]:
        """Ids of the sessions with records."""
        ...


class DurableTurns:
    """The rollout service's, for the nodes that hold leases.

    It hears of ends from the first record on that it may have: where servers share the records, from the beginning.
    """

    def __init__(
        self,
        store: TaskStore,
        kept: TurnRecords,
        watchers: list[Callable[[Sequence[Event]], None]],
        on_stored: list[Callable[[SessionResult], None]],
    ) -> None:
        """watchers: given the events of the service. on_stored: given the results that nodes report."""
        self._store = store
        self._kept = kept
        self._watchers = watchers
        self._on_stored = on_stored
        self._ended: list[str] = []
        self._forgetting: asyncio.Task[None] | None = None

    async def keep(self, node_id: str, sent: Sequence[Turns]) -> list[str]:
        """Durable on return. Returns the sessions whose lease the node has lost, whose records were not stored.

        Raises: StoreError, DiskFull.
        """
        self._listen()
        fences = await self._store.query(self._store.fences, node_id, [turns.session_id for turns in sent])
        held = [turns for turns in sent if fences.get(turns.session_id) == turns.fence]
        await asyncio.to_thread(lambda: [self._kept.append(turns) for turns in held])
        is_open = await self._store.query(self._store.open_of, [turns.session_id for turns in held])
        ended = [turns.session_id for turns in held if turns.session_id not in is_open]
        await asyncio.to_thread(self._forget, *ended)  # they ended before their turns were stored
        return [turns.session_id for turns in sent if fences.get(turns.session_id) != turns.fence]

    async def latest(self, session_id: str, fence: int) -> KeptTurns:
        """Records of a session's earlier leases. `fence`: the current lease's."""
        return await asyncio.to_thread(self._kept.latest, session_id, fence)

    async def begin_anew(self, node_id: str, session_id: str, fence: int) -> None:
        """Delete the records, because the agent's requests differ this time. Raises: LeaseLost."""
        fences = await self._store.query(self._store.fences, node_id, [session_id])
        if fences.get(session_id) != fence:
            raise LeaseLost(f"session {session_id} is not leased to node {node_id} with fence {fence}.")
        await asyncio.to_thread(self._kept.forget, session_id)

    def _reported(self, result: SessionResult) -> None:
        """Delete the records of an ended attempt: the next one starts over, unless the node was only restarted.
        Blocking.
        """
        if result.failure is None or result.failure.code != NODE_RESTARTED:
            self._forget(result.session_id)

    def _saw(self, events: Sequence[Event]) -> None:
        """Delete the records of ended sessions."""
        self._ended += (event.session_id for event in events if event.kind == "session.ended" and event.session_id)
        if self._ended and self._forgetting is None:
            self._forgetting = asyncio.create_task(self._forget_ended())

    async def _forget_ended(self) -> None:
        """Many at once: most have no records."""
        await asyncio.sleep(_FORGET_AFTER_S)
        ended, self._ended, self._forgetting = self._ended, [], None
        await asyncio.to_thread(self._forget, *ended)

    async def tidy(self) -> None:
        """Delete records that a crash left of ended or deleted sessions."""
        found = await asyncio.to_thread(self._kept.sessions)
        if found or self._store.database.shared:
            self._listen()
        is_open = await self._store.query(self._store.open_of, found)
        await asyncio.to_thread(self._forget, *(one for one in found if one not in is_open))

    def _listen(self) -> None:
        """Idempotent."""
        if self._saw not in self._watchers:
            self._watchers.append(self._saw)
            self._on_stored.append(self._reported)

    def _forget(self, *session_ids: str) -> None:
        for session_id in session_ids:
            try:
                self._kept.forget(session_id)
            except StoreError as error:  # retried at the next start
                log.error("server.turns_not_forgotten message=%s", error.message)
