"""Reports ended tasks to a callback, in order (used for traces)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gangline.domain.errors import GanglineError
from gangline.domain.views import Event, TaskView
from gangline.server.service.core import RolloutService

_MAX_WAITING = 10_000


class TaskWatch:
    """Never delays events. Beyond `_MAX_WAITING` tasks, the newest are not reported."""

    def __init__(self, service: RolloutService, on_task_ended: Callable[[TaskView], None]) -> None:
        self._service = service
        self._on_task_ended = on_task_ended
        self._ended: asyncio.Queue[str] = asyncio.Queue(_MAX_WAITING)
        service.watchers.append(self._saw)

    def _saw(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "task.ended" and event.task_id is not None and not self._ended.full():
                self._ended.put_nowait(event.task_id)

    async def tell_forever(self) -> None:
        """Runs until cancelled. A task that cannot be read is not reported."""
        while True:
            task_id = await self._ended.get()
            try:
                self._on_task_ended(await self._service.task(task_id))
            except GanglineError:
                continue
