"""Audits many tasks through a service, resumably.

Records are written to a folder, task by task. A restarted run only audits tasks without a record. The ids of a task's
trials are derived from its content, so sessions that ended before an interruption are not run again.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gangline import __version__
from gangline.domain.errors import GanglineError
from gangline.domain.session import SessionResult
from gangline.domain.vetting import TaskVerdict, VerdictName
from gangline.machine.durable import append, write_once, write_whole
from gangline.machine.private import make_private_folder
from gangline.tasks.vetting.audit import Audited, audit
from gangline.tasks.vetting.checks import CheckResult, verdict_of
from gangline.tasks.vetting.evidence import Evidence
from gangline.tasks.vetting.subject import Subject
from gangline.tasks.vetting.trials import Trial
from gangline.wire.client.rollouts import OpenTasks, RolloutClient

_RECORDS, _KEY = "audits.jsonl", "key"


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The audit of one task."""

    name: str
    digest: str
    """Digest of the audited content."""
    key: str
    """Digest of everything that the audit depends on, including the solution."""
    verdict: VerdictName
    checks: dict[str, CheckResult]
    evidence: tuple[Evidence, ...]
    seconds: float
    """From the start of its first trial to the end of its last."""
    vetted_at: str
    """UTC, ISO 8601."""
    gangline: str = __version__


class VettingRun:
    """Audits the tasks that have no record yet."""

    def __init__(
        self,
        service: RolloutClient,
        subjects: Sequence[Subject],
        folder: Path,
        *,
        num_in_flight: int = 4,
        num_runs: int = 5,
        shared: Mapping[str, CheckResult] | None = None,
        on_task: Callable[[TaskRecord | None], None] = lambda _: None,
        retry_s: float = 0.5,
    ) -> None:
        """folder: the audit's. num_in_flight: concurrent tasks. num_runs: sessions of each reference solution.

        shared: name -> result of the check `held_out`, if there are held-out tasks. on_task: called as each task ends,
        with None if it could not be audited.
        """
        make_private_folder(folder)
        write_once(folder / _KEY, secrets.token_hex(3).encode())
        self._key = (folder / _KEY).read_text()
        self._open = OpenTasks(service, retry_s)
        self._subjects = list(subjects)
        self._folder = folder
        self._slots = asyncio.Semaphore(num_in_flight)
        self._num_runs = num_runs
        self._shared = dict(shared or {})
        self._on_task = on_task
        wanted = {self._key_of(subject) for subject in self._subjects}
        self._records = {one.key: one for one in _read(folder / _RECORDS) if one.key in wanted}
        write_whole(folder / _RECORDS, _lines(self._records.values()))  # removes a truncated line
        self.failures: dict[str, str] = {}
        """Name -> why it could not be audited."""

    @property
    def records(self) -> list[TaskRecord]:
        """Records of the audited tasks, in task order."""
        found = [(one, self._records.get(self._key_of(one))) for one in self._subjects]
        return [self._judged(subject, record) for subject, record in found if record is not None]

    async def run(self) -> None:
        """Run until every task has a record or a failure. Cancelling it cancels the running trials."""
        await self._open.all(
            self._one(subject) for subject in self._subjects if self._key_of(subject) not in self._records
        )

    def _judged(self, subject: Subject, record: TaskRecord) -> TaskRecord:
        """The record with the check of held-out tasks, which concerns the whole set, and the task's name."""
        checks = {**record.checks}
        if (shared := self._shared.get(subject.name)) is not None:
            checks["held_out"] = shared
        return msgspec.structs.replace(record, name=subject.name, checks=checks, verdict=verdict_of(checks))

    async def _one(self, subject: Subject) -> None:
        async with self._slots:
            began_at = time.monotonic()
            try:
                audited = await audit(subject, self._runner(subject), num_runs=self._num_runs)
            except GanglineError as error:
                self.failures[subject.name] = error.message
                self._on_task(None)
                return
            record = self._record(subject, audited, time.monotonic() - began_at)
            await asyncio.to_thread(append, self._folder / _RECORDS, _lines([record]))
        self._records[record.key] = record
        self._on_task(self._judged(subject, record))

    def _record(self, subject: Subject, audited: Audited, seconds: float) -> TaskRecord:
        return TaskRecord(
            name=subject.name,
            digest=subject.digest,
            key=self._key_of(subject),
            verdict=verdict_of(audited.checks),
            checks=audited.checks,
            evidence=audited.evidence,
            seconds=round(seconds, 3),
            vetted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _runner(self, subject: Subject) -> Callable[[Trial, int], Any]:
        prefix = f"vet-{self._key}-{self._key_of(subject)}"

        async def run(trial: Trial, number: int) -> list[SessionResult]:
            task_id = f"{prefix}-{trial.name}" + (f".run{number}" if number > 1 else "")
            return await self._open.run({**trial.body, "task_id": task_id, "num_samples": trial.num_samples})

        return run

    def _key_of(self, subject: Subject) -> str:
        solutions = [(step.solution, step.top, step.floor) for step in (subject.steps or (subject,))]
        about = (subject.base, solutions, self._num_runs)
        return hashlib.sha256(msgspec.json.encode(about, order="deterministic")).hexdigest()[:16]


def forget(folder: Path) -> None:
    """Remove the results of an audit, so that its trials run again."""
    for name in (_RECORDS, _KEY):
        (folder / name).unlink(missing_ok=True)


def vetted_task(subject: Subject, record: TaskRecord) -> dict[str, Any]:
    """The task with its verdict, for training and `gangline submit`."""
    verdict = TaskVerdict(
        verdict=record.verdict,
        digest=record.digest,
        checks={name: one.status for name, one in record.checks.items()},
        vetted_at=record.vetted_at,
        gangline=record.gangline,
    )
    return {**subject.task, "vetting": verdict.model_dump(mode="json")}


def _read(path: Path) -> list[TaskRecord]:
    """The records of complete lines."""
    if not path.exists():
        return []
    *lines, _cut_off = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=TaskRecord) for line in lines]


def _lines(records: Any) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
