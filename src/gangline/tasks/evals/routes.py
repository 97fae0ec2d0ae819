"""Evaluations at a server: `gangline eval` sends their reports, and the page shows and compares them.

A report is one file, `FOLDER/EVALUATION_ID.json`. `gangline eval` sends the whole report after each task, so a file is
never behind for long, and never mixed.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest, NotFound, StoreError
from gangline.domain.ids import validated_id
from gangline.domain.tokens import encode_json
from gangline.machine.durable import write_whole
from gangline.machine.private import make_private_folder
from gangline.server.parts import ServerPart, ServerPlace
from gangline.tasks.evals.comparison import EvaluationComparison, compare_reports
from gangline.tasks.evals.report import Report, Slice
from gangline.wire.http.negotiation import JSON, answer, answer_large, path_id, read_record
from gangline.wire.http.query import Text
from gangline.wire.http.routes import SUBJECT, Route


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation in a list: a report without its tasks."""

    evaluation_id: str
    name: str
    num_samples: int
    num_left: int
    """Tasks that have not ended."""
    whole: Slice
    updated_at: float = 0.0
    """Unix time at which the server received its newest report."""


_Identity = tuple[str, int, int, int]
"""A file's name, inode, time of writing (ns) and bytes."""


class StoredReports:
    """Every method blocks. folder: None stores nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[_Identity, EvaluationSummary | None] = {}

    def summaries(self) -> tuple[EvaluationSummary, ...]:
        """The latest first. Files that another version wrote are left out. Only changed files are read."""
        found: dict[_Identity, EvaluationSummary | None] = {}
        for path in () if self._folder is None else self._folder.glob("[!.]*.json"):
            with contextlib.suppress(OSError):
                now = path.stat()
                key = (path.name, now.st_ino, now.st_mtime_ns, now.st_size)
                found[key] = self._known[key] if key in self._known else _summary(path, now.st_mtime)
        self._known = found
        return tuple(sorted(filter(None, found.values()), key=lambda one: one.updated_at, reverse=True))

    def read(self, evaluation_id: str) -> Report:
        """Raises: NotFound."""
        try:
            return msgspec.json.decode(self._path(evaluation_id).read_bytes(), type=Report)
        except (msgspec.MsgspecError, OSError):
            raise NotFound(
                f"this server has no evaluation {evaluation_id!r}; GET /v1/evaluations lists those that it has."
            ) from None

    def write(self, report: Report) -> None:
        """Raises: NotFound without a folder, InvalidRequest, StoreError."""
        path = self._path(report.evaluation_id)
        try:
            make_private_folder(path.parent)
            write_whole(path, msgspec.json.encode(report))
        except OSError as error:
            raise StoreError(f"the report of {report.evaluation_id} cannot be stored: {error.strerror}.") from error

    def _path(self, evaluation_id: str) -> Path:
        if self._folder is None:
            raise NotFound("this server has no data folder, and stores no evaluations.")
        return self._folder / f"{validated_id(evaluation_id, 'the id of an evaluation')}.json"


def _summary(path: Path, updated_at: float) -> EvaluationSummary | None:
    """Raises: OSError."""
    try:
        summary = msgspec.json.decode(path.read_bytes(), type=EvaluationSummary)
    except msgspec.MsgspecError:
        return None
    return msgspec.structs.replace(summary, updated_at=updated_at)


class EvaluationList(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluations, most recently changed first."""

    evaluations: tuple[EvaluationSummary, ...]


class EvaluationsPart(ServerPart):
    def __init__(self, place: ServerPlace) -> None:
        super().__init__(place)
        self._stored = StoredReports(None if place.data_dir is None else place.data_dir / "server" / "evaluations")

    async def listed(self, request: web.Request) -> web.Response:
        return answer(request, EvaluationList(evaluations=await asyncio.to_thread(self._stored.summaries)))

    async def received(self, request: web.Request) -> web.Response:
        report = await read_record(request, Report, max_bytes=self.place.max_task_bytes)
        SUBJECT.set(report.evaluation_id[:128])
        await asyncio.to_thread(self._stored.write, report)
        return answer(request, {})

    async def one(self, request: web.Request) -> web.Response:
        report = await asyncio.to_thread(self._stored.read, path_id(request, "evaluation"))
        return await answer_large(request, JSON, partial(encode_json, report))

    async def compared(self, request: web.Request) -> web.Response:
        first = _FIRST.read(request)
        if not first:
            raise InvalidRequest("name the evaluation to compare with: ?with=EVALUATION.")
        comparison = await asyncio.to_thread(self._compare, first, path_id(request, "evaluation"))
        return await answer_large(request, JSON, partial(encode_json, comparison))

    def _compare(self, first: str, second: str) -> EvaluationComparison:
        return compare_reports(self._stored.read(first), self._stored.read(second))

    def routes(self) -> list[Route]:
        one, errors = "/v1/evaluations/{evaluation}", (400, 401, 404)
        return [
            Route("GET", "/v1/evaluations", self.listed, "Evaluations that were sent to this server.",
                  answer=EvaluationList),
            Route("POST", "/v1/evaluations", self.received, "Store the newest report of an evaluation.",
                  body=Report, errors=(400, 401, 404, 413)),
            Route("GET", one, self.one, "The report of an evaluation, with its tasks, the worst first.",
                  answer=Report, answer_types=(JSON,), errors=errors),
            Route("GET", f"{one}/compared", self.compared, "An evaluation task by task against an earlier one.",
                  answer=EvaluationComparison, answer_types=(JSON,), query=(_FIRST,), errors=errors),
        ]  # fmt: skip


_FIRST = Text("with", "The earlier evaluation: a difference is this one's reward less the earlier one's.")
