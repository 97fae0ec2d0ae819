"""The server's side of leasing, as a node sees it; `ServerClient` is one."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.views import ResultReceipt


class HeartbeatTaker(Protocol):
    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        """Raises: NodeIdTaken, and as a connection does."""
        ...


class LeaseGiver(HeartbeatTaker, Protocol):
    def twin(self, *, timeout_s: float) -> AbstractAsyncContextManager[HeartbeatTaker]:
        """Its own connection, for another thread."""
        ...

    async def lease(
        self, node_id: str, *, url: str, max_sessions: int, wait_s: float = 0.0, identity: str = ""
    ) -> list[Lease]:
        """Up to `max_sessions` sessions. Raises: NodeIdTaken, and as a connection does."""
        ...

    async def release(self, node_id: str, *, session_id: str, fence: int, has_run: bool = False) -> None:
        """Give a session back; its attempt is spent where its agent has started.

        Raises: NotFound, LeaseLost, and as a connection does.
        """
        ...


class ResultTaker(Protocol):
    async def post_result(self, result: SessionResult, data: bytes | None = None) -> ResultReceipt:
        """Stored on return. Raises: NotFound, LeaseLost, DiskFull, and as a connection does."""
        ...
