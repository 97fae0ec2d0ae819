"""Training runs of the server's data folder: their curves, steps with their groups, and comparisons."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.server.parts import ServerPart, ServerPlace
from gangline.train.runs.service import RunCurves, RunStep, TrainingRuns
from gangline.train.runs.store import Comparison, RunSummary
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
