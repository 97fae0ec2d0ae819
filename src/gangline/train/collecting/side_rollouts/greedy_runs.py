"""Greedy runs: for each task, one extra session that samples the likeliest tokens, the baseline of ReMax.

The session only provides a reward and is never used for training. Its task id is derived from the task's id, so a
restarted trainer finds it again. Source: ReMax (arXiv 2310.10505).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.rows.measured import why_not_measured
from gangline.train.collecting.degenerates import num_sampled
from gangline.train.collecting.groups import Greedy, ValiditySettings
from gangline.wire.client.rollouts import MOST_RUNS, OpenTasks, RolloutClient, Task, id_of

_log = logging.getLogger(__name__)


def greedy_task(task: Task, run: int = 1) -> dict[str, Any]:
    """The task with one session, sampled at temperature 0. run: from 1; each run has its own task id."""
    body = task.model_dump(mode="json", exclude_unset=True) if isinstance(task, TaskRequest) else dict(task)
    capture = dict[str, Any](body.get("capture") or {})
    capture["sampling"] = {**(capture.get("sampling") or {}), "temperature": {"override": 0.0}}
    again = "" if run == 1 else f".run{run}"
    return {**body, "task_id": f"{id_of(task)}.greedy{again}", "num_samples": 1, "capture": capture}


class GreedyRuns:
    """The greedy sessions of all tasks of one run. reward: replaces the evaluator's reward of a session."""

    def __init__(
        self,
        service: RolloutClient,
        *,
        validity: ValiditySettings | None = None,
        reward: Callable[[SessionResult], float] | None = None,
        retry_s: float = 0.5,
    ) -> None:
        self.service = service
        self.validity = validity or ValiditySettings()
        self.retry_s = retry_s
        self._reward = reward

    def of(self, task: Task) -> GreedyOfTask:
        return GreedyOfTask(self, task)

    def judge(self, sessions: Sequence[SessionResult]) -> Greedy | str:
        """The greedy session's result, or the reason why there is none."""
        if not sessions:
            return "it has no result"
        (session,) = sessions
        if (why := why_not_measured(session)) is not None:
            return why
        reward = session.reward if self._reward is None else float(self._reward(session))
        assert reward is not None, "a session without a reward was left out"
        return Greedy(reward, num_sampled(session)) if math.isfinite(reward) else "its reward is not finite"


class GreedyOfTask:
    """The greedy session of one task, from submission to reward."""

    def __init__(self, runs: GreedyRuns, task: Task) -> None:
        self._runs = runs
        self._task = task
        self._open = OpenTasks(runs.service, runs.retry_s)

    async def submit(self, run: int = 1) -> None:
        await self._open.submit(greedy_task(self._task, run))

    async def measure(self) -> Greedy | None:
        """None if it has no reward and the group is to be dropped. Raises: InvalidGroup under `refuse`."""
        runs = self._runs
        for run in range(1, MOST_RUNS + 1):
            if run > 1:
                await self.submit(run)
            task_id = str(greedy_task(self._task, run)["task_id"])
            found = runs.judge(await self._open.result(task_id))
            if isinstance(found, Greedy):
                return found
            if runs.validity.on_invalid == "refuse":
                raise InvalidGroup(
                    f"the greedy session of {task_id}, the baseline of its group, is not valid ({found}). Look at it "
                    "with `gangline show`, or choose on_invalid: shrink or resubmit."
                )
            _log.warning("group.without_greedy task_id=%s reason=%s", task_id, found)
            if runs.validity.on_invalid == "shrink":
                break
        return None

    async def cancel(self) -> None:
        """End what the service may still run for it."""
        await self._open.cancel()
