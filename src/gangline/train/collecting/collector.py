"""Collectors: turn tasks into groups worth training on.

`PlainCollector` requests a batch, waits for all of it, and requests replacements for groups that were not admitted.
`ReplenishingCollector` keeps a number of groups in flight, stops as soon as it has enough, and carries the rest over to
the next call or cancels it. Source: ProRL Agent, 3.4.

Invariants: a group is returned once. An incomplete group is rejected, shrunk or rerun as the settings say, never passed
on silently. An error loses nothing: groups found before it are returned by the next call. Requests to an unreachable
server are retried until it answers; every task has an id, so nothing runs twice. Leaving a collector cancels every task
still in flight. It gives up if no task can run: see `giving_up.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

from gangline.domain.errors import OutOfTasks
from gangline.domain.ids import new_id
from gangline.train.collecting.giving_up import Patience
from gangline.train.collecting.groups import Group, ValiditySettings, judge_group
from gangline.train.collecting.side_rollouts.tasks import Beside, BesideTask
from gangline.wire.client.rollouts import (
    MOST_RUNS,
    OpenTasks,
    RolloutClient,
    Task,
    enough_sessions,
    id_of,
    named,
    refuse_held_out,
)

_log = logging.getLogger(__name__)

Admit = Callable[[Group], Group | None]
"""Returns the part of a whole group that is worth training on, or None."""


def informative(group: Group) -> Group | None:
    """Dynamic sampling: drops groups whose rewards are all equal. Source: DAPO, 3.2."""
    return group if group.is_informative else None


def _everything(group: Group) -> Group:
    return group


@dataclass
class CollectionCounts:
    """Groups since the collector was created."""

    submitted: int = 0
    handed_out: int = 0
    not_admitted: int = 0
    """Whole, but not worth training on."""
    invalid: int = 0
    """Incomplete, and dropped."""
    cancelled: int = 0
    """Still in flight when they were no longer needed."""
    wasted: int = 0
    """Worth training on, but surplus."""


_Ended = Group | Literal["not_admitted", "invalid"]


@dataclass(eq=False)
class _Rollout:
    """One task that is becoming a group."""

    task: Task
    open: OpenTasks
    beside: BesideTask
    work: asyncio.Task[_Ended] = field(init=False)


class _Rollouts:
    """Runs tasks at the service, each in its own asyncio task."""

    def __init__(
        self,
        service: RolloutClient,
        tasks: Iterator[Task],
        validity: ValiditySettings | None,
        admit: Admit | None,
        beside: Beside | None,
        retry_s: float,
        patience: Patience | None,
    ) -> None:
        self._retry_s = retry_s
        self._beside = beside or Beside()
        self._service = service
        self._tasks = tasks
        self._validity = validity or ValiditySettings()
        self._admit = admit or _everything
        self._patience = patience or Patience()
        self._running: dict[asyncio.Task[_Ended], _Rollout] = {}
        self.counts = CollectionCounts()

    def __len__(self) -> int:
        return len(self._running)

    def start(self) -> bool:
        """Start the next task; False if there is none. Raises: InvalidRequest if the task is held out."""
        task = next(self._tasks, None)
        if task is None:
            return False
        refuse_held_out(task)
        task = named(task, id_of(task) or new_id("task"))
        rollout = _Rollout(task, OpenTasks(self._service, self._retry_s), self._beside.of(task))
        self.counts.submitted += 1
        rollout.work = asyncio.create_task(self._run(rollout))
        self._running[rollout.work] = rollout
        return True

    async def next_groups(self, *, all_of_them: bool = False) -> list[Group]:
        """Waits for the first ready groups, or for all of them. Raises: as `ready_groups`."""
        if self._running:
            when = asyncio.ALL_COMPLETED if all_of_them else asyncio.FIRST_COMPLETED
            await asyncio.wait(self._running, return_when=when)
        return self.ready_groups()

    def ready_groups(self) -> list[Group]:
        """Admitted groups of finished rollouts, in the order they were started.

        Raises: a rollout's error, after the groups started before it were returned.
        """
        groups = list[Group]()
        for work in [work for work in self._running if work.done()]:
            if work.exception() is not None and groups:
                break  # it stays here, so the next call raises it
            del self._running[work]
            ended = work.result()
            if isinstance(ended, Group):
                groups.append(ended)
            self.counts.not_admitted += ended == "not_admitted"
            self.counts.invalid += ended == "invalid"
        return groups

    async def cancel_all(self) -> None:
        """Cancel every rollout, here and at the service."""
        rollouts = list(self._running.values())
        self._running.clear()
        self.counts.cancelled += len(rollouts)
        for rollout in rollouts:
            rollout.work.cancel()
        await asyncio.gather(*(rollout.work for rollout in rollouts), return_exceptions=True)
        await asyncio.gather(*(rollout.open.cancel() for rollout in rollouts))

    async def _run(self, rollout: _Rollout) -> _Ended:
        """Cancels extra tasks that are no longer needed. Raises: InvalidGroup under `refuse`."""
        try:
            return await self._measured(rollout)
        finally:
            await rollout.beside.cancel()

    async def _measured(self, rollout: _Rollout) -> _Ended:
        """The group to train on, with the rewards of its extra tasks."""
        if (group := await self._whole(rollout)) is None:
            return "invalid"
        if (admitted := self._admit(group)) is None:
            return "not_admitted"
        return await rollout.beside.measure(group, admitted) or "invalid"

    async def _whole(self, rollout: _Rollout) -> Group | None:
        """None if the group is to be dropped."""
        for run in range(1, MOST_RUNS + 1):
            # Under the same id the service would return the incomplete group again.
            task = rollout.task if run == 1 else named(rollout.task, f"{id_of(rollout.task)}.run{run}")
            task_id = id_of(task)
            submitted = await rollout.open.submit(task)
            if submitted.unplaced is not None:
                _log.warning("task.waits task_id=%s why=%s", task_id, submitted.unplaced)
            if run == 1:
                await rollout.beside.submit()
            sessions = await rollout.open.result(task_id)
            self._patience.note(id_of(rollout.task), sessions)
            verdict = judge_group(
                task_id, sessions, len(submitted.session_ids), self._validity, enough=enough_sessions(task)
            )
            if verdict.action == "keep":
                return verdict.group
            _log.warning("group.not_whole task_id=%s action=%s reasons=%s", task_id, verdict.action, verdict.reasons)
            if verdict.action == "drop":
                break
        return None


class _Collector:
    """Enter it before use; leaving it cancels the rollouts still in flight.

    tasks: usually endless; task ids, if given, must be unique. retry_s: delay between requests to an unreachable
    server. alongside: extra tasks run for every task, None for no extra tasks. patience: shared by the collectors of a
    run.
    """

    def __init__(
        self,
        service: RolloutClient,
        tasks: Iterator[Task],
        *,
        validity: ValiditySettings | None = None,
        admit: Admit | None = None,
        beside: Beside | None = None,
        retry_s: float = 0.5,
        patience: Patience | None = None,
    ) -> None:
        self._rollouts = _Rollouts(service, tasks, validity, admit, beside, retry_s, patience)
        self._found: list[Group] = []

    @property
    def num_waiting(self) -> int:
        """Groups that are ready for the next call."""
        return len(self._found)

    @property
    def counts(self) -> CollectionCounts:
        return self._rollouts.counts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._rollouts.cancel_all()

    def _hand_out(self, num_groups: int) -> list[Group]:
        groups, self._found = self._found[:num_groups], self._found[num_groups:]
        self.counts.handed_out += len(groups)
        return groups

    def _check_tasks(self, num_groups: int) -> None:
        if not len(self._rollouts):
            raise OutOfTasks(
                f"{len(self._found)} of {num_groups} groups were found when the tasks ended. Give an endless iterator "
                "of tasks, or ask for fewer groups."
            )


class PlainCollector(_Collector):
    """Batch by batch, for comparison: a batch must end before the next begins, and surplus groups are discarded."""

    async def collect(self, num_groups: int) -> list[Group]:
        """Raises: InvalidGroup, OutOfTasks, the service's errors."""
        while len(self._found) < num_groups:
            for _ in range(num_groups - len(self._rollouts)):
                self._rollouts.start()
            self._check_tasks(num_groups)
            while len(self._rollouts):
                self._found += await self._rollouts.next_groups(all_of_them=True)
        groups = self._hand_out(num_groups)
        self.counts.wasted += len(self._found)
        self._found.clear()
        return groups


class ReplenishingCollector(_Collector):
    """num_in_flight: groups kept in flight while it collects.

    unfinished: `carry` keeps them for the next call, `cancel` cancels them. Surplus finished groups are returned first
    by the next call.
    """

    def __init__(
        self,
        service: RolloutClient,
        tasks: Iterator[Task],
        *,
        num_in_flight: int,
        unfinished: Literal["carry", "cancel"] = "carry",
        validity: ValiditySettings | None = None,
        admit: Admit | None = None,
        beside: Beside | None = None,
        retry_s: float = 0.5,
    ) -> None:
        super().__init__(service, tasks, validity=validity, admit=admit, beside=beside, retry_s=retry_s)
        self._num_in_flight = num_in_flight
        self._unfinished = unfinished

    async def collect(self, num_groups: int) -> list[Group]:
        """Raises: InvalidGroup, OutOfTasks, the service's errors."""
        while len(self._found) < num_groups:
            while len(self._rollouts) < self._num_in_flight and self._rollouts.start():
                pass
            self._check_tasks(num_groups)
            self._found += await self._rollouts.next_groups()
        if self._unfinished == "cancel":
            self._found += self._rollouts.ready_groups()
            await self._rollouts.cancel_all()
        return self._hand_out(num_groups)
