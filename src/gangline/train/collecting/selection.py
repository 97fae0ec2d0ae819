"""Selection: the part of a whole group that is trained on, and counts of left-out sessions by reason.

The order is: the experiment's own rewards, its changes to the group, leaving out single sessions (by its filter, then
as degenerates), the control, and the decision on the remaining group. Sessions are left out by their true rewards, so a
control arm trains on the same sessions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.train.collecting.collector import Admit, informative
from gangline.train.collecting.degenerates import DegenerateSettings, without_degenerates
from gangline.train.collecting.groups import Group

Prepare = Callable[[Group], Group]
"""Changes a whole group before selection: other rows, other rewards."""

RewardSession = Callable[[SessionResult], float]
"""Returns the reward used for a session, instead of its evaluator's."""

FilterSession = Callable[[SessionResult], str | None]
"""Returns why a session is left out of its group, starting with the kind and a colon; None keeps it."""

_FEWEST = 2
"""Sessions; fewer cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Every part is optional; the default keeps whole groups unchanged."""

    reward: RewardSession | None = None
    prepare: Prepare | None = None
    filter: FilterSession | None = None
    degenerates: DegenerateSettings | None = None
    control: Prepare | None = None
    admit: Admit | None = None

    def select(self, group: Group, left_out: Counter[str]) -> Group | None:
        """The group to train on; None if nothing in it is worth training on.

        left_out: kind of reason -> number of sessions; updated. Raises: InvalidGroup if a reward is not finite.
        """
        if self.reward is not None:
            group = _rewarded(group, self.reward)
        if self.prepare is not None:
            group = self.prepare(group)
        kept = self._without(group, left_out)
        if len(kept.sessions) < len(group.sessions) and len(kept.sessions) < _FEWEST:
            return None
        if self.control is not None:
            kept = self.control(kept)
        if self.degenerates is not None and self.degenerates.identical_rewards and informative(kept) is None:
            return None
        return kept if self.admit is None else self.admit(kept)

    def _without(self, group: Group, left_out: Counter[str]) -> Group:
        if (why := self.filter) is not None:
            reasons = {session.session_id: found for session in group.sessions if (found := why(session)) is not None}
            group = replace(
                group, sessions=tuple(session for session in group.sessions if session.session_id not in reasons)
            )
            left_out.update(_kind(reason) for reason in reasons.values())
        if self.degenerates is not None:
            group, reasons = without_degenerates(group, self.degenerates)
            left_out.update(_kind(reason) for reason in reasons.values())
        return group


def _rewarded(group: Group, reward: RewardSession) -> Group:
    """Raises: InvalidGroup."""
    rewards = [float(reward(session)) for session in group.sessions]
    wrong = [one.session_id for one, found in zip(group.sessions, rewards, strict=True) if not math.isfinite(found)]
    if wrong:
        raise InvalidGroup(
            f"the experiment's reward of {', '.join(wrong)} in {group.task_id} is not finite. Return a number for "
            "every session, or leave sessions out by a filter."
        )
    sessions = zip(group.sessions, rewards, strict=True)
    return replace(group, sessions=tuple(with_reward(one, found) for one, found in sessions))


def with_reward(session: SessionResult, reward: float | None) -> SessionResult:
    """Replaces the reward of traces that have the session's reward; traces with an evaluator's own reward keep it."""
    changed = msgspec.structs.replace(session, reward=reward)
    if session.trajectory is None:
        return changed
    traces = tuple(
        msgspec.structs.replace(trace, reward=reward) if trace.reward == session.reward else trace
        for trace in session.trajectory.traces
    )
    return msgspec.structs.replace(changed, trajectory=msgspec.structs.replace(session.trajectory, traces=traces))


def _kind(reason: str) -> str:
    return reason.partition(":")[0]
