"""The server's side of leasing as a node uses it; `ServerClient` implements it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.views import ResultReceipt


class HeartbeatTaker(Protocol):
    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Raises: NodeIdTaken, and connection errors."""
        ...


class LeaseGiver(HeartbeatTaker, Protocol):
    def twin(self, *, timeout_s: float) -> AbstractAsyncContextManager[HeartbeatTaker]:
        """Returns a separate connection, for another thread."""
        ...

    async def lease(
        self, node_id: str, *, url: str, max_sessions: int, wait_s: float = 0.0, identity: str = ""
    ) -> list[Lease]:
        """Returns up to `max_sessions` leases. Raises: NodeIdTaken, and connection errors."""
        ...

    async def release(self, node_id: str, *, session_id: str, fence: int, has_run: bool = False) -> None:
        """Give a session back. Its attempt is used up if its agent has started.

        Raises: NotFound, LeaseLost, and connection errors.
        """
        ...


class ResultTaker(Protocol):
    async def post_result(self, result: SessionResult, data: bytes | None = None) -> ResultReceipt:
        """Stored on return. Raises: NotFound, LeaseLost, DiskFull, and connection errors."""
        ...
