"""The client of one node: sessions of your own agents, its engines, its gate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import RecordedCalls
from gangline.domain.node_views import BackendView, ExternalView, GateMode, GateState, NodeStatus
from gangline.domain.session import Grading, GradingRequest
from gangline.domain.tokens import encode_msgpack
from gangline.domain.weight_updates import GateUpdate
from gangline.wire.client.base import GRADING_WAIT_S, MSGPACK
from gangline.wire.client.sessions import CallerSessions

__all__ = ["NodeClient"]

_DRAIN_POLL_S = 30.0


class NodeClient(CallerSessions):
    """Calls one node: sessions of your own agents, its engines, its gate.

    opened = await node.open_session(max_turns=20)
    run_my_agent(base_url=opened.base_urls["openai"], api_key=opened.api_key)
    result = await node.finalize(opened.session_id)
    """

    async def status(self) -> NodeStatus:
        return await self.request_json("GET", "/v1/status", NodeStatus)

    async def drain(self) -> NodeStatus:
        """Take no more sessions, and end with those that it has."""
        return await self.request_json("POST", "/v1/drain", NodeStatus)

    async def sessions(self) -> list[ExternalView]:
        """Sessions that callers opened."""
        return await self.request_json("GET", "/v1/sessions", list[ExternalView])

    async def session(self, session_id: str) -> ExternalView:
        """Raises: NotFound."""
        return await self.request_json("GET", f"/v1/sessions/{session_id}", ExternalView)

    async def recorded_calls(self, session_id: str, *, after: int = 0, wait_s: float = 0.0) -> RecordedCalls:
        """Calls of an open session behind the first `after`: at once where there are some, else after `wait_s` at most.

        Raises: NotFound when the session has not begun, or is over.
        """
        params = {"after": str(after), "wait_s": f"{wait_s:g}"}
        return await self.request_msgpack(f"/v1/sessions/{session_id}/calls", RecordedCalls, params)

    async def grade(self, request: GradingRequest) -> Grading:
        """Grade a recorded session again, as long as that takes.

        Raises: InvalidRequest, UnknownPlugin, Conflict when the session was not to be graded.
        """
        body = await asyncio.to_thread(encode_msgpack, request)
        return await self.request_json(
            "POST", "/v1/gradings", Grading, body=body, content_type=MSGPACK, wait_s=GRADING_WAIT_S
        )

    # The gate, and the engines behind it.

    async def gate(self) -> GateState:
        return await self.request_json("GET", "/v1/gate", GateState)

    async def pause(self, mode: GateMode = "drain", lease_s: float = 600.0) -> GateState:
        """Let model calls wait; with `drain`, returns when none is in flight, or when the lease is over: see
        `is_drained`. Asks again every half minute, without renewing the lease. Raises: InvalidRequest.
        """
        ends_at = asyncio.get_running_loop().time() + lease_s
        while True:
            fields = {"mode": mode, "lease_s": lease_s, "wait_s": _DRAIN_POLL_S}
            state = await self.request_json(
                *("POST", "/v1/gate/pause", GateState), body=msgspec.json.encode(fields), wait_s=_DRAIN_POLL_S
            )
            lease_s = ends_at - asyncio.get_running_loop().time()
            if mode != "drain" or state.is_drained or not state.is_paused:
                return state
            if lease_s <= 0:
                return await self.gate()

    async def resume(self) -> GateState:
        return await self.request_json("POST", "/v1/gate/resume", GateState)

    async def hold(self, mode: GateMode, lease_s: float, wait_s: float = 0.0) -> GateState:
        """Close the gate, or renew the lease of a closed one. A drain is waited for `wait_s` at most."""
        body = msgspec.json.encode({"mode": mode, "lease_s": lease_s, "wait_s": wait_s})
        return await self.request_json("POST", "/v1/gate/pause", GateState, body=body, wait_s=wait_s)

    async def set_version(self, version: int, unknown: Sequence[str] = ()) -> GateState:
        """Set the policy version of tokens sampled from now on; `unknown`: URLs of engines that may have other weights.

        Raises: InvalidRequest when it would go back.
        """
        body = msgspec.json.encode({"version": version, "unknown": unknown})
        return await self.request_json("POST", "/v1/gate/version", GateState, body=body)

    async def updates(self) -> list[GateUpdate]:
        """The last weight updates by phase, the newest last."""
        return await self.request_json("GET", "/v1/gate/updates", list[GateUpdate])

    async def report_phases(self, phases: Mapping[str, float]) -> GateState:
        """phases: of the trainer's -> seconds, for the weight update under way, or the last one.

        Raises: InvalidRequest; Conflict when there was none.
        """
        body = msgspec.json.encode({"phases": {phase: float(seconds) for phase, seconds in phases.items()}})
        return await self.request_json("POST", "/v1/gate/phases", GateState, body=body)

    async def backends(self, *, times: bool = False) -> list[BackendView]:
        """times: with the engines' own, for which the node asks each."""
        return await self.request_json(
            "GET", "/v1/backends", list[BackendView], params={"times": "1"} if times else None
        )

    async def add_backend(
        self,
        url: str,
        *,
        kind: str = "auto",
        label: str | None = None,
        api_key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
        role: str | None = None,
    ) -> BackendView:
        """`api_key_env`: names the node's environment variable with the engine's key. `options`: of the plug-in.
        `role`: the role whose calls it answers; None: it serves the policy.

        Raises: EngineUnavailable, EngineIncapable, InvalidRequest, Conflict when it serves another model than others.
        """
        named = {"url": url, "kind": kind, "label": label, "api_key_env": api_key_env, "role": role}
        body = msgspec.json.encode(named | {"options": dict(options or {})})
        return await self.request_json("POST", "/v1/backends", BackendView, body=body)

    async def remove_backend(self, backend_id: str, *, drain: bool = True) -> None:
        """Raises: NotFound."""
        params = {"drain": "1" if drain else "0"}
        await self.request_json("DELETE", f"/v1/backends/{backend_id}", dict[str, Any], params=params, wait_s=3600.0)

    async def clear_backends(self, role: str | None = None) -> None:
        """Remove all engines of the policy, or of a role. Raises: NotFound for a role that has none of its own."""
        params = {} if role is None else {"role": role}
        await self.request_json("DELETE", "/v1/backends", dict[str, Any], params=params, wait_s=3600.0)
