"""How often nodes send heartbeats: less often where many do, since each costs a write of the database.

Those that the database did not take, as on a full disk, are kept in memory: status shows them all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec

from gangline.domain.errors import StoreError
from gangline.domain.session import Heartbeat
from gangline.domain.views import HEARTBEAT_REFUSED, NodeView, ServiceStatus

__all__ = ["HeartbeatRate", "RefusedHeartbeats"]

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


class RefusedHeartbeats:
    """The newest of each node. Belongs to one event loop."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._refused: dict[str, tuple[Heartbeat, float, StoreError]] = {}

    @contextmanager
    def noted(self, beat: Heartbeat) -> Generator[None]:
        """Around the storing of a heartbeat. Raises: what the block raises."""
        try:
            yield
        except StoreError as error:
            self._refused[beat.node_id] = beat, self._now(), error
            raise
        self._refused.pop(beat.node_id, None)

    def shown_in(self, status: ServiceStatus) -> ServiceStatus:
        if not self._refused:
            return status
        return msgspec.structs.replace(status, nodes=tuple(map(self._shown, status.nodes)))

    def _shown(self, node: NodeView) -> NodeView:
        if node.node_id not in self._refused:
            return node
        beat, at, error = self._refused[node.node_id]
        return msgspec.structs.replace(
            node,
            backends=beat.backends,
            metrics=beat.metrics | {HEARTBEAT_REFUSED + error.code: 1.0},
            last_seen_at=at,
            age_s=max(0.0, self._now() - at),
        )
