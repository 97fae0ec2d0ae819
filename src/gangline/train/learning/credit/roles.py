"""Roles: several agents in one session, each compared with the same role in the group's other sessions.

A turn's role is its `TurnSpan.agent_role`. A role's reward in a session is the mean reward of the traces that contain
its turns. Evaluators set rewards of traces by `trace_rewards`; a trace without one has the session's reward.

Invariants: a role's advantages sum to 0 over the sessions, unless they are clipped. They do not depend on other roles'
rewards. With a single role and no trace rewards this is plain GRPO. Source: M-GRPO, as "Inside the Agentic RL Training
Loop" gives it: `A = (value - mean of the role) / deviation of the role`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace, TurnSpan
from gangline.train.collecting.groups import Group, trainable_traces
from gangline.train.learning.advantages import AdvantageSettings, advantages_by_role
from gangline.train.learning.rewards import RewardShaping, shape_reward

UNNAMED = "unnamed"
"""Role of turns whose client did not name one."""


def _role(span: TurnSpan) -> str:
    return span.agent_role or UNNAMED


def role_rewards(
    session: SessionResult, traces: Sequence[Trace], shaping: RewardShaping | None = None
) -> dict[str, float]:
    """Role -> its reward. traces: the session's trainable traces. Raises: ValueError if the session has no reward."""
    if session.reward is None:
        raise ValueError(f"{session.session_id} has no reward: judge the group first.")
    rewards: dict[str, list[float]] = {}
    num_tokens: dict[str, int] = {}
    for trace in traces:
        for span in trace.spans:
            num_tokens[_role(span)] = num_tokens.get(_role(span), 0) + span.end - span.start
        for role in dict.fromkeys(map(_role, trace.spans)):
            rewards.setdefault(role, []).append(session.reward if trace.reward is None else trace.reward)
    means = {role: float(np.mean(found)) for role, found in rewards.items()}
    if shaping is None:
        return means
    return {role: shape_reward(mean, num_tokens[role], shaping) for role, mean in means.items()}


def role_advantages(
    group: Group, traces: Sequence[Sequence[Trace]], shaping: RewardShaping, settings: AdvantageSettings
) -> list[NDArray[np.float64]]:
    """Each token's advantage, by the role of its turn. traces: per session. Returns: [T] for each trace, in order."""
    values = [role_rewards(one, mine, shaping) for one, mine in zip(group.sessions, traces, strict=True)]
    advantages = advantages_by_role(values, settings)
    return [_spread(trace, by_role) for by_role, mine in zip(advantages, traces, strict=True) for trace in mine]


def _spread(trace: Trace, by_role: Mapping[str, float]) -> NDArray[np.float64]:
    found = np.zeros(len(trace.response_ids))
    for span in trace.spans:
        found[span.start : span.end] = by_role[_role(span)]
    return found


def mean_role_rewards(groups: Iterable[Group]) -> dict[str, float]:
    """Role -> mean reward over the sessions, before shaping; empty if no turn has a named role."""
    found: dict[str, list[float]] = {}
    for session in (session for group in groups for session in group.sessions):
        for role, reward in role_rewards(session, trainable_traces(session)).items():
            found.setdefault(role, []).append(reward)
    return {role: float(np.mean(rewards)) for role, rewards in found.items()} if found.keys() - {UNNAMED} else {}
