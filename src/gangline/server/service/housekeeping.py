"""A server's background work: deleting data beyond the retention limits, and following other servers' events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from gangline.domain.errors import StoreError
from gangline.server.service.core import RolloutService
from gangline.store.sql.retention import Keep

log = logging.getLogger("gangline.server")

_AT_ONCE = 50
_PAGE = 500
_SILENT_NODE_S = 86_400.0
"""Nodes silent for this long are no longer listed: if nodes are pods or jobs, each start brings a new name."""
_EVENTS_S = 30 * 86_400.0
"""Events of no task, such as a node's, are kept at most so long."""


class Housekeeper:
    """Deletes tasks beyond the retention limits, results first, so that a crash leaves no unreferenced data. Also
    deletes silent nodes, and old events of no task. By default no task is beyond a limit.
    """

    def __init__(
        self, service: RolloutService, keep: Keep, *, every_s: float = 60.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._service = service
        self._keep = keep
        self._every_s = every_s
        self._clock = clock

    async def tidy_forever(self) -> None:
        while True:
            try:
                await self.tidy()
            except StoreError as error:
                log.error("server.tidy_failed code=%s message=%s", error.code, error.message)
            await asyncio.sleep(self._every_s)

    async def tidy(self) -> int:
        """Delete due tasks in portions, between which other work on the store can run. Returns their number."""
        store, total = self._service.store, 0
        await store.run(store.forget_nodes, self._clock() - _SILENT_NODE_S)
        events_s = _EVENTS_S if self._keep.for_s is None else min(_EVENTS_S, self._keep.for_s)
        await store.run(store.forget_events, self._clock() - events_s)
        while chosen := await store.query(store.forgettable, self._keep, _AT_ONCE):
            await asyncio.to_thread(self._remove_results, chosen)
            total += await store.run(store.forget, chosen)
        if total:
            log.info("server.tidied tasks=%d", total)
        return total

    def _remove_results(self, task_ids: list[str]) -> None:
        for task_id in task_ids:
            self._service.results.remove(task_id)


async def follow_forever(service: RolloutService, *, every_s: float = 0.2) -> None:
    """Wake callers waiting here when another server on the same database makes a change."""
    store = service.store
    last: int | None = None
    while True:
        try:
            if last is None:
                last = await store.query(store.last_event)
            is_more = True
            while is_more and (events := await store.query(partial(store.events, after=last, limit=_PAGE))):
                last, is_more = events[-1].seq, len(events) == _PAGE
                service.wake(events)
        except StoreError as error:
            log.error("server.follow_failed code=%s message=%s", error.code, error.message)
        await asyncio.sleep(every_s)
