"""Applies a reward to a trajectory: to all its traces, or to each separately; scores to its turns."""

from __future__ import annotations

import math

import msgspec

from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError
from gangline.domain.trajectory import Trace, Trajectory

ON_UNPARSED = "on_unparsed"
"""In a reward's details: the turns whose tool calls could not be parsed, and the reward as graded."""


def apply_reward(trajectory: Trajectory, reward: Reward) -> Trajectory:
    """Each trace gets `trace_rewards[trace_id]`, or else the session's reward; each turn `turn_scores[completion_id]`.

    Raises: EvaluatorError when a named trace or turn does not exist, or a reward or score is not a finite number.
    """
    turns = {span.completion_id for trace in trajectory.traces for span in trace.spans}
    for kind, unknown in (
        ("traces", reward.trace_rewards.keys() - {trace.trace_id for trace in trajectory.traces}),
        ("turns", reward.turn_scores.keys() - turns),
    ):
        if unknown:
            raise EvaluatorError(
                f"the evaluator rewarded {kind} that are not in the trajectory: {sorted(unknown)[:8]}."
            )
    if not all(map(math.isfinite, (reward.reward, *reward.trace_rewards.values(), *reward.turn_scores.values()))):
        raise EvaluatorError("the evaluator gave a reward that is not a finite number.")
    traces = tuple(_rewarded(trace, reward) for trace in trajectory.traces)
    return msgspec.structs.replace(trajectory, traces=traces, reward=reward.reward)


def _rewarded(trace: Trace, reward: Reward) -> Trace:
    spans = tuple(
        msgspec.structs.replace(span, score=reward.turn_scores.get(span.completion_id)) for span in trace.spans
    )
    return msgspec.structs.replace(trace, reward=reward.trace_rewards.get(trace.trace_id, reward.reward), spans=spans)


def num_unparsed(trace: Trace) -> int:
    """Returns the number of turns with tokens to train on and a tool call that could not be parsed, by their
    certificates."""
    return sum(
        certificate.parse != "ok" and bool(trace.loss_mask[span.start : span.end].any())
        for span, certificate in zip(trace.spans, trace.certificates, strict=True)
    )


def lowered_where_unparsed(reward: Reward, trajectory: Trajectory, limit: float) -> Reward:
    """Limit the reward of the session, and of each trace with an unparsed tool call, to `limit`; unchanged without any.

    Other traces keep separate rewards from the evaluator. Turn scores stay.
    """
    turns = {trace.trace_id: num for trace in trajectory.traces if (num := num_unparsed(trace))}
    if not turns:
        return reward
    own = reward.trace_rewards.items()
    return msgspec.structs.replace(
        reward,
        reward=min(reward.reward, limit),
        trace_rewards={trace: min(found, limit) if trace in turns else found for trace, found in own},
        values={name: min(found, limit) for name, found in reward.values.items()},
        details=reward.details | {ON_UNPARSED: {"num_turns": sum(turns.values()), "graded": reward.reward}},
    )


def carry_rewards(before: Trajectory, trajectory: Trajectory) -> Trajectory:
    """Copy the rewards and scores of an earlier trajectory to another builder's trajectory of the same calls.

    A trace gets the reward of the trace that had its last turn.
    """
    traces = {span.completion_id: trace for trace in before.traces for span in trace.spans}
    scores = {span.completion_id: span.score for trace in before.traces for span in trace.spans}
    return msgspec.structs.replace(
        trajectory,
        reward=before.reward,
        traces=tuple(
            msgspec.structs.replace(
                trace,
                reward=origin.reward if (origin := traces.get(trace.spans[-1].completion_id)) else before.reward,
                spans=tuple(
                    msgspec.structs.replace(span, score=scores.get(span.completion_id)) for span in trace.spans
                ),
            )
            for trace in trajectory.traces
        ),
    )
