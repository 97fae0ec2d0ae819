"""Converts a Polar gateway's report on a session; pure.

Source: Polar, A.4 and A.5; its published models.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.conversation import Message, ModelCall, Role, Text, ToolDefinition
from gangline.domain.errors import Conflict, Failure, InvalidRequest, LeaseLost
from gangline.domain.ids import ID_PATTERN, validated_id
from gangline.domain.lifecycle import Outcome
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace, Trajectory
from gangline.domain.views import SessionView
from gangline.wire.dialects.chat.request import parse_chat_call

_OUTCOMES: dict[str, Outcome] = {"COMPLETED": "completed", "TIMEOUT": "agent_timeout", "ERROR": "infra_error"}
_UNSAID = {"TIMEOUT": {"training_filter": {"masked": True, "trainable": False, "reason": "session_timeout"}}}
"""Marks rows of older gateways, which do not report whose budget ended the session."""
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class PolarTrace(_Record):
    """See Polar, A.4."""

    prompt_ids: list[int] = []
    response_ids: list[int] = []
    loss_mask: list[Literal[0, 1]] = []
    response_logprobs: list[float | dict[str, Any]] | None = None
    prompt_messages: list[dict[str, Any]] = []
    response_messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    reward: float | None = None
    metadata: dict[str, Any] = {}


class PolarTrajectory(_Record):
    traces: list[PolarTrace] = Field(default=[], max_length=100_000)
    metadata: dict[str, Any] = {}
    error: str | None = None


class PolarSessionResult(_Record):
    """A gateway node's report on a session."""

    session_id: str = Field(pattern=ID_PATTERN)
    task_id: str = Field(pattern=ID_PATTERN)
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    trajectory: PolarTrajectory = PolarTrajectory()
    node_id: str | None = Field(default=None, pattern=ID_PATTERN)
    error: str | None = None


def session_result(reported: PolarSessionResult, session: SessionView, *, held_out: bool = False) -> SessionResult:
    """Raises: LeaseLost, Conflict, InvalidRequest."""
    if reported.task_id != session.task_id:
        raise Conflict(
            f"session {session.session_id!r} is of task {session.task_id!r}, not {reported.task_id[:140]!r}."
        )
    if session.state == "queued" or reported.node_id not in (None, session.node_id):
        raise LeaseLost(f"session {session.session_id!r} is not leased to node {reported.node_id!r}.")
    why = reported.error or reported.trajectory.error
    # ERROR does not distinguish causes. A failure that may be ours is not scored as the agent's.
    failure = Failure(boundary="node", code="polar_error", message=why or "ERROR", retryable=False)
    traces = tuple(_trace(trace, reported, index) for index, trace in enumerate(reported.trajectory.traces))
    reward = next((trace.reward for trace in reversed(traces) if trace.reward is not None), None)
    return SessionResult(
        session_id=session.session_id,
        task_id=session.task_id,
        node_id=session.node_id or "",
        attempt=session.attempt,
        fence=session.fence,
        outcome=_OUTCOMES[reported.status],
        failure=failure if reported.status == "ERROR" else None,
        reward=reward,
        trajectory=Trajectory(
            session_id=session.session_id,
            task_id=session.task_id,
            builder=str(reported.trajectory.metadata.get("builder", "polar")),
            traces=traces,
            num_completions=len(traces),
            reward=reward,
        ),
        held_out=held_out,
    )


def _trace(reported: PolarTrace, result: PolarSessionResult, index: int) -> Trace:
    """It has no certificates, since another gateway's capture was not observed here. Raises: InvalidRequest."""
    length = len(reported.response_ids)
    untrainable = _why_untrainable(reported)
    mask = reported.loss_mask if untrainable is None else [0] * length
    logprobs = reported.response_logprobs or [0.0] * length
    if len(mask) != length or len(logprobs) != length:
        raise InvalidRequest(
            f"traces.{index}: loss_mask and response_logprobs must be as long as response_ids, {length}."
        )
    return Trace(
        trace_id=validated_id(f"{result.session_id[:100]}.{index}", "trace_id"),
        session_id=result.session_id,
        prompt_ids=_ids(reported.prompt_ids, index),
        response_ids=_ids(reported.response_ids, index),
        loss_mask=np.array(mask, np.int8),
        response_logprobs=np.array([_logprob(value, index) for value in logprobs], np.float32),
        response_versions=np.full(length, -1, np.int32),
        spans=(),
        prompt_messages=_messages(reported.prompt_messages),
        response_messages=_messages(reported.response_messages),
        tools=_tools(reported.tools or []),
        finish_reason=reported.finish_reason or "stop",
        reward=None if result.status == "ERROR" or _is_masked(reported) else reported.reward,
        certificates=(),
        untrainable=untrainable,
        metadata=_UNSAID.get(result.status, {}) | reported.metadata,
    )


def _why_untrainable(reported: PolarTrace) -> str | None:
    """Without a mask the sampled tokens are unknown. Without log-probs each token would count as certain."""
    if reported.response_ids and not reported.loss_mask:
        return "the gateway sent no loss mask"
    if any(reported.loss_mask) and not reported.response_logprobs:
        return "the gateway sent no log-probs"
    return None


def _is_masked(reported: PolarTrace) -> bool:
    """Whether the gateway excludes the row: it gives 0 to every incomplete session, and marks zeros that are not the
    agent's.
    """
    kept_out = reported.metadata.get("training_filter")
    return isinstance(kept_out, dict) and cast("dict[str, Any]", kept_out).get("masked") is True


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


def _messages(reported: list[dict[str, Any]]) -> tuple[Message, ...]:
    """Messages of OpenAI's chat API; messages in another form become text."""
    try:
        return _call(messages=reported).messages if reported else ()
    except InvalidRequest:
        return tuple(map(_text_message, reported))


def _tools(reported: list[dict[str, Any]]) -> tuple[ToolDefinition, ...]:
    """Tools of OpenAI's chat API; empty if they are in another form."""
    try:
        return _call(messages=[{"role": "user", "content": ""}], tools=reported).tools if reported else ()
    except InvalidRequest:
        return ()


def _call(**fields: list[dict[str, Any]]) -> ModelCall:
    """Raises: InvalidRequest."""
    return parse_chat_call(msgspec.json.encode({"model": "polar", **fields}))


def _text_message(message: dict[str, Any]) -> Message:
    content = message.get("content")
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return Message(_ROLES.get(str(message.get("role")), "user"), (Text(text),))
