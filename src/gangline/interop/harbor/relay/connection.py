"""The connection to Harbor's relay: opened by us, opened again when it is lost, with a task for each call.

Laws
- A call's answer goes to the connection that the call came by. When that one is lost, the relay has given the call up
  and never takes its answer.
- A lost connection does not cancel its calls: the agent asks again, and then finds the same sample.
- An answer was heard once the relay has answered a ping that was sent after it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec

from gangline.domain.errors import Conflict, GanglineError, ServerUnavailable
from gangline.interop.harbor.relay.api import refusal, unavailable
from gangline.interop.harbor.relay.protocol import Cancelled, RelayedCall, ToRelay, decoded, encoded

log = logging.getLogger("gangline.harbor")

_BEAT_S = 30.0
_LONGEST_PAUSE_S = 10.0
_TAKEN_S = 60.0
"""How long the relay may hold a dead connection of a connector before us."""


class RelaySocket(Protocol):
    """The part of aiohttp's WebSocket that is used."""

    async def receive(self) -> aiohttp.WSMessage: ...
    async def send_str(self, data: str) -> None: ...
    async def ping(self, message: bytes) -> None: ...
    async def pong(self, message: bytes) -> None: ...


class RelayLink:
    """One connection, as its calls see it."""

    def __init__(self, socket: RelaySocket) -> None:
        self._socket = socket
        self._is_lost = False
        self._num_pings = 0
        self._pings: dict[bytes, asyncio.Future[bool]] = {}

    async def send(self, message: ToRelay) -> int:
        """Returns the time, in ns of the monotonic clock; 0 if the connection is lost."""
        if self._is_lost:
            return 0
        sent_ns = time.monotonic_ns()
        try:
            await self._socket.send_str(encoded(message))
        except (aiohttp.ClientError, ConnectionError):
            self.lose()
            return 0
        return sent_ns

    async def is_heard(self) -> bool:
        """Wait until the relay has read everything that was sent before. False if the connection was lost."""
        if self._is_lost:
            return False
        self._num_pings += 1
        number = str(self._num_pings).encode()
        self._pings[number] = answered = asyncio.get_running_loop().create_future()
        try:
            await self._socket.ping(number)
        except (aiohttp.ClientError, ConnectionError):
            self.lose()
        return await answered

    def hear(self, number: bytes) -> None:
        """Take the answer to a ping."""
        answered = self._pings.pop(number, None)
        if answered is not None and not answered.done():
            answered.set_result(True)

    def lose(self) -> None:
        """Idempotent."""
        self._is_lost = True
        for answered in self._pings.values():
            if not answered.done():
                answered.set_result(False)
        self._pings.clear()


Answer = Callable[[RelayedCall, RelayLink], Coroutine[Any, Any, None]]
"""Answers one call, with an error if need be. Raises nothing but cancellation."""


class RelayPlace(NamedTuple):
    """Where calls come from."""

    url: str
    """The Harbor server's."""
    session_id: str
    """Jobs that name it have their calls here."""


class RelayConnection:
    """Run `keep()` once.

    http: has Harbor's key in its headers; closed by its owner. on_change: called with a reason when the connection is
    lost, and with None when it is there.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        place: RelayPlace,
        answer: Answer,
        on_change: Callable[[str | None], None],
        *,
        pause_s: float = 0.5,
    ) -> None:
        self._http = http
        self._place = place
        self._answer = answer
        self._on_change = on_change
        self._pause_s = pause_s
        self._was_there = False

    async def keep(self) -> None:
        """Answer calls until it is cancelled.

        Raises: ServerUnavailable if Harbor does not answer at first, Conflict if another connector holds the session
        then; InvalidRequest, NotFound.
        """
        try:
            async with asyncio.TaskGroup() as calls:
                await self._keep(calls)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _keep(self, calls: asyncio.TaskGroup) -> None:
        while True:
            socket = await self._opened()
            self._was_there = True
            self._on_change(None)
            try:
                why = await self._read(socket, calls)
            finally:
                await socket.close()
            log.warning("harbor.connection_lost url=%s message=%s", self._place.url, why)
            self._on_change(why)
            await asyncio.sleep(self._pause_s)

    async def _opened(self) -> aiohttp.ClientWebSocketResponse:
        pause_s, since = self._pause_s, time.monotonic()
        while True:
            try:
                return await self._dial()
            except Conflict as error:
                if self._was_there:  # by us, as long as the relay has not noticed
                    self._on_change(error.message)
                elif time.monotonic() - since > _TAKEN_S:
                    raise
            except ServerUnavailable:
                if not self._was_there:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _dial(self) -> aiohttp.ClientWebSocketResponse:
        """Raises: as `keep`."""
        url = f"{self._place.url.rstrip('/')}/connect"
        try:
            return await self._http.ws_connect(
                url, params={"session_id": self._place.session_id}, heartbeat=_BEAT_S, autoping=False, max_msg_size=0
            )
        except aiohttp.WSServerHandshakeError as error:
            raise self._refused(error.status) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unavailable(error, self._place.url) from error

    def _refused(self, status: int) -> GanglineError:
        if status != 409:
            return refusal(status, "", self._place.url)
        return Conflict(
            f"another connector answers session {self._place.session_id!r} at {self._place.url}. Stop it, or choose "
            "another --session."
        )

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, calls: asyncio.TaskGroup) -> str:
        """Returns why the connection ended."""
        link, running = RelayLink(socket), dict[str, asyncio.Task[None]]()
        try:
            while True:
                message = await socket.receive()
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._take(message.data, link, running, calls)
                elif message.type is aiohttp.WSMsgType.PING:
                    with suppress(aiohttp.ClientError, ConnectionError):
                        await socket.pong(message.data)
                elif message.type is aiohttp.WSMsgType.PONG:
                    link.hear(bytes(message.data))
                else:
                    return f"{message.type.name.lower()} {socket.close_code or ''} {message.extra or ''}".strip()
        finally:
            link.lose()

    def _take(
        self, text: str, link: RelayLink, running: dict[str, asyncio.Task[None]], calls: asyncio.TaskGroup
    ) -> None:
        try:
            message = decoded(text)
        except msgspec.MsgspecError as error:
            log.error("harbor.message_unknown url=%s message=%s", self._place.url, error)
            return
        if isinstance(message, Cancelled):
            if (task := running.get(message.request_id)) is not None:
                task.cancel()
            return
        task = calls.create_task(self._answer(message, link))
        running[message.request_id] = task
        task.add_done_callback(lambda _: running.pop(message.request_id, None))
