"""The routes that harnesses call, by a session's own path or by the key alone. All answers have the provider's shape.

A session's key opens only that session's model calls. A request's dialect follows from its path, then from its headers.
An unknown route is answered in the client's format, with a list of the known ones.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import lru_cache
from typing import Literal

import msgspec
from aiohttp import ClientConnectionResetError, web

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import (
    Conflict,
    GanglineError,
    LimitExceeded,
    NodeError,
    NotFound,
    RequestTimeout,
    TooMany,
    Unauthorized,
    UnsupportedMediaType,
    UpgradeRefused,
)
from gangline.domain.open_files import out_of_files
from gangline.machine.telemetry.logs import FewRefusals, stays_session_in_logs
from gangline.models.engines.contract import EngineCapabilities
from gangline.node.calls.reading.body import (
    BytesInFlight,
    CallRead,
    TakenBytes,
    is_large,
    read_here,
    role_in,
    too_many_bytes,
)
from gangline.node.calls.reading.pool import Readers
from gangline.node.calls.retries import Answering, Subscription
from gangline.node.calls.session import ModelSession, key_digest
from gangline.node.calls.tool_routes import ToolRoutes
from gangline.settings import plugins
from gangline.settings.node import CallLimits
from gangline.wire.dialects.contract import Dialect, DialectRoute, EventWriter, RawRequest
from gangline.wire.http.listening import LIMITS, read_pieces

_APART_S = 0.1
"""Pause that lets a client read the bytes sent before as a separate chunk."""

_log = logging.getLogger("gangline.proxy")
_log.addFilter(FewRefusals("call.refused"))

_SESSION_ROOTS = ("s", "sessions")
"""A session's base URL is `/s/SESSION`, or `/sessions/SESSION` as in verl's gateway RFC."""

_IN_FRONT = ("anthropic", "api", "gemini", "google", "openai")
"""First segments that clients put before a provider's paths, from the base URLs of routers and gateways."""
_UNVERSIONED = ("chat", "complete", "completions", "embeddings", "messages", "models", "responses", "tokenize")
"""First segments of paths of clients whose base URL should end in `/v1`."""
_ALIAS = re.compile(rf"/(?:(?:{'|'.join(_IN_FRONT)}|v1(?=/v1/)|v1beta(?=/openai/))/)*(?P<rest>.*)")
_INSTEAD = {
    "/v1/complete": "Use /v1/messages",
    "/v1/completions": "Use /v1/chat/completions: a completion of bare text belongs to no conversation",
    "/v1/embeddings": "A session's model samples text; it has no embeddings",
}
"""Provider paths that are not served -> the reason or the replacement."""
_VARIABLE = re.compile(r"\{(\w+)(?::([^{}]+))?\}")


class Match(msgspec.Struct, frozen=True):
    dialect: Dialect
    route: DialectRoute | None
    """None: not served; the dialect shapes the error."""
    request: RawRequest


class DialectRoutes:
    """Finds a request's dialect and route: by path, then, where several dialects share it, by headers."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        """`dialects`: not empty; the first match wins."""
        self._dialects = sorted(dialects, key=lambda dialect: dialect.name != "openai_chat")
        self._table = [(_pattern(route.path), route, dialect) for dialect in self._dialects for route in dialect.routes]
        self.roots = sorted({route.path.split("/")[1] for _, route, _ in self._table} | {*_IN_FRONT, *_UNVERSIONED})
        """First segments of all paths: `v1` and the aliases'."""
        # Clients use a few paths over and over.
        self._served = lru_cache(maxsize=256)(self._find_served)

    @property
    def served(self) -> str:
        """The served dialects and routes, as readable text."""
        return "; ".join(
            f"{dialect.title} ({', '.join(f'`{route.path}`' for route in dialect.routes)})"
            for dialect in self._dialects
        )

    def why_not(self, path: str) -> str:
        """Returns the message for a path that is not served."""
        instead = _INSTEAD.get(_usual(path))
        return f"{instead}. Served" if instead else "Served"

    def find(self, method: str, path: str, request: RawRequest) -> Match:
        """`path`: after the session's prefix, or an alias."""
        path = _usual(path)
        found = self._served(method, path)
        if not found:
            return Match(self._nearest(path, request), None, request)
        route, dialect, params = found[0]
        if len(found) > 1:
            route, dialect, params = next((entry for entry in found if entry[1].speaks(request)), found[0])
        return Match(dialect, route, msgspec.structs.replace(request, params=params))

    def _find_served(self, method: str, path: str) -> list[tuple[DialectRoute, Dialect, dict[str, str]]]:
        """Returns every matching route with the path's variables."""
        return [
            (route, dialect, hit.groupdict())
            for pattern, route, dialect in self._table
            if route.method == method and (hit := pattern.fullmatch(path)) is not None
        ]

    def _nearest(self, path: str, request: RawRequest) -> Dialect:
        """Returns the dialect that has the path with another method, else the match by headers, else the
        first."""
        of_path = [dialect for pattern, _, dialect in self._table if pattern.fullmatch(path)]
        among = of_path or self._dialects
        return next((dialect for dialect in among if dialect.speaks(request)), among[0])


def _usual(path: str) -> str:
    """Returns the provider's own path: `/chat/completions`, `/openai/v1/chat/completions` and `/v1/v1/chat/completions`
    become `/v1/chat/completions`."""
    found = _ALIAS.fullmatch(path)
    rest = found["rest"] if found else path.lstrip("/")
    return f"/v1/{rest}" if rest.split("/")[0] in _UNVERSIONED else f"/{rest}"


def _pattern(path: str) -> re.Pattern[str]:
    """Returns a regular expression for an aiohttp path."""
    pieces: list[str] = []
    at = 0
    for variable in _VARIABLE.finditer(path):
        pieces += [re.escape(path[at : variable.start()]), f"(?P<{variable[1]}>{variable[2] or '[^{}/]+'})"]
        at = variable.end()
    return re.compile("".join(pieces) + re.escape(path[at:]))


class Proxy:
    """The model routes of one node. Mount `routes()` after the node's own routes, on an application whose runner has
    `handler_cancellation`."""

    def __init__(
        self,
        *,
        dialects: Sequence[Dialect] | None = None,
        limits: CallLimits | None = None,
        readers: Readers | None = None,
        keep_alive_s: float = 10.0,
        body_idle_s: float = LIMITS.body_idle_s,
        on_error: Callable[[GanglineError], None] | None = None,
    ) -> None:
        """dialects: None: all that are installed. limits: None: the defaults.
        readers: read large requests; None: they are read on the event loop.
        keep_alive_s: seconds of silence before a stream sends a keep-alive.
        body_idle_s: longest pause in a request's body before the client gets an error.
        on_error: called with every error sent to a client.
        """
        self._on_error = on_error or _ignored
        self._routes = DialectRoutes(_installed() if dialects is None else dialects)
        self._limits = limits or CallLimits()
        self._readers = readers
        self._keep_alive_s = keep_alive_s
        self._body_idle_s = body_idle_s
        self._sessions: dict[str, ModelSession] = {}
        self._by_key: dict[bytes, ModelSession] = {}
        self._in_flight: dict[str, BytesInFlight] = {}

    def add(self, session: ModelSession) -> None:
        """Raises: Conflict when another session with this id is served: its key must keep opening that session
        alone."""
        if self.serves(session.session_id):
            raise Conflict(f"session {session.session_id!r} is open on this node already.")
        self._sessions[session.session_id] = session
        for digest in session.key_digests:
            self._by_key[digest] = session

    def serves(self, session_id: str) -> bool:
        return session_id in self._sessions

    def session(self, session_id: str) -> ModelSession:
        """Raises: NotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound(f"session {session_id!r} takes no model calls here: it has not begun, or is over.")
        return session

    def remove(self, session_id: str) -> None:
        """Stop serving the session; its key is no longer accepted. Unknown ids are ignored."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            for digest in session.key_digests:
                self._by_key.pop(digest, None)
            self._in_flight.pop(session_id, None)

    def routes(self) -> list[web.RouteDef]:
        probes = [web.head(path, _alive) for path in ("/", "/api/hello")]
        probes += [web.head(f"/{root}/{{session}}{end}", _alive) for root in _SESSION_ROOTS for end in ("", "/")]
        tools = ToolRoutes(self.session)
        return [
            *probes,
            *(web.route("*", f"/{root}/{{session}}/mcp/{{environment}}", tools.answer) for root in _SESSION_ROOTS),
            *(web.route("*", f"/{root}/{{session}}{{path:(/.*)?}}", self._answer) for root in _SESSION_ROOTS),
            *(web.route("*", f"/{{path:{root}(/.*)?}}", self._answer) for root in self._routes.roots),
        ]

    def owns(self, path: str) -> bool:
        """Whether the path is below a session or provider root, or empty because it was not parsed: most are calls."""
        root = path.lstrip("/").partition("/")[0]
        return not path or root in _SESSION_ROOTS or root in self._routes.roots

    def shaped_error(self, method: str, path: str, error: GanglineError) -> web.Response:
        """Returns an error for a request that reached no handler, in the shape of its path's dialect."""
        self._on_error(error)
        below = re.sub(rf"^/({'|'.join(_SESSION_ROOTS)})/[^/]*", "", path)
        return _shaped(self._routes.find(method, below, RawRequest()).dialect, error)

    # -- any request ---------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Find the dialect, and answer every error in its shape."""
        raw = RawRequest(
            query=dict(request.query) if request.query_string else {},
            headers={name.lower(): value for name, value in request.headers.items()},
        )
        path = "/" + request.match_info["path"].lstrip("/")
        match = self._routes.find(request.method, path, raw)
        try:
            return await self._dispatch(request, match, path)
        except GanglineError as error:
            return self._refused(request, match, out_of_files(error) or error)
        except (web.HTTPException, ClientConnectionResetError):
            raise
        except Exception as error:  # the boundary: the client needs an error in a shape that it understands
            no_files = out_of_files(error)
            if no_files is None:
                _log.exception("proxy.internal_error path=%s", request.path)
            return self._refused(request, match, no_files or NodeError(f"{type(error).__name__}: {error}"))

    def _refused(self, request: web.Request, match: Match, error: GanglineError) -> web.Response:
        """Kept in its own frame: a frame in the error's traceback would keep the error alive, and with it the other
        frames' contents, such as a body of megabytes, until the garbage collector frees many of them at once."""
        self._on_error(error)
        _log.info("call.refused path=%.200s code=%s message=%s", request.path, error.code, str(error))
        with suppress(Unauthorized):
            _note_refusal(*self._authorised(request, match), match.dialect, error)
        return _shaped(match.dialect, error)

    async def _dispatch(self, request: web.Request, match: Match, path: str) -> web.StreamResponse:
        """Raises: GanglineError."""
        if request.headers.get("Upgrade", "").lower() == "websocket":
            raise UpgradeRefused("WebSocket is not spoken here: send the request over HTTP.")
        route = match.route
        if route is None:
            raise NotFound(
                f"{request.method} {request.path} is not served here. {self._routes.why_not(path)}: "
                f"{self._routes.served}."
            )
        session, of_environment = self._authorised(request, match)
        if route.kind == "models" or route.kind == "model":
            engine = session.engine_of(role_in(match.request))
            return _json(_models(match, route, await engine.capabilities()))
        held = self._in_flight.setdefault(session.session_id, BytesInFlight(self._limits.max_in_flight_bytes))
        async with held.body() as taken:
            body = await self._body(request, taken)
            read = await self._read(session, match, body, "call" if route.kind == "call" else "count", path)
            if route.kind == "count":
                return _json(match.dialect.count_body(len(await session.render(read.call))))
            if route.kind == "tokenize":
                return _json(await _tokenized(session, read.call))
            if of_environment:
                read = msgspec.structs.replace(read, call=msgspec.structs.replace(read.call, of_environment=True))
            return await self._call(request, session, match.dialect, read)

    def _authorised(self, request: web.Request, match: Match) -> tuple[ModelSession, bool]:
        """Returns the session, and whether the key is that of its environments.

        Raises: Unauthorized, with the same message for a wrong key, another session's key and an unknown session.
        """
        given = match.dialect.key_of(match.request)
        if given is None:
            raise Unauthorized("You didn't provide an API key: send the session's key, as `Authorization: Bearer KEY`.")
        key = key_digest(given)
        session_id = request.match_info.get("session")
        session = self._by_key.get(key) if session_id is None else self._sessions.get(session_id)
        fits = [] if session is None else [hmac.compare_digest(one, key) for one in session.key_digests]
        if session is None or not any(fits):
            raise Unauthorized("Incorrect API key provided: it is not the key of this session, or the session is over.")
        return session, not fits[0]

    async def _body(self, request: web.Request, taken: TakenBytes) -> Sequence[bytes | bytearray]:
        """Returns the body in pieces. Raises: LimitExceeded, TooMany, RequestTimeout, InvalidRequest."""
        limit = self._limits.max_body_bytes
        try:
            return await read_pieces(request, limit, idle_s=self._body_idle_s, on_piece=taken.add)
        except TooMany:
            raise
        except LimitExceeded:
            raise too_many_bytes(self._limits) from None

    async def _read(
        self,
        session: ModelSession,
        match: Match,
        pieces: Sequence[bytes | bytearray],
        kind: Literal["call", "count"],
        path: str,
    ) -> CallRead:
        """Raises: LimitExceeded, InvalidRequest, NodeError."""
        if self._readers is not None and is_large(pieces):
            return await self._readers.read(session, match.dialect, match.request, pieces, kind, path, self._limits)
        request = msgspec.structs.replace(match.request, body=b"".join(pieces))
        return read_here(match.dialect, request, kind, path, self._limits)

    # -- model calls ---------------------------------------------------------------------------------------------

    async def _call(
        self, request: web.Request, session: ModelSession, dialect: Dialect, read: CallRead
    ) -> web.StreamResponse:
        call = read.call
        stays_session_in_logs(session.session_id)
        subscription = session.subscribe(call, read.mark, read.known)
        try:
            if call.stream:
                return await self._stream(request, session, dialect, call, subscription)
            response = _json(dialect.reply_body(call, await subscription.flight.reply()))
            await response.prepare(request)
            await response.write_eof()
            subscription.delivered()
            return response
        finally:
            subscription.leave()

    async def _stream(
        self,
        request: web.Request,
        session: ModelSession,
        dialect: Dialect,
        call: ModelCall,
        subscription: Subscription,
    ) -> web.StreamResponse:
        """Before the first byte an error is a plain answer with its status; after it, an event of the stream."""
        flight = subscription.flight
        writer = dialect.event_writer(
            call, reply_id=flight.record_key, model=call.model, created_at=int(flight.created_at)
        )
        response = web.StreamResponse(
            headers={"Content-Type": f"{writer.media_type}; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            async with aclosing(self._events(writer, flight)) as events:
                async for event, is_content in events:
                    subscription.has_sent |= is_content
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(event)
        except GanglineError as error:
            if not response.prepared:
                raise
            error = out_of_files(error) or error
            self._on_error(error)
            _note_refusal(session, call.of_environment, dialect, error)
            if writer.error_stands_alone:
                await asyncio.sleep(_APART_S)
            await response.write(writer.error(error))
            await response.write_eof()
            return response
        await response.write_eof()
        subscription.delivered()
        return response

    async def _events(self, writer: EventWriter, flight: Answering) -> AsyncGenerator[tuple[bytes, bool], None]:
        """Yields bytes to send, and whether they belong to the answer rather than being a keep-alive. Raises:
        GanglineError."""
        has_begun = False
        async with aclosing(flight.news(self._keep_alive_s)) as news:
            async for deltas in news:
                if not deltas:
                    yield writer.keep_alive(), False
                    continue
                begin = b"" if has_begun else writer.start(flight.num_prompt_tokens or 0)
                has_begun = True
                event = begin + b"".join([writer.delta(delta) for delta in deltas])
                if event:
                    yield event, True
        reply = await flight.reply()
        begin = b"" if has_begun else writer.start(reply.usage.num_prompt_tokens)
        yield begin + writer.finish(reply), True


def _installed() -> list[Dialect]:
    return [plugins.made("dialect", name) for name in plugins.usable("dialect")]


def _models(match: Match, route: DialectRoute, capabilities: EngineCapabilities) -> bytes:
    """Raises: NotFound."""
    served, max_context = capabilities.model, capabilities.max_context
    if route.kind == "models":
        return match.dialect.model_list([served], max_context)
    model = match.request.params.get("model", "")
    if model != served:
        raise NotFound(f"the model {model!r} does not exist; this session is served {served!r}.")
    return match.dialect.model_card(model, max_context)


async def _tokenized(session: ModelSession, call: ModelCall) -> bytes:
    """Returns tokens in the format of vLLM's `/tokenize`. Raises: GanglineError."""
    ids = (await session.render(call)).tolist()
    max_context = (await session.engine_of(call.agent_role).capabilities()).max_context
    return msgspec.json.encode({"count": len(ids), "max_model_len": max_context, "tokens": ids, "token_strs": None})


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _note_refusal(session: ModelSession, of_environment: bool, dialect: Dialect, error: GanglineError) -> None:
    if not of_environment:
        session.failures.note_refusal(dialect.title, dialect.error_answer(error).status, error.message)


def _shaped(dialect: Dialect, error: GanglineError) -> web.Response:
    shaped = dialect.error_answer(error)
    # HTTP's own statuses, which a provider's table lacks.
    status = error.status if isinstance(error, (RequestTimeout, UpgradeRefused)) else shaped.status
    headers = dict(shaped.headers) | ({"Upgrade": "HTTP/1.1"} if isinstance(error, UpgradeRefused) else {})
    response = web.Response(body=shaped.body, status=status, headers=headers, content_type="application/json")
    if isinstance(error, (LimitExceeded, RequestTimeout, UnsupportedMediaType, UpgradeRefused)):
        response.force_close()  # the rest of the client's body is not read
    return response


def _ignored(_error: GanglineError) -> None:
    """Default for `on_error`."""


async def _alive(request: web.Request) -> web.StreamResponse:
    return web.Response()
