"""Opens a session for a rollout at its first call, and ends it with the rollout."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gangline.domain.errors import Conflict, NotFound, ServerUnavailable, SessionOver, TooMany
from gangline.domain.ids import validated_id
from gangline.domain.task import TaskRequest
from gangline.interop.harbor.relay.api import HarborApi, HarborRollout
from gangline.interop.harbor.relay.groups import affinity_of
from gangline.interop.harbor.relay.rollouts import RelayedRollout, RolloutBook, SessionAddress
from gangline.machine.event_loop import to_end
from gangline.wire.client.server import ServerClient

log = logging.getLogger("gangline.harbor")

_TTL_S = 7 * 86_400.0
"""A group may wait that long for its last rollout."""


class RolloutSessions:
    """template: its `capture` and `builder` are the sessions'. patience_s: how long a full or absent service is asked.
    on_wait: called with the reason while no node takes a session, and with None after that.
    """

    def __init__(
        self,
        client: ServerClient,
        harbor: HarborApi,
        book: RolloutBook,
        template: TaskRequest,
        on_wait: Callable[[str | None], None],
        *,
        patience_s: float = 600.0,
        pause_s: float = 1.0,
    ) -> None:
        self._client = client
        self._harbor = harbor
        self._book = book
        self._template = template
        self._on_wait = on_wait
        self._patience_s = patience_s
        self._pause_s = pause_s
        self._opening = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def of(self, rollout_id: str) -> tuple[RelayedRollout, SessionAddress]:
        """The rollout and its session, opened if it is the first call.

        Raises: SessionOver; ServerUnavailable, TooMany if no node takes it; Conflict if another folder's connector
        answered its calls; StoreError; Harbor's errors.
        """
        validated_id(rollout_id, "rollout_id")
        async with self._opening[rollout_id]:
            rollout = self._book.find(rollout_id)
            if rollout is None:
                rollout = await self._begun(await self._harbor.rollout(rollout_id))
        if rollout.is_over or rollout.session is None:
            raise SessionOver(f"rollout {rollout_id} has ended: it takes no more model calls.")
        return rollout, rollout.session

    async def end(self, rollout: RelayedRollout, *, keep: bool) -> None:
        """End the session. Idempotent. keep: whether its result is delivered. Raises: ServerUnavailable, StoreError."""
        if rollout.session is not None:
            ending = self._client.finalize if keep else self._client.abort_session
            try:
                await ending(rollout.session.session_id)
            except (NotFound, Conflict) as error:  # the delivery says so
                log.warning("harbor.session_lost session=%s message=%s", rollout.session.session_id, error)
        rollout.is_over = True
        self._opening.pop(rollout.rollout_id, None)
        await self._book.save(rollout)

    async def _begun(self, about: HarborRollout) -> RelayedRollout:
        """Raises: as `of`."""
        deadline = time.monotonic() + self._patience_s
        try:
            while True:
                try:
                    return await to_end(self._begin(about))
                except (ServerUnavailable, TooMany) as error:
                    if time.monotonic() > deadline:
                        raise
                    self._on_wait(error.message)
                await asyncio.sleep(self._pause_s)
        finally:
            self._on_wait(None)

    async def _begin(self, about: HarborRollout) -> RelayedRollout:
        session_id = f"harbor-{about.id}"
        wanted: dict[str, Any] = {
            "task_id": affinity_of(about),
            "capture": self._template.capture.model_dump(mode="json", exclude_unset=True),
            "builder": self._template.builder.model_dump(mode="json"),
            "ttl_s": _TTL_S,
            "metadata": {"harbor": {"rollout_id": about.id, "job_id": about.job_id, "trial": about.name}},
        }
        try:
            opened = await self._client.open_session(session_id=session_id, **wanted)
        except Conflict:
            await self._give_up_unused(session_id)
            opened = await self._client.open_session(**wanted)
        address = SessionAddress(
            session_id=opened.session_id, api_key=opened.api_key, url=opened.base_urls["anthropic"]
        )
        rollout = RelayedRollout(about.id, about.job_id, session=address)
        self._book.add(rollout)
        await self._book.save(rollout)
        return rollout

    async def _give_up_unused(self, session_id: str) -> None:
        """End a session that a connector before us opened, and whose key it lost before a call was made with it.

        Raises: Conflict if there were calls: then another folder has the key.
        """
        found = await self._client.wait_session(session_id, timeout_s=0.0)
        if found.num_calls:
            raise Conflict(
                f"the calls of session {session_id} were answered by a connector with another data folder: run it with "
                "that --data, so that none of them is lost."
            )
        await self._client.abort_session(session_id)
