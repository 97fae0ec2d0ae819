"""Coalitions: the agent's reward when only some of its players take part.

For each training task, further tasks run the same agent with a subset of its players: its program reads their names
from `GANGLINE_COALITION` and replaces each absent player by a fallback. These sessions only provide rewards and are
never used for training.

Law: ids of coalition tasks are derived from their task's id, so a restarted trainer finds them again. Sources: Shapley
(1953); SHARP and M-GRPO, as "Inside the Agentic RL Training Loop" gives them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from gangline.domain.task import TaskRequest
from gangline.train.options import TrainingOptions
from gangline.wire.client.rollouts import Task, id_of

COALITION = "GANGLINE_COALITION"
"""Environment variable of an agent: the participating players, joined by commas. If unset, all take part."""

Coalition = frozenset[str]
Player = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

_MOST_EXACT = 4
"""Players; 14 coalitions besides the empty one and the one of all players."""


class CoalitionSettings(TrainingOptions):
    players: tuple[Player, ...] = Field(min_length=2)
    """Roles, as the agent's calls give them in the header `x-gangline-role`."""
    samples: int = Field(default=4, ge=1)
    """Sessions per coalition."""
    method: Literal["exact", "two_level", "monte_carlo"] = "exact"
    """exact: all coalitions, for at most 4 players. two_level: SHARP, a manager against its workers, then the workers
    among themselves, for at most 4 players. monte_carlo: the coalitions of random orders of the players.
    """
    manager: Player | None = None
    """Only for `two_level`: one of the players; the others are its workers."""
    permutations: int = Field(default=4, ge=1)
    """Only for `monte_carlo`: orders for each task. Every second one reverses the one before it, so an odd number is
    rounded up.
    """
    empty_value: float = 0.0
    """The reward when no player takes part. It is not measured by a session."""
    weight: float = Field(default=1.0, ge=0, le=1)
    """0: values are measured but change no advantage. 1: a player without a contribution learns nothing."""

    @model_validator(mode="after")
    def _fits(self) -> CoalitionSettings:
        if len(set(self.players)) < len(self.players):
            raise ValueError(f"a player is named twice in {list(self.players)}")
        if self.method != "monte_carlo" and len(self.players) > _MOST_EXACT:
            raise ValueError(
                f"method {self.method} runs all {2 ** len(self.players) - 2} coalitions of {len(self.players)} "
                f"players, and is for at most {_MOST_EXACT}: choose monte_carlo"
            )
        if (self.method == "two_level") != (self.manager is not None):
            raise ValueError("method two_level needs `manager`, and no other method has one")
        if self.manager is not None and self.manager not in self.players:
            raise ValueError(f"the manager {self.manager} is none of the players {list(self.players)}")
        return self

    @property
    def everybody(self) -> Coalition:
        return frozenset(self.players)

    @property
    def num_permutations(self) -> int:
        """Rounded up to an even number."""
        return self.permutations + self.permutations % 2

    @property
    def most_coalitions(self) -> int:
        """The largest number of coalitions that are measured for a task."""
        num = len(self.players)
        every = 2**num - 2
        return min(every, self.num_permutations * (num - 1)) if self.method == "monte_carlo" else every

    def number_of(self, coalition: Coalition) -> int:
        """The coalition's number in task ids: bit i is player i."""
        return sum(1 << index for index, player in enumerate(self.players) if player in coalition)


def coalition_task(task: Task, coalition: Coalition, settings: CoalitionSettings, run: int = 1) -> dict[str, Any]:
    """The task whose sessions have only these players. run: from 1; each run has its own task id.

    A coalition whose players never call the model still has a value, so such sessions are graded.
    """
    body = task.model_dump(mode="json", exclude_unset=True) if isinstance(task, TaskRequest) else dict(task)
    agent = dict[str, Any](body.get("agent", {}))
    present = ",".join(player for player in settings.players if player in coalition)
    agent |= {"env": {**agent.get("env", {}), COALITION: present}, "allow_no_model_call": True}
    again = "" if run == 1 else f".run{run}"
    task_id = f"{id_of(task)}.coalition{settings.number_of(coalition)}{again}"
    return {**body, "task_id": task_id, "num_samples": settings.samples, "agent": agent}
