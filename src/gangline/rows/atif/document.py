"""The records of ATIF v1.8 (Agent Trajectory Interchange Format) that we write.

Fields that are None are left out. Source: Harbor's RFC 0001, Trajectory Format.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gangline.domain.tokens import Logprobs, TokenIds


class AtifImage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    media_type: str
    """image/jpeg, image/png, image/gif, image/webp."""
    path: str
    """A URL, or a file relative to the document."""


class AtifPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["text", "image"]
    text: str | None = None
    source: AtifImage | None = None


AtifContent = str | list[AtifPart]


class AtifToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class AtifReference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    trajectory_id: str
    """Id of an entry of the document's `subagent_trajectories`."""


class AtifResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    source_call_id: str | None = None
    """A tool call of the same step."""
    content: AtifContent | None = None
    subagent_trajectory_ref: list[AtifReference] | None = None
    extra: dict[str, Any] | None = None


class AtifObservation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    results: list[AtifResult]


class AtifMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Metrics of one model call."""

    prompt_tokens: int
    completion_tokens: int
    prompt_token_ids: TokenIds
    """The whole prompt that the engine saw."""
    completion_token_ids: TokenIds
    logprobs: Logprobs | None = None
    extra: dict[str, Any]


class AtifStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Filled while a conversation is read: an agent's step gets its observations later."""

    step_id: int
    """From 1, in order."""
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    message: AtifContent
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class AtifAgent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    version: str
    model_name: str
    tool_definitions: list[dict[str, Any]] | None = None


class AtifTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    total_prompt_tokens: int
    total_completion_tokens: int
    total_steps: int
    extra: dict[str, Any] | None = None


class AtifTrajectory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    schema_version: str
    session_id: str
    trajectory_id: str
    agent: AtifAgent
    steps: list[AtifStep]
    final_metrics: AtifTotals
    extra: dict[str, Any]
    subagent_trajectories: list[AtifTrajectory] | None = None
