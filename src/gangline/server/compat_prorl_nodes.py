"""The engines behind all nodes at once, as ProRL Agent's routes ask for them: each node is told over its own routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from gangline.client import NodeClient
from gangline.domain.errors import GanglineError, ServerUnavailable
from gangline.server.live_nodes import live_nodes
from gangline.server.service import RolloutService

__all__ = ["NodeEngines"]

log = logging.getLogger("gangline.server")


class NodeEngines:
    """control_token: the nodes' own, which is the server's."""

    def __init__(self, service: RolloutService, control_token: str | None) -> None:
        self._service = service
        self._token = control_token

    async def add(self, url: str) -> list[str]:
        """The nodes that have the engine now. Raises: the error of a node, when none could take it."""
        return await self._on_all(lambda node: node.add_backend(url))

    async def clear(self) -> list[str]:
        """The nodes that have no engine now; their calls wait for the next one."""
        return await self._on_all(lambda node: node.clear_backends())

    async def _on_all(self, ask: Callable[[NodeClient], Awaitable[Any]]) -> list[str]:
        """Raises: ServerUnavailable when there is no node."""
        live = await live_nodes(self._service)
        if not live:
            raise ServerUnavailable("no node has been heard in the last minute; start one: `gangline node`.")

        async def one(url: str) -> None:
            async with NodeClient(url, self._token) as client:
                await ask(client)

        answers = await asyncio.gather(*(one(node.url) for node in live), return_exceptions=True)
        failed: list[BaseException] = []
        for node, answer in zip(live, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("engines.not_changed node=%s message=%s", node.node_id, answer)
                failed.append(answer)
        if len(failed) == len(live) or any(not isinstance(error, GanglineError) for error in failed):
            raise failed[0]
        return [node.node_id for node, answer in zip(live, answers, strict=True) if answer is None]
