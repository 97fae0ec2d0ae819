"""The draws and measurements of a run: `sampled.jsonl` in its folder, one event per line.

A draw is written to disk before its task is submitted, so a run that is killed at any moment draws the same tasks for
the same numbers and keeps all measurements. An incomplete last line belongs to an event that was never used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from gangline.machine.durable import append, write_whole


class Draw(msgspec.Struct, frozen=True, kw_only=True, tag="draw", tag_field="event"):
    number: int
    """The task's number in the run, from 0."""
    task: int
    """Index in the file of tasks."""
    pool: str
    """Pool or label it was drawn from."""
    stage: int | None = None
    """From 0; None without stages."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag="measurement", tag_field="event"):
    number: int
    """The task's number, as in its draw."""
    reward: float
    """Mean of the evaluators' rewards over the sessions of its group."""


class SamplingHistory:
    """Draws in the order of their numbers, and their measurements."""

    def __init__(self, path: Path | None = None) -> None:
        """path: read if it exists, then appended to; None keeps the history in memory only."""
        self._path = path
        self.draws: list[Draw] = []
        self.rewards: dict[int, float] = {}
        """Number of a draw -> measured mean reward."""
        self.last_draw: dict[int, int] = {}
        """Task -> number of its last draw."""
        self.last_reward: dict[int, float] = {}
        """Task -> reward of its latest measured draw."""
        self._measured_at: dict[int, int] = {}
        self.num_by_stage = Counter[int | None]()
        if path is not None and path.exists():
            self._read(path)

    def draw(self, draw: Draw) -> None:
        """Durable on return."""
        assert draw.number == len(self.draws)
        self._write(draw)
        self._add(draw)

    def measure(self, measurement: Measurement) -> None:
        """Durable on return. A draw that was already measured keeps its first reward."""
        if measurement.number not in self.rewards:
            self._write(measurement)
            self._add(measurement)

    def rewards_of_stage(self, stage: int, most: int) -> list[float]:
        """Rewards of the stage's latest measured draws, at most `most`, latest first."""
        return list(islice(self._rewards_of_stage(stage), most))

    def _rewards_of_stage(self, stage: int) -> Iterator[float]:
        for draw in reversed(self.draws):
            if draw.stage != stage:
                return
            if draw.number in self.rewards:
                yield self.rewards[draw.number]

    def _add(self, event: Draw | Measurement) -> None:
        if isinstance(event, Draw):
            self.draws.append(event)
            self.last_draw[event.task] = event.number
            self.num_by_stage[event.stage] += 1
            return
        self.rewards[event.number] = event.reward
        task = self.draws[event.number].task
        # By number, not arrival: the same measurements give the same history.
        if event.number >= self._measured_at.get(task, 0):
            self._measured_at[task] = event.number
            self.last_reward[task] = event.reward

    def _write(self, event: Draw | Measurement) -> None:
        if self._path is not None:
            append(self._path, msgspec.json.encode(event) + b"\n")

    def _read(self, path: Path) -> None:
        *lines, cut_off = path.read_bytes().split(b"\n")
        if cut_off:
            write_whole(path, b"".join(line + b"\n" for line in lines))
        for line in lines:
            self._add(msgspec.json.decode(line, type=Draw | Measurement))
