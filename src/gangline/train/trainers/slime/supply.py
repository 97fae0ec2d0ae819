"""A trainer's engines for the nodes of a service, between the moments at which the trainer itself needs them.

slime and miles tell the rollout side nothing. But both change weights, and offload engines, only between two rollout
calls: `train.py` trains there, `train_async.py` waits for the open call before an update. So the gates of all nodes
are open within a call and closed between calls, after calls in flight have ended. When a call begins, the engines are
asked for the version of their weights, and the nodes learn it.

Laws
- Between rollout calls no node asks an engine for anything but its health; nodes that come meanwhile are closed too.
- A node has the trainer's engines and no others: a foreign one that is healthy is an error, for its tokens would be of
  other weights.
- A version never goes back. Every reply of SGLang carries its version too, and that one is recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

from pydantic import Field

from gangline.domain.errors import (
    Conflict,
    EngineUnavailable,
    GanglineError,
    InvalidRequest,
    NodeError,
    ServerUnavailable,
    WeightsNotLoaded,
)
from gangline.domain.node_views import GateState
from gangline.settings.machine import read_secret
from gangline.train.options import TrainingOptions
from gangline.train.trainers.slime.router import Router, weight_version
from gangline.train.weights.fleet import Roster
from gangline.wire.client.node import NodeClient

__all__ = ["EngineSupply", "SupplySettings"]

_log = logging.getLogger(__name__)

_DRAIN_POLL_S = 30.0
_UNREACHABLE = (ServerUnavailable, EngineUnavailable)
"""Errors of one node or engine that died: the others go on. Any other error is one of the whole call."""


class SupplySettings(TrainingOptions):
    """How nodes get a trainer's engines."""

    model: str | None = None
    """The trained model's name in `--sglang-config`, where that has several."""
    node_token_env: str | None = None
    """Names the environment variable with the nodes' control token; None: it is the server's."""
    kind: str = "sglang"
    """Engine plug-in of the nodes: `sglang`, or `generate_sglang` and its relatives."""
    options: Mapping[str, Any] = {}
    """Options of the plug-in, such as `parsers` where the trainer starts SGLang without a tool call parser."""
    lease_s: float = Field(default=60.0, gt=0)
    """After which closed gates open by themselves, should the trainer die; renewed while it lives."""
    patience_s: float = Field(default=1800.0, gt=0)
    """For model calls in flight when a rollout call ends."""
    poll_s: float = Field(default=2.0, gt=0)
    """Between looks for engines and nodes that came or went."""
    lost_after_s: float = Field(default=60.0, gt=0)
    """A node that the server has not heard for so long is left out."""


class EngineSupply:
    """Enter it before use; it watches until it is left, and leaves the gates open."""

    def __init__(
        self, service: Roster, router: Router, token: str | None, settings: SupplySettings | None = None
    ) -> None:
        """token: the server's control token."""
        self._settings = settings or SupplySettings()
        self._service = service
        self._router = router
        name = self._settings.node_token_env
        self._token = token if name is None else read_secret(name)
        self._nodes: dict[str, NodeClient] = {}
        """By URL; all that were ever heard."""
        self._clients = AsyncExitStack()
        self._given: set[str] = set()
        """Engines that were given to some node."""
        self._is_open = False
        self._version: int | None = None
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        """Policy version of the engines' weights; None: nobody set one."""
        return self._version

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await asyncio.gather(*(node.resume() for node in self._nodes.values()), return_exceptions=True)
        await self._clients.aclose()
        await self._router.close()

    @asynccontextmanager
    async def opened(self, expected: int | None = None) -> AsyncGenerator[None]:
        """A rollout call: nodes have the engines and their version inside, and leave them alone afterwards.

        expected: version that the trainer names. Raises: EngineUnavailable; WeightsNotLoaded when engines have other
        weights than expected, or than each other; Conflict when a node has a foreign engine; InvalidRequest when the
        version would go back; NodeError when calls in flight do not end.
        """
        try:
            await self._open(expected)
            yield
        finally:
            await self._close()

    async def _open(self, expected: int | None) -> None:
        async with self._lock:
            urls, self._version = await weight_version(await self._router.engines(), kind=self._settings.kind)
            if expected is not None and self._version not in (None, expected):
                raise WeightsNotLoaded(
                    f"the trainer has pushed policy version {expected}, and its engines say {self._version}: an update "
                    "did not reach them."
                )
            nodes = await self._heard()
            if not nodes:
                _log.warning("engines.no_nodes engines=%d", len(urls))
            await _at_each(nodes, lambda node: self._give(node, urls))
            await _at_each(nodes, NodeClient.resume)
            self._is_open = True

    async def _close(self) -> None:
        async with self._lock:
            self._is_open = False
            nodes = await self._heard()
            await _at_each(nodes, self._hold)
            try:
                async with asyncio.timeout(self._settings.patience_s):
                    await _at_each(nodes, self._drain)
            except TimeoutError:
                raise NodeError(
                    f"model calls were still in flight {self._settings.patience_s:g} s after the rollout, and the "
                    "trainer changes its engines now: wait longer (`patience_s`), or bound replies by max_tokens."
                ) from None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            async with self._lock:
                try:
                    await self._look()
                except GanglineError as error:
                    _log.warning("engines.not_looked_after error=%s", error)

    async def _look(self) -> None:
        """Do for nodes and engines that came meanwhile what was done for the others."""
        nodes = await self._heard()
        if not self._is_open:
            await _at_each(nodes, self._hold)
            return
        urls = await self._router.engines()
        await _at_each(nodes, lambda node: self._give(node, urls))

    async def _heard(self) -> list[NodeClient]:
        """Nodes that the server heard of lately; as long as it does not answer, the last ones."""
        try:
            views = (await self._service.status()).nodes
        except ServerUnavailable as error:
            _log.warning("engines.server_silent error=%s", error)
            return list(self._nodes.values())
        for view in views:
            if view.url not in self._nodes:
                client = NodeClient(view.url, self._token)
                self._nodes[view.url] = await self._clients.enter_async_context(client)
        return [self._nodes[view.url] for view in views if view.age_s <= self._settings.lost_after_s]

    async def _give(self, node: NodeClient, urls: Sequence[str]) -> None:
        """The engines at `urls` and no others, and the version of their weights."""
        views = [view for view in await node.backends() if view.role is None]
        have = {view.url: view for view in views if view.state != "draining"}
        for url in have.keys() - urls:
            if have[url].state == "healthy" and url not in self._given:
                raise Conflict(
                    f"node {node.url} has engine {url}, which is not the trainer's: its tokens would be of other "
                    f"weights. Remove it (`gangline backend remove {have[url].backend_id}`)."
                )
            await node.remove_backend(have[url].backend_id, drain=False)
        is_new = False
        for url in [url for url in urls if url not in have]:
            await node.add_backend(url, kind=self._settings.kind, options=self._settings.options)
            _log.info("engines.given engine=%s node=%s", url, node.url)
            self._given.add(url)
            is_new = True
        self._given |= set(urls)
        await self._tell_version(node, is_new=is_new)

    async def _tell_version(self, node: NodeClient, *, is_new: bool) -> None:
        if self._version is None or ((known := (await node.gate()).version) == self._version and not is_new):
            return
        try:
            await node.set_version(self._version)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"node {node.url} has had policy version {known}, and the trainer's engines say {self._version}: a "
                "trainer that starts again counts from 1. Restart the nodes, or number on by "
                f"`update_weight_start_version: {known}` in the file of --custom-config-path."
            ) from error

    async def _hold(self, node: NodeClient) -> GateState:
        return await node.hold("drain", self._settings.lease_s)

    async def _drain(self, node: NodeClient) -> None:
        wait_s = min(_DRAIN_POLL_S, self._settings.lease_s / 3)
        while not (await node.hold("drain", self._settings.lease_s, wait_s)).is_drained:
            pass


async def _at_each(nodes: Sequence[NodeClient], work: Callable[[NodeClient], Awaitable[object]]) -> None:
    """At all at once, to the end of each.

    Raises: the first error; one of a node or engine that does not answer only where no node does better.
    """
    answers = await asyncio.gather(*(work(node) for node in nodes), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in errors:
        if not isinstance(error, _UNREACHABLE) or len(errors) == len(nodes):
            raise error
        _log.warning("engines.node_left_out error=%s", error)
