"""The tasks of a run, with ids that stay the same after a restart: a list repeated endlessly, or a sampler's choice."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.domain.seeds import derived_seed
from gangline.train.collecting.sampling.sampler import TaskSampler
from gangline.train.runs.records import SamplerMetrics


def seeded_task(task: Mapping[str, Any], *path: int) -> dict[str, Any]:
    """The task with a `capture.seed` made from whole numbers, such as the run's seed and the task's number."""
    return {**task, "capture": {**task.get("capture", {}), "seed": derived_seed(*path)}}


class TaskStream:
    """Task number `i` of a run is always the same task with the same id, so the service recognizes it after a
    restart.
    """

    def __init__(
        self,
        run: str,
        tasks: Sequence[Mapping[str, Any]],
        *,
        num_samples: int,
        shuffle: bool = True,
        seed: int = 0,
        seeded: bool = False,
        sampler: TaskSampler | None = None,
    ) -> None:
        """tasks: bodies of `POST /v1/tasks`; their ids are replaced. num_samples: sessions per task. sampler: chooses
        the next task. Without one, all tasks are used, pass after pass.

        seeded: each task has its own `capture.seed`, derived from `seed` and its number; a rerun has the same one.

        Raises: InvalidRequest if there are no tasks.
        """
        if not tasks:
            raise InvalidRequest("there are no tasks to train on: the file of tasks is empty.")
        self._run = run
        self._tasks = tasks
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._seed = seed
        self._seeded = seeded
        self._sampler = sampler

    @property
    def digest(self) -> str:
        """Digest of the tasks, their order, their number of samples and their sampling settings."""
        made_of = [self._tasks, self._num_samples, self._shuffle, self._seed, self._seeded]
        return hashlib.sha256(msgspec.json.encode(made_of, order="deterministic")).hexdigest()

    def task_id(self, number: int) -> str:
        return f"{self._run}-{number:06d}"

    def epoch_of(self, task_id: str) -> int:
        """The pass over the tasks, from 0, that a task (or its rerun) belongs to. With a sampler, a pass is as many
        draws as there are tasks.
        """
        return self._number_of(task_id) // len(self._tasks)

    def measure(self, task_id: str, rewards: Sequence[float]) -> None:
        """Report the rewards of a task's sessions to the sampler, if there is one."""
        if self._sampler is not None:
            self._sampler.measure(self._number_of(task_id), rewards)

    def sampler_metrics(self, task_ids: Iterable[str]) -> SamplerMetrics | None:
        """task_ids: tasks of a step's groups. None without a sampler."""
        return None if self._sampler is None else self._sampler.metrics(map(self._number_of, task_ids))

    def _number_of(self, task_id: str) -> int:
        return int(task_id.partition(".run")[0].removeprefix(f"{self._run}-"))

    def tasks(self, settled: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Endless; tasks with ids in `settled` are left out."""
        for number, index in enumerate(self._indices()):
            task_id = self.task_id(number)
            if task_id not in settled:
                yield {**self._task(number, index), "task_id": task_id, "num_samples": self._num_samples}

    def _task(self, number: int, index: int) -> Mapping[str, Any]:
        task = self._tasks[index]
        return seeded_task(task, self._seed, number) if self._seeded else task

    def _indices(self) -> Iterator[int]:
        if self._sampler is not None:
            yield from map(self._sampler.task, itertools.count())
        for epoch in itertools.count():
            order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            yield from order
