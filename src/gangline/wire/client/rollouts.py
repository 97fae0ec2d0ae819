"""The service as collectors know it: four calls, and tasks under ids of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from gangline.domain.errors import InvalidRequest, ServerUnavailable
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import Submitted, TaskView

__all__ = ["MOST_RUNS", "RolloutClient", "Task", "answered", "enough_sessions", "id_of", "named", "refuse_held_out"]

MOST_RUNS = 3
"""Runs of a task whose sessions come back incomplete, under `resubmit`."""

A = TypeVar("A")
T = TypeVar("T")
Task = TaskRequest | Mapping[str, Any]


class RolloutClient(Protocol):
    """The calls of the service that a collector needs. `gangline.wire.client.ServerClient` is one."""

    async def submit(self, task: Task) -> Submitted: ...

    async def wait(self, task_id: str) -> TaskView:
        """The task when it has ended, through restarts of the server."""
        ...

    async def result(self, task_id: str) -> list[SessionResult]: ...

    async def cancel(self, task_id: str) -> TaskView: ...


async def answered(call: Callable[[A], Awaitable[T]], argument: A, retry_s: float) -> T:
    """The service's answer, after any number of retries."""
    while True:
        try:
            return await call(argument)
        except ServerUnavailable:
            await asyncio.sleep(retry_s)


def id_of(task: Task) -> str:
    """Empty where it has none."""
    return (task.task_id if isinstance(task, TaskRequest) else task.get("task_id")) or ""


def enough_sessions(task: Task) -> int | None:
    """How many of its sessions make its group whole, where not all of them must."""
    return task.enough_sessions if isinstance(task, TaskRequest) else task.get("enough_sessions")


def named(task: Task, task_id: str) -> Task:
    changes = {"task_id": task_id}
    return task.model_copy(update=changes) if isinstance(task, TaskRequest) else {**task, **changes}


def refuse_held_out(task: Task) -> None:
    """Raises: InvalidRequest for a task that measures, and so is not trained on."""
    if task.held_out if isinstance(task, TaskRequest) else task.get("held_out"):
        raise InvalidRequest(
            f"task {id_of(task) or 'without an id'} is held out: it measures, and its sessions are not trained on. "
            "Take it out of the tasks that are trained on, or remove `held_out` from it."
        )
