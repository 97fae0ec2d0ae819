"""Find: searches sessions by words in their messages, tools and errors, by how they ended, and by rules."""

from __future__ import annotations

from typing import Any, get_args

from aiohttp import web

from gangline.domain.lifecycle import Outcome
from gangline.server.access import TENANT, tenant_of
from gangline.server.service.finder import Finder
from gangline.server.web.finding import FindAnswer, Rule, Wanted
from gangline.wire.http.negotiation import answer
from gangline.wire.http.query import Choice, Name, Number, Text, Whole, given
from gangline.wire.http.routes import Route


class FindRoutes:
    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    async def find(self, request: web.Request) -> web.Response:
        wanted: dict[str, Any] = {**given(request, _CONDITIONS), "tenant": tenant_of(request)}
        return answer(request, await self._finder.find(Wanted(**wanted)))

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/find", self.find, "Ended sessions by words, rewards, causes and rules.",
                  answer=FindAnswer, query=_CONDITIONS),
        ]  # fmt: skip


_CONDITIONS = (
    Name("words", "Words, and phrases in quotes; `word*` is the beginning of a word."),
    Choice("outcome", "Only sessions with this outcome.", get_args(Outcome)),
    Name("cause", "Only sessions whose failure has this code."),
    Choice("rule", "Only sessions in which this rule found something.", get_args(Rule)),
    Name("harness", "Only sessions of this harness."),
    Whole("version", "Only sessions of which this policy version sampled a token.", high=2**53),
    Text("task_id", "Only sessions of this task."),
    Number("min_reward", "Only rewards from here on.", low=-1e300, high=1e300),
    Number("max_reward", "Only rewards up to here.", low=-1e300, high=1e300),
    Whole("limit", "How many sessions.", default=50, low=1, high=500),
    TENANT,
)
