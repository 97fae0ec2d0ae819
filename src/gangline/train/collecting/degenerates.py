"""Degenerates: groups and sessions that teach nothing, or the wrong thing."""

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

__all__ = ["DegenerateSettings", "num_sampled", "num_turns", "repetition", "why_degenerate", "without_degenerates"]


class DegenerateSettings(TrainingOptions):
    loop_turns: int | None = Field(default=20, ge=1)
    """A loop has more turns than this, no reward, and repeats itself. None: loops stay."""
    loop_repetition: float = Field(default=0.5, gt=0, le=1)
    """Share of actions that the session had done before, from which on it repeats itself."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Longest session: ids of its longest trace, prompt included."""
    drop_unparsed: bool = False
    """Whether sessions go whose tool calls could not be read. `on_unparsed` of a task's evaluator trains on them as
    failures instead."""
    identical_rewards: bool = False
    """Whether groups of one reward go, others being collected in their place, as under `dynamic_sampling`."""


def num_turns(session: SessionResult) -> int:
    return sum(len(trace.spans) for trace in _traces(session))


def num_sampled(session: SessionResult) -> int:
    """Tokens that the session sampled, those that may not be trained on included."""
    return sum(span.end - span.start for trace in _traces(session) for span in trace.spans)


def repetition(session: SessionResult) -> float:
    """Share of the session's actions (a turn's tool calls, with their arguments) that it had done before. 0.0 of none.

    A cycle of several actions counts as much as one action again and again.
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
    """Why a session should not be trained on, its kind up to the first colon; None when it may."""
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
    """The group's other sessions, and session id -> why it was left out. One reward in all is not looked at here."""
    reasons = {one.session_id: why for one in group.sessions if (why := why_degenerate(one, settings)) is not None}
    return replace(group, sessions=tuple(one for one in group.sessions if one.session_id not in reasons)), reasons


def _traces(session: SessionResult) -> Sequence[Trace]:
    return () if session.trajectory is None else session.trajectory.traces


def _num_ids(trace: Trace) -> int:
    shared = 0 if trace.shared_prefix is None else trace.shared_prefix.num_ids
    return shared + len(trace.prompt_ids) + len(trace.response_ids)
