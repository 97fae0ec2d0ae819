"""Sessions for trainers that ask for one sample at a time, and form groups themselves.

Such a trainer calls once for each sample of a prompt, beside its engine, and compares what the calls return. A call
runs one session and returns its row, or raises: a trainer that gets an error for one sample has no group, so a group is
never short, and an infrastructure fault is never a reward.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

from gangline.domain.errors import InvalidGroup
from gangline.train.collecting.groups import Group, why_invalid
from gangline.train.trainers.contract import TrainerRow, rows_of
from gangline.train.trainers.own_engine import EngineSettings, OwnEngine, Sampling, answering
from gangline.wire.client.rollouts import MOST_RUNS, OpenTasks, refuse_held_out
from gangline.wire.client.server import ServerClient

_log = logging.getLogger(__name__)


class Episodes:
    """Sessions of this process's engine. `episodes` returns the one of the process."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._tasks: OpenTasks | None = None

    async def row(
        self, task: Mapping[str, Any], sampling: Sampling, make_engine: Callable[[EngineSettings], OwnEngine]
    ) -> TrainerRow:
        """The row of one session. A session that broke runs again, three times in all.

        task: without number of samples; its id is made here. make_engine: called once, in a thread.

        Raises: InvalidGroup if the session cannot be trained on, or has several traces; InvalidRequest for a held-out
        task; EngineUnavailable, and errors of the service.
        """
        refuse_held_out(task)
        tasks = await self._started(make_engine)
        episode, why = uuid4().hex, ""
        for run in range(1, MOST_RUNS + 1):
            task_id = f"{episode}-run{run}"
            sessions = await tasks.run(sampling.in_task({**task, "task_id": task_id, "num_samples": 1}))
            why = next(map(why_invalid, sessions), "the service has no result of it")
            if why is None:
                return _only(Group(task_id, tuple(sessions)), temperature=sampling.temperature)
            _log.warning("trainer.session_invalid task=%s run=%d reason=%s", task_id, run, why)
        raise InvalidGroup(
            f"a sample could not be trained on, {MOST_RUNS} times, the last time because {why}. Look at it with "
            f"`gangline show {episode}-run{MOST_RUNS}`."
        )

    async def _started(self, make_engine: Callable[[EngineSettings], OwnEngine]) -> OpenTasks:
        async with self._starting:
            if self._tasks is None:
                engine = await asyncio.to_thread(make_engine, self._settings)
                async with AsyncExitStack() as stack:
                    client = ServerClient(self._settings.url, self._settings.token())
                    service = await stack.enter_async_context(client)
                    await stack.enter_async_context(answering(engine, service, self._settings, is_only=False))
                    self._tasks, self._stack = OpenTasks(service), stack.pop_all()
            return self._tasks

    async def close(self) -> None:
        """Stop answering the nodes. Without it that ends with the process."""
        await self._stack.aclose()
        self._tasks = None


@functools.cache
def episodes(url: str, **settings: Any) -> Episodes:
    """One for each process and settings, the fields of `EngineSettings`: trainers make their classes anew."""
    return Episodes(EngineSettings(url=url, **settings))


def _only(group: Group, *, temperature: float) -> TrainerRow:
    """The single row of a group of one session. Raises: InvalidGroup."""
    rows = rows_of(group, 1, temperature=temperature)
    if len(rows) > 1:
        raise InvalidGroup(
            f"{rows[0].session_id} has {len(rows)} traces to train on, and the trainer takes one row a sample: build "
            "with prefix_merging, and take agents that neither compact their context nor start others."
        )
    return rows[0]
