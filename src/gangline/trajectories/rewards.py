"""A reward given to a trajectory: to all its traces, or to each its own."""

from __future__ import annotations

import math

import msgspec

from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError
from gangline.domain.trajectory import Trajectory

__all__ = ["apply_reward"]


def apply_reward(trajectory: Trajectory, reward: Reward) -> Trajectory:
    """Each trace gets `trace_rewards[trace_id]`, or else the session's reward.

    Raises: EvaluatorError when a trace is named that is not there, or a reward is not a finite number.
    """
    unknown = reward.trace_rewards.keys() - {trace.trace_id for trace in trajectory.traces}
    if unknown:
        raise EvaluatorError(f"the evaluator rewarded traces that are not in the trajectory: {sorted(unknown)}.")
    if not all(map(math.isfinite, (reward.reward, *reward.trace_rewards.values()))):
        raise EvaluatorError("the evaluator gave a reward that is not a finite number.")
    traces = tuple(
        msgspec.structs.replace(trace, reward=reward.trace_rewards.get(trace.trace_id, reward.reward))
        for trace in trajectory.traces
    )
    return msgspec.structs.replace(trajectory, traces=traces, reward=reward.reward)
