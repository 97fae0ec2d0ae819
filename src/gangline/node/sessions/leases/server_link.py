"""A node's link to its server: takes and gives back leases, sends heartbeats, and renews leases while the event loop is
blocked.

The loop itself reports the node's state to the server every few seconds. If it has not done so for a while, a thread
sends the last heartbeat again over its own connection, so that a delay in the loop costs no session its lease. A loop
that stays silent for too long is presumed dead: then the leases expire, and other nodes get the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping

import msgspec

from gangline.domain.errors import GanglineError, LeaseLost, NodeIdTaken, NotFound
from gangline.domain.lifecycle import Stage
from gangline.domain.placement import Offer
from gangline.domain.session import Heartbeat, Lease
from gangline.node.health.metrics import NodeNow
from gangline.node.sessions.leases.rollout_server import LeaseGiver
from gangline.node.sessions.parts import NodeParts

log = logging.getLogger("gangline.node")

_TIMEOUT_S = 10.0


class Renewals:
    """Call `start()`, then `sending()` with each heartbeat of the loop, and `stop()` at the end."""

    def __init__(self, server: LeaseGiver, *, every_s: float, max_silence_s: float = 300.0) -> None:
        """every_s: how often the loop sends a heartbeat. It counts as silent after twice that time.
        max_silence_s: after this much silence the leases may expire.
        """
        self._server = server
        self.every_s = every_s
        """May change while it runs."""
        self._max_silence_s = max_silence_s
        self._last: tuple[float, Heartbeat] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="lease-renewals", daemon=True)
        self._thread.start()

    def sending(self, beat: Heartbeat) -> None:
        """Record a heartbeat that the loop is about to send."""
        self._last = (time.monotonic(), beat)

    async def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _watch(self) -> None:
        is_given_up = False
        while not self._stopping.wait(self.every_s):
            if self._last is None:
                continue
            at, beat = self._last
            silent_s = time.monotonic() - at
            if silent_s > self._max_silence_s:
                if not is_given_up:
                    log.error("lease.not_renewed silent_s=%.0f: the event loop is taken for dead", silent_s)
                is_given_up = True
            elif silent_s > 2 * self.every_s:
                self._renew(beat, silent_s)
            else:
                is_given_up = False

    def _renew(self, beat: Heartbeat, silent_s: float) -> None:
        log.warning("lease.renewed_apart silent_s=%.1f sessions=%d: the loop is held up", silent_s, len(beat.sessions))
        try:
            asyncio.run(self._sent(beat))
        except GanglineError as error:
            log.warning("heartbeat.failed message=%s", error)

    async def _sent(self, beat: Heartbeat) -> None:
        async with self._server.twin(timeout_s=_TIMEOUT_S) as client:
            await client.heartbeat(beat)


class ServerLink:
    """`renewals` run in their own thread while the node leases."""

    def __init__(self, parts: NodeParts, server: LeaseGiver, *, url: str, identity: str, every_s: float) -> None:
        """url: where others reach the node.
        identity: of the node's data folder.
        every_s: interval of heartbeats, unless the server asks for a longer one.
        """
        self.renewals = Renewals(server, every_s=every_s)
        self._own_every_s = every_s
        self._parts = parts
        self._server = server
        self._url = url
        self._identity = identity
        self.leaving = False
        """Whether the next heartbeat is the last."""

    @property
    def every_s(self) -> float:
        """Seconds between heartbeats."""
        return self.renewals.every_s

    async def lease(self, max_sessions: int, wait_s: float) -> list[Lease]:
        """Raises: NodeIdTaken, and connection errors."""
        node_id = self._parts.node_id
        return await self._server.lease(
            node_id, url=self._url, max_sessions=max_sessions, wait_s=wait_s, identity=self._identity
        )

    async def release(self, lease: Lease, *, has_run: bool = False) -> bool:
        """Give a session back. Returns whether this node no longer holds it.

        has_run: whether its agent has started.
        """
        session_id, fence = lease.session_id, lease.fence
        try:
            await self._server.release(self._parts.node_id, session_id=session_id, fence=fence, has_run=has_run)
        except (LeaseLost, NotFound):
            return True
        except GanglineError as error:  # then the lease expires
            log.warning("lease.not_released session=%s message=%s", lease.session_id, error)
            return False
        return True

    async def beat(
        self, held: Mapping[str, tuple[int, Stage]], now: NodeNow, *, draining: bool, offer: Offer | None = None
    ) -> tuple[str, ...] | None:
        """Report the sessions held: id -> fence and stage. Returns the ids of lost sessions; None: no answer.

        Raises: NodeIdTaken, since another node runs sessions under the id.
        """
        beat = Heartbeat(
            node_id=self._parts.node_id,
            url=self._url,
            sessions=dict(held),
            capacity=self._parts.pools.sizes.capacity,
            draining=draining,
            backends=tuple(msgspec.to_builtins(view) for view in now.backends),
            metrics=self._parts.metrics.numbers(now).as_metrics() | now.troubles(),
            identity=self._identity,
            offer=offer,
            leaving=self.leaving,
        )
        self.renewals.sending(beat)
        try:
            reply = await self._server.heartbeat(beat)
        except NodeIdTaken:
            raise
        except GanglineError as error:
            log.warning("heartbeat.failed message=%s", error)
            return None
        self.renewals.every_s = max(self._own_every_s, reply.every_s)
        return tuple(reply.lost)
