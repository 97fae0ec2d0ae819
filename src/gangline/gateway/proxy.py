"""The routes that harnesses call: a session's own path, or the key alone. Answers in the provider's shapes, always.

The key of a session opens that session's model calls and nothing else. What is not served is answered in the shape
that the client understands, and names what is.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from aiohttp import ClientConnectionResetError, web

from gangline.dialects.chat import ChatDialect
from gangline.dialects.contract import Dialect, EventWriter
from gangline.domain.conversation import ModelCall
from gangline.domain.errors import GanglineError, LimitExceeded, NodeError, NotFound, Unauthorized
from gangline.gateway.calls import CallInFlight
from gangline.gateway.model_session import ModelSession

__all__ = ["Proxy"]

_log = logging.getLogger("gangline.proxy")

_SERVED = "OpenAI Chat (`/v1/chat/completions`, `/v1/models`)"

_OTHER_DIALECTS = ("messages", "messages/count_tokens", "responses", "completions", "embeddings")

_GONE = "client disconnected"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """The model routes of one node. Mount `routes()` on an application whose runner has `handler_cancellation`."""

    def __init__(self, *, max_body_bytes: int = 64 << 20) -> None:
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[str, ModelSession] = {}
        self._by_key: dict[bytes, ModelSession] = {}
        self._chat = ChatDialect()

    def add(self, session: ModelSession) -> None:
        self._sessions[session.session_id] = session
        self._by_key[session.key_digest] = session

    def remove(self, session_id: str) -> None:
        """Its key is dead from now on. Unknown ids are no error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._by_key.pop(session.key_digest, None)

    def routes(self) -> list[web.RouteDef]:
        chat = self._chat
        routes = [web.head("/", _alive), web.head("/api/hello", _alive), web.head("/s/{session}", _alive)]
        for base in ("/s/{session}", ""):
            routes += [
                web.post(f"{base}/v1/chat/completions", _in_shape(chat, self._call)),
                web.get(f"{base}/v1/models", _in_shape(chat, self._models), allow_head=False),
                web.get(base + "/v1/models/{model:.+}", _in_shape(chat, self._model), allow_head=False),
            ]
        routes += [web.route("*", f"/v1/{path}", _in_shape(chat, _not_served)) for path in _OTHER_DIALECTS]
        routes += [web.route("*", "/v1beta/{tail:.*}", _in_shape(chat, _not_served))]
        return [*routes, web.route("*", "/s/{session}{tail:(/.*)?}", _in_shape(chat, _not_served))]

    # -- model calls ---------------------------------------------------------------------------------------------

    async def _call(self, request: web.Request) -> web.StreamResponse:
        session = self._authorised(request)
        call = self._chat.parse_call(await self._body(request))
        flight = session.start_call(call)
        try:
            if call.stream:
                return await self._stream(request, flight)
            reply = await flight.reply()
            return _json(self._chat.reply_body(call, reply))
        finally:
            flight.abort(_GONE)  # nothing to abort where the call has ended

    async def _stream(self, request: web.Request, flight: CallInFlight) -> web.StreamResponse:
        """Until the first event, an error is a plain answer with its status; after it, an event of the stream."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        writer = self._writer(flight.call, flight)
        try:
            async with aclosing(flight.deltas()) as deltas:
                async for delta in deltas:
                    await _begin(request, response)
                    await response.write(writer.delta(delta))
            last = writer.finish(await flight.reply())
        except GanglineError as error:
            if not response.prepared:
                raise
            last = writer.error(error)
        await _begin(request, response)
        await response.write(last)
        await response.write_eof()
        return response

    def _writer(self, call: ModelCall, flight: CallInFlight) -> EventWriter:
        return self._chat.event_writer(
            call, reply_id=flight.record_key, model=call.model, created_at=int(flight.created_at)
        )

    async def _body(self, request: web.Request) -> bytes:
        """Raises: LimitExceeded."""
        body = bytearray()
        if (request.content_length or 0) <= self._max_body_bytes:
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > self._max_body_bytes:
                    break
            else:
                return bytes(body)
        raise LimitExceeded(f"the request body is longer than {self._max_body_bytes} bytes")

    # -- side routes ---------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        capabilities = await self._authorised(request).engine.capabilities()
        return _json(self._chat.model_list([capabilities.model]))

    async def _model(self, request: web.Request) -> web.StreamResponse:
        capabilities = await self._authorised(request).engine.capabilities()
        model = request.match_info["model"]
        if model != capabilities.model:
            raise NotFound(f"the model {model!r} does not exist; this session is served {capabilities.model!r}.")
        return _json(self._chat.model_card(model))

    # -- keys ----------------------------------------------------------------------------------------------------

    def _authorised(self, request: web.Request) -> ModelSession:
        """Raises: Unauthorized, in the same words for a wrong key, another session's key and an unknown session."""
        key = _digest(_bearer(request))
        session_id = request.match_info.get("session")
        session = self._by_key.get(key) if session_id is None else self._sessions.get(session_id)
        if session is None or not hmac.compare_digest(session.key_digest, key):
            raise Unauthorized("Incorrect API key provided: it is not the key of this session, or the session is over.")
        return session


def _bearer(request: web.Request) -> str:
    """Raises: Unauthorized."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("You didn't provide an API key: send the session's key as `Authorization: Bearer KEY`.")
    return key.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


async def _begin(request: web.Request, response: web.StreamResponse) -> None:
    if not response.prepared:
        await response.prepare(request)


async def _alive(request: web.Request) -> web.StreamResponse:
    return web.Response()


async def _not_served(request: web.Request) -> web.StreamResponse:
    raise NotFound(f"{request.method} {request.path} is not served here. Served: {_SERVED}.")


def _in_shape(dialect: Dialect, answer: Answer) -> Answer:
    """Answer every error in the dialect's own shape."""

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await answer(request)
        except GanglineError as error:
            known = error
        except (web.HTTPException, ClientConnectionResetError):
            raise
        except Exception as error:  # the boundary: a client must be told in a shape that it understands
            _log.exception("proxy.internal_error path=%s", request.path)
            known = NodeError(f"{type(error).__name__}: {error}")
        shaped = dialect.error_answer(known)
        return web.Response(
            body=shaped.body, status=shaped.status, headers=dict(shaped.headers), content_type="application/json"
        )

    return handler
