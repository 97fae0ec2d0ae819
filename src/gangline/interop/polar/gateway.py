"""Calls to one of Polar's gateways: create, look at and delete its sessions.

Source: Polar, 3.1; the routes of its published gateway.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

import aiohttp
import msgspec

__all__ = ["GatewayCalls", "Received"]

log = logging.getLogger("gangline.server")

_MAX_SAID_CHARS = 500
_REFUSALS = (400, 413, 422, 500)
"""Statuses that concern the session itself: 400 to one that it cannot queue, 500 to one that it cannot read."""
_TIMEOUT_S = 10.0

Received = Literal["taken", "refused", "given_back"]


class _State(msgspec.Struct, frozen=True):
    """What a gateway answers about a session."""

    result: dict[str, Any] | None = None


class GatewayCalls:
    """control_token: the gateways' own, which is the server's. Use as a context manager."""

    def __init__(self, control_token: str | None) -> None:
        headers = dict[str, str]()
        if control_token is not None:
            headers = {"X-Polar-Control-Token": control_token, "Authorization": f"Bearer {control_token}"}
        self._http = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))

    async def __aenter__(self) -> GatewayCalls:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._http.close()

    async def create(self, url: str, body: dict[str, Any]) -> tuple[Received, str]:
        """Also says what the gateway said. A session that is given back does not run there."""
        session_id = str(body["session_id"])
        try:
            async with self._http.post(f"{url.rstrip('/')}/sessions", json=body) as reply:
                said, status = (await reply.text(errors="replace"))[:_MAX_SAID_CHARS], reply.status
        except (aiohttp.ClientError, TimeoutError) as error:
            if not isinstance(error, aiohttp.ClientConnectorError):  # it may have taken the session
                await self.delete(url, session_id)
            return "given_back", f"{type(error).__name__}: {error}"
        if 200 <= status < 300:
            return "taken", said
        log.warning("polar.not_sent url=%s session=%s status=%d said=%s", url, session_id, status, said)
        if status in _REFUSALS:
            return "refused", f"({status}): {said}"
        if status == 409:  # an earlier attempt of it is there still
            await self.delete(url, session_id)
        return "given_back", f"({status}): {said}"

    async def result(self, url: str, session_id: str) -> dict[str, Any] | None:
        """The session's result, when it is there; None when it is not yet, or the gateway does not answer.

        Raises: LookupError when the gateway does not know the session.
        """
        try:
            async with self._http.get(f"{url.rstrip('/')}/sessions/{session_id}") as reply:
                if reply.status == 404:
                    raise LookupError(session_id)
                if reply.status != 200:
                    return None
                return (await asyncio.to_thread(msgspec.json.decode, await reply.read(), type=_State)).result
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("polar.not_seen url=%s session=%s error=%s", url, session_id, error)
            return None

    async def delete(self, url: str, session_id: str) -> None:
        """As well as can be: a gateway clears up by itself in the end."""
        try:
            async with self._http.delete(f"{url.rstrip('/')}/sessions/{session_id}"):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("polar.not_deleted url=%s session=%s error=%s", url, session_id, error)
