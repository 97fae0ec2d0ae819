"""Parts of rewards: what evaluators `composite` and `staged` found, as means over the sessions of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gangline.domain.session import SessionResult
from gangline.train.learning.credit.parts import found_parts

__all__ = ["mean_reward_parts"]


def mean_reward_parts(sessions: Iterable[SessionResult]) -> dict[str, float]:
    """Name -> mean reward of a part of `composite`, or share of sessions that passed a gate of `staged`.

    Names of nested parts are joined by dots. A gate that was not asked, since an earlier one was not passed, is not
    passed.
    """
    sums: dict[str, float] = {}
    num_asked, num_staged, level_of = Counter[str](), Counter[str](), dict[str, str]()
    for session in sessions:
        for level, name, value in found_parts(session.reward_details):
            if name is None:
                num_staged[level] += 1
                continue
            sums[name] = sums.get(name, 0.0) + value
            num_asked[name] += 1
            level_of[name] = level
    return {name: total / (num_staged[level_of[name]] or num_asked[name]) for name, total in sums.items()}
