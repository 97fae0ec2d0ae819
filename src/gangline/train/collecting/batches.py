"""Collects, selects and buffers groups until there are enough fresh ones for a step.

    sync    the groups of a step are collected when it begins
    async   collection continues during training until the buffer has enough for the next step

A group is settled once it was trained on, was not admitted or is too old. A resumed run does not request it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from gangline.domain.session import SessionResult
from gangline.rows.forks.calls import REPLAYED
from gangline.train.collecting.buffer import BufferState, ReplayBuffer
from gangline.train.collecting.collector import (
    Admit,
    CollectionCounts,
    PlainCollector,
    ReplenishingCollector,
)
from gangline.train.collecting.groups import Group
from gangline.train.collecting.schedule import ScheduleSettings
from gangline.train.collecting.selection import Selection
from gangline.train.collecting.side_rollouts.tasks import Beside
from gangline.train.collecting.task_stream import TaskStream
from gangline.wire.client.rollouts import RolloutClient


class Collected(NamedTuple):
    """Counts of groups since the previous step."""

    reward_mean: float | None
    """Mean over all groups that came, admitted or not; None where none came."""
    degenerate: dict[str, int]
    num_not_admitted: int
    num_invalid: int
    num_stale: int
    num_sampled_tokens: int
    """In all groups received, admitted or not."""


@dataclass
class _Tally:
    rewards: list[float] = field(default_factory=list[float])
    degenerate: Counter[str] = field(default_factory=Counter[str])
    num_stale: int = 0
    num_sampled_tokens: int = 0
    before: CollectionCounts = field(default_factory=CollectionCounts)
    """The collector's counts at the previous step."""


class Batches:
    """The batches of one run. Enter it once, after `restore`; leaving it cancels the groups still in flight."""

    def __init__(
        self,
        schedule: ScheduleSettings,
        service: RolloutClient,
        stream: TaskStream,
        *,
        current_version: Callable[[], int],
        selection: Selection,
        informative: Admit | None = None,
        beside: Beside | None = None,
    ) -> None:
        """current_version: the trainer's policy version, which decides whether a group is fresh.

        informative: selects groups to learn from (dynamic sampling); None also admits groups whose rewards are all
        equal. alongside: runs extra tasks for each task; None runs only the tasks themselves.
        """
        self._schedule = schedule
        self._service = service
        self._stream = stream
        self._current_version = current_version
        self._selection = selection
        self._informative = informative
        self._beside = beside
        self._num_buffered = schedule.groups_per_step * max(schedule.staleness.max_lag, 1)
        """Enough to start the next step; more would only become stale."""
        self._buffer = ReplayBuffer(
            self._num_buffered + schedule.num_in_flight, schedule.staleness, max_uses=schedule.max_uses
        )
        self._changed, self._has_room = asyncio.Event(), asyncio.Event()
        """Set when a group was added, and when there is room for one."""
        self._settled = set[str]()
        self._tally = _Tally()
        self._collector = self._make_collector()
        self._feeding: asyncio.Task[None] | None = None
        """Fills the buffer ahead of the trainer; None under `sync`."""

    def _make_collector(self) -> PlainCollector | ReplenishingCollector:
        tasks, validity = self._stream.tasks(self._settled), self._schedule.validity
        service, beside = self._service, self._beside
        if self._schedule.mode == "sync":
            return PlainCollector(service, tasks, validity=validity, admit=self._admit, beside=beside)
        return ReplenishingCollector(
            service,
            tasks,
            num_in_flight=self._schedule.num_in_flight,
            validity=validity,
            admit=self._admit,
            beside=beside,
        )

    @property
    def settled(self) -> frozenset[str]:
        """Ids of tasks that are not requested again."""
        return frozenset(self._settled)

    @property
    def buffer_state(self) -> BufferState:
        return self._buffer.state

    def restore(self, settled: Iterable[str], buffer: BufferState) -> None:
        """Continue after a checkpoint."""
        self._settled.update(settled)
        self._buffer.restore(buffer)

    async def __aenter__(self) -> Self:
        await self._collector.__aenter__()
        if isinstance(self._collector, ReplenishingCollector):
            self._feeding = asyncio.create_task(self._feed(self._collector))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        await self._collector.__aexit__(*exc)

    async def next(self) -> list[Group]:
        """Waits until there are enough fresh groups for the next step and returns them.

        Raises: InvalidGroup, OutOfTasks, the service's errors.
        """
        while (groups := self._take()) is None:
            await self._grow()
        return groups

    def take_counts(self) -> Collected:
        """Counts since the previous call."""
        tally, now = self._tally, replace(self._collector.counts)
        self._tally = _Tally(before=now)
        return Collected(
            reward_mean=float(np.mean(tally.rewards)) if tally.rewards else None,
            degenerate=dict(tally.degenerate),
            num_not_admitted=now.not_admitted - tally.before.not_admitted,
            num_invalid=now.invalid - tally.before.invalid,
            num_stale=tally.num_stale,
            num_sampled_tokens=tally.num_sampled_tokens,
        )

    def _admit(self, group: Group) -> Group | None:
        self._tally.rewards += group.rewards
        self._tally.num_sampled_tokens += sum(_num_own_sampled(session) for session in group.sessions)
        self._stream.measure(group.task_id, group.rewards)
        selected = self._selection.select(group, self._tally.degenerate)
        admitted = selected if selected is None or self._informative is None else self._informative(selected)
        if admitted is None:
            self._settle(group.task_id)
        return admitted

    def _settle(self, task_id: str) -> None:
        self._settled.add(task_id.partition(".run")[0])  # a rerun counts as its original task

    def _take(self) -> list[Group] | None:
        version, before = self._current_version(), self._buffer.task_ids
        self._tally.num_stale += self._buffer.drop_stale(version)
        groups = self._buffer.take(self._schedule.groups_per_step, version)
        for task_id in before - self._buffer.task_ids:
            self._settle(task_id)
        self._has_room.set()
        return groups

    async def _grow(self) -> None:
        """Waits until the buffer has more groups."""
        if self._feeding is None:
            missing = self._schedule.groups_per_step - len(self._buffer)
            for group in await self._collector.collect(missing):
                self._buffer.add(group)
            return
        self._changed.clear()
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({changed, self._feeding}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if self._feeding.done():
            await self._feeding  # it ends only with an error

    async def _feed(self, collector: ReplenishingCollector) -> None:
        while True:
            while len(self._buffer) >= self._num_buffered:
                self._has_room.clear()
                await self._has_room.wait()
            for group in await collector.collect(1):
                self._buffer.add(group)
                self._changed.set()


def _num_own_sampled(session: SessionResult) -> int:
    """Tokens that engines sampled for the session; those that a fork repeats were sampled for its parent."""
    return sum(len(completion.sampled_ids) for completion in session.completions if REPLAYED not in completion.metadata)
