"""Find: searches sessions by words in their messages, tools and errors, by how they ended, and by rules."""

from __future__ import annotations

from typing import get_args

from aiohttp import web

from gangline.domain.lifecycle import Outcome
from gangline.server.service.finder import Finder
from gangline.server.web.finding import FindAnswer, Rule, Wanted
from gangline.wire.http.negotiation import answer
from gangline.wire.http.query import Choice, Name, Number, Text, Whole
from gangline.wire.http.routes import Route


class FindRoutes:
    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    async def find(self, request: web.Request) -> web.Response:
        wanted = Wanted(
            words=_WORDS.read(request),
            outcome=_OUTCOME.read(request),
            cause=_CAUSE.read(request),
            rule=_RULE.read(request),
            harness=_HARNESS.read(request),
            version=None if _VERSION.text(request) is None else _VERSION.read(request),
            task_id=_TASK_ID.read(request) or None,
            min_reward=None if _MIN.text(request) is None else _MIN.read(request),
            max_reward=None if _MAX.text(request) is None else _MAX.read(request),
            limit=_LIMIT.read(request),
        )
        return answer(request, await self._finder.find(wanted))

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/find", self.find, "Ended sessions by words, rewards, causes and rules.",
                  answer=FindAnswer, query=(_WORDS, _OUTCOME, _CAUSE, _RULE, _HARNESS, _VERSION, _TASK_ID, _MIN, _MAX,
                                            _LIMIT)),
        ]  # fmt: skip


_WORDS = Name("words", "Words, and phrases in quotes; `word*` is the beginning of a word.")
_OUTCOME = Choice("outcome", "Only sessions with this outcome.", get_args(Outcome))
_CAUSE = Name("cause", "Only sessions whose failure has this code.")
_RULE = Choice("rule", "Only sessions in which this rule found something.", get_args(Rule))
_HARNESS = Name("harness", "Only sessions of this harness.")
_VERSION = Whole("version", "Only sessions of which this policy version sampled a token.", high=2**53)
_TASK_ID = Text("task_id", "Only sessions of this task.")
_MIN = Number("min_reward", "Only rewards from here on.", low=-1e300, high=1e300)
_MAX = Number("max_reward", "Only rewards up to here.", low=-1e300, high=1e300)
_LIMIT = Whole("limit", "How many sessions.", default=50, low=1, high=500)
