"""Control arms: comparisons that show whether an experiment learned from the intended signal."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from gangline.training.collecting.groups import Group

__all__ = ["shuffled_rewards"]


def shuffled_rewards(seed: int, run: str) -> Callable[[Group], Group]:
    """Deals each group's rewards out to its sessions at random: the same rewards, of nobody's merit.

    The same seed and number of the task give the same order, independent of the run's name.
    """

    def prepare(group: Group) -> Group:
        rewards = [session.reward for session in group.sessions]
        random.Random(f"{seed}/{group.task_id.removeprefix(run)}").shuffle(rewards)
        sessions = zip(group.sessions, rewards, strict=True)
        return Group(group.task_id, tuple(msgspec.structs.replace(one, reward=reward) for one, reward in sessions))

    return prepare
