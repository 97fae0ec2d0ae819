"""The connector: answers the calls of Harbor's agents, and delivers their rollouts once they have ended.

Laws
- Each call is answered once, over any losses of a connection and restarts of Harbor, the connector or the node: the
  repeat of a call finds its sample. See `rollouts` and `connection`.
- A rollout's session ends when Harbor says that the rollout has; its group is delivered when all of it has.
- What cannot be delivered now is tried again: nothing is dropped. Harbor's records and the node's are kept until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from gangline.domain.errors import Conflict, GanglineError
from gangline.domain.task import TaskRequest
from gangline.domain.views import TaskView
from gangline.interop.harbor.relay.api import HarborApi, HarborRollout
from gangline.interop.harbor.relay.calls import CallAnswers
from gangline.interop.harbor.relay.connection import RelayConnection, RelayPlace
from gangline.interop.harbor.relay.delivery import GroupDelivery
from gangline.interop.harbor.relay.groups import alike, ended_groups
from gangline.interop.harbor.relay.protocol import API_VERSION
from gangline.interop.harbor.relay.rollouts import RolloutBook
from gangline.interop.harbor.relay.sessions import RolloutSessions
from gangline.machine.durable import locked
from gangline.machine.event_loop import call_all
from gangline.machine.private import make_private_folder
from gangline.wire.client.server import ServerClient

log = logging.getLogger("gangline.harbor")

_LOOK_EVERY_S = 2.0


class ConnectorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to connect, and how to deliver."""

    place: RelayPlace
    key: str
    """Harbor's, of its `HARBOR_API_KEY`."""
    folder: Path
    """For what is remembered of this session's rollouts."""
    template: TaskRequest
    """Fields for each delivered task: capture, builder, callback, priority, metadata ..."""
    reward_name: str = "reward"


class ConnectorState(msgspec.Struct, kw_only=True):
    """What the connector is doing, for people."""

    is_connected: bool = False
    trouble: str | None = None
    """Why it waits: for Harbor, for a node, or for the server."""
    num_rollouts: int = 0
    """Rollouts that made calls and have not ended."""
    num_calls: int = 0
    """Calls in flight."""
    num_delivered: int = 0


class Connector:
    """Run `run()` once, inside `connector(...)`."""

    def __init__(
        self,
        spec: ConnectorSpec,
        client: ServerClient,
        harbor_http: aiohttp.ClientSession,
        node_http: aiohttp.ClientSession,
        on_change: Callable[[ConnectorState], None],
        on_delivered: Callable[[TaskView], None],
    ) -> None:
        self.seen = ConnectorState()
        self._troubles: dict[str, str] = {}
        self._on_change = on_change
        self._on_delivered = on_delivered
        self._book = RolloutBook(spec.folder)
        self._harbor = HarborApi(harbor_http, spec.place.url)
        self._sessions = RolloutSessions(client, self._harbor, self._book, spec.template, partial(self._note, "node"))
        answers = CallAnswers(node_http, self._book, self._sessions.of)
        self._connection = RelayConnection(harbor_http, spec.place, answers.answer, self._connected)
        self._delivery = GroupDelivery(client, self._book, spec.template, spec.reward_name)

    async def run(self) -> None:
        """Until it is cancelled. Raises: as `RelayConnection.keep`."""
        await call_all([self._connection.keep(), self._look_forever()])

    async def look(self) -> None:
        """End the sessions of rollouts that have ended, and deliver groups that have."""
        for job_id in self._book.jobs():
            try:
                await self._look_at(job_id)
            except GanglineError as error:  # it is tried again; other jobs go on
                if self._troubles.get(job_id) != error.message:
                    log.warning("harbor.not_delivered job=%s code=%s message=%s", job_id, error.code, error.message)
                self._note(job_id, error.message)
            else:
                self._note(job_id, None)

    async def _look_at(self, job_id: str) -> None:
        rollouts = await self._harbor.rollouts(job_id)
        delivered = await asyncio.to_thread(self._book.delivered, job_id)
        works = [partial(self._end, rollout) for rollout in rollouts]
        works += [partial(self._deliver, job_id, group) for group in ended_groups(rollouts, delivered)]
        failure: GanglineError | None = None
        for work in works:  # what fails is tried again, and holds up nothing else
            try:
                await work()
            except GanglineError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if all(rollout.has_ended for rollout in rollouts):
            await asyncio.to_thread(self._book.forget, job_id, {rollout.id for rollout in rollouts})

    async def _look_forever(self) -> None:
        while True:
            began_at = time.monotonic()
            await self.look()
            self.seen.num_rollouts = sum(not rollout.is_over for rollout in self._book)
            self.seen.num_calls = sum(rollout.num_open for rollout in self._book)
            self._on_change(self.seen)
            await asyncio.sleep(max(_LOOK_EVERY_S, 4 * (time.monotonic() - began_at)))

    async def _end(self, about: HarborRollout) -> None:
        rollout = self._book.find(about.id)
        if rollout is not None and about.has_ended and not rollout.is_over:
            await self._sessions.end(rollout, keep=not about.is_superseded)

    async def _deliver(self, job_id: str, group: Sequence[HarborRollout]) -> None:
        whole = [await self._harbor.rollout(rollout.id) for rollout in group]
        for same in alike(whole):
            task = await self._delivery.deliver(same)
            await self._book.add_delivered(job_id, frozenset(rollout.id for rollout in same))
            self.seen.num_delivered += len(same)
            self._on_delivered(task)

    def _connected(self, why_not: str | None) -> None:
        self.seen.is_connected = why_not is None
        self._note("relay", None if why_not is None else f"the connection to Harbor was lost: {why_not}")

    def _note(self, what: str, trouble: str | None) -> None:
        self._troubles.pop(what, None)
        if trouble is not None:
            self._troubles[what] = trouble
        self.seen.trouble = next(iter(self._troubles.values()), None)
        self._on_change(self.seen)


@asynccontextmanager
async def connector(
    spec: ConnectorSpec,
    client: ServerClient,
    on_change: Callable[[ConnectorState], None],
    on_delivered: Callable[[TaskView], None],
) -> AsyncGenerator[Connector]:
    """A connector and its connections. Raises: StoreError, Conflict if another one works on the folder."""
    await asyncio.to_thread(make_private_folder, spec.folder)
    with ExitStack() as held:
        try:
            held.enter_context(locked(spec.folder / "lock"))
        except BlockingIOError as error:
            raise Conflict(
                f"another connector works on {spec.folder}: stop it, or choose another --session."
            ) from error
        async with _connections(spec) as (harbor_http, node_http):
            yield Connector(spec, client, harbor_http, node_http, on_change, on_delivered)


@asynccontextmanager
async def _connections(spec: ConnectorSpec) -> AsyncGenerator[tuple[aiohttp.ClientSession, aiohttp.ClientSession]]:
    """To Harbor, and to nodes."""
    headers = {"Authorization": f"Bearer {spec.key}", "Harbor-API-Version": API_VERSION}
    jars: dict[str, Any] = {"cookie_jar": aiohttp.DummyCookieJar()}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    skipped = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
    async with (
        aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0), **jars) as harbor_http,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=skipped,
            **jars,
        ) as node_http,
    ):
        yield harbor_http, node_http
