"""A rollout service in memory, whose groups end when a test says so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from gangline.domain.errors import NotFound, ServerUnavailable
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import Submitted, TaskView
from support.training.samples import group

GOOD, DULL, BROKEN = (1.0, 0.0), (1.0, 1.0), (1.0, None)


class FakeService:
    """A task ends when it is told to, or at once when its rewards were given before."""

    def __init__(self, **rewards: tuple[float | None, ...]) -> None:
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.num_unavailable = 0
        """How many calls are still to fail."""
        self.rewards = dict(rewards)
        self._ended: dict[str, asyncio.Event] = {}
        self._was_submitted = asyncio.Condition()

    @property
    def open(self) -> list[str]:
        """Tasks that have not ended, in the order of their submitting."""
        return [task_id for task_id, ended in self._ended.items() if not ended.is_set()]

    def end(self, task_id: str, rewards: tuple[float | None, ...] = GOOD) -> None:
        self.rewards[task_id] = rewards
        self._ended[task_id].set()

    async def until_submitted(self, number: int) -> None:
        async with self._was_submitted:
            await self._was_submitted.wait_for(lambda: len(self.submitted) >= number)

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        self._may_fail()
        task_id = (task.task_id if isinstance(task, TaskRequest) else task["task_id"]) or ""
        created = task_id not in self._ended
        self._ended[task_id] = asyncio.Event()
        if task_id in self.rewards:
            self._ended[task_id].set()
        async with self._was_submitted:
            self.submitted.append(task_id)
            self._was_submitted.notify_all()
        return Submitted(task_id=task_id, session_ids=("s0", "s1"), created=created)

    async def wait(self, task_id: str) -> TaskView:
        await self._ended[task_id].wait()
        return await self._view(task_id)

    async def result(self, task_id: str) -> list[SessionResult]:
        self._may_fail()
        return list(group(*self.rewards[task_id]).sessions)

    async def cancel(self, task_id: str) -> TaskView:
        if task_id not in self._ended:
            raise NotFound(f"no task {task_id}.")
        self.cancelled.append(task_id)
        self._ended[task_id].set()
        return await self._view(task_id)

    async def _view(self, task_id: str) -> TaskView:
        return TaskView(
            task_id=task_id,
            status="ended",
            num_samples=2,
            num_open=0,
            position=0,
            created_at=0.0,
            ended_at=1.0,
            states={},
            outcomes={},
            rewards=(),
            sessions=(),
            request={},
        )

    def _may_fail(self) -> None:
        if self.num_unavailable:
            self.num_unavailable -= 1
            raise ServerUnavailable("the server does not answer.")


def tasks() -> Iterator[dict[str, Any]]:
    return ({"task_id": f"t{number}", "instruction": "add"} for number in itertools.count())
