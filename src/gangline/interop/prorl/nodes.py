"""The engines of all nodes, for ProRL Agent's routes: each change is sent to every node over the node's own routes.

Added engines are stored, so that nodes that join later or were away also get them; so is the clearing of all engines.
An engine that an operator removes from one node stays removed there.

Source: ProRL Agent, 3.3.2 (dynamic registration, checkpoint swapping).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from gangline.domain.errors import GanglineError, StoreError
from gangline.domain.views import NodeView
from gangline.server.service.core import NODES, RolloutService
from gangline.server.service.live_nodes import live_nodes, node_client

log = logging.getLogger("gangline.server")

_KEY = "engines"
_LOOK_EVERY_S = 5.0
_FIRST_REST_S, _LONGEST_REST_S = 2.0, 120.0
"""Seconds before a failed node is retried."""


class _Given(msgspec.Struct, frozen=True):
    """The state last sent to one node."""

    num_clears: int = 0
    urls: tuple[str, ...] = ()


class _Wanted(msgspec.Struct, frozen=True):
    """The desired engines of all nodes, and the state sent to each."""

    num_clears: int = 0
    urls: tuple[str, ...] = ()
    given: dict[str, _Given] = {}
    """By node id."""

    def is_outdated(self, node_id: str) -> bool:
        """Whether the node lacks changes. A node that has never joined before has nothing to clear."""
        given = self.given.get(node_id, _Given(self.num_clears))
        return given.num_clears < self.num_clears or bool(set(self.urls) - set(given.urls))

    def anew(self, url: str) -> _Wanted:
        """With the engine, which is sent to every node again, even to nodes that already have it."""
        given = {name: _Given(one.num_clears, _others(one.urls, url)) for name, one in self.given.items()}
        return msgspec.structs.replace(self, urls=(*_others(self.urls, url), url), given=given)

    def without(self, url: str) -> _Wanted:
        return msgspec.structs.replace(self, urls=_others(self.urls, url))


class NodeEngines:
    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._telling = asyncio.Lock()
        self._rests: dict[str, tuple[float, float]] = {}
        """node id -> (time of the next attempt, delay after the next failure)"""
        self._monotonic = time.monotonic

    async def add(self, url: str) -> list[str]:
        """Returns the nodes that now have the engine; nodes that join later get it then.

        Raises: a node's error, if there are nodes and all failed. The engine is then not stored.
        """
        async with self._telling:
            base = url.rstrip("/").removesuffix("/v1")
            before = await self._change(lambda wanted: wanted)
            await self._change(lambda wanted: wanted.anew(base))
            reached, failed = await self._tell(await live_nodes(self._service))
            if failed and not reached:
                if base not in before.urls:
                    await self._change(lambda wanted: wanted.without(base))
                raise failed[0]
            return reached

    async def clear(self) -> list[str]:
        """Returns the nodes that now have no engine; their calls wait for the next one. Nodes that are away are cleared
        when they return.

        Raises: a node's error, if there are nodes and all failed.
        """
        async with self._telling:
            known = (await self._service.store.query(self._service.store.status)).nodes
            await self._change(
                lambda wanted: _Wanted(
                    num_clears=wanted.num_clears + 1,
                    given={node.node_id: _Given(wanted.num_clears) for node in known},
                )
            )
            reached, failed = await self._tell(await live_nodes(self._service))
            if failed and not reached:
                raise failed[0]
            return reached

    async def hand_out_forever(self) -> None:
        """Send missed changes to nodes that joined or came back."""
        with self._service.notifier.listen(NODES) as listener:
            while True:
                try:
                    await self._hand_out()
                except StoreError as error:
                    log.error("engines.store_failed message=%s", error)
                await listener.wait(_LOOK_EVERY_S)

    async def _hand_out(self) -> None:
        async with self._telling:
            wanted = await self._change(lambda wanted: wanted)
            if not (wanted.urls or wanted.num_clears):
                return
            outdated = [node for node in await live_nodes(self._service) if wanted.is_outdated(node.node_id)]
            now = self._monotonic()
            await self._tell([node for node in outdated if self._rests.get(node.node_id, (0.0, 0.0))[0] <= now])

    async def _tell(self, nodes: Sequence[NodeView]) -> tuple[list[str], list[GanglineError]]:
        """Bring nodes to the desired state. Returns the ids of the nodes that have it, and the errors of the others."""
        wanted = await self._change(lambda wanted: wanted)
        answers = await asyncio.gather(*(self._bring(node, wanted) for node in nodes))
        reached = [node.node_id for node, error in zip(nodes, answers, strict=True) if error is None]
        now = _Given(wanted.num_clears, wanted.urls)
        await self._change(lambda kept: msgspec.structs.replace(kept, given=kept.given | dict.fromkeys(reached, now)))
        return reached, [error for error in answers if error is not None]

    async def _bring(self, node: NodeView, wanted: _Wanted) -> GanglineError | None:
        given = wanted.given.get(node.node_id, _Given(wanted.num_clears))
        try:
            async with node_client(self._service, node) as client:
                if given.num_clears < wanted.num_clears:
                    await client.clear_backends()
                    given = _Given(wanted.num_clears)
                for url in wanted.urls:
                    if url not in given.urls:
                        await client.add_backend(url)
        except GanglineError as error:
            _, pause_s = self._rests.get(node.node_id, (0.0, _FIRST_REST_S))
            self._rests[node.node_id] = (self._monotonic() + pause_s, min(2 * pause_s, _LONGEST_REST_S))
            log.warning("engines.not_changed node=%s again_in_s=%g message=%s", node.node_id, pause_s, error)
            return error
        self._rests.pop(node.node_id, None)
        return None

    async def _change(self, change: Callable[[_Wanted], _Wanted]) -> _Wanted:
        """Raises: StoreError."""

        def changed(kept: str | None) -> str:
            wanted = _Wanted() if kept is None else msgspec.json.decode(kept, type=_Wanted)
            return msgspec.json.encode(change(wanted)).decode()

        note = await self._service.store.run(self._service.store.change_note, _KEY, changed)
        return msgspec.json.decode(note, type=_Wanted)


def _others(urls: tuple[str, ...], url: str) -> tuple[str, ...]:
    return tuple(one for one in urls if one != url)
