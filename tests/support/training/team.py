"""A service in memory whose agent is a team: each player of a session's coalition makes one call in its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.trajectory import Trace
from gangline.domain.views import Submitted
from gangline.train.collecting.side_rollouts.coalitions import COALITION
from support.training.samples import session, trace
from support.training.service import FakeService

Rewards = Callable[[frozenset[str]], Sequence[float | None]]


def turn_of(player: str, version: int = 0) -> Trace:
    """A trace of one turn in the player's role."""
    one = trace(versions=[version])
    return msgspec.structs.replace(one, spans=(msgspec.structs.replace(one.spans[0], agent_role=player),))


class Team(FakeService):
    """Ends every task at once, coalitions' too unless they are held, with these rewards, dealt round to its sessions.

    players: who makes calls, by the coalition; by default just its members.
    """

    def __init__(
        self,
        everybody: Sequence[str],
        rewards: Rewards,
        *,
        players: Callable[[frozenset[str]], Sequence[str]] = sorted,
        version: Callable[[], int] = lambda: 0,
        holds_coalitions: bool = False,
    ) -> None:
        super().__init__()
        self.bodies: dict[str, Mapping[str, Any]] = {}
        self._everybody = everybody
        self._rewards_of, self._players, self._version = rewards, players, version
        self._holds_coalitions = holds_coalitions
        self._results: dict[str, list[SessionResult]] = {}

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        body = task.model_dump(mode="json") if isinstance(task, TaskRequest) else task
        task_id = str(body["task_id"])
        self.bodies[task_id] = body
        present = body.get("agent", {}).get("env", {}).get(COALITION)
        coalition = frozenset(self._everybody if present is None else present.split(","))
        if present is None or not self._holds_coalitions:
            rewards = self._rewards_of(coalition)
            self.rewards.setdefault(task_id, tuple(rewards[n % len(rewards)] for n in range(body["num_samples"])))
        submitted = await super().submit(body)
        if task_id in self.rewards and task_id not in self._results:  # what was stored once stays as it is
            self._results[task_id] = self._sessions(task_id, coalition)
        return msgspec.structs.replace(
            submitted, session_ids=tuple(f"{task_id}.{n}" for n in range(body["num_samples"]))
        )

    async def result(self, task_id: str) -> list[SessionResult]:
        self._may_fail()
        return self._results[task_id]

    def _sessions(self, task_id: str, coalition: frozenset[str]) -> list[SessionResult]:
        turns = [turn_of(player, self._version()) for player in self._players(coalition)]
        return [
            session(f"{task_id}.{index}", reward, *turns, task_id=task_id)
            for index, reward in enumerate(self.rewards[task_id])
        ]
