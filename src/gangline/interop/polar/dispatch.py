"""Sends sessions to gateways that joined by Polar's route, keeps them leased while the gateways send heartbeats, and
deletes them at the end.

A gateway of Polar's is sent its sessions, while our nodes ask for them. It tries its callback three times within a
second and then keeps the result, and after a restart it knows none of its sessions; so each session is also polled. A
session that a gateway rejects or has lost fails with that reason. A gateway that does not answer, or accepts no session
at the moment, is skipped for a while, and its sessions go elsewhere.

Source: Polar, 3.1, A.5; its published rollout server and gateway, including its routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec
from pydantic import ValidationError

from gangline.domain.errors import (
    Conflict,
    DiskFull,
    Failure,
    InvalidRequest,
    LeaseLost,
    NodeIdTaken,
    NotFound,
    StoreError,
)
from gangline.domain.lifecycle import Stage
from gangline.domain.session import Heartbeat, Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.tokens import encode_msgpack
from gangline.domain.views import SessionView
from gangline.interop.polar.results import PolarSessionResult, session_result
from gangline.interop.polar.sessions import needs_of_ours, session_for_gateway
from gangline.server.service.core import WORK, RolloutService
from gangline.server.service.live_nodes import live_nodes

log = logging.getLogger("gangline.server")

_LOOK_EVERY_S = 5.0
_REST_S = 10.0
_MISSED_BEATS = 3
_MAX_TASKS = 500
"""Tasks considered for one lease; there are never as many free places."""

_MAX_SAID_CHARS = 500
_REFUSALS = (400, 413, 422, 500)
"""Statuses that concern the session itself: 400 if it cannot be queued, 500 if it cannot be parsed."""
_TIMEOUT_S = 10.0

Received = Literal["taken", "refused", "given_back"]


class _State(msgspec.Struct, frozen=True):
    """A gateway's answer about a session."""

    result: dict[str, Any] | None = None


class GatewayCalls:
    """Calls to gateways: create, poll and delete their sessions. Use as a context manager.

    control_token: the gateways', which is the server's.
    """

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
        """Returns the outcome and the gateway's message. A session that is given back does not run there."""
        session_id = str(body["session_id"])
        try:
            async with self._http.post(f"{url.rstrip('/')}/sessions", json=body) as reply:
                reply_body, status = (await reply.text(errors="replace"))[:_MAX_SAID_CHARS], reply.status
        except (aiohttp.ClientError, TimeoutError) as error:
            if not isinstance(error, aiohttp.ClientConnectorError):  # it may have taken the session
                await self.delete(url, session_id)
            return "given_back", f"{type(error).__name__}: {error}"
        if 200 <= status < 300:
            return "taken", reply_body
        log.warning("polar.not_sent url=%s session=%s status=%d said=%s", url, session_id, status, reply_body)
        if status in _REFUSALS:
            return "refused", f"({status}): {reply_body}"
        if status == 409:  # an earlier attempt of it is still there
            await self.delete(url, session_id)
        return "given_back", f"({status}): {reply_body}"

    async def result(self, url: str, session_id: str) -> dict[str, Any] | None:
        """The session's result; None if it is not ready or the gateway does not answer.

        Raises: LookupError if the gateway does not know the session.
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
        """Best effort: a gateway eventually cleans up by itself."""
        try:
            async with self._http.delete(f"{url.rstrip('/')}/sessions/{session_id}"):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("polar.not_deleted url=%s session=%s error=%s", url, session_id, error)


def _judged(requests: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """Needs of the tasks with a stored request; see `needs_of_ours`."""
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
    """session id -> fence; None until the sessions from before a server restart have been looked up."""
    rests_until: float = 0.0
    looked_at: float = 0.0


def _failed(gateway: _Gateway, session: SessionView, failure: Failure) -> SessionResult:
    return SessionResult(
        session_id=session.session_id,
        task_id=session.task_id,
        node_id=gateway.node_id,
        attempt=session.attempt,
        fence=session.fence,
        outcome="infra_error",
        failure=failure,
    )


class PolarDispatch:
    """control_token: also the gateways'."""

    def __init__(self, service: RolloutService, control_token: str | None) -> None:
        self._service = service
        self._control_token = control_token
        self._gateways: dict[str, _Gateway] = {}
        self._needs: dict[str, tuple[str, ...]] = {}
        """Queued task -> the fields that only our nodes can run."""
        self._has_gateway = asyncio.Event()
        self._passed_over: set[str] = set()
        """Tasks whose submitter has been informed of that."""

    def heard(self, node_id: str, url: str, *, slots: int, interval_s: float) -> None:
        """Called when a gateway registers or sends a heartbeat."""
        gateway = self._gateways.get(node_id)
        now = time.monotonic()
        if gateway is None:
            self._gateways[node_id] = _Gateway(node_id, url, slots, interval_s, now)
            self._has_gateway.set()
        else:
            gateway.url, gateway.slots, gateway.interval_s, gateway.heard_at = url, slots, interval_s, now
        self._service.notifier.notify(WORK)

    def held(self, node_id: str) -> dict[str, tuple[int, Stage]]:
        """The sessions sent to the gateway, in the form of a heartbeat."""
        gateway = self._gateways.get(node_id)
        sent = {} if gateway is None or gateway.sent is None else gateway.sent
        return {session_id: (fence, "run") for session_id, fence in sent.items()}

    async def send_forever(self, public_url: str) -> None:
        """public_url: the server's URL for callbacks of gateways."""
        callback_url = f"{public_url}/callbacks/session_result"
        await self._has_gateway.wait()  # until then new work is nothing to it
        async with GatewayCalls(self._control_token) as calls:
            with self._service.notifier.listen(WORK) as listener:
                while True:
                    serving = (self._serve(calls, gateway, callback_url) for gateway in self._alive())
                    await asyncio.gather(*serving)
                    await listener.wait(self._look_every_s)

    @property
    def _look_every_s(self) -> float:
        return min(_LOOK_EVERY_S, self._service.store.lease_s / 3)

    async def take(self, reported: PolarSessionResult) -> None:
        """Accept a gateway's report. Raises: NotFound, LeaseLost, Conflict, InvalidRequest, StoreError, DiskFull."""
        store = self._service.store
        session = await store.query(store.session, reported.session_id)
        task = await store.query(store.request, session.task_id)
        result = session_result(reported, session, held_out=task.held_out)
        await self._service.report(reported.session_id, encode_msgpack(result))

    def _alive(self) -> list[_Gateway]:
        now = time.monotonic()
        found = self._gateways.values()
        return [one for one in found if now - one.heard_at <= _MISSED_BEATS * one.interval_s]

    async def _serve(self, calls: GatewayCalls, gateway: _Gateway, callback_url: str) -> None:
        try:
            sent = await self._sent(gateway)
            await self._renew(calls, gateway, sent)
            await self._look_at(calls, gateway, sent)
            free = gateway.slots - len(sent)
            if free <= 0 or time.monotonic() < gateway.rests_until:
                return
            suited = await self._suited_tasks()
            leases = await self._service.lease(gateway.node_id, gateway.url, free, 0.0, task_ids=suited)
            await asyncio.gather(*(self._send(calls, gateway, sent, lease, callback_url) for lease in leases))
        except StoreError as error:
            log.error("polar.store_failed node=%s message=%s", gateway.node_id, error)
        except NodeIdTaken as error:
            log.error("polar.id_taken node=%s message=%s", gateway.node_id, error)

    async def _suited_tasks(self) -> list[str]:
        """Queued tasks that a gateway can run, from the head of the queue. Informs the submitters of other tasks if
        there is no node of ours.

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

    async def _renew(self, calls: GatewayCalls, gateway: _Gateway, sent: dict[str, int]) -> None:
        """Renew leases, and delete sessions that ended, were cancelled or now belong to another node."""
        beat = Heartbeat(node_id=gateway.node_id, url=gateway.url, sessions=self.held(gateway.node_id), capacity=0)
        kept = await self._service.store.run(self._service.store.renew, beat) if sent else set[str]()
        over = [session_id for session_id in sent if session_id not in kept]
        for session_id in over:
            del sent[session_id]
        await asyncio.gather(*(calls.delete(gateway.url, session_id) for session_id in over))

    async def _look_at(self, calls: GatewayCalls, gateway: _Gateway, sent: Mapping[str, int]) -> None:
        """Collect results whose callback did not arrive, and note sessions that the gateway does not know."""
        now = time.monotonic()
        if now - gateway.looked_at < self._look_every_s:
            return
        gateway.looked_at = now
        await asyncio.gather(*(self._look_at_session(calls, gateway, *one) for one in sent.items()))

    async def _look_at_session(self, calls: GatewayCalls, gateway: _Gateway, session_id: str, fence: int) -> None:
        """Raises: StoreError."""
        try:
            found = await calls.result(gateway.url, session_id)
        except LookupError:
            why = f"gateway {gateway.node_id!r} does not know the session any more: it was restarted."
            await self._fail(gateway, session_id, fence, "polar_lost", why)
            return
        if found is None:
            return
        try:
            await self.take(await asyncio.to_thread(PolarSessionResult.model_validate, found))
        except (LeaseLost, StoreError, DiskFull) as error:  # its callback arrived meanwhile, or it is collected later
            log.info("polar.not_collected node=%s session=%s why=%s", gateway.node_id, session_id, error)
        except (Conflict, InvalidRequest, ValidationError) as error:
            why = f"the result of gateway {gateway.node_id!r} cannot be read: {error}"
            await self._fail(gateway, session_id, fence, "polar_unreadable", why)

    async def _send(
        self, calls: GatewayCalls, gateway: _Gateway, sent: dict[str, int], lease: Lease, callback_url: str
    ) -> None:
        received, body = await calls.create(gateway.url, session_for_gateway(lease, callback_url))
        if received == "taken":
            sent[lease.session_id] = lease.fence
            return
        if received == "refused":
            why = f"gateway {gateway.node_id!r} refused the session {body}"
            await self._fail(gateway, lease.session_id, lease.fence, "polar_refused", why)
            return
        log.error("polar.gateway_rests node=%s for_s=%g said=%s", gateway.node_id, _REST_S, body)
        gateway.rests_until = time.monotonic() + _REST_S
        with suppress(LeaseLost):
            await self._service.release(gateway.node_id, lease.session_id, lease.fence)

    async def _fail(self, gateway: _Gateway, session_id: str, fence: int, code: str, why: str) -> None:
        """Fail the attempt given to the gateway; the session may be retried. Raises: StoreError."""
        store = self._service.store
        with suppress(LeaseLost, NotFound):
            session = await store.query(store.session, session_id)
            if session.fence == fence:  # else another node has it
                result = _failed(gateway, session, Failure(boundary="node", code=code, message=why, retryable=True))
                await self._service.report(session_id, encode_msgpack(result))
