"""Traces and trajectories: the input of a trainer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gangline.domain.completion import Certificate, DivergenceCause, Lineage
from gangline.domain.conversation import Message, ToolDefinition
from gangline.domain.tokens import Logprobs, LossMask, TokenIds, Versions

TraceRole = Literal["main", "sub_agent", "side", "compaction"]
"""Purpose of a call: the session's task; a part of it, given to a separate agent; a side task (a title, a classifier);
a summary from which the conversation continues. See `trajectories.lineage` for the evidence."""


class TurnSpan(msgspec.Struct, frozen=True):
    """Sampled tokens of one completion: `response_ids[start:end]`."""

    completion_id: str
    start: int
    end: int
    role: TraceRole = "main"
    score: float | None = None
    """The evaluator's score for this turn, if any."""
    agent_role: str | None = None
    """The role that the client named for the call (header `x-gangline-role`), such as `solver`."""
    model: str = ""
    """The model that answered, by the name that its engine reports."""


class Splice(msgspec.Struct, frozen=True):
    """Where a trace joins turns whose contexts were not exact (only under `on_divergence = "splice"`)."""

    completion_id: str
    at: int
    """Index into `response_ids` where the spliced turn's context begins."""
    cause: DivergenceCause


class SharedPrefix(msgspec.Struct, frozen=True):
    """Ids before a trace's `prompt_ids` that are stored with another trace of its trajectory."""

    trace_id: str
    """A trace before this one in `Trajectory.traces`."""
    num_ids: int
    """How many leading ids of that trace's whole stream: its own shared prefix, its prompt, its response."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One append-only token stream with a loss mask: one training sample. All arrays below are [len(response_ids)]."""

    trace_id: str
    session_id: str
    shared_prefix: SharedPrefix | None = None
    """The beginning of the prompt, stored elsewhere; only from the `tree` builder. None: the prompt is whole."""
    prompt_ids: TokenIds
    """After `shared_prefix`, if there is one."""
    response_ids: TokenIds
    loss_mask: LossMask
    response_logprobs: Logprobs
    """0.0 where masked."""
    response_versions: Versions
    """Policy version that sampled the token; -1 where masked."""
    response_texts: tuple[str | None, ...] = ()
    """Text of each sampled token, None if no token was sampled; empty unless `capture.token_texts` asks for them."""
    spans: tuple[TurnSpan, ...]
    prompt_messages: tuple[Message, ...]
    response_messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    finish_reason: str
    """Finish reason of the last turn."""
    reward: float | None = None
    role: TraceRole = "main"
    """Role of the first turn."""
    lineage: Lineage = Lineage()
    """How the first turn follows from an earlier call."""
    parent_trace_id: str | None = None
    """The trace from which this one's first prompt branches off, if any."""
    certificates: tuple[Certificate, ...]
    """One per turn, in order of `spans`."""
    splices: tuple[Splice, ...] = ()
    untrainable: str | None = None
    """Why the row must not be trained on; its mask is then all 0."""
    metadata: dict[str, Any] = {}


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """All traces of a session."""

    session_id: str
    task_id: str
    builder: str
    traces: tuple[Trace, ...]
    num_completions: int
    reward: float | None = None
    drops_turns: str | None = None
    """Why completions may be in no trace: the builder's declaration. None: a completion in no trace is lost."""
