"""Evaluations at a server: `gangline eval` sends their reports, and the page shows and compares them."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.domain.tokens import encode_json
from gangline.server.parts import ServerPart, ServerPlace
from gangline.tasks.evals.comparison import EvaluationComparison, compare_reports
from gangline.tasks.evals.report import Report
from gangline.tasks.evals.stored import EvaluationSummary, StoredReports
from gangline.wire.http.negotiation import JSON, answer, answer_large, path_id, read_record
from gangline.wire.http.query import Text
from gangline.wire.http.routes import SUBJECT, Route


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
