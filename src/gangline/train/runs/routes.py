"""Training runs of the server's data folder: their curves, steps with their groups, and comparisons.

Runs are read on request, and again after their files change. A run's folder is written by its trainer. Runs with
another data folder are not visible here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from gangline.domain.errors import GanglineError, InvalidRequest, NotFound
from gangline.domain.ids import validated_id
from gangline.domain.views import TaskView
from gangline.server.parts import ServerPart, ServerPlace
from gangline.server.service.core import RolloutService
from gangline.train.runs.records import EvaluationRecord, StepRecord
from gangline.train.runs.store import (
    Comparison,
    Run,
    RunReader,
    RunSummary,
    compare_runs,
    run_folders,
    state_of_files,
)
from gangline.wire.http.negotiation import answer, path_id
from gangline.wire.http.query import Text, Whole
from gangline.wire.http.routes import Route


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """Runs, most recently changed first."""

    runs: tuple[RunSummary, ...]


class RunsPart(ServerPart):
    def __init__(self, place: ServerPlace) -> None:
        super().__init__(place)
        self._runs = TrainingRuns(place.service, place.data_dir)

    async def runs(self, request: web.Request) -> web.Response:
        return answer(request, RunList(runs=await self._runs.summaries()))

    async def curves(self, request: web.Request) -> web.Response:
        return answer(request, await self._runs.curves(path_id(request, "run"), _POINTS.read(request)))

    async def step(self, request: web.Request) -> web.Response:
        step = request.match_info["step"]
        if not step.isascii() or not step.isdecimal() or len(step) > _MAX_DIGITS:
            raise InvalidRequest(f"a step is a whole number from 1, got {step[:80]!r}.")
        return answer(request, await self._runs.step(path_id(request, "run"), int(step)))

    async def compared(self, request: web.Request) -> web.Response:
        other = _OTHER.read(request)
        if not other:
            raise InvalidRequest("name the run to compare with: ?with=RUN.")
        return answer(request, await self._runs.compared((path_id(request, "run"), other)))

    def routes(self) -> list[Route]:
        one, errors = "/v1/runs/{run}", (400, 401, 404)
        return [
            Route("GET", "/v1/runs", self.runs, "Training runs of the data folder.", answer=RunList),
            Route("GET", one, self.curves, "The numbers of a run over its steps.",
                  answer=RunCurves, query=(_POINTS,), errors=errors),
            Route("GET", f"{one}/steps/{{step}}", self.step, "One step of a run, with its groups.",
                  answer=RunStep, errors=errors),
            Route("GET", f"{one}/compared", self.compared, "A run compared with another one.",
                  answer=Comparison, query=(_OTHER,), errors=errors),
        ]  # fmt: skip


_MAX_DIGITS = 15
_POINTS = Whole("points", "Most points of a curve.", default=1000, low=2, high=100_000)
_OTHER = Text("with", "Name of the other run.")


_MAX_RUNS = 4


class RunCurves(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run over its steps. Long runs are reduced to every n-th step and the last one."""

    summary: RunSummary
    every: int
    """n."""
    steps: list[int]
    """[points] from 1."""
    versions: list[int]
    """[points] policy version trained."""
    wall_s: list[float]
    """[points] since the run began, over all its starts."""
    curves: dict[str, list[float | None]]
    """name, as in trackers -> [points]; null if a step has no such number."""
    evaluations: list[EvaluationRecord]
    """All evaluations on held-out tasks."""
    settings: dict[str, Any]
    """All settings, including defaults, by dotted names."""


class TrainedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group used in a step, with details if the server still has its task."""

    task_id: str
    is_known: bool
    mean_reward: float | None
    rewards: tuple[float | None, ...]
    """By sample index; empty if the task is not known."""
    sessions: tuple[str, ...]


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a run."""

    run: str
    record: StepRecord
    groups: tuple[TrainedGroup, ...]
    """Empty if the record was written by a version that did not list them."""


class TrainingRuns:
    """Bound to one event loop. data_dir: None means no runs."""

    def __init__(self, service: RolloutService, data_dir: Path | None) -> None:
        self._service = service
        self._data_dir = data_dir
        self._reading = asyncio.Lock()
        self._summaries: dict[Path, tuple[object, RunSummary]] = {}
        """folder -> (state of its files, summary)"""
        self._readers: OrderedDict[Path, RunReader] = OrderedDict()
        """Most recently used last. Lets a run that is being trained be read incrementally."""

    async def summaries(self) -> tuple[RunSummary, ...]:
        """All runs, latest first. Unreadable folders are left out."""
        async with self._reading:
            found = await asyncio.to_thread(self._read_summaries)
        return tuple(sorted(found, key=lambda run: run.updated_at, reverse=True))

    async def curves(self, name: str, max_points: int) -> RunCurves:
        """Raises: NotFound, InvalidRequest if its folder cannot be read."""
        return await asyncio.to_thread(_curves, await self._find(name), max_points)

    async def step(self, name: str, step: int) -> RunStep:
        """Raises: NotFound, InvalidRequest."""
        run = await self._find(name)
        record = next((one for one in run.records if one.step == step), None)
        if record is None:
            raise NotFound(f"run {name!r} has {len(run.records)} steps, and no step {step}.")
        return RunStep(run=name, record=record, groups=tuple([await self._group(group) for group in record.groups]))

    async def compared(self, names: Sequence[str]) -> Comparison:
        """Compares the other runs with the first. Raises: NotFound, InvalidRequest."""
        return compare_runs([await self._find(name) for name in names])

    async def _group(self, task_id: str) -> TrainedGroup:
        task: TaskView | None = None
        try:
            task = await self._service.store.query(self._service.store.task, task_id)
        except NotFound:  # the service deleted it, or it ran in another service
            return TrainedGroup(task_id=task_id, is_known=False, mean_reward=None, rewards=(), sessions=())
        return TrainedGroup(
            task_id=task_id,
            is_known=True,
            mean_reward=task.mean_reward,
            rewards=task.rewards,
            sessions=tuple(session.session_id for session in task.sessions),
        )

    async def _find(self, name: str) -> Run:
        if self._data_dir is None:
            raise NotFound("this server has no data folder with runs.")
        folder = self._data_dir / "runs" / validated_id(name, "the name of a run")
        async with self._reading:
            return await asyncio.to_thread(self._read, folder)

    def _read_summaries(self) -> list[RunSummary]:
        folders = [] if self._data_dir is None else run_folders(self._data_dir)
        self._summaries = {folder: held for folder, held in self._summaries.items() if folder in folders}
        for folder in folders:
            try:
                state = state_of_files(folder)
                if self._summaries.get(folder, (None,))[0] != state:
                    self._summaries[folder] = (state, self._read(folder).summary)
            except (GanglineError, OSError):  # written by another version, or removed meanwhile
                self._summaries.pop(folder, None)
        return [summary for _, summary in self._summaries.values()]

    def _read(self, folder: Path) -> Run:
        if not (folder / "lineage.json").exists():
            raise NotFound(f"there is no run {folder.name!r} in the server's data folder.")
        reader = self._readers.pop(folder, None) or RunReader(folder)
        self._readers[folder] = reader
        while len(self._readers) > _MAX_RUNS:
            self._readers.popitem(last=False)
        return reader.read()


def _curves(run: Run, max_points: int) -> RunCurves:
    every = max(1, -(-len(run.records) // max_points))
    records = [record for index, record in enumerate(run.records) if (len(run.records) - 1 - index) % every == 0]
    numbers = [record.scalars() for record in records]
    names = sorted({name for number in numbers for name in number})
    return RunCurves(
        summary=run.summary,
        every=every,
        steps=[record.step for record in records],
        versions=[record.version for record in records],
        wall_s=[record.wall_s for record in records],
        curves={name: [number.get(name) for number in numbers] for name in names},
        evaluations=run.evaluations,
        settings=run.settings,
    )
