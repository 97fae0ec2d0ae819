"""The service calls that a collector needs, and helpers for tasks with their own ids."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from gangline.domain.errors import GanglineError, InvalidRequest, ServerUnavailable
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import Submitted, TaskView

MOST_RUNS = 3
"""Maximum number of runs of a task with incomplete sessions, under `resubmit`."""

A = TypeVar("A")
T = TypeVar("T")
Task = TaskRequest | Mapping[str, Any]


class RolloutClient(Protocol):
    """The calls of the service that a collector needs. `gangline.wire.client.ServerClient` is one."""

    async def submit(self, task: Task) -> Submitted: ...

    async def wait(self, task_id: str) -> TaskView:
        """The task when it has ended; survives restarts of the server."""
        ...

    async def result(self, task_id: str) -> list[SessionResult]: ...

    async def cancel(self, task_id: str) -> TaskView: ...


async def _answered(call: Callable[[A], Awaitable[T]], argument: A, retry_s: float) -> T:
    """The service's answer, retried without limit."""
    while True:
        try:
            return await call(argument)
        except ServerUnavailable:
            await asyncio.sleep(retry_s)


class OpenTasks:
    """Tasks that the service may still have work for; those that are no longer wanted are cancelled there."""

    def __init__(self, service: RolloutClient, retry_s: float = 0.5) -> None:
        """retry_s: seconds between retries to a server that does not answer."""
        self._service = service
        self._retry_s = retry_s
        self._open = set[str]()

    async def submit(self, task: Task) -> Submitted:
        self._open.add(id_of(task))  # before the call, which may arrive although it is cancelled here
        return await _answered(self._service.submit, task, self._retry_s)

    async def result(self, task_id: str) -> list[SessionResult]:
        """The sessions, once the task has ended."""
        await self._service.wait(task_id)
        sessions = await _answered(self._service.result, task_id, self._retry_s)
        self._open.discard(task_id)
        return sessions

    async def run(self, task: Task) -> list[SessionResult]:
        await self.submit(task)
        return await self.result(id_of(task))

    async def all(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Their values. When one fails, or this is cancelled, all of them end, and so do their tasks at the service."""
        running = [asyncio.create_task(work) for work in works]
        try:
            return await asyncio.gather(*running)
        finally:
            for work in running:
                work.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self.cancel()

    async def cancel(self) -> None:
        ids = list(self._open)
        self._open.clear()
        await asyncio.gather(*map(self._cancel, ids))

    async def _cancel(self, task_id: str) -> None:
        # Not there yet, there no longer, or nobody answers: its sessions end by their own budgets.
        with suppress(GanglineError):
            await self._service.cancel(task_id)


def id_of(task: Task) -> str:
    """The task's id; empty if it has none."""
    return (task.task_id if isinstance(task, TaskRequest) else task.get("task_id")) or ""


def enough_sessions(task: Task) -> int | None:
    """Number of sessions that complete the task's group, if fewer than all."""
    return task.enough_sessions if isinstance(task, TaskRequest) else task.get("enough_sessions")


def named(task: Task, task_id: str) -> Task:
    changes = {"task_id": task_id}
    return task.model_copy(update=changes) if isinstance(task, TaskRequest) else {**task, **changes}


def refuse_held_out(task: Task) -> None:
    """Raises: InvalidRequest for a held-out task, which must not be trained on."""
    if task.held_out if isinstance(task, TaskRequest) else task.get("held_out"):
        raise InvalidRequest(
            f"task {id_of(task) or 'without an id'} is held out: it measures, and its sessions are not trained on. "
            "Take it out of the tasks that are trained on, or remove `held_out` from it."
        )
