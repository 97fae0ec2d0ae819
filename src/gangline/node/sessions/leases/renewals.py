"""Renews a node's leases while its event loop is held up.

The loop itself reports the node's state to the server every few seconds. When it has not done so for a while, this
thread sends the last heartbeat again over a connection of its own, so that no other session pays for the delay. A loop
that stays silent for too long is presumed dead: then the leases expire, and others get the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from gangline.domain.errors import GanglineError
from gangline.domain.session import Heartbeat
from gangline.node.sessions.leases.rollout_server import LeaseGiver

__all__ = ["Renewals"]

log = logging.getLogger("gangline.node")

_TIMEOUT_S = 10.0


class Renewals:
    """Call `start()`, then `sending()` with each heartbeat of the loop, and `stop()` at the end."""

    def __init__(self, server: LeaseGiver, *, every_s: float, max_silence_s: float = 300.0) -> None:
        """
        every_s: how often the loop sends a heartbeat. Its silence begins after twice as long.
        max_silence_s: after so long the leases are left to run out.
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
        """The loop is about to send this heartbeat."""
        self._last = (time.monotonic(), beat)

    async def stop(self) -> None:
        """Idempotent."""
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
