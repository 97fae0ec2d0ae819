"""Polar's routes for gateway nodes: register, heartbeat, report.

Sessions are sent to a node that registers here (see `dispatch`). Its callback is accepted while it holds the lease. The
callback contains no fence, so the lease's current fence is used.

Source: Polar, A.5.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.errors import NotFound
from gangline.domain.ids import ID_PATTERN
from gangline.domain.session import Heartbeat, HeartbeatReply
from gangline.domain.views import NodeView
from gangline.interop.polar.dispatch import PolarDispatch
from gangline.interop.polar.results import PolarSessionResult
from gangline.interop.polar.views import KNOBS, PolarNode, interval_s, node_fields
from gangline.server.service.core import RolloutService
from gangline.server.service.live_nodes import is_polar_gateway
from gangline.wire.http.negotiation import answer_json, path_id, read_record
from gangline.wire.http.routes import Route, json_route

_MAX_WORKERS = 1_000_000


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class PolarRegistration(_Record):
    """A gateway node's registration."""

    node_id: str = Field(pattern=ID_PATTERN)
    gateway_url: str = Field(pattern=r"^https?://[^\s/]+", max_length=2000)
    max_init_workers: int = Field(default=1, ge=1, le=_MAX_WORKERS)
    max_run_workers: int = Field(default=1, ge=1, le=_MAX_WORKERS)
    max_postrun_workers: int = Field(default=1, ge=1, le=_MAX_WORKERS)
    heartbeat_interval_seconds: int = Field(default=30, ge=1, le=86_400)


class PolarBeat(_Record):
    """A gateway node's heartbeat."""

    metrics: dict[str, float] = Field(default={}, max_length=256)
    """Queue depths and in-flight counts, by name."""


class PolarHeard(PolarNode, frozen=True, kw_only=True):
    """Answer to a gateway's registration or heartbeat: its current state."""

    renewed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    """Sessions that the node must drop."""


class PolarReceipt(msgspec.Struct, frozen=True, kw_only=True):
    status: str


class PolarNodeRoutes:
    def __init__(self, service: RolloutService, dispatch: PolarDispatch, *, max_result_bytes: int) -> None:
        self._service = service
        self._dispatch = dispatch
        self._max_result_bytes = max_result_bytes

    async def register_polar_node(self, request: web.Request) -> web.Response:
        registration = await read_record(request, PolarRegistration)
        knobs = registration.model_dump(include=set(KNOBS))
        beat = Heartbeat(
            node_id=registration.node_id,
            url=registration.gateway_url,
            sessions={},
            capacity=registration.max_run_workers,
            metrics={name: float(value) for name, value in knobs.items()},
        )
        reply = await self._service.heartbeat(beat)
        return answer_json(self._heard(await self._node(registration.node_id), reply))

    async def beat_polar_node(self, request: web.Request) -> web.Response:
        node = await self._node(path_id(request, "node_id"))
        beat = await read_record(request, PolarBeat)
        kept = {name: value for name, value in node.metrics.items() if name in KNOBS}
        reply = await self._service.heartbeat(
            Heartbeat(
                node_id=node.node_id,
                url=node.url,
                sessions=self._dispatch.held(node.node_id),
                capacity=node.capacity,
                draining=node.draining,
                backends=node.backends,
                metrics=beat.metrics | kept,
            )
        )
        return answer_json(self._heard(await self._node(node.node_id), reply))

    async def take_polar_result(self, request: web.Request) -> web.Response:
        await self._dispatch.take(await read_record(request, PolarSessionResult, max_bytes=self._max_result_bytes))
        return answer_json(PolarReceipt(status="accepted"))

    def _heard(self, node: NodeView, reply: HeartbeatReply) -> PolarHeard:
        self._dispatch.heard(node.node_id, node.url, slots=node.capacity, interval_s=interval_s(node))
        return PolarHeard(**node_fields(node), renewed=reply.renewed, lost=reply.lost)

    async def _node(self, node_id: str) -> NodeView:
        """Raises: NotFound."""
        status = await self._service.store.query(self._service.store.status)
        found = next((node for node in status.nodes if node.node_id == node_id), None)
        if found is None or not is_polar_gateway(found):
            raise NotFound(f"no gateway {node_id!r}; it registers with POST /nodes/register.")
        return found

    def routes(self) -> list[Route]:
        return [
            json_route("POST", "/callbacks/session_result", self.take_polar_result,
                  "Polar's report of a session's end.",
                  body=PolarSessionResult, answer=PolarReceipt, errors=(400, 401, 404, 409, 413, 507), routine=True),
            json_route("POST", "/nodes/register", self.register_polar_node, "Polar's way for a node to join.",
                  body=PolarRegistration, answer=PolarHeard),
            json_route("POST", "/nodes/{node_id}/heartbeat", self.beat_polar_node, "Polar's heartbeat.",
                  body=PolarBeat, answer=PolarHeard, errors=(400, 401, 404), routine=True),
        ]  # fmt: skip
