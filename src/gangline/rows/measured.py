"""Whether a session measures its policy, or why it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.lifecycle import UNGRADED, Outcome, is_infrastructure_fault
from gangline.domain.session import SessionResult, made_no_call

_FAILED: tuple[Outcome, ...] = ("agent_error", "agent_timeout", "memory_limit")


def needs_model(task: Mapping[str, Any]) -> bool:
    """Whether a session of the task is meaningless without a model call. task: the body of `POST /v1/tasks`."""
    agent = task.get("agent")
    return not (isinstance(agent, Mapping) and cast("Mapping[str, Any]", agent).get("allow_no_model_call"))


def why_without_reward(session: SessionResult) -> str | None:
    """Returns why a session does not measure its policy; None when it does."""
    failure = session.failure
    if session.outcome in UNGRADED:
        return f"it ended as {session.outcome}" + ("" if failure is None else f": {failure.message}")
    if failure is not None and is_infrastructure_fault(failure) and session.reward is None:
        return f"{failure.boundary} failed: {failure.message}"
    if session.reward is None:
        return "it has no reward"
    return None


def why_not_measured(session: SessionResult, *, needs_model: bool = True) -> str | None:
    """Like `why_without_reward`, but also excludes a session whose agent failed before a model call was answered.

    needs_model: False for an agent with `allow_no_model_call`.
    """
    if needs_model and session.outcome in _FAILED and made_no_call(session):
        why = session.outcome if session.failure is None else session.failure.message
        return f"its agent failed before a model call was answered: {why}"
    return why_without_reward(session)
