"""The sampler of a run: its history, and the choice that follows from it.

Invariants: a task number of the run always means the same task, whatever is measured in between and however often the
run is killed. Every measurement counts once. A task that is not drawn any more is counted in a pool of weight 0.

The choice of a task, as a function of only the history and the seed.

Invariants: the same history and seed give the same task. Within a pool, or among the tasks with a label, the task drawn
longest ago comes next; tasks never drawn come first, in an order given by the seed. So no task repeats before all
others of its pool were drawn.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gangline.domain.errors import InvalidRequest, OutOfTasks
from gangline.train.collecting.sampling.history import Draw, Measurement, SamplingHistory
from gangline.train.collecting.sampling.settings import (
    DifficultyPoolSettings,
    Label,
    SamplerSettings,
    StageSettings,
)
from gangline.train.runs.records import SamplerMetrics


class TaskSampler:
    def __init__(self, chooser: Chooser, history: SamplingHistory, num_tasks: int) -> None:
        self._chooser = chooser
        self._history = history
        self._num_tasks = num_tasks

    def task(self, number: int) -> int:
        """Index of the run's task `number`, drawn if it was not yet. Numbers must be requested in order.

        Raises: OutOfTasks.
        """
        while len(self._history.draws) <= number:
            self._history.draw(self._chooser.choose(self._history))
        return self._history.draws[number].task

    def measure(self, number: int, rewards: Sequence[float]) -> None:
        """rewards: rewards of the sessions of task `number`."""
        if rewards:
            self._history.measure(Measurement(number=number, reward=statistics.fmean(rewards)))

    def metrics(self, numbers: Iterable[int]) -> SamplerMetrics:
        """numbers: task numbers of the step's groups."""
        draws = self._history.draws
        stage = draws[-1].stage if draws else None
        return SamplerMetrics(
            drawn=dict(Counter(draws[number].pool for number in numbers)),
            sizes=self._chooser.sizes(self._history),
            stage=None if stage is None else stage + 1,
            num_never_drawn=self._num_tasks - len(self._history.last_draw),
        )


UNSEEN = "unseen"
"""Pool of tasks that were not yet measured."""


class Chooser(Protocol):
    def choose(self, history: SamplingHistory) -> Draw:
        """The next draw. Raises: OutOfTasks."""
        ...

    def sizes(self, history: SamplingHistory) -> dict[str, int]:
        """Pool or label -> number of its tasks."""
        ...


class _Order:
    """Orders tasks by the time since their last draw."""

    def __init__(self, num_tasks: int, *, seed: int, shuffle: bool) -> None:
        order = list(range(num_tasks))
        if shuffle:
            random.Random(f"{seed}/order").shuffle(order)
        self._ranks = {task: rank for rank, task in enumerate(order)}

    def first(self, tasks: Sequence[int], history: SamplingHistory) -> int:
        return min(tasks, key=lambda task: (history.last_draw.get(task, -1), self._ranks[task]))


def _drawn(weights: Mapping[str, float], seed: int, number: int) -> str:
    """The name drawn for a task number of the run, by weight."""
    return random.Random(f"{seed}/{number}").choices(list(weights), list(weights.values()))[0]


class DifficultyPools:
    def __init__(self, settings: DifficultyPoolSettings, num_tasks: int, *, seed: int, shuffle: bool = True) -> None:
        self._settings = settings
        self._seed = seed
        self._order = _Order(num_tasks, seed=seed, shuffle=shuffle)
        self._tasks = range(num_tasks)
        self._weights = {UNSEEN: settings.unseen_weight} | {name: one.weight for name, one in settings.pools.items()}

    def choose(self, history: SamplingHistory) -> Draw:
        pools, number = self._pools(history), len(history.draws)
        weights = {name: self._weights[name] * len(tasks) for name, tasks in pools.items()}
        if not any(weights.values()):
            retired = ", ".join(f"{name} ({len(tasks)})" for name, tasks in pools.items() if tasks)
            raise OutOfTasks(
                f"all tasks are in pools of weight 0: {retired}. The run has learned what they teach: add tasks, or "
                "give these pools a weight."
            )
        name = _drawn(weights, self._seed, number)
        return Draw(number=number, task=self._order.first(pools[name], history), pool=name)

    def sizes(self, history: SamplingHistory) -> dict[str, int]:
        return {name: len(tasks) for name, tasks in self._pools(history).items()}

    def _pools(self, history: SamplingHistory) -> dict[str, list[int]]:
        found = {name: list[int]() for name in self._weights}
        for task in self._tasks:
            found[self._pool(history.last_reward.get(task))].append(task)
        return found

    def _pool(self, reward: float | None) -> str:
        if reward is None:
            return UNSEEN
        pools = self._settings.pools
        return next((name for name, pool in pools.items() if reward <= pool.threshold), list(pools)[-1])


class Stages:
    def __init__(
        self, settings: StageSettings, tasks: Sequence[Mapping[str, Any]], *, seed: int, shuffle: bool = True
    ) -> None:
        """Raises: InvalidRequest if a task has no label or a label that no stage draws from, or if a label has no
        task.
        """
        self._settings = settings
        self._seed = seed
        self._order = _Order(len(tasks), seed=seed, shuffle=shuffle)
        self._by_label: dict[str, list[int]] = {}
        wanted = {_name(label) for stage in settings.stages for label in stage.shares}
        for number, task in enumerate(tasks):
            label = task.get("metadata", {}).get(settings.key)
            if label is None or _name(label) not in wanted:
                raise InvalidRequest(
                    f"task {number + 1} has {settings.key} {label!r} in its metadata, and data.sampler draws from: "
                    f"{', '.join(sorted(wanted))}. No task is left out silently: label it, or leave it out of the file."
                )
            self._by_label.setdefault(_name(label), []).append(number)
        if missing := sorted(wanted - self._by_label.keys()):
            raise InvalidRequest(f"no task has {settings.key} {', '.join(missing)}, which data.sampler draws from.")

    def choose(self, history: SamplingHistory) -> Draw:
        stage, number = self._stage(history), len(history.draws)
        shares = {_name(label): share for label, share in self._settings.stages[stage].shares.items()}
        label = _drawn(shares, self._seed, number)
        task = self._order.first(self._by_label[label], history)
        return Draw(number=number, task=task, pool=label, stage=stage)

    def sizes(self, history: SamplingHistory) -> dict[str, int]:
        return {label: len(tasks) for label, tasks in self._by_label.items()}

    def _stage(self, history: SamplingHistory) -> int:
        """The stage of the last draw or the next stage; never an earlier one."""
        at = (history.draws[-1].stage or 0) if history.draws else 0
        stage = self._settings.stages[at]
        if stage.most_tasks is not None and history.num_by_stage[at] >= stage.most_tasks:
            return at + 1
        if stage.until is not None:
            rewards = history.rewards_of_stage(at, stage.window)
            if len(rewards) == stage.window and sum(rewards) / stage.window >= stage.until:
                return at + 1
        return at


def _name(label: Label) -> str:
    return str(label)


def chooser_of(
    settings: SamplerSettings, tasks: Sequence[Mapping[str, Any]], *, seed: int, shuffle: bool = True
) -> Chooser:
    """Raises: InvalidRequest if the settings do not fit the tasks."""
    if isinstance(settings, StageSettings):
        return Stages(settings, tasks, seed=seed, shuffle=shuffle)
    return DifficultyPools(settings, len(tasks), seed=seed, shuffle=shuffle)
