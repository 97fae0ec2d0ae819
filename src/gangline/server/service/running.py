"""Follows running sessions while they are viewed: recorded calls arrive from their nodes as they are made.

Nodes are queried only for sessions being viewed, over one connection each, and answer when there is a new call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from gangline.domain.completion import Completion
from gangline.domain.errors import Conflict, GanglineError, NotFound, ServerUnavailable, TooMany
from gangline.domain.views import NodeView, SessionView
from gangline.server.service.core import CALLS, RolloutService
from gangline.server.service.live_nodes import live_nodes, node_client
from gangline.server.web.outline import OpenedSession, open_running

log = logging.getLogger("gangline.server")

LOOKED_AT_S = 60.0
"""A session without requests for this long is no longer followed."""
MAX_SESSIONS = 64
_WAIT_S = 20.0
_REST_S = 0.5
_FIRST_S = 5.0


class RunningSessions:
    """Bound to one event loop; `close` ends following."""

    def __init__(self, service: RolloutService, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._monotonic = monotonic
        self._followed: dict[tuple[str, int], _Followed] = {}

    async def find(self, session: SessionView) -> OpenedSession:
        """A leased session with the calls recorded so far. It is followed from now on.

        Raises: Conflict if its node cannot be queried, ServerUnavailable if it does not answer, TooMany.
        """
        followed = self._followed.get((session.session_id, session.attempt)) or await self._follow(session)
        followed.asked_at = self._monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await followed.heard.wait()
        if followed.error is not None and not followed.completions:
            raise followed.error
        return await asyncio.to_thread(followed.opened, session)

    def num_calls(self) -> Mapping[str, tuple[int, int]]:
        """session id -> (attempt, number of recorded calls), for all followed sessions."""
        return {one: (attempt, len(held.completions)) for (one, attempt), held in self._followed.items()}

    async def close(self) -> None:
        tasks = [followed.task for followed in self._followed.values() if followed.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, session: SessionView) -> _Followed:
        """Raises: Conflict, TooMany."""
        node = next(
            (live_node for live_node in await live_nodes(self._service) if live_node.node_id == session.node_id), None
        )
        if node is None:
            raise Conflict(
                f"session {session.session_id!r} runs on node {session.node_id!r}, which cannot be asked for them.",
                state=session.state,
            )
        key = (session.session_id, session.attempt)
        if key in self._followed:  # another request was as quick
            return self._followed[key]
        if len(self._followed) >= MAX_SESSIONS:
            raise TooMany(f"{MAX_SESSIONS} running sessions are looked at; close some.", limit=MAX_SESSIONS)
        followed = self._followed[key] = _Followed(self._monotonic())
        followed.task = asyncio.create_task(self._ask(node, key, followed), name=f"running {session.session_id}")
        followed.task.add_done_callback(lambda _done: self._followed.pop(key, None))
        return followed

    async def _ask(self, node: NodeView, key: tuple[str, int], followed: _Followed) -> None:
        session_id, attempt = key
        async with node_client(self._service, node) as client:
            while self._monotonic() - followed.asked_at < LOOKED_AT_S and not self._service.stopping:
                num_known = len(followed.completions)
                wait_s = _WAIT_S if followed.heard.is_set() else 0.0
                try:
                    found = await client.recorded_calls(session_id, after=num_known, wait_s=wait_s)
                    if found.attempt != attempt:
                        return  # the node has started another attempt
                    followed.add(found.completions, None)
                except NotFound:  # its agent has not started, or has ended
                    followed.add((), None)
                    await asyncio.sleep(_REST_S)
                except GanglineError as error:
                    log.info("running.not_read session=%s node=%s message=%s", session_id, node.node_id, error)
                    followed.add((), ServerUnavailable(f"node {node.node_id} does not answer: {error}"))
                    await asyncio.sleep(_REST_S)
                if len(followed.completions) > num_known:
                    self._service.notifier.notify(CALLS)


class _Followed:
    """The known state of one attempt."""

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.completions: tuple[Completion, ...] = ()
        self.error: GanglineError | None = None
        self.heard = asyncio.Event()
        """Set by the node's first response."""
        self.task: asyncio.Task[None] | None = None
        self._opened: tuple[object, OpenedSession] | None = None

    def add(self, completions: tuple[Completion, ...], error: GanglineError | None) -> None:
        self.completions += completions
        self.error = error
        self.heard.set()

    def opened(self, session: SessionView) -> OpenedSession:
        """Blocking."""
        held = self.completions
        seen = (session.stage, len(held))
        kept = self._opened
        if kept is None or kept[0] != seen:
            kept = self._opened = (seen, open_running(session, session.attempt, held))
        return kept[1]
