"""Samples: the unit of training. A sample is one trace with its whole prompt, and an advantage and a weight per
token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.domain.tokens import Logprobs, TokenIds, Versions
from gangline.domain.trajectory import Trace
from gangline.rows.comparability import scoring_temperature
from gangline.train.collecting.degenerates import num_sampled
from gangline.train.collecting.groups import Group, require_no_images, require_no_masks, trainable_traces
from gangline.train.learning.advantages import AdvantageSettings, group_advantages, part_advantages, whitened
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.credit.coalitions import spread_factors
from gangline.train.learning.credit.parts import rewards_of_parts
from gangline.train.learning.credit.resampling import ResamplingSettings, drawn_factors
from gangline.train.learning.credit.roles import role_advantages
from gangline.train.learning.credit.tokens import token_rewards
from gangline.train.learning.credit.traces import spread_advantage
from gangline.train.learning.credit.turns import return_advantages, turn_advantages
from gangline.train.learning.masks import Weights, all_sampled
from gangline.train.learning.rewards import shape_reward

Mask = Callable[[Trace], Weights]


@dataclass(frozen=True, eq=False)
class Sample:
    """All arrays except `prompt_ids` are [T], T = len(response_ids)."""

    trace_id: str
    session_id: str
    task_id: str
    """Samples of one task are a group."""
    score: float
    """The evaluator's reward of the session."""
    prompt_ids: TokenIds
    """The whole prompt; never empty."""
    response_ids: TokenIds
    weights: Weights
    """0.0 for untrained tokens."""
    advantages: NDArray[np.float64]
    """One value all over, unless turns (`turn_credit`) or roles (`compare`, coalitions) are credited on their own."""
    behaviour_logprobs: Logprobs
    """As reported by the engine; 0.0 if not sampled."""
    versions: Versions
    """-1 if not sampled."""
    temperatures: NDArray[np.float32]
    """Temperatures of the behaviour log-probs, as certified: softmax(logits / temperature). 1.0 if not sampled."""
    teacher_logprobs: Logprobs | None = None
    """The teacher's, for distillation; 0.0 where it gave none, and then the weight is 0.0."""
    rewards: NDArray[np.float64] | None = None
    """With a critic or a token baseline, the reward after each token (`credit.tokens`); `advantages` are then 0 until
    the model's scores are known. None if sessions are compared.
    """

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise ValueError(f"{self.trace_id} has no prompt: nothing would predict its first token.")


def make_samples(
    group: Group,
    algorithm: Algorithm,
    mask: Mask = all_sampled,
    factors: Mapping[str, float] | None = None,
    *,
    penalties: Mapping[str, float] | None = None,
    takes_images: bool = False,
    replays_masks: bool = False,
) -> list[Sample]:
    """The samples of a group: shapes rewards, compares sessions, distributes advantages over their traces, credits
    turns by their scores, and applies the mask. With a critic, sessions are not compared; rewards are assigned to
    tokens.

    Sessions must be valid (`judge_group`). Traces that are fully masked or have advantage 0 are kept, because they
    count in means over traces. factors: role -> factor of the sessions' advantages in its turns (`player_factors`).
    penalties: session id -> penalty subtracted from its shaped reward. takes_images: the trainer receives pixels
    separately. replays_masks: it receives sampling masks separately. Raises: ValueError if a session has no reward,
    InvalidGroup if a trace has images or masks that would be lost.
    """
    traces = [trainable_traces(session) for session in group.sessions]
    flat = [trace for mine in traces for trace in mine]
    for trace in () if takes_images else flat:
        require_no_images(trace)
    for trace in () if replays_masks else flat:
        require_no_masks(trace)
    if algorithm.follows_from_scores:
        return _samples_for_critic(group, traces, algorithm, mask, penalties or {})
    if algorithm.compare == "roles":
        advantages = role_advantages(group, traces, algorithm.shaping, algorithm.advantage)
    elif algorithm.turn_credit.returns is not None:
        rewards = [_shaped_reward(one, algorithm, penalties or {}) for one in group.sessions]
        advantages = return_advantages(traces, rewards, algorithm.turn_credit.returns, algorithm.advantage)
    else:
        advantages = _session_advantages(group, traces, algorithm, penalties or {})
    scores, weight = _scores(group), algorithm.turn_credit.weight
    advantages = [spread_factors(one, factors or {}) * own_T for one, own_T in zip(flat, advantages, strict=True)]
    if weight > 0:
        of_turns = turn_advantages(flat, algorithm.advantage)
        advantages = [own_T + weight * turns_T for own_T, turns_T in zip(advantages, of_turns, strict=True)]
    return [_sample(trace, own_T, mask, scores) for trace, own_T in zip(flat, advantages, strict=True)]


def _samples_for_critic(
    group: Group,
    traces: Sequence[Sequence[Trace]],
    algorithm: Algorithm,
    mask: Mask,
    penalties: Mapping[str, float],
) -> list[Sample]:
    found, scores = list[Sample](), _scores(group)
    for session, mine in zip(group.sessions, traces, strict=True):
        samples = [_sample(trace, np.zeros(len(trace.response_ids)), mask, scores) for trace in mine]
        rewards = token_rewards(
            mine,
            [sample.weights for sample in samples],
            _shaped_reward(session, algorithm, penalties),
            score_weight=algorithm.turn_credit.weight,
        )
        found += [replace(one, rewards=rewards_T) for one, rewards_T in zip(samples, rewards, strict=True)]
    return found


def over_batch(samples: Sequence[Sample], settings: AdvantageSettings) -> list[Sample]:
    """Samples of all groups of a step, after the part of the advantages that depends on all of them (`is_of_step`)."""
    samples = _whitened(samples, settings) if settings.scale == "batch" else samples
    factor = _factor(samples, settings)
    return (
        list(samples)
        if factor == 1.0
        else [replace(sample, advantages=factor * sample.advantages) for sample in samples]
    )


def resampled(samples: Sequence[Sample], settings: ResamplingSettings | None) -> list[Sample]:
    """Samples of a step, weighted by how often their sessions are drawn; unchanged if `settings` is None."""
    if settings is None:
        return list(samples)
    factors = drawn_factors({sample.session_id: sample.score for sample in samples}, settings)
    return [replace(sample, weights=sample.weights * np.float32(factors[sample.session_id])) for sample in samples]


def _whitened(samples: Sequence[Sample], settings: AdvantageSettings) -> list[Sample]:
    trained = [sample.weights != 0 for sample in samples]
    sizes = [int(mask.sum()) for mask in trained]
    values = np.concatenate([np.empty(0), *(one.advantages[at] for one, at in zip(samples, trained, strict=True))])
    parts = np.split(whitened(values, settings), np.cumsum(sizes)[:-1]) if samples else []
    found = list[Sample]()
    for sample, mask, part in zip(samples, trained, parts, strict=True):
        advantages = np.zeros(len(sample.advantages))
        advantages[mask] = part
        found.append(replace(sample, advantages=advantages))
    return found


def _factor(samples: Sequence[Sample], settings: AdvantageSettings) -> float:
    """Number of all sessions divided by the number that teach."""
    match settings.factor:
        case "none":
            return 1.0
        case "judged":
            teaching = {sample.session_id for sample in samples if sample.advantages.any()}
        case "rewarded":
            teaching = {sample.session_id for sample in samples if sample.score != 0}
    return len({sample.session_id for sample in samples}) / max(len(teaching), 1)


def _session_advantages(
    group: Group, traces: Sequence[Sequence[Trace]], algorithm: Algorithm, penalties: Mapping[str, float]
) -> list[NDArray[np.float64]]:
    """[T] for each trace: its share of its session's advantage."""
    advantages = _compared(group, algorithm, penalties)
    own_range = _range_of_own([trace for mine in traces for trace in mine])
    return [
        np.full(len(trace.response_ids), credit)
        for advantage, mine in zip(advantages, traces, strict=True)
        for trace, credit in zip(mine, _credits(float(advantage), mine, algorithm, own_range), strict=True)
    ]


def _compared(group: Group, algorithm: Algorithm, penalties: Mapping[str, float]) -> NDArray[np.float64]:
    """[S] the sessions' advantages."""
    settings = algorithm.advantage
    if settings.rewards == "parts":
        return part_advantages(rewards_of_parts(group, tuple(settings.part_weights)), settings)
    return group_advantages(
        [_shaped_reward(session, algorithm, penalties) for session in group.sessions],
        settings,
        lengths=[num_sampled(session) for session in group.sessions],
        greedy=_greedy_reward(group, algorithm) if settings.baseline == "greedy" else None,
    )


def _greedy_reward(group: Group, algorithm: Algorithm) -> float:
    """The shaped reward of the greedy session. Raises: InvalidGroup."""
    if group.greedy is None:
        raise InvalidGroup(
            f"advantage.baseline greedy needs a greedy session alongside {group.task_id}, and it has none: "
            f"collect with "
            "Beside(greedy=...), as `gangline train run` does, or choose another baseline."
        )
    return shape_reward(group.greedy.reward, group.greedy.num_tokens, algorithm.shaping)


def _shaped_reward(session: SessionResult, algorithm: Algorithm, penalties: Mapping[str, float]) -> float:
    if session.reward is None:
        raise ValueError(f"{session.session_id} has no reward: judge the group first.")
    shaped = shape_reward(session.reward, num_sampled(session), algorithm.shaping)
    return shaped - penalties.get(session.session_id, 0.0)


def _credits(advantage: float, traces: Sequence[Trace], algorithm: Algorithm, own_range: float) -> NDArray[np.float64]:
    """[len(traces)]"""
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    own = np.array(rewards) if len(rewards) == len(traces) else None
    return spread_advantage(advantage, len(traces), algorithm.credit, own=own, own_range=own_range)


def _range_of_own(traces: Sequence[Trace]) -> float:
    """Largest minus smallest evaluator's reward of the traces."""
    rewards = [trace.reward for trace in traces if trace.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


class _Scores(NamedTuple):
    task_id: str
    of_sessions: Mapping[str, float]


def _scores(group: Group) -> _Scores:
    return _Scores(
        group.task_id, {session.session_id: session.reward for session in group.sessions if session.reward is not None}
    )


def _sample(trace: Trace, advantages_T: NDArray[np.float64], mask: Mask, scores: _Scores) -> Sample:
    return Sample(
        trace_id=trace.trace_id,
        session_id=trace.session_id,
        task_id=scores.task_id,
        score=scores.of_sessions[trace.session_id],
        prompt_ids=trace.prompt_ids,
        response_ids=trace.response_ids,
        weights=mask(trace),
        advantages=advantages_T,
        behaviour_logprobs=trace.response_logprobs,
        versions=trace.response_versions,
        temperatures=_temperatures(trace),
    )


def _temperatures(trace: Trace) -> NDArray[np.float32]:
    temperatures = np.ones(len(trace.response_ids), np.float32)
    for span, certificate in zip(trace.spans, trace.certificates, strict=True):
        temperatures[span.start : span.end] = scoring_temperature(certificate)
    return temperatures
