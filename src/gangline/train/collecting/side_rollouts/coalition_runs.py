"""Runs coalitions of a training task and returns their mean rewards.

Invariants: every requested coalition is measured, or the group is dropped, run again or refused, like a group of
training sessions. Only sessions with a reward count. The run ends if an absent player makes a call, or if a player
never makes
one: the agent does not follow the protocol. Tasks that are no longer needed are cancelled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.rows.measured import why_without_reward
from gangline.train.collecting.groups import CoalitionRewards, Group, ValiditySettings
from gangline.train.collecting.side_rollouts.coalitions import COALITION, Coalition, CoalitionSettings, coalition_task
from gangline.wire.client.rollouts import MOST_RUNS, OpenTasks, RolloutClient, Task, id_of

_log = logging.getLogger(__name__)


class CoalitionRuns:
    """The coalitions of all tasks of one run.

    asked: id of a task -> the coalitions to measure for it. reward: replaces the evaluator's reward of a session.
    validity: as for groups; under `shrink` one valid session is enough.
    """

    def __init__(
        self,
        service: RolloutClient,
        settings: CoalitionSettings,
        asked: Callable[[str], Sequence[Coalition]],
        *,
        validity: ValiditySettings | None = None,
        reward: Callable[[SessionResult], float] | None = None,
        retry_s: float = 0.5,
    ) -> None:
        self.service = service
        self.settings = settings
        self.asked = asked
        self.validity = validity or ValiditySettings()
        self.retry_s = retry_s
        self._reward = reward
        self._seen: set[str] = set()

    def of(self, task: Task) -> CoalitionsOfTask:
        return CoalitionsOfTask(self, task)

    def see(self, sessions: Iterable[SessionResult]) -> None:
        """Record which roles made calls in the sessions."""
        for session in sessions:
            self._seen.update(_roles(session))

    def require_all_seen(self, task_id: str) -> None:
        """Raises: InvalidGroup if a player has made no call in any session so far."""
        unseen = [player for player in self.settings.players if player not in self._seen]
        if unseen:
            seen = ", ".join(sorted(self._seen)) or "none"
            raise InvalidGroup(
                f"coalitions.players names {', '.join(unseen)}, and no session of {task_id} or of its coalitions has "
                f"a call of that role (roles of calls so far: {seen}). Use the names that the agent's calls give in "
                "the header x-gangline-role."
            )

    def reward_of(self, session: SessionResult) -> float:
        """The session's reward; not finite if it has none."""
        if self._reward is not None:
            return float(self._reward(session))
        return math.nan if session.reward is None else session.reward


class CoalitionsOfTask:
    """The coalitions of one task, from submission to mean rewards."""

    def __init__(self, runs: CoalitionRuns, task: Task) -> None:
        self._runs = runs
        self._task = task
        self._coalitions = runs.asked(id_of(task))
        self._open = OpenTasks(runs.service, runs.retry_s)

    async def submit(self) -> None:
        for coalition in self._coalitions:
            await self._open.submit(self._body(coalition, run=1))

    async def measure(self, group: Group) -> CoalitionRewards | None:
        """Waits for all coalitions; None if one has too few valid sessions and the group is to be dropped.

        group: the sessions with all players, before any is left out. Raises: InvalidGroup under `refuse`, and always
        when absent players made calls or a player has no call in any session.
        """
        settings = self._runs.settings
        self._runs.see(group.sessions)
        everybody = float(np.mean([self._runs.reward_of(session) for session in group.sessions]))
        rewards: dict[Coalition, float] = {frozenset(): settings.empty_value, settings.everybody: everybody}
        num_sessions = 0
        for coalition in self._coalitions:
            found = await self._rewards(coalition)
            if found is None:
                return None
            rewards[coalition] = float(np.mean(found))
            num_sessions += len(found)
        self._runs.require_all_seen(group.task_id)
        return CoalitionRewards(rewards, num_sessions)

    def _body(self, coalition: Coalition, run: int) -> dict[str, Any]:
        return coalition_task(self._task, coalition, self._runs.settings, run)

    async def cancel(self) -> None:
        """End what the service may still run for it."""
        await self._open.cancel()

    async def _rewards(self, coalition: Coalition) -> list[float] | None:
        """Rewards of the coalition's valid sessions; None if there are too few even in its last run."""
        runs = self._runs
        for run in range(1, MOST_RUNS + 1):
            body = self._body(coalition, run)
            task_id = str(body["task_id"])
            if run > 1:
                await self._open.submit(body)
            sessions = await self._open.result(task_id)
            runs.see(sessions)
            self._require_honoured(task_id, sessions, coalition)
            reasons = {
                session.session_id: why for session in sessions if (why := self._why_invalid(session)) is not None
            }
            rewards = [runs.reward_of(session) for session in sessions if session.session_id not in reasons]
            if len(rewards) == runs.settings.samples or (runs.validity.on_invalid == "shrink" and rewards):
                return rewards
            if runs.validity.on_invalid == "refuse":
                raise InvalidGroup(_refused(task_id, len(rewards), runs.settings.samples, coalition, reasons))
            action = "drop" if runs.validity.on_invalid == "shrink" or run == MOST_RUNS else "resubmit"
            _log.warning("group.not_whole task_id=%s action=%s reasons=%s", task_id, action, reasons)
            if action == "drop":
                break
        return None

    def _why_invalid(self, session: SessionResult) -> str | None:
        if (why := why_without_reward(session)) is not None:
            return why
        return None if math.isfinite(self._runs.reward_of(session)) else "its reward is not finite"

    def _require_honoured(self, task_id: str, sessions: Iterable[SessionResult], coalition: Coalition) -> None:
        """Raises: InvalidGroup. Another run would not help: the agent's program decides who plays."""
        absent = self._runs.settings.everybody - coalition
        called = {
            session.session_id: sorted(absent & _roles(session)) for session in sessions if absent & _roles(session)
        }
        if called:
            shown = "; ".join(f"{session_id}: {', '.join(players)}" for session_id, players in called.items())
            raise InvalidGroup(
                f"sessions of {task_id} have calls of players that take no part in it ({shown}). The agent's program "
                f"must read {COALITION}, which is {_shown(coalition)!r} there, and replace every other player by a "
                "fallback that makes no calls in its role."
            )


def _refused(task_id: str, num_valid: int, samples: int, coalition: Coalition, reasons: dict[str, str]) -> str:
    why = "; ".join(f"{session_id}: {reason}" for session_id, reason in reasons.items()) or "the others have no result"
    return (
        f"{num_valid} of {samples} sessions of {task_id}, with the players {_shown(coalition)}, are valid ({why}). "
        "Look at them with `gangline show`, or choose on_invalid: shrink or resubmit."
    )


def _shown(coalition: Coalition) -> str:
    return ",".join(sorted(coalition))


def _roles(session: SessionResult) -> set[str]:
    traces = () if session.trajectory is None else session.trajectory.traces
    return {span.agent_role for trace in traces for span in trace.spans if span.agent_role is not None}
