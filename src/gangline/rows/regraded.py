"""A file of later verdicts on recorded sessions, each with the grade that it replaces, and results with these verdicts.

`gangline regrade` writes such files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.contracts import Reward
from gangline.domain.lifecycle import Outcome
from gangline.domain.session import Grading, SessionResult
from gangline.rows.rewards import apply_reward


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """The grade that a session was recorded with."""

    outcome: Outcome
    reward: float | None
    details: dict[str, Any] = {}


class Regrade(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file."""

    session_id: str
    task_id: str
    evaluator: str
    """Its strategy and a digest of its settings."""
    before: Grade
    verdict: Grading


def read_regrades(path: Path) -> dict[str, Regrade]:
    """Returns session id -> its complete line."""
    if not path.exists():
        return {}
    *lines, _cut_off = path.read_bytes().split(b"\n")
    found: Iterable[Regrade] = (msgspec.json.decode(line, type=Regrade) for line in lines)
    return {one.session_id: one for one in found}


def regraded(result: SessionResult, verdicts: Mapping[str, Regrade]) -> SessionResult | None:
    """Returns the result with its verdict's reward, including in its traces and turns; None if it has no verdict."""
    found = verdicts.get(result.session_id)
    if found is None:
        return None
    verdict = found.verdict
    before = {"outcome": found.before.outcome, "reward": found.before.reward}
    trajectory = result.trajectory
    if trajectory is not None and verdict.reward is not None:
        reward = Reward(reward=verdict.reward, trace_rewards=verdict.trace_rewards, turn_scores=verdict.turn_scores)
        trajectory = apply_reward(trajectory, reward)
    elif trajectory is not None:
        bare = tuple(msgspec.structs.replace(trace, reward=None) for trace in trajectory.traces)
        trajectory = msgspec.structs.replace(trajectory, reward=None, traces=bare)
    return msgspec.structs.replace(
        result,
        outcome=verdict.outcome,
        failure=verdict.failure,
        reward=verdict.reward,
        reward_details=verdict.details | {"evaluator": found.evaluator, "graded_before": before},
        trajectory=trajectory,
    )
