"""Grades recorded sessions again: writes a file of verdicts, each with the grade that it replaces.

A line is written as soon as its session is graded, and a session with a line is not graded again, so an interrupted run
continues where it stopped. The recorded results are not changed: `gangline.rows.regraded` reads the file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from gangline.domain.errors import CallerError, Conflict
from gangline.domain.session import Grading
from gangline.domain.task import EvaluatorSpec
from gangline.machine.durable import append, write_whole
from gangline.machine.private import make_private_folder
from gangline.rows.regraded import Grade, Regrade, read_regrades


class Grader(Protocol):
    """A list of nodes, such as `gangline.wire.client.ServerClient`."""

    async def regrade(self, session_id: str, evaluator: EvaluatorSpec | None = None) -> Grading:
        """Raises: CallerError if the session cannot be graded."""
        ...


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A session to grade again."""

    session_id: str
    before: Grade
    evaluator: EvaluatorSpec


class RegradeRun:
    """Grades the candidates that have no verdict in a file yet."""

    def __init__(self, candidates: Sequence[Candidate], path: Path) -> None:
        """Raises: Conflict if the file has another evaluator's verdict for one of them."""
        make_private_folder(path.parent)
        self._path = path
        self._done = read_regrades(path)
        for candidate in candidates:
            found = self._done.get(candidate.session_id)
            if found is not None and found.evaluator != _name(candidate.evaluator):
                raise Conflict(
                    f"{path} has a verdict of {found.evaluator} for session {candidate.session_id}, and this "
                    f"evaluator is "
                    f"{_name(candidate.evaluator)}: give this run another --name."
                )
        self._candidates = candidates
        self.refused: dict[str, str] = {}
        """Session id -> why it could not be graded again."""
        if path.exists():  # removes a truncated line: appended records must start a line
            write_whole(path, b"".join(map(_line, self._done.values())))

    @property
    def regrades(self) -> list[Regrade]:
        """The candidates' verdicts, in their order."""
        return [
            self._done[candidate.session_id] for candidate in self._candidates if candidate.session_id in self._done
        ]

    @property
    def left(self) -> list[Candidate]:
        return [candidate for candidate in self._candidates if candidate.session_id not in self._done]

    async def run(self, grader: Grader, *, num_in_flight: int, on_session: Callable[[], None] = lambda: None) -> None:
        """Run until each candidate has a verdict or a reason. Raises: the service's errors; written verdicts are
        kept.
        """
        left = iter(self.left)

        async def work() -> None:
            for one in left:
                await self._grade(grader, one)
                on_session()

        works = [asyncio.create_task(work()) for _ in range(num_in_flight)]
        try:
            await asyncio.gather(*works)
        finally:
            for one in works:
                one.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _grade(self, grader: Grader, one: Candidate) -> None:
        try:
            verdict = await grader.regrade(one.session_id, one.evaluator)
        except CallerError as error:
            self.refused[one.session_id] = error.message
            return
        if verdict.outcome == "infra_error":
            self.refused[one.session_id] = "" if verdict.failure is None else verdict.failure.message
            return
        done = Regrade(
            session_id=one.session_id,
            task_id=verdict.task_id,
            evaluator=_name(one.evaluator),
            before=one.before,
            verdict=verdict,
        )
        await asyncio.to_thread(append, self._path, _line(done))
        self._done[one.session_id] = done


def _name(evaluator: EvaluatorSpec) -> str:
    digest = hashlib.sha256(evaluator.model_dump_json(exclude_defaults=True).encode()).hexdigest()
    return f"{evaluator.strategy}-{digest[:12]}"


def _line(regrade: Regrade) -> bytes:
    return msgspec.json.encode(regrade) + b"\n"
