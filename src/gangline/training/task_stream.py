"""The tasks of a run: a list of them, again and again, each time under an id of its own that a restart gives again."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest

__all__ = ["TaskStream"]


class TaskStream:
    """Task number `i` of a run is always the same task with the same id: the service knows it when it comes again."""

    def __init__(
        self, run: str, tasks: Sequence[Mapping[str, Any]], *, num_samples: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        """tasks: bodies of `POST /v1/tasks`; their ids are replaced. num_samples: sessions of each.

        Raises: InvalidRequest of no tasks.
        """
        if not tasks:
            raise InvalidRequest("there are no tasks to train on: the file of tasks is empty.")
        self._run = run
        self._tasks = tasks
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._seed = seed

    @property
    def digest(self) -> str:
        """Of the tasks, their order and their number of samples."""
        data = msgspec.json.encode([self._tasks, self._num_samples, self._shuffle, self._seed], order="deterministic")
        return hashlib.sha256(data).hexdigest()

    def task_id(self, number: int) -> str:
        return f"{self._run}-{number:06d}"

    def tasks(self, settled: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Without end; those whose ids are in `settled` are left out."""
        for number, index in enumerate(self._indices()):
            task_id = self.task_id(number)
            if task_id not in settled:
                yield {**self._tasks[index], "task_id": task_id, "num_samples": self._num_samples}

    def _indices(self) -> Iterator[int]:
        for epoch in itertools.count():
            order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            yield from order
