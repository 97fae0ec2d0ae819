"""Sessions for gateways that joined by Polar's route: sent to them, kept leased while they beat, deleted at the end.

A gateway of Polar's waits to be given its sessions, where a node of ours asks for them. The paper prints the gateway's
control surface in words only (session creation, status, deletion), so its paths here are ours: `POST URL/sessions` with
the fields of a session in 3.1, and `DELETE URL/sessions/SESSION` when the session is over. A session that a gateway
rejects (4xx) has failed with the gateway's reason; a gateway that does not answer gets nothing for a while, and its
sessions go elsewhere.

Source: Polar, 3.1, A.5.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from gangline.domain.errors import Failure, LeaseLost, NodeIdTaken, StoreError
from gangline.domain.lifecycle import Stage
from gangline.domain.session import Heartbeat, Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_msgpack
from gangline.server.compat.polar.sessions import needs_of_ours, session_for_gateway
from gangline.server.service.core import WORK, RolloutService
from gangline.server.service.live_nodes import live_nodes

__all__ = ["PolarDispatch"]

log = logging.getLogger("gangline.server")

_LOOK_EVERY_S = 5.0
_REST_S = 10.0
_TIMEOUT_S = 10.0
_MISSED_BEATS = 3
_MAX_SAID_CHARS = 500
_MAX_TASKS = 500
"""Looked at for one lease; there are never as many places."""


def _judged(requests: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """Needs of the tasks whose request is there; see `needs_of_ours`."""
    return {
        task_id: needs_of_ours(TaskRequest.model_validate_json(body))
        for task_id, body in requests.items()
        if body is not None
    }


@dataclass(eq=False)
class _Gateway:
    node_id: str
    url: str
    slots: int
    interval_s: float
    heard_at: float
    sent: dict[str, int] | None = None
    """session id -> fence; None until those of an earlier life of the server are looked up."""
    rests_until: float = 0.0


class PolarDispatch:
    """control_token: also the gateways'."""

    def __init__(self, service: RolloutService, control_token: str | None) -> None:
        self._service = service
        self._headers = {} if control_token is None else {"Authorization": f"Bearer {control_token}"}
        self._gateways: dict[str, _Gateway] = {}
        self._needs: dict[str, tuple[str, ...]] = {}
        """Queued task -> the fields by which only a node of ours can run it."""
        self._passed_over: set[str] = set()
        """Tasks whose submitter has been informed of that."""

    def heard(self, node_id: str, url: str, *, slots: int, interval_s: float) -> None:
        """A gateway registered, or beat."""
        gateway = self._gateways.get(node_id)
        now = time.monotonic()
        if gateway is None:
            self._gateways[node_id] = _Gateway(node_id, url, slots, interval_s, now)
        else:
            gateway.url, gateway.slots, gateway.interval_s, gateway.heard_at = url, slots, interval_s, now
        self._service.notifier.notify(WORK)

    def held(self, node_id: str) -> dict[str, tuple[int, Stage]]:
        """The sessions sent to the gateway, in the form of a heartbeat."""
        gateway = self._gateways.get(node_id)
        sent = {} if gateway is None or gateway.sent is None else gateway.sent
        return {session_id: (fence, "run") for session_id, fence in sent.items()}

    async def send_forever(self, public_url: str) -> None:
        """public_url: how gateways reach this server, for their callbacks."""
        callback_url = f"{public_url}/callbacks/session_result"
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http:
            with self._service.notifier.listen(WORK) as listener:
                while True:
                    serving = (self._serve(http, gateway, callback_url) for gateway in self._alive())
                    await asyncio.gather(*serving)
                    await listener.wait(min(_LOOK_EVERY_S, self._service.store.lease_s / 3))

    def _alive(self) -> list[_Gateway]:
        now = time.monotonic()
        found = self._gateways.values()
        return [one for one in found if now - one.heard_at <= _MISSED_BEATS * one.interval_s]

    async def _serve(self, http: aiohttp.ClientSession, gateway: _Gateway, callback_url: str) -> None:
        try:
            sent = await self._sent(gateway)
            await self._renew(http, gateway, sent)
            free = gateway.slots - len(sent)
            if free <= 0 or time.monotonic() < gateway.rests_until:
                return
            suited = await self._suited_tasks()
            leases = await self._service.lease(gateway.node_id, gateway.url, free, 0.0, task_ids=suited)
            await asyncio.gather(*(self._send(http, gateway, sent, lease, callback_url) for lease in leases))
        except StoreError as error:
            log.error("polar.store_failed node=%s message=%s", gateway.node_id, error)
        except NodeIdTaken as error:
            log.error("polar.id_taken node=%s message=%s", gateway.node_id, error)

    async def _suited_tasks(self) -> list[str]:
        """Queued tasks that a gateway can run, from the head of the queue. Submitters of others are informed, if no
        node of ours is there.

        Raises: StoreError.
        """
        store = self._service.store
        queued = await store.query(store.queued_requests, tuple(self._needs))
        found = await asyncio.to_thread(_judged, queued)
        self._needs = {task_id: found[task_id] if task_id in found else self._needs[task_id] for task_id in queued}
        self._passed_over.intersection_update(queued)
        ours = [task_id for task_id, needs in self._needs.items() if needs and task_id not in self._passed_over]
        if ours and not await live_nodes(self._service):
            self._passed_over.update(ours)
            for task_id in ours:
                await store.run(store.passed_over, task_id, self._needs[task_id])
        return [task_id for task_id, needs in self._needs.items() if not needs][:_MAX_TASKS]

    async def _sent(self, gateway: _Gateway) -> dict[str, int]:
        if gateway.sent is None:
            store = self._service.store
            page = await store.query(lambda: store.sessions(limit=1000, state="leased", node_id=gateway.node_id))
            gateway.sent = {session.session_id: session.fence for session in page.sessions}
        return gateway.sent

    async def _renew(self, http: aiohttp.ClientSession, gateway: _Gateway, sent: dict[str, int]) -> None:
        """Also deletes sessions that are over: ended, cancelled, or another node's by now."""
        beat = Heartbeat(node_id=gateway.node_id, url=gateway.url, sessions=self.held(gateway.node_id), capacity=0)
        kept = await self._service.store.run(self._service.store.renew, beat) if sent else set[str]()
        over = [session_id for session_id in sent if session_id not in kept]
        for session_id in over:
            del sent[session_id]
        await asyncio.gather(*(self._delete(http, gateway, session_id) for session_id in over))

    async def _delete(self, http: aiohttp.ClientSession, gateway: _Gateway, session_id: str) -> None:
        """As well as can be: a gateway clears up by itself in the end."""
        try:
            async with http.delete(f"{gateway.url.rstrip('/')}/sessions/{session_id}"):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("polar.not_deleted node=%s session=%s error=%s", gateway.node_id, session_id, error)

    async def _send(
        self, http: aiohttp.ClientSession, gateway: _Gateway, sent: dict[str, int], lease: Lease, callback_url: str
    ) -> None:
        body = session_for_gateway(lease, callback_url)
        try:
            async with http.post(f"{gateway.url.rstrip('/')}/sessions", json=body) as reply:
                said, status = (await reply.text(errors="replace"))[:_MAX_SAID_CHARS], reply.status
        except (aiohttp.ClientError, TimeoutError) as error:
            said, status = f"{type(error).__name__}: {error}", 503
        if 200 <= status < 300:
            sent[lease.session_id] = lease.fence
            return
        log.warning(
            "polar.not_sent node=%s session=%s status=%d said=%s", gateway.node_id, lease.session_id, status, said
        )
        if 400 <= status < 500:
            await self._refused(gateway, lease, f"gateway {gateway.node_id!r} refused the session ({status}): {said}")
            return
        gateway.rests_until = time.monotonic() + _REST_S
        with suppress(LeaseLost):
            await self._service.release(gateway.node_id, lease.session_id, lease.fence)

    async def _refused(self, gateway: _Gateway, lease: Lease, why: str) -> None:
        failure = Failure(boundary="node", code="polar_refused", message=why, retryable=True)
        result = SessionResult(
            session_id=lease.session_id,
            task_id=lease.task_id,
            node_id=gateway.node_id,
            attempt=lease.attempt,
            fence=lease.fence,
            outcome="infra_error",
            failure=failure,
        )
        with suppress(LeaseLost):
            await self._service.report(lease.session_id, encode_msgpack(result))
