"""Task ids that are used again: a trainer of Polar's counts them from 0 in each of its runs.

There only the id of a running task is taken. Here a task is kept under its id, so the next one of that name gets an id
of its own, `NAME--again-2`, and answers call it `NAME`.

Source: the `submit_task` of Polar's published rollout server.
"""

from __future__ import annotations

import re

from gangline.domain.errors import NotFound
from gangline.server.service.core import RolloutService

__all__ = ["id_to_submit", "newest_id", "polar_name"]

_AGAIN = re.compile(r"--again-\d+\Z")


def polar_name(task_id: str) -> str:
    return _AGAIN.sub("", task_id)


async def newest_id(service: RolloutService, name: str) -> str:
    """The id of the newest task of that name; the name itself where there is none. Raises: StoreError."""
    return _numbered(name, max(await _num_tasks(service, name), 1))


async def id_to_submit(service: RolloutService, name: str) -> str:
    """The id of the task of that name that has not ended, else a new one. Raises: StoreError."""
    number = await _num_tasks(service, name)
    if number and not await service.store.query(service.store.task_ended, _numbered(name, number)):
        return _numbered(name, number)
    return _numbered(name, number + 1)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}--again-{number}"


async def _num_tasks(service: RolloutService, name: str) -> int:
    number = 0
    while await _exists(service, _numbered(name, number + 1)):
        number += 1
    return number


async def _exists(service: RolloutService, task_id: str) -> bool:
    try:
        await service.store.query(service.store.task_ended, task_id)
    except NotFound:
        return False
    return True
