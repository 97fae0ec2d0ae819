"""Sessions of callers that run their agents themselves, opened at the server. Each is pinned to one node.

The server chooses the node with the fewest sessions and forwards the request. The returned URLs lead to that node, so
the agent's calls do not pass through the server; waiting, finalizing and aborting do. Pins are kept in memory. After a
restart, or for sessions opened by another server of the same database, the nodes are queried.

Source: "Agent Abstractions and Trajectory Gateway for VERL", gateway manager and scaling.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web

from gangline.domain.errors import (
    Conflict,
    GanglineError,
    InvalidRequest,
    NodeDraining,
    NotFound,
    ServerUnavailable,
    TooMany,
)
from gangline.domain.ids import new_id, validated_id
from gangline.domain.node_views import ExternalView, OpenedSession
from gangline.domain.session import SessionResult
from gangline.domain.views import NodeView
from gangline.server.service.core import RolloutService
from gangline.server.service.live_nodes import live_nodes, node_client
from gangline.wire.client.node import NodeClient
from gangline.wire.http.negotiation import answer, path_id, read_record
from gangline.wire.http.query import Flag, Number
from gangline.wire.http.routes import PRINCIPAL, SUBJECT, Route

log = logging.getLogger("gangline.server")

T = TypeVar("T")


class CallerSessions:
    def __init__(self, service: RolloutService, *, clock: Callable[[], float] = time.time) -> None:
        self._service = service
        self._pins: dict[str, NodeView] = {}
        """session id -> its node"""
        self._placed: defaultdict[str, list[float]] = defaultdict(list)
        """node id -> times of placements there that its heartbeat has not counted yet"""
        self._opening: set[str] = set()
        self._clock = clock

    async def open(self, wanted: dict[str, Any], tenant: str | None = None) -> OpenedSession:
        """The node's response. tenant: whose it is; its ids begin with its name. None: an admin's.

        Raises: InvalidRequest if the id does not begin so, Conflict if it is taken on any node, ServerUnavailable if no
        node can take it; the node's errors.
        """
        given = wanted.get("session_id")
        prefix = "" if tenant is None else f"{tenant}."
        session_id = prefix + new_id("session") if given is None else validated_id(str(given), "session_id")
        if not session_id.startswith(prefix):
            raise InvalidRequest(f"session_id: the ids of your tenant's own sessions begin with {prefix!r}.")
        if session_id in self._opening:
            raise _taken(session_id)
        self._opening.add(session_id)
        try:
            if given is not None:
                await self._refuse_taken(session_id)
            opened, self._pins[session_id] = await self._on_least_loaded({**wanted, "session_id": session_id})
        finally:
            self._opening.discard(session_id)
        return opened

    async def _refuse_taken(self, session_id: str) -> None:
        """Raises: Conflict."""
        try:
            await self._service.store.query(self._service.store.session, session_id)
        except NotFound:
            if session_id not in self._pins and await self._found(session_id) is None:
                return
        raise _taken(session_id)

    async def _on_least_loaded(self, wanted: dict[str, Any]) -> tuple[OpenedSession, NodeView]:
        """The opened session, and its node.

        Raises: ServerUnavailable; the error of a node that refuses the request itself.
        """
        nodes = [node for node in await live_nodes(self._service) if not node.draining]
        failures: list[str] = []
        while nodes:
            node = min(nodes, key=self._load)
            nodes.remove(node)
            placed_at = self._clock()
            self._placed[node.node_id].append(placed_at)
            try:
                async with node_client(self._service, node) as client:
                    return await client.open_session(**wanted), node
            except GanglineError as error:
                self._forget(node.node_id, placed_at)
                if not isinstance(error, NodeDraining | TooMany | ServerUnavailable):
                    raise
                log.warning("session.not_placed node=%s message=%s", node.node_id, error)
                failures.append(f"{node.node_id}: {error}")
        raise ServerUnavailable(
            f"no node can take the session ({'; '.join(failures)})."
            if failures
            else "no node that takes sessions has reported in the last minute; start one: `gangline node`."
        )

    def _load(self, node: NodeView) -> float:
        """Sessions on a node: those in its last heartbeat, plus later placements."""
        placed = self._placed[node.node_id]
        placed[:] = uncounted = [at for at in placed if at > node.last_seen_at]
        return node.num_sessions + node.metrics.get("external_sessions", 0.0) + len(uncounted)

    def _forget(self, node_id: str, placed_at: float) -> None:
        with suppress(ValueError):  # a heartbeat has counted it
            self._placed[node_id].remove(placed_at)

    async def on_its_node(self, session_id: str, ask: Callable[[NodeClient], Awaitable[T]]) -> T:
        """Raises: NotFound if no node has the session; as `ask`."""
        node = self._pins.get(session_id) or await self._found(session_id)
        if node is None:
            raise NotFound(f"no node that answers has a session {session_id!r} of its caller's own.")
        async with node_client(self._service, node) as client:
            try:
                return await ask(client)
            except NotFound:
                self._pins.pop(session_id, None)  # the node deleted it after its time to live
                raise

    async def _found(self, session_id: str) -> NodeView | None:
        """The live node that has the session."""

        async def has(node: NodeView) -> bool:
            async with node_client(self._service, node) as client:
                try:
                    await client.session(session_id)
                except GanglineError:
                    return False
                return True

        nodes = await live_nodes(self._service)
        answers = await asyncio.gather(*map(has, nodes))
        holder = next((node for node, found in zip(nodes, answers, strict=True) if found), None)
        if holder is not None:
            self._pins[session_id] = holder
        return holder


def _taken(session_id: str) -> Conflict:
    return Conflict(f"session {session_id!r} exists already; its key is returned only once.")


class CallerSessionRoutes:
    def __init__(self, sessions: CallerSessions) -> None:
        self._sessions = sessions

    async def open(self, request: web.Request) -> web.Response:
        opened = await self._sessions.open(await read_record(request, dict[str, Any]), PRINCIPAL.get().bound_to)
        SUBJECT.set(opened.session_id)
        return answer(request, opened)

    async def wait(self, request: web.Request) -> web.Response:
        timeout_s = TIMEOUT.read(request)
        session_id = path_id(request, "session_id")
        return answer(
            request, await self._sessions.on_its_node(session_id, lambda node: node.wait_session(session_id, timeout_s))
        )

    async def finalize(self, request: web.Request) -> web.Response:
        session_id = path_id(request, "session_id")
        completions = COMPLETIONS.read(request)
        result = await self._sessions.on_its_node(
            session_id, lambda node: node.finalize(session_id, completions=completions)
        )
        return await asyncio.to_thread(answer, request, result)  # it may be large

    async def abort(self, request: web.Request) -> web.Response:
        session_id = path_id(request, "session_id")
        return answer(
            request, await self._sessions.on_its_node(session_id, lambda node: node.abort_session(session_id))
        )

    def routes(self) -> list[Route]:
        one = "/v1/sessions/{session_id}"
        return [
            Route("POST", "/v1/sessions", self.open,
                  "Open a session for an agent of your own, on the node with the fewest; body as on a node.",
                  answer=OpenedSession, errors=(400, 401, 409, 413, 503)),
            Route("GET", f"{one}/wait", self.wait, "Such a session, once its agent is done.", query=(TIMEOUT,),
                  answer=ExternalView, errors=(400, 401, 404, 503)),
            Route("POST", f"{one}/finalize", self.finalize, "Close such a session; its result.", answer=SessionResult,
                  query=(COMPLETIONS,), errors=(400, 401, 404, 409, 503)),
            Route("POST", f"{one}/abort", self.abort, "Close such a session and discard its records.",
                  answer=ExternalView, errors=(400, 401, 404, 409, 503)),
        ]  # fmt: skip


TIMEOUT = Number("timeout_s", "Seconds to wait.", default=60.0)
COMPLETIONS = Flag("completions", "1: with every captured call.")
