"""Harbor 0.26's relay in memory, as its `server/relay.py` behaves, with connections that die as planned; and a node
that tells retries apart by the node's own rule.

A relay gives up what is in flight on a connection that it loses, takes nothing late, and replays nothing. The messages
that it takes are read as strictly as Harbor reads them.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from gangline.interop.harbor.relay.calls import CallAnswers
from gangline.interop.harbor.relay.connection import RelayConnection, RelayPlace
from gangline.interop.harbor.relay.rollouts import RelayedRollout, RolloutBook, SessionAddress
from gangline.node.calls.retries import Retries, Subscription, mark_of
from gangline.wire.dialects.contract import RawRequest

_MAX_BYTES = 16 << 20
_MAX_UNREAD = 256


class Refused(Exception):
    """The agent's client got an error: it asks again."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code


class BrokenOff(Exception):
    """The agent's client got a part of an answer."""


class _Reply(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["response_start", "response_chunk", "response_end", "error"]
    request_id: str
    status: int = 0
    headers: list[tuple[str, str]] = []
    body_b64: str = ""
    code: str = ""
    message: str = ""


@dataclass
class _Pending:
    rollout_id: str
    connection: FakeSocket | None = None
    start: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    pieces: asyncio.Queue[Any] = field(default_factory=lambda: asyncio.Queue(_MAX_UNREAD))
    has_ended: bool = False

    def fail(self, error: Exception) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        while not self.pieces.empty():
            self.pieces.get_nowait()
        if not self.start.done():
            self.start.set_result(error)
        self.pieces.put_nowait(error)


class Death(NamedTuple):
    """How a connection dies."""

    after: int
    """Messages of the connector that it carries."""
    is_late: int = 0
    """Messages that the connector still sends into the void before it notices."""


class FakeRelay:
    """deaths: of its connections, in order; later ones live."""

    def __init__(self, deaths: Iterable[Death] = ()) -> None:
        self._deaths = iter(deaths)
        self._socket: FakeSocket | None = None
        self._requests: dict[str, _Pending] = {}
        self._is_there = asyncio.Event()
        self.errors: list[str] = []
        self.num_taken = 0
        """Messages of connectors."""

    # -- the connector's side: what aiohttp's session has --------------------------------------------------------

    async def ws_connect(self, url: str, **_options: Any) -> FakeSocket:
        assert url.endswith("/connect")
        if self._socket is not None:
            raise handshake_error(409)
        socket = FakeSocket(self, next(self._deaths, None))
        self.attach(socket)
        return socket

    def attach(self, socket: FakeSocket) -> None:
        self._socket = socket
        self._is_there.set()

    def take(self, socket: FakeSocket, text: str) -> None:
        assert len(text.encode()) <= _MAX_BYTES
        self.num_taken += 1
        reply = msgspec.json.decode(text, type=_Reply)
        pending = self._requests.get(reply.request_id)
        if pending is None or pending.connection is not socket or pending.has_ended:
            return
        if reply.type == "error":
            self.errors.append(reply.code)
            pending.fail(Refused(502, reply.code))
        elif reply.type == "response_start":
            assert 200 <= reply.status <= 599
            assert not pending.start.done(), "Duplicate response_start."
            pending.start.set_result(reply.status)
        else:
            assert pending.start.done(), "Expected response_start first."
            pending.pieces.put_nowait(
                None if reply.type == "response_end" else base64.b64decode(reply.body_b64, validate=True)
            )
            pending.has_ended = reply.type == "response_end"

    def disconnect(self, socket: FakeSocket) -> None:
        if self._socket is socket:
            self._socket = None
            self._is_there.clear()
        for pending in list(self._requests.values()):
            if pending.connection is socket:
                pending.fail(Refused(503, "disconnected"))

    # -- the agent's side -----------------------------------------------------------------------------------------

    async def ask(self, rollout_id: str, target: str, body: bytes, **headers: str) -> bytes:
        """One try of an agent's client. Raises: Refused, BrokenOff."""
        request_id, pending = str(uuid4()), _Pending(rollout_id)
        self._requests[request_id] = pending
        try:
            while self._socket is None:
                await self._is_there.wait()
            pending.connection = self._socket
            message = {"type": "request", "rollout_id": rollout_id, "request_id": request_id, "method": "POST"}
            message |= {"target": target, "body_b64": base64.b64encode(body).decode()}
            self._socket.put(json.dumps({**message, "headers": [[name, value] for name, value in headers.items()]}))
            return await self._answer(pending)
        finally:
            if not pending.has_ended and pending.connection is not None:
                pending.connection.put(json.dumps({"type": "cancel", "request_id": request_id, "reason": "agent"}))
            del self._requests[request_id]

    async def _answer(self, pending: _Pending) -> bytes:
        start = await pending.start
        if isinstance(start, Exception):
            raise start
        answer = b""
        while (piece := await pending.pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise BrokenOff(str(piece))
            answer += piece
        if start >= 400:
            raise Refused(start, answer.decode())
        return answer


class FakeSocket:
    """The connector's end of a connection."""

    close_code = 1006

    def __init__(self, relay: FakeRelay, death: Death | None) -> None:
        self._relay = relay
        self._left = None if death is None else death.after
        self._late = 0 if death is None else death.is_late
        self._inbox: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()

    def put(self, text: str) -> None:
        if self._left != -1:
            self._inbox.put_nowait(aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, text, None))

    def die(self) -> None:
        """The relay loses it now, and we notice later."""
        self._left = -1
        self._relay.disconnect(self)
        if self._late:  # with nothing more to send, its heartbeat notices
            asyncio.get_running_loop().call_later(0.005, self._notice)
        else:
            self._notice()

    def _notice(self) -> None:
        self._inbox.put_nowait(aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None))

    async def receive(self) -> aiohttp.WSMessage:
        return await self._inbox.get()

    async def send_str(self, data: str) -> None:
        await asyncio.sleep(0)
        if self._carries():
            self._relay.take(self, data)

    async def ping(self, message: bytes) -> None:
        if self._carries():
            self._inbox.put_nowait(aiohttp.WSMessage(aiohttp.WSMsgType.PONG, message, None))

    async def pong(self, message: bytes) -> None: ...

    async def close(self) -> None:
        self._left = -1
        self._relay.disconnect(self)

    def _carries(self) -> bool:
        if self._left == 0:
            self.die()
        if self._left is None:
            return True
        if self._left > 0:
            self._left -= 1
            return True
        if self._late:
            self._late -= 1
            if not self._late:
                self._notice()
            return False
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")


def handshake_error(status: int) -> aiohttp.WSServerHandshakeError:
    url = URL("http://relay.test/connect")
    info = aiohttp.RequestInfo(url, "GET", None, url)  # type: ignore[arg-type]
    return aiohttp.WSServerHandshakeError(info, (), status=status, message="Invalid response status")


class _WebSocket:
    """The relay's end of a real connection."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[str] = asyncio.Queue()
        self.put = self.outgoing.put_nowait


class FakeHarbor:
    """A Harbor server for tests: the relay, and its records of rollouts. Serve `app()`."""

    def __init__(self, key: str) -> None:
        self.relay = FakeRelay()
        self.rollouts: dict[str, dict[str, Any]] = {}
        self.unreadable = set[str]()
        """Rollouts whose own record cannot be read."""
        self._key = key
        self._socket: web.WebSocketResponse | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/connect", self._connect),
                web.get("/rollouts", self._list),
                web.get("/rollouts/{id}", self._one),
            ]
        )
        return app

    def begin(self, rollout_id: str, **fields: Any) -> None:
        """A rollout of the one job, in Harbor's words; again: another state of it."""
        before = self.rollouts.get(rollout_id) or {
            "id": rollout_id,
            "job_id": "4f1c0c3e-job",
            "name": f"hello__{rollout_id}",
            "state": "running",
            "retry_ids": [rollout_id],
            "task": {"name": "hello", "digest": "sha256:" + "a" * 64, "source": None},
            "agent": {"name": "claude-code", "version": "2.1"},
            "model": {"name": "anthropic/m", "provider": "anthropic", "reasoning_effort": None},
            "rewards": None,
            "error_type": None,
            "updated_at": "2026-11-30T08:00:00Z",
        }
        self.rollouts[rollout_id] = {**before, **fields}

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    async def drop(self) -> None:
        """Lose the connection."""
        assert self._socket is not None
        await self._socket.close()

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {self._key}":
            return _problem(401, "A valid bearer token is required.")
        if request.headers.get("Harbor-API-Version", "2026-10-30") != "2026-10-30":
            return _problem(400, "Harbor-API-Version must be 2026-10-30.")
        return None

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None or self._socket is not None:
            return refusal or _problem(409, "A client is already connected.")
        self._socket = socket = web.WebSocketResponse(max_msg_size=16 << 20)
        await socket.prepare(request)
        ours: Any = _WebSocket()
        self.relay.attach(ours)
        writer = asyncio.create_task(self._write(socket, ours))
        try:
            async for message in socket:
                self.relay.take(ours, message.data)
        finally:
            writer.cancel()
            self._socket = None
            self.relay.disconnect(ours)
        return socket

    async def _write(self, socket: web.WebSocketResponse, ours: _WebSocket) -> None:
        while True:
            await socket.send_str(await ours.outgoing.get())

    async def _list(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        at, many = int(request.query.get("page_token") or 0), 2
        found = [one for one in self.rollouts.values() if one["job_id"] == request.query["job_ids"]]
        token = str(at + many) if at + many < len(found) else ""
        return web.json_response({"items": found[at : at + many], "total": len(found), "next_page_token": token})

    async def _one(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        found = self.rollouts.get(request.match_info["id"])
        if found is not None and found["id"] in self.unreadable:
            return _problem(500, "Its result cannot be read.")
        if found is None:
            return _problem(404, "No such rollout.")
        whole = {**found, "lock": {"task": found["task"], "agent": found["agent"]["name"]}, "result": None}
        return web.json_response({"rollout": whole})


def _problem(status: int, detail: str) -> web.Response:
    body = {"type": "about:blank", "status": status, "detail": detail, "_tag": "Problem"}
    return web.json_response(body, status=status, content_type="application/problem+json")


class _Flight:
    """A sample: `num_pieces` pieces of text that no other sample has."""

    created_at = 0.0
    num_prompt_tokens = None

    def __init__(self, number: int, num_pieces: int) -> None:
        self.record_key = f"{number:016x}"
        self.pieces = [f"{number}.{at} ".encode() for at in range(num_pieces)]
        self.num_replays = 0
        self.num_sampled = 0
        self.failed = False

    @property
    def whole(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def ended_already(self) -> bool:
        return self.failed or self.num_sampled == len(self.pieces)

    def replayed(self) -> None:
        self.num_replays += 1

    def compact(self) -> None: ...

    def abort(self, _message: str) -> None:
        self.failed = True

    async def reply(self) -> Any:
        raise NotImplementedError

    def news(self, idle_s: float) -> AsyncGenerator[Any, None]:
        raise NotImplementedError


class FakeNode:
    """A session's model calls, as aiohttp's session reaches them. num_pieces: of each answer."""

    def __init__(self, num_pieces: int = 3) -> None:
        self.samples: list[_Flight] = []
        self.keys: list[str] = []
        self.outages: list[Exception] = []
        """Raised by the next requests."""
        self._num_pieces = num_pieces
        self._asked: list[bytes] = []
        self._retries = Retries(self._has_gone_on, grace_s=0.0)

    def request(self, _method: str, url: URL, *, data: Any, headers: Any, **_options: Any) -> _NodeReply:
        if self.outages:
            raise self.outages.pop(0)
        headers = dict(headers)
        assert headers["authorization"] == "Bearer key"
        body = data.read()
        self._asked.append(body)
        self.keys.append(headers["idempotency-key"])
        mark = mark_of("openai_chat", url.path, RawRequest(headers=headers, body=body))
        return _NodeReply(self._retries.subscribe(mark, self._start))

    def _start(self) -> Any:
        self.samples.append(_Flight(len(self.samples), self._num_pieces))
        return self.samples[-1]

    def _has_gone_on(self, flight: Any) -> bool:
        return any(flight.whole in asked for asked in self._asked)


class _NodeReply:
    status = 200

    def __init__(self, subscription: Subscription) -> None:
        self.headers = {"Content-Type": "text/event-stream"}
        self.content = self
        self._subscription = subscription
        self._flight: Any = subscription.flight
        self._num_read = 0

    async def __aenter__(self) -> _NodeReply:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._subscription.leave()

    def at_eof(self) -> bool:
        return self._num_read == len(self._flight.pieces)

    async def readany(self) -> bytes:
        await asyncio.sleep(0)
        if self._flight.failed:
            raise aiohttp.ClientPayloadError("the call was aborted")
        if self.at_eof():
            self._subscription.delivered()
            return b""
        self._num_read += 1
        self._flight.num_sampled = max(self._flight.num_sampled, self._num_read)
        self._subscription.has_sent = True
        return self._flight.pieces[self._num_read - 1]


_ADDRESS = SessionAddress(session_id="session", api_key="key", url="http://node.test/s/session")
_TARGET = "/v1/chat/completions"
_MAX_TRIES = 40


def connector_of(relay: FakeRelay, node: FakeNode, folder: Path, patience_s: float = 300.0) -> RelayConnection:
    """A new connector on the folder of the one before."""
    book = RolloutBook(folder)

    async def session(rollout_id: str) -> tuple[RelayedRollout, SessionAddress]:
        rollout = book.find(rollout_id)
        if rollout is None:
            rollout = RelayedRollout(rollout_id, "job", session=_ADDRESS)
            book.add(rollout)
        return rollout, _ADDRESS

    http: Any = node
    answers = CallAnswers(http, book, session, patience_s=patience_s, pause_s=0.0, apart_s=0.0)
    dialed: Any = relay
    place = RelayPlace("http://relay.test", "training-1")
    return RelayConnection(dialed, place, answers.answer, lambda _why: None, pause_s=0.0)


async def asked(relay: FakeRelay, rollout_id: str, body: bytes) -> bytes:
    """An agent's client, which asks until it has an answer."""
    for _ in range(_MAX_TRIES):
        try:
            return await relay.ask(rollout_id, _TARGET, body)
        except (Refused, BrokenOff):
            await asyncio.sleep(0)
    raise AssertionError("the agent got no answer")


async def stopped(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
