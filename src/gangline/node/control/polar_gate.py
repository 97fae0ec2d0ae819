"""Polar's routes around a weight update, using the same gate.

Source: Polar's gateway. Its pause has no lease; here a trainer that died cannot hold the calls forever.
"""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from gangline.domain.errors import DrainTimeout
from gangline.node.backends.by_role import BackendsByRole
from gangline.node.backends.gate import Gate
from gangline.wire.http.negotiation import answer_json
from gangline.wire.http.query import Number
from gangline.wire.http.routes import Route, json_route

_LEASE_S = 3600.0
"""How long a pause lasts after its drain, unless it is requested again."""
_TIMEOUT_S = Number("timeout_seconds", "How long the drain may take; then 504, still paused.", default=300, high=3600)


class PolarGateState(msgspec.Struct, frozen=True, kw_only=True):
    """Polar's view of the gate."""

    paused: bool
    inflight: int
    """Calls in flight at the engines."""
    base_url: str
    """URL of the policy's first engine; empty: it has none."""
    engine: str
    """Its kind; empty: there is none."""


class PolarGateRoutes:
    """Gate and engines of one node."""

    def __init__(self, gate: Gate, backends: BackendsByRole) -> None:
        self._gate = gate
        self._backends = backends

    def routes(self) -> list[Route]:
        root = "/admin/inference"
        route = partial(json_route, answer=PolarGateState, password_too=False)  # browsers do not use a node
        return [
            route("GET", f"{root}/status", self.show, "Polar's view of the gate."),
            route("POST", f"{root}/pause", self.pause, "Polar's pause: hold model calls, and wait for those in flight.",
                  query=(_TIMEOUT_S,), errors=(400, 401, 504)),
            route("POST", f"{root}/resume", self.resume, "Polar's resume."),
        ]  # fmt: skip

    async def show(self, _request: web.Request) -> web.Response:
        state = self._gate.state
        engine = next((view for view in self._backends.views() if view.role is None), None)
        return answer_json(
            PolarGateState(
                paused=state.is_paused,
                inflight=state.num_in_flight,
                base_url=engine.url if engine else "",
                engine=engine.engine if engine else "",
            )
        )

    async def pause(self, request: web.Request) -> web.Response:
        timeout_s = _TIMEOUT_S.read(request)
        state = await self._gate.pause("drain", timeout_s + _LEASE_S, timeout_s)
        if not state.is_drained:
            raise DrainTimeout(
                f"{state.num_in_flight} model calls were still in flight after {timeout_s:g} s. New calls are held: "
                "pause again to go on waiting, or resume."
                if state.is_paused
                else "the gate was opened while the drain was waited for: pause again."
            )
        return await self.show(request)

    async def resume(self, request: web.Request) -> web.Response:
        self._gate.resume()
        return await self.show(request)
