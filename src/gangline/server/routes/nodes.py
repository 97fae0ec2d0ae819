"""The routes for nodes: lease, heartbeat, release, report."""

from __future__ import annotations

import contextlib

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest, LeaseLost
from gangline.domain.session import Heartbeat, HeartbeatReply, KeptTurns, Lease, SessionResult, Turns
from gangline.domain.tokens import decode_msgpack, encode_json, encode_msgpack
from gangline.domain.views import ResultReceipt, TurnsReceipt
from gangline.server.service.core import RolloutService
from gangline.wire.http.listening import read_body
from gangline.wire.http.negotiation import JSON, MSGPACK, answer, answer_large, path_id, prefers_msgpack, read_record
from gangline.wire.http.query import MAX_WAIT_S, Whole
from gangline.wire.http.routes import PRINCIPAL, Route

MAX_SESSIONS = 1024
_MAX_CAPACITY = 1_000_000
_MAX_IDENTITY = 64
_FENCE = Whole("fence", "The present lease's; records of earlier ones are wanted.", default=0, high=2**53)


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's request for work."""

    url: str
    """The node's URL."""
    max_sessions: int
    wait_s: float = 0.0
    """How long to wait if nothing is queued."""
    identity: str = ""
    """The same as in its heartbeats."""


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    session_id: str
    fence: int
    has_run: bool = False
    """Whether the session's agent has started, which uses up the attempt."""


class NodeRoutes:
    def __init__(self, service: RolloutService, *, max_result_bytes: int) -> None:
        self._service = service
        self._max_result_bytes = max_result_bytes

    async def lease(self, request: web.Request) -> web.Response:
        node_id = path_id(request, "node_id")
        wish = await read_record(request, LeaseRequest)
        if wish.max_sessions < 1:
            raise InvalidRequest(f"max_sessions must be at least 1, got {wish.max_sessions}.")
        wait_s = min(max(wish.wait_s, 0.0), MAX_WAIT_S)
        _check_identity(wish.identity)
        most = min(wish.max_sessions, MAX_SESSIONS)
        leases = await self._service.lease(node_id, wish.url, most, wait_s, wish.identity, key=PRINCIPAL.get().node_key)
        if leases and _is_gone(request):
            await self._take_back(node_id, leases)
        return answer(request, leases)

    async def _take_back(self, node_id: str, leases: list[Lease]) -> None:
        """Releases the sessions of a node that disconnected during the request, instead of waiting for their leases to
        expire.
        """
        for lease in leases:
            with contextlib.suppress(LeaseLost):
                await self._service.release(node_id, lease.session_id, lease.fence)

    async def heartbeat(self, request: web.Request) -> web.Response:
        node_id = path_id(request, "node_id")
        beat = await read_record(request, Heartbeat)
        if beat.node_id != node_id:
            raise InvalidRequest(f"node_id: the path says {node_id!r}, the body {beat.node_id[:140]!r}.")
        if not 0 <= beat.capacity <= _MAX_CAPACITY:
            raise InvalidRequest(f"capacity must be between 0 and {_MAX_CAPACITY}, got {beat.capacity}.")
        _check_identity(beat.identity)
        return answer(request, await self._service.heartbeat(beat, PRINCIPAL.get().node_key))

    async def release(self, request: web.Request) -> web.Response:
        body = await read_record(request, ReleaseRequest)
        await self._service.release(path_id(request, "node_id"), body.session_id, body.fence, has_run=body.has_run)
        return answer(request, {})

    async def keep_turns(self, request: web.Request) -> web.Response:
        data = await read_body(request, self._max_result_bytes)
        lost = await self._service.turns.keep(path_id(request, "node_id"), decode_msgpack(data, list[Turns]))
        return answer(request, TurnsReceipt(lost=tuple(lost)))

    async def kept_turns(self, request: web.Request) -> web.Response:
        kept = await self._service.turns.latest(path_id(request, "session_id"), _FENCE.read(request))
        if prefers_msgpack(request):
            return await answer_large(request, MSGPACK, lambda: encode_msgpack(kept))
        return await answer_large(request, JSON, lambda: encode_json(kept))

    async def begin_anew(self, request: web.Request) -> web.Response:
        body = await read_record(request, ReleaseRequest)
        await self._service.turns.begin_anew(path_id(request, "node_id"), body.session_id, body.fence)
        return answer(request, {})

    async def report(self, request: web.Request) -> web.Response:
        data = await read_body(request, self._max_result_bytes)
        return answer(request, await self._service.report(path_id(request, "session_id"), data))

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/nodes/{node_id}/lease", self.lease, "Lease sessions; can wait for some.",
                  body=LeaseRequest, answer=list[Lease], errors=(400, 401, 409), routine=True),
            Route("POST", "/v1/nodes/{node_id}/heartbeat", self.heartbeat, "Renew leases; the answer lists lost ones.",
                  body=Heartbeat, answer=HeartbeatReply, errors=(400, 401, 409), routine=True),
            Route("POST", "/v1/nodes/{node_id}/release", self.release, "Return a session: before its start, unharmed.",
                  body=ReleaseRequest, errors=(400, 401, 404, 409), routine=True),
            Route("POST", "/v1/nodes/{node_id}/turns", self.keep_turns, "Keep records of sessions that run there.",
                  body=list[Turns], body_type=MSGPACK, answer=TurnsReceipt, errors=(400, 401, 413, 507), routine=True),
            Route("POST", "/v1/nodes/{node_id}/turns:begin-anew", self.begin_anew,
                  "Forget the records of a session's earlier leases.", body=ReleaseRequest,
                  errors=(400, 401, 409), routine=True),
            Route("GET", "/v1/sessions/{session_id}/turns", self.kept_turns,
                  "Records of a session that has not ended, of the earlier lease with the most of them.",
                  query=(_FENCE,), answer=KeptTurns, errors=(400, 401), routine=True),
            Route("POST", "/v1/sessions/{session_id}/result", self.report, "Report how an attempt ended.",
                  body=SessionResult, body_type=MSGPACK, answer=ResultReceipt, errors=(400, 401, 404, 409, 413, 507),
                  routine=True),
        ]  # fmt: skip


def _check_identity(identity: str) -> None:
    if len(identity) > _MAX_IDENTITY:
        raise InvalidRequest(f"identity must have at most {_MAX_IDENTITY} characters, got {len(identity)}.")


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
