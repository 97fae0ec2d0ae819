"""The client of one node: sessions of external agents, its engines, its gate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.completion import RecordedCalls
from gangline.domain.image_store import HeldImage
from gangline.domain.node_views import (
    BackendView,
    DecodedIds,
    ExternalView,
    GateMode,
    GateState,
    IdsToDecode,
    NodeStatus,
)
from gangline.domain.session import Grading, GradingRequest
from gangline.domain.tokens import encode_msgpack
from gangline.domain.weight_updates import GateUpdate
from gangline.wire.client.base import GRADING_WAIT_S, MSGPACK
from gangline.wire.client.sessions import CallerSessions

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
        """Lease no more sessions; current ones continue to their end."""
        return await self.request_json("POST", "/v1/drain", NodeStatus)

    async def sessions(self) -> list[ExternalView]:
        """Sessions that callers opened."""
        return await self.request_json("GET", "/v1/sessions", list[ExternalView])

    async def session(self, session_id: str) -> ExternalView:
        """Raises: NotFound."""
        return await self.request_json("GET", f"/v1/sessions/{session_id}", ExternalView)

    async def recorded_calls(self, session_id: str, *, after: int = 0, wait_s: float = 0.0) -> RecordedCalls:
        """Calls of an open session after the first `after`. Waits up to `wait_s` if there are no new ones.

        Raises: NotFound if the session has not begun or is over.
        """
        params = {"after": str(after), "wait_s": f"{wait_s:g}"}
        return await self.request_msgpack(f"/v1/sessions/{session_id}/calls", RecordedCalls, params)

    async def grade(self, request: GradingRequest) -> Grading:
        """Grade a recorded session again. Waits until that is done.

        Raises: InvalidRequest, UnknownPlugin, Conflict if the session ended before it was graded.
        """
        body = await asyncio.to_thread(encode_msgpack, request)
        return await self.request_json(
            "POST", "/v1/gradings", Grading, body=body, content_type=MSGPACK, wait_s=GRADING_WAIT_S
        )

    async def prefetch(self, runtime: str, image: str) -> HeldImage:
        """Pull an image if the node lacks it. Waits until it is there. Raises: PullFailed, InvalidRequest."""
        body = msgspec.json.encode({"runtime": runtime, "image": image})
        return await self.request_json("POST", "/v1/images/prefetch", HeldImage, body=body, wait_s=GRADING_WAIT_S)

    # The gate, and the engines behind it.

    async def gate(self) -> GateState:
        return await self.request_json("GET", "/v1/gate", GateState)

    async def pause(self, mode: GateMode = "drain", lease_s: float = 600.0) -> GateState:
        """Make model calls wait. With `drain`, returns when no call is in flight or the lease has expired: see
        `is_drained`. Polls every half minute without renewing the lease. Raises: InvalidRequest.
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
        """Close the gate, or renew the lease of a closed one. Waits up to `wait_s` for a drain."""
        body = msgspec.json.encode({"mode": mode, "lease_s": lease_s, "wait_s": wait_s})
        return await self.request_json("POST", "/v1/gate/pause", GateState, body=body, wait_s=wait_s)

    async def set_version(self, version: int, unknown: Sequence[str] = ()) -> GateState:
        """Set the policy version of tokens sampled from now on. `unknown`: URLs of engines that may have other weights.

        Raises: InvalidRequest if the version would decrease.
        """
        body = msgspec.json.encode({"version": version, "unknown": unknown})
        return await self.request_json("POST", "/v1/gate/version", GateState, body=body)

    async def updates(self) -> list[GateUpdate]:
        """The last weight updates by phase, newest last."""
        return await self.request_json("GET", "/v1/gate/updates", list[GateUpdate])

    async def report_phases(self, phases: Mapping[str, float]) -> GateState:
        """phases: the trainer's phases -> seconds, for the current or last weight update.

        Raises: InvalidRequest; Conflict if there was no update.
        """
        body = msgspec.json.encode({"phases": {phase: float(seconds) for phase, seconds in phases.items()}})
        return await self.request_json("POST", "/v1/gate/phases", GateState, body=body)

    async def backends(self, *, times: bool = False) -> list[BackendView]:
        """times: include the engines' own times, for which the node queries each engine."""
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
        """`api_key_env`: name of the node's environment variable with the engine's key. `options`: for the plug-in.
        `role`: the role whose calls it answers; None: it serves the policy.

        Raises: EngineUnavailable, EngineIncapable, InvalidRequest, Conflict if it serves a different model than the
        others.
        """
        named = {"url": url, "kind": kind, "label": label, "api_key_env": api_key_env, "role": role}
        body = msgspec.json.encode(named | {"options": dict(options or {})})
        return await self.request_json("POST", "/v1/backends", BackendView, body=body)

    async def remove_backend(self, backend_id: str, *, drain: bool = True) -> None:
        """Raises: NotFound."""
        params = {"drain": "1" if drain else "0"}
        await self.request_json("DELETE", f"/v1/backends/{backend_id}", dict[str, Any], params=params, wait_s=3600.0)

    async def clear_backends(self, role: str | None = None) -> None:
        """Remove all engines of the policy, or of a role. Raises: NotFound if the role has no engines."""
        params = {} if role is None else {"role": role}
        await self.request_json("DELETE", "/v1/backends", dict[str, Any], params=params, wait_s=3600.0)

    async def detokenize(self, tokenizer_digest: str, ids: Sequence[int]) -> str:
        """Returns the text of ids, with special tokens. Raises: NotFound without an engine that has the tokenizer."""
        body = msgspec.json.encode(IdsToDecode(tokenizer_digest=tokenizer_digest, ids=tuple(ids)))
        return (await self.request_json("POST", "/v1/detokenize", DecodedIds, body=body)).text
