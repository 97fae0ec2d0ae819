"""Provides a trainer's engines to the nodes of a service while the trainer itself does not need them.

slime and miles send no notifications to the rollout side. But both change weights and offload engines only between two
rollout calls: `train.py` trains there, and `train_async.py` waits for the open call before an update. So the gates of
all nodes are open during a call, and closed between calls after calls in flight have ended. When a call begins, the
version of the engines' weights is read from the engines and sent to the nodes.

Laws
- Between rollout calls no node calls an engine except for its health; nodes that join meanwhile are closed too.
- A node has only the trainer's engines: a healthy foreign engine is an error, because its tokens would be from other
  weights.
- A version never decreases. Every reply of SGLang carries its version too, and that one is recorded.
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
from gangline.train.weights.fleet import Roster, nodes_in
from gangline.wire.client.node import NodeClient

_log = logging.getLogger(__name__)

_DRAIN_POLL_S = 30.0
_UNREACHABLE = (ServerUnavailable, EngineUnavailable)
"""Errors of a single dead node or engine, without which the call continues. Any other error ends the whole call."""


class SupplySettings(TrainingOptions):
    """How nodes receive a trainer's engines."""

    model: str | None = None
    """The trained model's name in `--sglang-config`, if that lists several."""
    node_token_env: str | None = None
    """Name of the environment variable with the nodes' control token; None: the same as the server's."""
    kind: str = "sglang"
    """Engine plug-in of the nodes: `sglang`, or `generate_sglang` and related ones."""
    options: Mapping[str, Any] = {}
    """Options of the plug-in, such as `parsers` if the trainer starts SGLang without a tool call parser."""
    lease_s: float = Field(default=60.0, gt=0)
    """After which closed gates open by themselves if the trainer dies; renewed while it is alive."""
    patience_s: float = Field(default=1800.0, gt=0)
    """Time for model calls in flight to end after a rollout call."""
    poll_s: float = Field(default=2.0, gt=0)
    """Delay between checks for engines and nodes that joined or left."""
    lost_after_s: float = Field(default=60.0, gt=0)
    """Nodes without a heartbeat at the server for this long are left out."""


class EngineSupply:
    """Enter it before use. It watches until it is left, and then leaves the gates open."""

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
        """By URL; all nodes ever seen."""
        self._clients = AsyncExitStack()
        self._given: set[str] = set()
        """Engines that were added to some node."""
        self._is_open = False
        self._version: int | None = None
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        """Policy version of the engines' weights; None if never set."""
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
        """A rollout call: inside the block the nodes use the engines and know their version; afterwards they leave them
        alone.

        expected: version that the trainer reports. Raises: EngineUnavailable. WeightsNotLoaded if engines have other
        weights than expected, or different weights. Conflict if a node has a foreign engine. InvalidRequest if the
        version would decrease. NodeError if calls in flight do not end.
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
        """Apply the current state to nodes and engines that joined meanwhile."""
        nodes = await self._heard()
        if not self._is_open:
            await _at_each(nodes, self._hold)
            return
        urls = await self._router.engines()
        await _at_each(nodes, lambda node: self._give(node, urls))

    async def _heard(self) -> list[NodeClient]:
        """Nodes with a recent heartbeat at the server; the last known nodes while the server does not answer."""
        try:
            views = nodes_in(await self._service.status())
        except ServerUnavailable as error:
            _log.warning("engines.server_silent error=%s", error)
            return list(self._nodes.values())
        for view in views:
            if view.url not in self._nodes:
                client = NodeClient(view.url, self._token)
                self._nodes[view.url] = await self._clients.enter_async_context(client)
        return [self._nodes[view.url] for view in views if view.age_s <= self._settings.lost_after_s]

    async def _give(self, node: NodeClient, urls: Sequence[str]) -> None:
        """Give the node exactly the engines at `urls`, and the version of their weights."""
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
    """Run `work` at all nodes at once and wait for all.

    Raises: the first error. Errors of unreachable nodes or engines are raised only if all nodes failed.
    """
    answers = await asyncio.gather(*(work(node) for node in nodes), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    for error in errors:
        if not isinstance(error, _UNREACHABLE) or len(errors) == len(nodes):
            raise error
        _log.warning("engines.node_left_out error=%s", error)
