"""Routes of the sessions that callers open on a node, and of the agents in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
import numpy as np
from aiohttp import web
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

from gangline.domain.conversation import SamplingParams
from gangline.domain.errors import GanglineError, InvalidRequest, Unauthorized
from gangline.domain.node_views import ExternalView, OpenedSession
from gangline.domain.session import SessionResult
from gangline.domain.tokens import TokenIds, encode_json
from gangline.models.engines.replies import plain_ids
from gangline.node.calls.session import key_digest
from gangline.node.calls.token_call import TokenCall, TokenReply, TokenRequest
from gangline.node.external.sessions import ClaimRequest, ExternalSessions, SessionRequest
from gangline.wire.http.listening import read_body
from gangline.wire.http.negotiation import answer, path_id, read_record
from gangline.wire.http.query import Flag, Number
from gangline.wire.http.routes import SUBJECT, Route

MAX_GENERATE_BYTES = 8 << 20
_LONG_BYTES = 64 << 10
_GONE = "client disconnected"


class TokenSampling(BaseModel):
    """How to sample. Unset fields use the engine's defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int | None = Field(default=None, gt=0, validation_alias=AliasChoices("max_tokens", "max_new_tokens"))
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class GenerateRequest(BaseModel):
    """Body of `POST /s/{session}/generate`: exact prompt ids."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_ids: Annotated[list[int], Field(min_length=1)] = Field(
        validation_alias=AliasChoices("prompt_ids", "input_ids")
    )
    sampling_params: TokenSampling = TokenSampling()
    stream: bool = False

    def as_call(self, prompt_ids: TokenIds) -> TokenRequest:
        """`prompt_ids`: used in place of the request's own."""
        sampling = SamplingParams(**self.sampling_params.model_dump())
        return TokenRequest(prompt_ids=prompt_ids, sampling=sampling, stream=self.stream)


def _call(body: bytes) -> TokenRequest:
    """Raises: InvalidRequest, ValidationError."""
    wanted = GenerateRequest.model_validate_json(body)
    return wanted.as_call(_ids(wanted.prompt_ids))


def _long_call(body: bytes) -> TokenRequest:
    """Like `_call`, without a Python object for each id, which would block the event loop from any thread.

    Raises: InvalidRequest, ValidationError.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}.") from error
    names = [name for name in ("prompt_ids", "input_ids") if name in fields]
    rest = sum(len(memoryview(value)) for name, value in fields.items() if name not in names)
    if len(names) != 1 or rest > _LONG_BYTES:
        raise InvalidRequest(
            f"a body of more than {_LONG_BYTES} bytes must be prompt_ids, and at most {_LONG_BYTES} bytes besides.",
            param="prompt_ids",
        )
    ids = plain_ids(bytes(fields[names[0]]))
    if ids is None:
        raise InvalidRequest("prompt_ids must be whole numbers from 0 to 2147483647.", param="prompt_ids")
    wanted = GenerateRequest.model_validate_json(msgspec.json.encode(fields | {names[0]: [0]}))
    return wanted.as_call(ids)


def _ids(values: list[int]) -> TokenIds:
    """Raises: InvalidRequest."""
    try:
        ids = np.array(values, dtype=np.int32)
    except OverflowError:
        ids = np.array([-1], dtype=np.int32)
    if (ids < 0).any():
        raise InvalidRequest("prompt_ids must be whole numbers from 0 to 2147483647.", param="prompt_ids")
    return ids


class SessionRoutes:
    """model: returns the name of the model that the node's engines serve.
    public_url: how agents reach the node; None: as the opener reached it.
    """

    def __init__(
        self, sessions: ExternalSessions, model: Callable[[], Awaitable[str]], public_url: str | None = None
    ) -> None:
        self._sessions = sessions
        self._model = model
        self._public_url = public_url

    def routes(self) -> list[Route]:
        one = "/v1/sessions/{session}"
        return [
            Route("POST", "/v1/sessions", self.create, "Open a session; only this answer contains its key.",
                  body=SessionRequest, answer=OpenedSession, errors=(400, 401, 409, 429, 502, 503)),
            Route("GET", "/v1/sessions", self.all, "The sessions that callers opened.", answer=list[ExternalView]),
            Route("GET", one, self.view, "One of them.", answer=ExternalView, errors=(400, 401, 404)),
            Route("GET", f"{one}/wait", self.wait, "The same, once its agent is done.", answer=ExternalView,
                  query=(_TIMEOUT,), errors=(400, 401, 404)),
            Route("POST", f"{one}/finalize", self.finalize, "Close it; its result.", answer=SessionResult,
                  query=(_COMPLETIONS,), errors=(400, 401, 404, 409)),
            Route("POST", f"{one}/abort", self.abort, "Close it and discard its records.", answer=ExternalView,
                  errors=(400, 401, 404, 409)),
            Route("DELETE", one, self.abort, "The same.", answer=ExternalView, errors=(400, 401, 404, 409)),
            Route("POST", f"{one}/complete", self.complete, "The agent's report of its end, with its claim.", "session",
                  ClaimRequest, errors=_OF_AGENTS),
            *self._below("/s/{session}"),
            *self._below("/sessions/{session}"),
        ]  # fmt: skip

    def _below(self, base: str) -> list[Route]:
        """Returns the agent's own routes, next to its model calls."""
        same = "The same, below its base URL."
        return [
            Route("POST", f"{base}/complete", self.complete, same, "session", ClaimRequest, errors=_OF_AGENTS),
            Route("POST", f"{base}/generate", self.generate, "A call in tokens.", "session", GenerateRequest,
                  answer=TokenReply, errors=_OF_AGENTS),
        ]  # fmt: skip

    # -- the owner's side ----------------------------------------------------------------------------------------

    async def create(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_record(request, SessionRequest)
        origin = (self._public_url or str(request.url.origin())).rstrip("/")
        opened = await self._sessions.create(wanted, origin, await self._model())
        SUBJECT.set(opened.session_id)
        return answer(request, opened)

    async def all(self, request: web.Request) -> web.StreamResponse:
        return answer(request, self._sessions.views())

    async def view(self, request: web.Request) -> web.StreamResponse:
        return answer(request, self._sessions.view(path_id(request, "session")))

    async def wait(self, request: web.Request) -> web.StreamResponse:
        timeout_s = _TIMEOUT.read(request)
        return answer(request, await self._sessions.wait(path_id(request, "session"), timeout_s))

    async def finalize(self, request: web.Request) -> web.StreamResponse:
        completions = _COMPLETIONS.read(request)
        result = await self._sessions.finalize(path_id(request, "session"))
        if not completions:
            result = msgspec.structs.replace(result, completions=())
        return await asyncio.to_thread(answer, request, result)  # may be large

    async def abort(self, request: web.Request) -> web.StreamResponse:
        return answer(request, await self._sessions.abort(path_id(request, "session")))

    # -- the agent's side ----------------------------------------------------------------------------------------

    async def complete(self, request: web.Request) -> web.StreamResponse:
        session_id = path_id(request, "session")
        self._sessions.authorised(session_id, key_digest(_key_of(request)))
        await self._sessions.complete(session_id, await read_record(request, ClaimRequest))
        return answer(request, {"status": "completed"})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        session = self._sessions.authorised(path_id(request, "session"), key_digest(_key_of(request)))
        body = await read_body(request, MAX_GENERATE_BYTES) or b"{}"
        # In a thread: NumPy releases the interpreter's lock, so the event loop continues.
        wanted = await asyncio.to_thread(_long_call, body) if len(body) > _LONG_BYTES else _call(body)
        call = session.start_tokens(wanted)
        try:
            if wanted.stream:
                return await _stream(request, call)
            return answer(request, await call.reply())
        finally:
            call.abort(_GONE)  # does nothing if the call has ended


_IDLE_S = 60.0
_TIMEOUT = Number("timeout_s", "Seconds to wait.", default=60.0)
_COMPLETIONS = Flag("completions", "1: with every captured call.")
_OF_AGENTS = (400, 401, 403, 404, 409, 429, 502, 503)


def _key_of(request: web.Request) -> str:
    """Returns the session's key, from any header in which a provider's SDK sends one. Raises: Unauthorized."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    found = key if scheme.lower() == "bearer" else ""
    found = found or request.headers.get("x-api-key", "") or request.headers.get("x-goog-api-key", "")
    if not found.strip():
        raise Unauthorized("send the session's key as `Authorization: Bearer KEY`.")
    return found.strip()


async def _stream(request: web.Request, call: TokenCall) -> web.StreamResponse:
    """Sends events `{output_ids, logprobs}` as tokens arrive, then the whole reply, then `[DONE]`."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    async with aclosing(call.news(_IDLE_S)) as news:
        async for pieces in news:
            if pieces and not response.prepared:
                await response.prepare(request)
            for piece in pieces:
                await response.write(_event(piece))
    try:
        last = _event(await call.reply())
    except GanglineError as error:
        if not response.prepared:
            raise
        last = _event({"error": error.failure()})
    if not response.prepared:
        await response.prepare(request)
    await response.write(last + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(record: Any) -> bytes:
    return b"data: " + encode_json(record) + b"\n\n"
