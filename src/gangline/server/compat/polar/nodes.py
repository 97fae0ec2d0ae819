"""Polar's routes for gateway nodes, over the same core as ours: join, beat, report.

A node that joins here is sent its sessions (see `dispatch`). Its callback counts while it holds the lease,
and names no fence: the one that it holds is taken.

Source: Polar, A.5.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.conversation import Message, Role, Text
from gangline.domain.errors import Conflict, Failure, InvalidRequest, LeaseLost, NotFound
from gangline.domain.ids import ID_PATTERN, validated_id
from gangline.domain.lifecycle import Outcome
from gangline.domain.session import Heartbeat, SessionResult
from gangline.domain.tokens import encode_msgpack
from gangline.domain.trajectory import Trace, Trajectory
from gangline.domain.views import NodeView, SessionView
from gangline.http.negotiation import answer_json, path_id, read_record
from gangline.http.routes import Route, json_route
from gangline.server.compat.polar.dispatch import PolarDispatch
from gangline.server.service.core import RolloutService
from gangline.server.service.live_nodes import is_polar_gateway

__all__ = ["PolarNode", "PolarNodeRoutes", "PolarReceipt"]

_MAX_WORKERS = 1_000_000
_OUTCOMES: dict[str, Outcome] = {"COMPLETED": "completed", "TIMEOUT": "agent_timeout", "ERROR": "infra_error"}
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)


class PolarRegistration(_Record):
    """A gateway node's first word."""

    node_id: str = Field(pattern=ID_PATTERN)
    gateway_url: str = Field(pattern=r"^https?://[^\s/]+", max_length=2000)
    max_init_workers: int = Field(default=1, ge=1, le=_MAX_WORKERS)
    max_run_workers: int = Field(default=1, ge=1, le=_MAX_WORKERS)
    max_postrun_workers: int = Field(default=1, ge=1, le=_MAX_WORKERS)
    heartbeat_interval_seconds: int = Field(default=30, ge=1, le=86_400)


class PolarBeat(_Record):
    """A gateway node's heartbeat."""

    metrics: dict[str, float] = Field(default={}, max_length=256)
    """Queue depths and numbers in flight, by name."""


class PolarTrace(_Record):
    """A.4."""

    prompt_ids: list[int] = []
    response_ids: list[int] = []
    loss_mask: list[Literal[0, 1]] = []
    response_logprobs: list[float | dict[str, Any]] | None = None
    prompt_messages: list[dict[str, Any]] = []
    response_messages: list[dict[str, Any]] = []
    finish_reason: str | None = None
    reward: float | None = None
    metadata: dict[str, Any] = {}


class PolarTrajectory(_Record):
    traces: list[PolarTrace] = Field(default=[], max_length=100_000)
    metadata: dict[str, Any] = {}
    error: str | None = None


class PolarSessionResult(_Record):
    """A gateway node's report about a session."""

    session_id: str = Field(pattern=ID_PATTERN)
    task_id: str = Field(pattern=ID_PATTERN)
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    trajectory: PolarTrajectory = PolarTrajectory()
    node_id: str | None = Field(default=None, pattern=ID_PATTERN)
    error: str | None = None


class PolarNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as the server knows it."""

    node_id: str
    gateway_url: str
    healthy: bool
    draining: bool
    last_heartbeat: float
    """Unix time, UTC, seconds."""
    metrics: dict[str, float]
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
        told = await read_record(request, PolarRegistration)
        knobs = told.model_dump(include=_KNOBS)
        beat = Heartbeat(
            node_id=told.node_id,
            url=told.gateway_url,
            sessions={},
            capacity=told.max_run_workers,
            metrics={name: float(value) for name, value in knobs.items()},
        )
        await self._service.heartbeat(beat)
        return answer_json(self._heard(await self._node(told.node_id)))

    async def beat_polar_node(self, request: web.Request) -> web.Response:
        node = await self._node(path_id(request, "node_id"))
        told = await read_record(request, PolarBeat)
        kept = {name: value for name, value in node.metrics.items() if name in _KNOBS}
        reply = await self._service.heartbeat(
            Heartbeat(
                node_id=node.node_id,
                url=node.url,
                sessions=self._dispatch.held(node.node_id),
                capacity=node.capacity,
                draining=node.draining,
                backends=node.backends,
                metrics=told.metrics | kept,
            )
        )
        seen = self._heard(await self._node(node.node_id))
        return answer_json(msgspec.structs.replace(seen, renewed=reply.renewed, lost=reply.lost))

    async def take_polar_result(self, request: web.Request) -> web.Response:
        told = await read_record(request, PolarSessionResult, max_bytes=self._max_result_bytes)
        store = self._service.store
        session = await store.query(store.session, told.session_id)
        result = _result(told, session)
        await self._service.report(told.session_id, encode_msgpack(result))
        return answer_json(PolarReceipt(status="accepted"))

    def _heard(self, node: NodeView) -> PolarNode:
        seen = _seen(node)
        self._dispatch.heard(node.node_id, node.url, slots=node.capacity, interval_s=_interval_s(node))
        return seen

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
                  body=PolarRegistration, answer=PolarNode),
            json_route("POST", "/nodes/{node_id}/heartbeat", self.beat_polar_node, "Polar's heartbeat.",
                  body=PolarBeat, answer=PolarNode, errors=(400, 401, 404), routine=True),
        ]  # fmt: skip


_KNOBS = {"max_init_workers", "max_run_workers", "max_postrun_workers", "heartbeat_interval_seconds"}


def _interval_s(node: NodeView) -> float:
    return node.metrics.get("heartbeat_interval_seconds", 30.0)


def _seen(node: NodeView) -> PolarNode:
    return PolarNode(
        node_id=node.node_id,
        gateway_url=node.url,
        healthy=node.age_s <= 3 * _interval_s(node),
        draining=node.draining,
        last_heartbeat=node.last_seen_at,
        metrics=node.metrics,
    )


def _result(told: PolarSessionResult, session: SessionView) -> SessionResult:
    """Raises: LeaseLost, Conflict, InvalidRequest."""
    if told.task_id != session.task_id:
        raise Conflict(f"session {session.session_id!r} is of task {session.task_id!r}, not {told.task_id[:140]!r}.")
    if session.state == "queued" or told.node_id not in (None, session.node_id):
        raise LeaseLost(f"session {session.session_id!r} is not leased to node {told.node_id!r}.")
    why = told.error or told.trajectory.error
    # ERROR does not say who broke. What may be our fault is not scored as the agent's.
    failure = Failure(boundary="node", code="polar_error", message=why or "ERROR", retryable=False)
    traces = tuple(_trace(trace, told, index) for index, trace in enumerate(told.trajectory.traces))
    reward = next((trace.reward for trace in reversed(traces) if trace.reward is not None), None)
    return SessionResult(
        session_id=session.session_id,
        task_id=session.task_id,
        node_id=session.node_id or "",
        attempt=session.attempt,
        fence=session.fence,
        outcome=_OUTCOMES[told.status],
        failure=failure if told.status == "ERROR" else None,
        reward=reward,
        trajectory=Trajectory(
            session_id=session.session_id,
            task_id=session.task_id,
            builder=str(told.trajectory.metadata.get("builder", "polar")),
            traces=traces,
            num_completions=len(traces),
            reward=reward,
        ),
    )


def _trace(told: PolarTrace, result: PolarSessionResult, index: int) -> Trace:
    """It has no certificates, since another gateway's capture was not observed here. Raises: InvalidRequest."""
    length = len(told.response_ids)
    mask = told.loss_mask or [1] * length
    logprobs = told.response_logprobs or [0.0] * length
    if len(mask) != length or len(logprobs) != length:
        raise InvalidRequest(
            f"traces.{index}: loss_mask and response_logprobs must be as long as response_ids, {length}."
        )
    return Trace(
        trace_id=validated_id(f"{result.session_id[:100]}.{index}", "trace_id"),
        session_id=result.session_id,
        prompt_ids=_ids(told.prompt_ids, index),
        response_ids=_ids(told.response_ids, index),
        loss_mask=np.array(mask, np.int8),
        response_logprobs=np.array([_logprob(value, index) for value in logprobs], np.float32),
        response_versions=np.full(length, -1, np.int32),
        spans=(),
        prompt_messages=tuple(map(_message, told.prompt_messages)),
        response_messages=tuple(map(_message, told.response_messages)),
        finish_reason=told.finish_reason or "stop",
        reward=told.reward,
        certificates=(),
        metadata=told.metadata,
    )


def _ids(values: list[int], index: int) -> Any:
    """Raises: InvalidRequest."""
    if any(not 0 <= value < 2**31 for value in values):
        raise InvalidRequest(f"traces.{index}: token ids must be whole numbers from 0 to 2147483647.")
    return np.array(values, np.int32)


def _logprob(value: float | dict[str, Any], index: int) -> float:
    """Raises: InvalidRequest."""
    found = value.get("logprob") if isinstance(value, dict) else value
    if not isinstance(found, int | float):
        raise InvalidRequest(f"traces.{index}: a log-prob must be a number, or an object with `logprob`.")
    return float(found)


def _message(told: dict[str, Any]) -> Message:
    content = told.get("content")
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return Message(_ROLES.get(str(told.get("role")), "user"), (Text(text),))
