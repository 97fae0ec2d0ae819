"""Degenerates: groups and sessions that teach nothing or teach something wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from gangline.domain.conversation import Message, ToolCall
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace
from gangline.rows.rewards import num_unparsed
from gangline.train.collecting.groups import Group
from gangline.train.options import TrainingOptions


class DegenerateSettings(TrainingOptions):
    loop_turns: int | None = Field(default=20, ge=1)
    """A session is a loop if it has more turns than this, no reward, and repeats itself. None keeps loops."""
    loop_repetition: float = Field(default=0.5, gt=0, le=1)
    """A session repeats itself if at least this share of its actions were done before."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum ids of the session's longest trace, including the prompt."""
    drop_unparsed: bool = False
    """Whether to drop sessions with tool calls that could not be parsed. `on_unparsed` of a task's evaluator trains on
    them as failures instead.
    """
    identical_rewards: bool = False
    """Whether to drop groups whose rewards are all equal and collect others instead, as under `dynamic_sampling`."""


def num_turns(session: SessionResult) -> int:
    return sum(len(trace.spans) for trace in _traces(session))


def num_sampled(session: SessionResult) -> int:
    """Tokens that the session sampled, including tokens that may not be trained on."""
    return sum(span.end - span.start for trace in _traces(session) for span in trace.spans)


def repetition(session: SessionResult) -> float:
    """Share of the session's actions (a turn's tool calls with their arguments) that it had done before; 0.0 without
    actions.

    Repeating a cycle of several actions counts as much as repeating one action.
    """
    seen: set[tuple[tuple[str, str], ...]] = set()
    num = num_again = 0
    for trace in _traces(session):
        for message in trace.response_messages:
            action = _action(message)
            if action:
                num, num_again = num + 1, num_again + (action in seen)
                seen.add(action)
    return num_again / num if num else 0.0


def _action(message: Message) -> tuple[tuple[str, str], ...]:
    if message.role != "assistant":
        return ()
    return tuple((part.name, part.arguments) for part in message.parts if isinstance(part, ToolCall))


def why_degenerate(session: SessionResult, settings: DegenerateSettings) -> str | None:
    """Why a session should not be trained on, starting with the kind and a colon; None if it may be."""
    turns = num_turns(session)
    if (
        settings.loop_turns is not None
        and turns > settings.loop_turns
        and not session.reward
        and (again := repetition(session)) >= settings.loop_repetition
    ):
        return f"a loop: {turns} turns, reward 0, {again:.0%} of its actions done before"
    longest = max((_num_ids(trace) for trace in _traces(session)), default=0)
    if settings.max_tokens is not None and longest > settings.max_tokens:
        return f"too long: {longest} ids, {settings.max_tokens} are allowed"
    if settings.drop_unparsed and any(map(num_unparsed, _traces(session))):
        return "tool calls that could not be read"
    return None


def without_degenerates(group: Group, settings: DegenerateSettings) -> tuple[Group, dict[str, str]]:
    """The group without degenerate sessions, and session id -> reason. Does not check for equal rewards."""
    reasons = {
        session.session_id: why for session in group.sessions if (why := why_degenerate(session, settings)) is not None
    }
    return replace(
        group, sessions=tuple(session for session in group.sessions if session.session_id not in reasons)
    ), reasons


def _traces(session: SessionResult) -> Sequence[Trace]:
    return () if session.trajectory is None else session.trajectory.traces


def _num_ids(trace: Trace) -> int:
    shared = 0 if trace.shared_prefix is None else trace.shared_prefix.num_ids
    return shared + len(trace.prompt_ids) + len(trace.response_ids)
