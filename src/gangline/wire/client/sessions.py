"""Sessions of external agents: the routes that servers and nodes have in common."""

from __future__ import annotations

from typing import Any

import msgspec

from gangline.domain.node_views import ExternalView, OpenedSession
from gangline.domain.session import SessionResult
from gangline.wire.client.base import HttpClient


class CallerSessions(HttpClient):
    """Sessions of agents that Gangline does not run. A server forwards them to its nodes."""

    async def open_session(self, **request: Any) -> OpenedSession:
        """Open a session. Fields of `request`: docs/guides/external-sessions.md.

        Raises: InvalidRequest, Conflict if the id is taken, TooMany.
        """
        return await self.request_json("POST", "/v1/sessions", OpenedSession, body=msgspec.json.encode(request))

    async def wait_session(self, session_id: str, timeout_s: float = 60.0) -> ExternalView:
        """The session when its agent is done, or after `timeout_s` (at most 300). Raises: NotFound."""
        params = {"timeout_s": f"{timeout_s:g}"}
        path = f"/v1/sessions/{session_id}/wait"
        return await self.request_json("GET", path, ExternalView, params=params, wait_s=timeout_s)

    async def finalize(self, session_id: str, *, completions: bool = False) -> SessionResult:
        """Idempotent. Raises: NotFound, Conflict if it was aborted."""
        params = {"completions": "1"} if completions else None
        return await self.request_msgpack(f"/v1/sessions/{session_id}/finalize", SessionResult, params, method="POST")

    async def abort_session(self, session_id: str) -> ExternalView:
        """Raises: NotFound, Conflict if it was finalized."""
        return await self.request_json("POST", f"/v1/sessions/{session_id}/abort", ExternalView)
