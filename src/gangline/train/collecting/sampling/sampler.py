"""The sampler of a run: its history, and the choice that follows from it.

Invariants: a task number of the run always means the same task, whatever is measured in between and however often the
run is killed. Every measurement counts once. A task that is not drawn any more is counted in a pool of weight 0.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from gangline.train.collecting.sampling.choosing import Chooser
from gangline.train.collecting.sampling.history import Measurement, SamplingHistory
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
