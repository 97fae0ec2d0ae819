"""Runs the tasks of one evaluation through a service, resumably and within a budget.

Records are written task by task. A restarted run only runs tasks without records, so its report equals that of an
uninterrupted run. A task whose sessions were cancelled, for example by Ctrl-C, is run again under another id.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from gangline.domain.errors import Conflict, GanglineError
from gangline.domain.session import SessionResult
from gangline.machine.durable import append, write_whole
from gangline.machine.private import make_private_folder
from gangline.rows.measured import needs_model
from gangline.tasks.evals.records import SessionRecord, record_of
from gangline.tasks.evals.report import Prices, Report, cost_of, make_report
from gangline.wire.client.rollouts import OpenTasks, RolloutClient

R = TypeVar("R", SessionRecord, "Prediction")

_MOST_RUNS = 3
_PATCH = "patch.diff"


class EvaluationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Definition of an evaluation; an evaluation's folder belongs to one definition."""

    name: str
    tasks: tuple[dict[str, Any], ...]
    """Bodies of `POST /v1/tasks`, without ids."""
    names: tuple[str, ...]
    """Unique names of the tasks, in the same order."""
    num_samples: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:12]

    @property
    def evaluation_id(self) -> str:
        """The beginning of its tasks' ids."""
        return f"{self.name}-{self.digest}"


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A session's patch."""

    task: str
    sample: int
    patch: str


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """When it is exceeded no further task is started; running ones finish."""

    max_cost: float | None = None
    prices: Prices | None = None
    max_s: float | None = None


class EvaluationRun:
    """Runs the unfinished tasks of one evaluation."""

    def __init__(
        self,
        service: RolloutClient,
        spec: EvaluationSpec,
        folder: Path,
        *,
        num_in_flight: int = 16,
        budget: Budget | None = None,
        on_task: Callable[[Sequence[SessionRecord]], None] = lambda _: None,
        retry_s: float = 0.5,
    ) -> None:
        """folder: the evaluation's. num_in_flight: concurrent tasks. on_task: called with the records of each task as
        it ends.

        Raises: Conflict if the folder belongs to another evaluation.
        """
        begin(folder, spec)
        self._open = OpenTasks(service, retry_s)
        self._spec = spec
        self._folder = folder
        self._slots = asyncio.Semaphore(num_in_flight)
        self._budget = budget or Budget()
        self._on_task = on_task
        self._records = read_sessions(folder, spec.num_samples)
        self._mend()
        self._cost = sum(map(self._cost_of, self._records))
        self._ends_at = None if self._budget.max_s is None else time.monotonic() + self._budget.max_s

    def _mend(self) -> None:
        """Remove truncated lines and incomplete tasks, so that appended records start on a new line."""
        done = {record.task for record in self._records}
        patches = [one for one in _read(self._folder / "patches.jsonl", Prediction) if one.task in done]
        for name, kept in (("sessions.jsonl", self._records), ("patches.jsonl", patches)):
            if (self._folder / name).exists():
                write_whole(self._folder / name, _lines(kept))

    @property
    def records(self) -> list[SessionRecord]:
        """Records of all finished tasks, in task order."""
        order = {name: at for at, name in enumerate(self._spec.names)}
        return sorted(self._records, key=lambda record: (order[record.task], record.sample))

    @property
    def num_left(self) -> int:
        """Number of unfinished tasks."""
        return len(self._spec.tasks) - len({record.task for record in self._records})

    def report(self, **wanted: Any) -> Report:
        """The report so far. wanted: options of `make_report`."""
        spec = self._spec
        wanted |= {"evaluation_id": spec.evaluation_id, "num_left": self.num_left}
        return make_report(spec.name, self.records, num_samples=spec.num_samples, **wanted)

    async def run(self) -> None:
        """Run until every task is finished or the budget is used up. Cancelling it cancels the running tasks."""
        done = {record.task for record in self._records}
        await self._open.all(self._one(at) for at, name in enumerate(self._spec.names) if name not in done)

    async def _one(self, at: int) -> None:
        body = self._spec.tasks[at]
        async with self._slots:
            if self._is_spent:
                return
            sessions = await self._sessions(f"{self._spec.evaluation_id}-{at:06d}", body)
        metadata = cast("dict[str, Any]", body.get("metadata") or {})
        records = [
            record_of(one, self._spec.names[at], sample, metadata, needs_model=needs_model(body))
            for sample, one in enumerate(sessions)
        ]
        await asyncio.to_thread(self._write, sessions, records)
        self._records += records
        self._cost += sum(map(self._cost_of, records))
        self._on_task(records)

    def _write(self, sessions: Sequence[SessionResult], records: Sequence[SessionRecord]) -> None:
        """Patches first: a task with records is not run again."""
        patches = [
            Prediction(task=record.task, sample=record.sample, patch=session.artifacts[_PATCH].decode(errors="replace"))
            for session, record in zip(sessions, records, strict=True)
            if _PATCH in session.artifacts
        ]
        if patches:
            append(self._folder / "patches.jsonl", _lines(patches))
        append(self._folder / "sessions.jsonl", _lines(records))

    async def _sessions(self, task_id: str, body: Mapping[str, Any]) -> list[SessionResult]:
        for run in range(1, _MOST_RUNS + 1):
            run_id = task_id if run == 1 else f"{task_id}.run{run}"
            task = {**body, "task_id": run_id, "num_samples": self._spec.num_samples, "held_out": True}
            sessions = await self._open.run(task)
            if len(sessions) == self._spec.num_samples and all(session.outcome != "cancelled" for session in sessions):
                return sessions
        raise GanglineError(f"{task_id} was cancelled at the service, {_MOST_RUNS} times over.")

    @property
    def _is_spent(self) -> bool:
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            return True
        return self._budget.max_cost is not None and self._cost >= self._budget.max_cost

    def _cost_of(self, record: SessionRecord) -> float:
        return 0.0 if self._budget.prices is None else cost_of(record, self._budget.prices)


def begin(folder: Path, spec: EvaluationSpec) -> None:
    """Raises: Conflict."""
    make_private_folder(folder)
    path = folder / "evaluation.json"
    if path.exists() and read_spec(folder).digest != spec.digest:
        raise Conflict(
            f"{folder} is an evaluation of other tasks, agents or samples. Give this one another name, or remove that "
            "folder."
        )
    if not path.exists():
        write_whole(path, msgspec.json.encode(spec))


def read_spec(folder: Path) -> EvaluationSpec:
    return msgspec.json.decode((folder / "evaluation.json").read_bytes(), type=EvaluationSpec)


def read_predictions(folder: Path) -> dict[str, str]:
    """Task -> patch of its first sample."""
    return {one.task: one.patch for one in _read(folder / "patches.jsonl", Prediction) if one.sample == 0}


def read_sessions(folder: Path, num_samples: int) -> list[SessionRecord]:
    """Records of complete tasks; a task that was being written during a crash is omitted."""
    by_task = defaultdict[str, dict[int, SessionRecord]](dict)
    for record in _read(folder / "sessions.jsonl", SessionRecord):
        by_task[record.task][record.sample] = record
    return [record for mine in by_task.values() if len(mine) == num_samples for record in mine.values()]


def _read(path: Path, kind: type[R]) -> list[R]:
    """The records of complete lines."""
    if not path.exists():
        return []
    *lines, _cut_off = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=kind) for line in lines]


def _lines(records: Sequence[SessionRecord | Prediction]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
