"""Implements NeMo RL's collector on one event loop.

Invariants: every step gets exactly the groups it trains on, without tokens older than `max_age` versions. Groups
already in the buffer, from a checkpoint, count. Only tasks needed by steps within that age are started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol, cast

import numpy as np
from pydantic import Field, model_validator

from gangline.domain.errors import OutOfTasks
from gangline.train.collecting.admission import lag_of
from gangline.train.collecting.collector import Admit, CollectionCounts, ReplenishingCollector
from gangline.train.collecting.degenerates import num_turns
from gangline.train.collecting.group_judge import GroupJudgeSettings, judged
from gangline.train.collecting.groups import Group, ValiditySettings, trainable_traces
from gangline.train.options import TrainingOptions
from gangline.train.trainers.contract import Gate, close_gates, open_gates
from gangline.train.trainers.nemo_rl.batches import to_batch
from gangline.wire.client.rollouts import RolloutClient

_log = logging.getLogger(__name__)

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""

_FULL_S = 0.2
"""Delay between attempts to add to a full buffer."""


class Buffer(Protocol):
    """NeMo RL's `ReplayBuffer`. `RayBuffer` of `seam` calls the actor."""

    def add(self, trajectory: dict[str, Any], weight_version: int, target_weight_version: int) -> Awaitable[str]:
        """`success` or `full`."""
        ...

    def get_trajectories_needed(
        self, target_step: int, num_prompts_per_step: int, max_age_steps: int
    ) -> Awaitable[int]: ...


class NemoSettings(TrainingOptions):
    num_samples: int = Field(ge=2)
    """Sessions per group: NeMo RL's `grpo.num_generations_per_prompt`."""
    groups_per_step: int = Field(ge=1)
    """`grpo.num_prompts_per_step`."""
    max_age: int = Field(default=1, ge=1)
    """`grpo.async_grpo.max_trajectory_age_steps`."""
    num_in_flight: int = Field(default=32, ge=1)
    """Maximum number of groups in flight; never more than steps within `max_age` need."""
    start_version: int = Field(default=0, ge=0)
    """The step at which training starts."""
    temperature: float = Field(default=1.0, gt=0)
    """`policy.generation.temperature`."""
    lease_s: float = Field(default=1800.0, gt=0)
    """Longest refit: after this time gates open by themselves, because the trainer is assumed dead."""
    validity: ValiditySettings = ValiditySettings()
    group_judge: GroupJudgeSettings | None = None

    @model_validator(mode="after")
    def _has_whole_groups(self) -> NemoSettings:
        if self.validity.on_invalid == "shrink":
            raise ValueError("NeMo RL trains on groups of one size: set on_invalid to refuse or resubmit.")
        return self


class NemoCollector:
    """Fills NeMo RL's buffer and closes the gates during its refits.

    gates: gates of all nodes. tasks_of: an item of the data loader -> tasks. batch_type: NeMo RL's `BatchedDataDict`.
    `start_collection` enters the clients.
    """

    def __init__(
        self,
        service: RolloutClient,
        gates: Sequence[Gate],
        buffer: Buffer,
        settings: NemoSettings,
        tasks_of: Callable[[Any], Iterable[Mapping[str, Any]]],
        *,
        admit: Admit | None = None,
        batch_type: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        self._service = service
        self._gates = _Gates(gates, settings.lease_s)
        self._buffer = buffer
        self._settings = settings
        self._tasks_of = tasks_of
        self._admit = admit
        self._batch_type = batch_type
        self._version = settings.start_version
        self._plan = _Plan(settings)
        self._counts = CollectionCounts()
        self.num_too_old = 0
        """Collected groups that were too old for the next step."""
        self._is_paused = False
        self._changed = asyncio.Event()
        self._clients = AsyncExitStack()

    @property
    def num_under_way(self) -> int:
        """Groups whose tasks run, or that wait to be pushed."""
        return _num_under_way(self._counts)

    @property
    def num_pushed(self) -> int:
        return self._plan.num_pushed

    @property
    def closed_s(self) -> float:
        """Total time that gates were closed for refits."""
        return self._gates.closed_s

    # Methods called by NeMo RL.

    async def start_collection(self, dataloader: Iterable[Any]) -> None:
        """Collect until there are no more tasks. Raises: InvalidGroup, the service's errors."""
        for client in (self._service, *self._gates.all):
            if isinstance(client, AbstractAsyncContextManager):
                await self._clients.enter_async_context(cast("AbstractAsyncContextManager[Any]", client))
        await self._gates.open(self._version)
        await self._plan.begin(self._buffer)
        tasks = _WhileNeeded(self._tasks(dataloader), lambda: self._num_wanted > self.num_under_way)
        collector = ReplenishingCollector(
            judged(self._service, self._settings.group_judge),
            tasks,
            num_in_flight=self._settings.num_in_flight,
            validity=self._settings.validity,
            admit=self._admit,
        )
        self._counts = collector.counts
        try:
            async with collector:
                await self._collect(collector, tasks)
        except Exception as error:  # the caller may not wait for this actor's answer
            _log.error("nemo_rl.stopped groups=%d error=%s", self.num_pushed, error)
            raise

    async def stop(self) -> None:
        """Close the clients, which weight updates need even after the last task; idempotent."""
        await self._clients.aclose()

    def set_weight_version(self, version: int) -> None:
        """The version that NeMo RL has loaded. `resume_after_refit` sends it to the nodes and starts its tasks."""
        self._version = version
        self._changed.set()

    def get_weight_version(self) -> int:
        return self._version

    async def prepare_for_refit(self) -> None:
        """Hold new model calls and wait until calls in flight have ended. Raises: as `close_gates`."""
        await self._gates.close()

    async def resume_after_refit(self) -> None:
        """Raises: as `open_gates`."""
        await self._gates.open(self._version)
        self._changed.set()

    def pause(self) -> None:
        """Stop starting tasks."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._changed.set()

    # Collection.

    def _tasks(self, dataloader: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
        for item in dataloader:
            for task in self._tasks_of(item):
                yield {**task, "num_samples": self._settings.num_samples}

    @property
    def _num_missing(self) -> int:
        return self._plan.num_missing(self._version)

    @property
    def _starts_tasks(self) -> bool:
        return not self._is_paused and not self._gates.are_closed

    @property
    def _num_wanted(self) -> int:
        return self._num_missing if self._starts_tasks else 0

    async def _collect(self, collector: ReplenishingCollector, tasks: _WhileNeeded) -> None:
        while True:
            await self._until(lambda: self._num_missing > 0)
            try:
                group = await self._next_group(collector)
            except OutOfTasks:
                if tasks.are_over:
                    _log.info("nemo_rl.out_of_tasks groups=%d", self.num_pushed)
                    return
                await self._until(lambda: self._starts_tasks)
                continue
            await self._hand_over(group)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    async def _next_group(self, collector: ReplenishingCollector) -> Group:
        """The next group. If more groups are needed meanwhile, further tasks are started."""
        while True:
            self._changed.clear()
            collecting = asyncio.create_task(collector.collect(1))
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait([collecting, changed], return_when=asyncio.FIRST_COMPLETED)
                if collecting.done():
                    return collecting.result()[0]
            finally:
                collecting.cancel()
                changed.cancel()
                await asyncio.gather(collecting, changed, return_exceptions=True)

    async def _hand_over(self, group: Group) -> None:
        target = self._plan.target
        traces = [trace for session in group.sessions for trace in trainable_traces(session)]
        age = lag_of(traces, target)
        if age is None or age > self._settings.max_age:
            _log.warning("nemo_rl.too_old task_id=%s age=%s target=%d", group.task_id, age, target)
            self.num_too_old += 1
            return
        batch = to_batch(group, self._settings.num_samples, temperature=self._settings.temperature)
        handed_over = {
            "batch": self._batch_type(batch),
            "rollout_metrics": _metrics(group),
            "timestamp": time.time(),
        }
        while True:
            if await self._buffer.add(handed_over, target - age, target) == "success":
                break
            await asyncio.sleep(_FULL_S)
        self._plan.num_pushed += 1


class _Gates:
    """The gates of all nodes, and the time they were closed."""

    def __init__(self, gates: Sequence[Gate], lease_s: float) -> None:
        self.all = gates
        self.closed_s = 0.0
        self._lease_s = lease_s
        self._closed_at: float | None = None

    @property
    def are_closed(self) -> bool:
        return self._closed_at is not None

    async def close(self) -> None:
        """Raises: as `close_gates`."""
        self._closed_at = self._closed_at or time.monotonic()
        await close_gates(self.all, lease_s=self._lease_s)

    async def open(self, version: int) -> None:
        """Raises: as `open_gates`."""
        await open_gates(self.all, version=version)
        if self._closed_at is not None:
            self.closed_s += time.monotonic() - self._closed_at
        self._closed_at = None


class _Plan:
    """The step that the next group is for, and the number of groups that steps within `max_age` still need."""

    def __init__(self, settings: NemoSettings) -> None:
        self._settings = settings
        self._first_steps: list[int] = []
        """Groups that each of the first steps lacks: a checkpoint's buffer may already contain some."""
        self.num_pushed = 0

    async def begin(self, buffer: Buffer) -> None:
        first, max_age = self._settings.start_version, self._settings.max_age
        self._first_steps = [
            await buffer.get_trajectories_needed(step, self._settings.groups_per_step, max_age)
            for step in range(first, first + max_age + 1)
        ]

    @property
    def target(self) -> int:
        """The step that the next group is for: the first incomplete one."""
        num_left = self.num_pushed
        for place, needed in enumerate(self._first_steps):
            if num_left < needed:
                return self._settings.start_version + place
            num_left -= needed
        later = num_left // self._settings.groups_per_step
        return self._settings.start_version + len(self._first_steps) + later

    def num_missing(self, version: int) -> int:
        """Groups that steps within `max_age` of this version still need."""
        num_later = version - self._settings.start_version
        return sum(self._first_steps) + num_later * self._settings.groups_per_step - self.num_pushed


def _metrics(group: Group) -> dict[str, float]:
    return {
        "gangline/reward_mean": float(np.mean(group.rewards)),
        "gangline/turns_mean": float(np.mean([num_turns(session) for session in group.sessions])),
    }


def _num_under_way(counts: CollectionCounts) -> int:
    """Groups in flight, or found and waiting."""
    return counts.submitted - counts.handed_out - counts.not_admitted - counts.invalid


class _WhileNeeded(Iterator[Mapping[str, Any]]):
    """Yields tasks while they are needed. Iteration may stop and be continued later."""

    def __init__(self, tasks: Iterator[Mapping[str, Any]], is_needed: Callable[[], bool]) -> None:
        self._tasks = tasks
        self._is_needed = is_needed
        self.are_over = False

    def __next__(self) -> Mapping[str, Any]:
        if not self._is_needed():
            raise StopIteration
        try:
            return next(self._tasks)
        except StopIteration:
            self.are_over = True
            raise
