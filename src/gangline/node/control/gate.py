"""Routes of the gate: a trainer's requests to a node around a weight update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.node_views import BackendView, GateState
from gangline.domain.weight_updates import GateUpdate
from gangline.node.backends.gate import Gate
from gangline.wire.http.negotiation import answer, read_record
from gangline.wire.http.query import MAX_WAIT_S
from gangline.wire.http.routes import Route


class PauseRequest(BaseModel):
    """Body of `POST /v1/gate/pause`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["drain", "keep"] = "drain"
    """drain: answered once no call is in flight (`is_drained`), or after `wait_s`. keep: answered at once; calls in
    flight stay as they are."""
    lease_s: float = Field(default=600.0, gt=0, le=86_400)
    """The gate opens by itself after this many seconds; pausing again renews it."""
    wait_s: float = Field(default=30.0, ge=0, le=MAX_WAIT_S)
    """A drain that takes longer is answered after this time, with `num_in_flight`; ask again to keep waiting. A client
    that disconnects before an answer has 30 s to ask again; then the gate opens."""


class VersionRequest(BaseModel):
    """Body of `POST /v1/gate/version`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(ge=0)
    """Policy version of tokens sampled from now on; it never decreases."""
    unknown: list[str] = []
    """URLs of engines that may have other weights: their tokens have an unknown version, unless the engines report
    it."""


_PhaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./: -]{0,63}$")]
_Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]


class PhasesRequest(BaseModel):
    """Body of `POST /v1/gate/phases`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phases: Annotated[dict[_PhaseName, _Seconds], Field(min_length=1, max_length=32)]
    """The trainer's phase -> its seconds, for the weight update in progress, or the last one if the gate is open.
    Phases should not overlap. A name that is reported again replaces its seconds; `drain` and `held` are the gate's own
    and are ignored."""


class GateRoutes:
    """`on_version`: called with a version's `unknown` after it was set. `engines`: returns the policy's."""

    def __init__(
        self, gate: Gate, on_version: Callable[[Sequence[str]], None], engines: Callable[[], Sequence[BackendView]]
    ) -> None:
        self._gate = gate
        self._on_version = on_version
        self._engines = engines

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/gate", self.show, "Whether model calls wait, and the policy version.", answer=GateState),
            Route("POST", "/v1/gate/pause", self.pause, "Hold model calls (`drain` or `keep`, with a lease).",
                  body=PauseRequest, answer=GateState),
            Route("POST", "/v1/gate/resume", self.resume, "Resume them.", answer=GateState),
            Route("POST", "/v1/gate/version", self.set_version, "The policy version from now on.",
                  body=VersionRequest, answer=GateState),
            Route("GET", "/v1/gate/updates", self.updates, "The last weight updates by phase, the newest last.",
                  answer=list[GateUpdate]),
            Route("POST", "/v1/gate/phases", self.report, "A trainer's own phases of a weight update.",
                  body=PhasesRequest, answer=GateState, errors=(400, 401, 409)),
        ]  # fmt: skip

    async def show(self, request: web.Request) -> web.StreamResponse:
        return answer(request, self._noted(self._gate.state))

    async def pause(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_record(request, PauseRequest)
        return answer(request, await self._gate.pause(wanted.mode, wanted.lease_s, wanted.wait_s))

    async def resume(self, request: web.Request) -> web.StreamResponse:
        return answer(request, self._gate.resume())

    async def set_version(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_record(request, VersionRequest)
        state = self._gate.set_version(wanted.version)
        self._on_version(wanted.unknown)
        return answer(request, self._noted(state))

    def _noted(self, state: GateState) -> GateState:
        if state.version is None:
            return state
        notes = (
            f"engine {engine.url} reports the versions of its tokens itself: they keep those, and not version "
            f"{state.version}. Give the version to the engine, together with its weights."
            for engine in self._engines()
            if engine.reports_versions
        )
        return msgspec.structs.replace(state, notes=tuple(notes))

    async def updates(self, request: web.Request) -> web.StreamResponse:
        return answer(request, self._gate.updates.last)

    async def report(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_record(request, PhasesRequest)
        self._gate.updates.report(wanted.phases)
        return answer(request, self._gate.state)
