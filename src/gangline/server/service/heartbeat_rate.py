"""How often nodes send heartbeats: less often where many do, since each costs a write of the database."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["HeartbeatRate"]

_MAX_PER_S = 100.0
"""Heartbeats that a server asks for, in all."""
_WINDOW_S = 30.0


class HeartbeatRate:
    """Counts the nodes that are heard by this server. Belongs to one event loop."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now: set[str] = set()
        self._before: set[str] = set()
        self._since = monotonic()

    def every_s(self, node_id: str, lease_s: float) -> float:
        """Seconds until the node's next heartbeat, where its own interval is shorter: at most a third of a lease, so
        that two may be lost."""
        now = self._monotonic()
        if now - self._since > _WINDOW_S:
            self._before, self._now, self._since = self._now, set(), now
        self._now.add(node_id)
        return min(max(len(self._now), len(self._before)) / _MAX_PER_S, lease_s / 3)
