"""A service for weight updates: nodes in this process, engines that may be killed, and what a trainer writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from gangline.domain.errors import InvalidRequest
from gangline.domain.node_views import OpenedSession
from gangline.domain.views import NodeView, ServiceStatus
from gangline.serving.scripted.server import ScriptedSampler
from gangline.train.weights.update import ServiceWeights
from support.node.backends import KillableEngine
from support.node.node import TOKEN, RunningNode


class Nodes:
    """What a server tells of its nodes."""

    def __init__(self, *nodes: RunningNode) -> None:
        self.nodes = nodes
        self.ages_s = [0.0] * len(nodes)

    async def status(self) -> ServiceStatus:
        fields: dict[str, Any] = {"version": "", "at": 0.0, "oldest_queued_s": None}
        counts: dict[str, Any] = {"tasks": {}, "sessions": {}, "stages": {}, "callbacks": {}}
        views = [self._view(number) for number in range(len(self.nodes))]
        return ServiceStatus(**fields, **counts, nodes=tuple(views))

    def _view(self, number: int) -> NodeView:
        return NodeView(
            node_id=f"n{number}",
            url=self.nodes[number].url,
            capacity=1,
            draining=False,
            num_sessions=0,
            first_seen_at=0.0,
            last_seen_at=0.0,
            age_s=self.ages_s[number],
        )


def weights_of(folder: Path, *nodes: RunningNode, **options: Any) -> ServiceWeights:
    return ServiceWeights(Nodes(*nodes), folder / "weights", token=TOKEN, **options)


def save(folder: Path) -> None:
    """Weights of the scripted engine, which has none."""
    (folder / "model.safetensors").write_bytes(b"weights")


def refuse_weights(engine: KillableEngine) -> None:
    """From now on, as an engine whose model has other shapes."""

    async def load(path: Path) -> None:
        raise InvalidRequest(f"the shapes in {path.name} are others")

    sampler_of(engine).load_weights = load


def break_at_weights(engine: KillableEngine) -> None:
    """From now on, as an engine that dies half way."""

    async def load(path: Path) -> None:
        raise RuntimeError(f"out of memory in {path.name}")

    sampler_of(engine).load_weights = load


class HeldLoad:
    """Loading takes until it is let go."""

    def __init__(self, engine: KillableEngine) -> None:
        self.began = asyncio.Event()
        self.goes_on = asyncio.Event()
        sampler_of(engine).load_weights = self._load

    async def _load(self, path: Path) -> None:
        self.began.set()
        await self.goes_on.wait()


def sampler_of(engine: KillableEngine) -> ScriptedSampler:
    assert engine.sampler is not None
    return engine.sampler


@asynccontextmanager
async def agent(opened: OpenedSession) -> AsyncGenerator[openai.AsyncOpenAI]:
    """The SDK as a harness has it, which notices every failure."""
    async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0) as client:
        yield client


async def versions_sampled(node: RunningNode, model: str = "scripted") -> Sequence[int]:
    """Of the tokens of one call in a new session; -1 is unknown."""
    opened = await node.client.open_session()
    async with agent(opened) as client:
        await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=4)
    result = await node.client.finalize(opened.session_id)
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    return sorted(set(trace.response_versions[trace.loss_mask == 1].tolist()))
