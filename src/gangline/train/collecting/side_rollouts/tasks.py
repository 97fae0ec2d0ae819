"""Tasks that run for the sake of one that is trained on: coalitions, and a greedy session.

Invariants: they give rewards. They are asked for with the task, measured once its group is admitted, and cancelled when
it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gangline.train.collecting.groups import Group
from gangline.train.collecting.side_rollouts.coalition_runs import CoalitionRuns, CoalitionsOfTask
from gangline.train.collecting.side_rollouts.greedy_runs import GreedyOfTask, GreedyRuns
from gangline.wire.client.rollouts import Task


@dataclass(frozen=True)
class Beside:
    coalitions: CoalitionRuns | None = None
    """Measured for every task whose group is admitted; None disables coalitions."""
    greedy: GreedyRuns | None = None
    """None runs none."""

    def of(self, task: Task) -> BesideTask:
        return BesideTask(
            None if self.coalitions is None else self.coalitions.of(task),
            None if self.greedy is None else self.greedy.of(task),
        )


@dataclass(frozen=True)
class BesideTask:
    """The extra tasks of one task."""

    coalitions: CoalitionsOfTask | None
    greedy: GreedyOfTask | None

    async def submit(self) -> None:
        for one in (self.coalitions, self.greedy):
            if one is not None:
                await one.submit()

    async def measure(self, group: Group, admitted: Group) -> Group | None:
        """`admitted` with the measured rewards; None if it is to be dropped. group: before any session is left out.

        Raises: InvalidGroup.
        """
        if self.coalitions is not None:
            rewards = await self.coalitions.measure(group)
            if rewards is None:
                return None
            admitted = replace(admitted, coalitions=rewards)
        if self.greedy is not None:
            greedy = await self.greedy.measure()
            if greedy is None:
                return None
            admitted = replace(admitted, greedy=greedy)
        return admitted

    async def cancel(self) -> None:
        """Cancel the tasks that the service may still be running."""
        for one in (self.coalitions, self.greedy):
            if one is not None:
                await one.cancel()
