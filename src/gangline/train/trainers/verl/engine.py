"""Serves verl's engines to the nodes: runs an engine server of ours over verl's client, and registers it with the
nodes.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

from gangline.domain.errors import EngineUnavailable, GanglineError
from gangline.domain.views import NodeView, ServiceStatus
from gangline.models.engine_server.app import create_app, serving
from gangline.models.language.tokenizer import load_tokenizer
from gangline.train.trainers.verl.sampler import VerlSampler, one_attempt
from gangline.train.trainers.verl.settings import GanglineSettings
from gangline.wire.client.node import NodeClient
from gangline.wire.http.same_origin import OwnNames

_log = logging.getLogger("gangline.train.trainers.verl")
_LOOK_EVERY_S = 2.0


class Roster(Protocol):
    """A list of nodes, such as `gangline.wire.client.ServerClient`."""

    async def status(self) -> ServiceStatus: ...


def make_sampler(config: Any, client: Any, settings: GanglineSettings) -> VerlSampler:
    """verl's client as a sampler, with the tokenizer that verl loads. Raises: NotFound."""
    auto: Any = importlib.import_module("transformers").AutoConfig  # Ray's workers import this module without it
    copy_to_local: Callable[[str], str] = importlib.import_module("verl.utils.fs").copy_to_local
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    folder = copy_to_local(model.path)
    tokenizer_path = model.get("tokenizer_path")
    tokenizer = load_tokenizer(folder if tokenizer_path is None else copy_to_local(tokenizer_path))
    described = auto.from_pretrained(folder)
    return VerlSampler(
        one_attempt(client),
        tokenizer,
        model_name=settings.model_name,
        context_length=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        num_ids=int(described.get_text_config().vocab_size),
    )


@asynccontextmanager
async def served(sampler: VerlSampler, settings: GanglineSettings) -> AsyncGenerator[str]:
    """Yields the URL for the nodes. Raises: PortUnavailable."""
    names = OwnNames(settings.host, public_url=settings.public_url)
    app = create_app(sampler, dev_mode=False, names=names)
    async with serving(app, host=settings.host, port=settings.port) as url:
        if settings.public_url is None:
            yield url
        else:
            public, port = urlsplit(settings.public_url), urlsplit(url).port
            yield settings.public_url.rstrip("/") if public.port else f"{settings.public_url.rstrip('/')}:{port}"


class NodeKeeper:
    """Registers the engine with every node of the service, including nodes that join later."""

    def __init__(self, roster: Roster, token: str | None, url: str, settings: GanglineSettings) -> None:
        """url: the engine's."""
        self._roster = roster
        self._token = token
        self._url = url
        self._settings = settings

    async def first(self) -> None:
        """Wait until a node samples from the engine. Raises: EngineUnavailable, with the last problem."""
        why = "no node is there"
        try:
            async with asyncio.timeout(self._settings.ready_within_s):
                while True:
                    num_served, problem = await self.look()
                    if num_served:
                        return
                    why = problem or why
                    await asyncio.sleep(_LOOK_EVERY_S / 4)
        except TimeoutError as error:
            raise EngineUnavailable(
                f"no node of {self._settings.url} took verl's engine at {self._url} in "
                f"{self._settings.ready_within_s:g} s ({why}). Start nodes that reach this address "
                "(`host`, `public_url`), without engines of their own."
            ) from error

    async def keep(self) -> None:
        """Run forever."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> tuple[int, str | None]:
        """The number of nodes that have the engine, and the last problem."""
        try:
            nodes = (await self._roster.status()).nodes
        except GanglineError as error:
            return 0, str(error)
        answers = await asyncio.gather(*(self._give(node) for node in nodes))
        return sum(problem is None for problem in answers), next(
            (answer for answer in answers if answer is not None), None
        )

    async def _give(self, node: NodeView) -> str | None:
        """Returns the problem, if any."""
        try:
            async with NodeClient(node.url, self._token) as client:
                for backend in await client.backends():
                    if backend.role is not None:
                        continue
                    if backend.url == self._url:
                        return None
                    if backend.model == self._settings.model_name:  # left by a trainer that has ended
                        await client.remove_backend(backend.backend_id, drain=False)
                await client.add_backend(self._url, kind="vllm")
        except GanglineError as error:
            _log.warning("verl.node_without_engine node=%s message=%s", node.node_id, error)
            return f"node {node.node_id}: {error}"
        _log.info("verl.node_has_engine node=%s url=%s", node.node_id, self._url)
        return None
