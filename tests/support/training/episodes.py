"""Sessions for trainers that ask for one sample at a time: a list of them by hand, or those of a whole service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import Failure
from gangline.domain.session import SessionResult
from gangline.models.engine_server.sampler import SampledToken, Sampler, SampleRequest
from gangline.server.run import serving
from gangline.train.collecting.groups import Group
from gangline.train.trainers.episodes import Episodes
from gangline.train.trainers.own_engine import EngineSettings, OwnEngine
from support.node.node import running_node
from support.sdk.talking_agent import tasks
from support.training.samples import session, trace

__all__ = ["BROKEN", "HandedOut", "block_of_guide", "in_letters", "one_task", "service_with_node"]

_DOWN = Failure(boundary="engine", code="engine_unavailable", message="it is down", retryable=True)

BROKEN: dict[str, SessionResult] = {
    "a fault of ours": session("s9", None, outcome="infra_error", failure=_DOWN),
    "no reward": session("s9", None),
    "cancelled": session("s9", 1.0, outcome="cancelled"),
    "no model call": session("s9", 1.0, outcome="no_model_call"),
    "no trajectory": session("s9", 1.0, trajectory=None),
    "held out": session("s9", 1.0, held_out=True),
    "nothing trained": session("s9", 1.0, trace(untrainable="its context is not exact")),
}


class HandedOut(Episodes):
    """The service hands out the sessions of a group, one for each sample; a sample that runs again gets its own again,
    or, from its second run on, the one in `again`.
    """

    def __init__(self, group: Group, again: SessionResult | None = None) -> None:
        super().__init__(EngineSettings(url="http://127.0.0.1:9"))
        self.submitted = list[Mapping[str, Any]]()
        self._sessions: Iterator[SessionResult] = iter(group.sessions)
        self._again = again
        self._given = dict[str, SessionResult | None]()

    async def _started(self, make_engine: Callable[[EngineSettings], OwnEngine]) -> Any:
        return self

    async def run(self, task: Mapping[str, Any]) -> list[SessionResult]:
        self.submitted.append(task)
        episode, _, run = task["task_id"].rpartition("-run")
        if episode not in self._given:
            self._given[episode] = next(self._sessions, None)
        found = self._again if run != "1" and self._again is not None else self._given[episode]
        return [] if found is None else [found]


def one_task() -> dict[str, Any]:
    """Of the agent that talks twice."""
    return {name: value for name, value in next(tasks()).items() if name not in ("task_id", "num_samples")}


async def in_letters(sampler: Sampler, request: SampleRequest, *, temperature: float = 0.7) -> list[SampledToken]:
    """At most two tokens, of letters: an agent that says them again says the same. Probes get what they ask for.

    temperature: of the agent's calls.
    """
    short = msgspec.structs.replace(request, max_tokens=min(request.max_tokens, 2))
    while True:
        tokens = [token async for token in sampler.sample(short)]
        text = sampler.tokenizer.decode([token.token_id for token in tokens])
        if request.temperature != temperature or request.top_k == 1 or (text.isascii() and text.isalpha()):
            return tokens


@asynccontextmanager
async def service_with_node(folder: Path) -> AsyncGenerator[tuple[str, Any]]:
    """A server and a node without engines. Yields the server's URL and the node."""
    async with (
        serving(data_dir=folder / "server", control_token=None) as server,
        running_node(folder / "node", server_url=server.url, control_token=None) as node,
    ):
        yield server.url, node


def block_of_guide(mark: str) -> str:
    """The block of code with these words in the guide of trainers."""
    guide = (Path(__file__).parents[3] / "docs/guides/trainers.md").read_text()
    [found] = [block.partition("\n")[2] for block in guide.split("```")[1::2] if mark in block]
    return found
