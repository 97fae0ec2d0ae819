"""Compares rewards with equal weight for each session.

slime's own normalisation splits a batch into groups by counting samples, which is wrong once a session has two; miles's
own refuses traces of one session with different rewards. Both use this function with `--custom-reward-post-process-path
gangline.train.trainers.slime.post_process_rewards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.advantages import AdvantageSettings, group_advantages
from gangline.train.learning.credit.traces import CreditSettings, spread_advantage

POST_PROCESS = "gangline.train.trainers.slime.post_process_rewards"

_OWN = CreditSettings(scheme="own")
_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_DIVIDED = ("grpo", "gspo", "cispo")
_NOT_COMPARED = ("reinforce_plus_plus", "ppo")
"""Estimators that use rewards unchanged."""


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """slime's normalisation with equal weight for each session: (rewards, compared rewards), by sample.

    The results equal slime's and miles's own if every session has one trace. If the evaluator rewards traces
    separately, the best trace takes all of a positive advantage and the worst all of a negative one (scheme `own` of
    `training/learning/credit/traces`). Raises: InvalidRequest for an estimator whose baseline is not known here.
    """
    require_known_estimator(args.advantage_estimator)
    raw = np.array([float(sample.get_reward_value(args)) for sample in samples])
    if not compares_rewards(args):
        return raw.tolist(), raw.tolist()
    divided = args.advantage_estimator in _DIVIDED and args.grpo_std_normalization
    settings = AdvantageSettings(scale="deviation" if divided else "none", deviation="sample")
    groups = np.array([sample.group_index for sample in samples])
    sessions = np.array([sample.metadata["session_id"] for sample in samples])
    outcomes = np.array([sample.metadata["session_reward"] for sample in samples])
    compared = np.zeros(len(raw))
    for group in np.unique(groups):
        mine = np.flatnonzero(groups == group)
        first, numbers = np.unique(sessions[mine], return_index=True, return_inverse=True)[1:]
        advantages = group_advantages(outcomes[mine][first], settings)
        own_range = float(np.ptp(raw[mine]))
        for number, advantage in enumerate(advantages):
            traces = mine[numbers == number]
            compared[traces] = spread_advantage(
                float(advantage), len(traces), _OWN, own=raw[traces], own_range=own_range
            )
    return raw.tolist(), compared.tolist()


def compares_rewards(args: Any) -> bool:
    """Whether the estimator subtracts a group's mean from rewards."""
    return args.advantage_estimator in _NORMALISED and args.rewards_normalization


def require_known_estimator(estimator: str) -> None:
    """Raises: InvalidRequest."""
    if estimator not in (*_NORMALISED, *_NOT_COMPARED):
        raise InvalidRequest(
            f"the advantage estimator {estimator!r} is not known here, so its rewards would not be compared as it "
            f"needs them. Use one of {', '.join((*_NORMALISED, *_NOT_COMPARED))}, or a reward post-processing of your "
            "own (--custom-reward-post-process-path)."
        )
