"""Common parts of the engine clients: a pool of HTTP connections and the mapping of engine errors. Also the base of
clients that talk to one server: its connections, the last probe's result, and closing."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, cast

import aiohttp
import msgspec

from gangline.domain.errors import ContextOverflow, EngineError, EngineMalformed, EngineRefused, EngineUnavailable
from gangline.domain.open_files import out_of_files
from gangline.models.engines.contract import EngineCapabilities, EngineDelta, EngineReply, EngineRequest, whole_deltas
from gangline.models.engines.replies import ModelCard, ModelList, decode
from gangline.wire.http.event_stream import SseEvents

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}

SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
"""Headers by which balancers keep a session at one replica: vLLM's router and our own engine server read the first,
SGLang's model gateway the second."""

_DONE = b"[DONE]"
_OF_EVENTS = (b":", b"data", b"event", b"id", b"retry", b"\xef")
"""First bytes of an event stream."""
_HEAD_BYTES = 120

_PIECE_BYTES = 128 << 10
"""A longer body is sent in pieces of this size: a socket copies the part that it cannot send at once."""

_READ_BYTES = 1 << 20
"""Bytes of an answer to read ahead: the ids of a long prompt are some hundred kilobytes."""

_MAX_IDLE_S = 4.0
"""vLLM closes connections after five idle seconds, possibly just as the next request is sent."""

_OVERFLOW = re.compile(
    # vLLM, old and new; the engines that Gangline starts
    r"maximum context length"
    r"|maximum model length"
    r"|max_model_len"
    # SGLang
    r"|longer than the model'?s context length"
    r"|exceeds the maximum allowed length"
    r"|exceeds the context length"
    # llama.cpp and providers
    r"|exceeds the available context size"
    r"|prompt is too long",
    re.IGNORECASE,
)

_CHAT = "/v1/chat/completions"

_OWN_SAMPLING = (
    ". NeMo RL's server (`expose_http_server`) answers so to a call whose temperature, top_p or top_k is not the "
    "trainer's own. Train with temperature 1 and top_p 1, and have each call sampled so: "
    '`"capture": {"sampling": {"temperature": {"override": 1}, "top_p": {"override": 1}, "top_k": {"override": -1}}}`'
)


def call_headers(request: EngineRequest) -> dict[str, str]:
    """Headers of a model call, for balancers and for traces."""
    headers: dict[str, str] = {}
    if request.session_id is not None:
        headers |= dict.fromkeys(SESSION_HEADERS, request.session_id)
    return headers if request.traceparent is None else {**headers, "traceparent": request.traceparent}


class _Named(msgspec.Struct):
    model: str = ""


class _Length(msgspec.Struct):
    max_model_len: int | None = None


class EngineHttp:
    """One engine at `url` (without `/v1`)."""

    def __init__(
        self, url: str, *, timeout_s: float = 1800.0, connect_timeout_s: float = 10.0, api_key: str | None = None
    ) -> None:
        """timeout_s: longest silence of the engine within one call."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s)
        self._headers = _HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._session: aiohttp.ClientSession | None = None
        self.lists_models = True
        """False once `served_model` finds no list."""

    async def get(self, path: str) -> bytes:
        async with self.request("GET", path, None) as answer:
            return await answer.read()

    async def post(self, path: str, body: bytes | Sequence[bytes], headers: Mapping[str, str] | None = None) -> bytes:
        async with self.request("POST", path, body, headers) as answer:
            return await answer.read()

    async def events(
        self, path: str, body: bytes | Sequence[bytes], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[list[bytes]]:
        """Yields the data of a stream's events, in batches as they arrive, until `[DONE]`. If the server does not
        stream and answers JSON, yields the whole reply as one event.

        Raises: like `request`, also EngineUnavailable when the stream ends early, and EngineMalformed when it is not a
        stream.
        """
        events, head, has_events = SseEvents(), b"", False
        async with self.request("POST", path, body, headers) as response:
            async for piece in response.content.iter_any():
                if not head and (head := piece.lstrip()[:_HEAD_BYTES]).startswith(b"{"):
                    yield [piece + await response.content.read()]
                    return
                found = events.feed(piece)
                has_events = has_events or bool(found)
                if _DONE in found:
                    yield found[: found.index(_DONE)]
                    return
                if found:
                    yield found
        found = events.finish()
        if _DONE not in found:
            if not has_events and not found and head and not head.startswith(_OF_EVENTS):
                raise EngineMalformed(
                    f"engine {self.url} answered with no stream: got {head.decode(errors='replace')!r}"
                )
            raise EngineUnavailable(f"engine {self.url} ended its stream before it was done")
        yield found[: found.index(_DONE)]

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | Sequence[bytes] | None, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """body: whole, or in pieces to send in order. headers: see `call_headers`.

        Raises: EngineUnavailable when the engine does not answer or the connection breaks, EngineMalformed for
        malformed HTTP, TooManyFiles, and the error of `refusal` for a status."""
        try:
            pieces = [body] if isinstance(body, bytes) else body or []
            data = body
            sent = dict(headers or {})
            if (num_bytes := sum(map(len, pieces))) > _PIECE_BYTES:
                data, sent["Content-Length"] = _sent_in_pieces(pieces), str(num_bytes)
            elif body is not None:
                data = b"".join(pieces)
            async with (
                _Silence(self._timeout_s) as silence,
                self._opened().request(
                    method, self.url + path, data=data, headers=sent, allow_redirects=False
                ) as response,
            ):
                silence.broken_by(response)
                if response.status >= 300:
                    raise self.refusal(response.status, await response.read())
                yield response
        except aiohttp.ClientResponseError as error:
            why = f"engine {self.url} answered {method} {path} with malformed HTTP: {error.message}"
            raise EngineMalformed(why) from error
        except (aiohttp.ClientError, ValueError, TimeoutError, OSError) as error:
            if (no_files := out_of_files(error)) is not None:  # a limit of this process, not an error of the engine
                raise no_files from error
            why = str(error) or type(error).__name__
            raise EngineUnavailable(f"engine {self.url} did not answer {method} {path}: {why}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_MAX_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_READ_BYTES,
                timeout=self._timeout,
                headers=self._headers,
            )
        return self._session

    async def check_health(self, timeout_s: float) -> None:
        """Raises: EngineUnavailable when the engine is down, or does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self.get("/health")
                except EngineRefused:
                    await self._check_known_route()  # not every server has `/health`
        except EngineRefused as refused:
            raise EngineUnavailable(refused.message) from refused
        except TimeoutError as late:
            raise EngineUnavailable(f"engine {self.url} did not answer a health check in {timeout_s:g} s") from late

    async def _check_known_route(self) -> None:
        try:
            await self.get("/v1/models" if self.lists_models else _CHAT)
        except EngineRefused as refused:
            if self.lists_models or refused.details.get("status") != 405:  # the route exists, for POST
                raise

    async def served_model(self, wanted: str | None) -> ModelCard:
        """Returns the engine's description of the model `wanted`, or of the first listed model. Without a list,
        describes `wanted` or the model named in its replies.

        Raises: EngineRefused when the engine does not serve it, or does not name it.
        """
        try:
            listed = await self.get("/v1/models")
        except EngineRefused as error:
            if error.details.get("status") != 404:
                raise
            self.lists_models = False
            name = await self._name_in_reply() if wanted is None else wanted
            return ModelCard(name, await self._max_context(name))
        self.lists_models = True
        cards = decode(listed, ModelList, self.url).data
        found = [card for card in cards if wanted in (None, card.id)]
        if not found:
            known = ", ".join(card.id for card in cards) or "none"
            raise EngineRefused(f"engine {self.url} does not serve {wanted!r}; it serves: {known}.", status=404)
        return found[0]

    async def _name_in_reply(self) -> str:
        """vLLM accepts a call without a model's name, and names its model in the reply. Raises: EngineRefused."""
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 1.0, "top_p": 1.0}
        try:
            named = decode(await self.post(_CHAT, msgspec.json.encode(asked)), _Named, self.url).model
        except (EngineRefused, EngineMalformed) as error:
            if error.details.get("status") in (401, 403):
                raise
            why = "it has no chat route either" if error.details.get("status") == 404 else error.message
        else:
            if named:
                return named
            why = "its replies name none"
        raise EngineRefused(
            f"engine {self.url} has no /v1/models, and nobody can know which model it serves: {why}. Name the URL of "
            "an engine; or, if it is one, its model: `--engine-kind vllm --engine-options '{\"model\": NAME}'`.",
            status=404,
            lists_models=False,
        )

    async def _max_context(self, model: str) -> int | None:
        """As reported by vLLM's `/tokenize`; None without that route."""
        try:
            answer = await self.post("/tokenize", msgspec.json.encode({"model": model, "prompt": "x"}))
            return decode(answer, _Length, self.url).max_model_len
        except EngineError:
            return None

    def refusal(self, status: int, body: bytes) -> EngineError:
        """The error in a body that is not a reply."""
        message, code = _error_fields(body)
        text = f"engine {self.url} answered {status}: {message}"
        if code == "context_length_exceeded" or _OVERFLOW.search(message):
            return ContextOverflow(message)
        if status >= 500 or status in (408, 425, 429):
            is_assertion = message == "Internal Server Error" and not self.lists_models
            return EngineUnavailable(text + (_OWN_SAMPLING if is_assertion else ""), status=status)
        return EngineRefused(text, status=status)

    async def close(self) -> None:
        """Open calls fail with EngineUnavailable."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


class _Silence:
    """Ends a request with TimeoutError when the engine is silent for `limit_s` seconds, or up to an eighth more.

    aiohttp's own limit (`sock_read`) sets and cancels a timer for each received piece, hundreds in a stream. This class
    checks periodically instead.
    """

    _NUM_LOOKS = 8

    def __init__(self, limit_s: float) -> None:
        self._pause_s = limit_s / self._NUM_LOOKS
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._response: aiohttp.ClientResponse | None = None
        self._num_bytes = 0
        """Bytes at the last check."""
        self._num_quiet = 0
        """Checks in a row without new bytes."""

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(self._pause_s, self._look)
        return self

    async def __aexit__(self, *raised: Any) -> bool | None:
        self._timer.cancel()
        return await self._limit.__aexit__(*raised)

    def broken_by(self, response: aiohttp.ClientResponse) -> None:
        """Call it once the head of the answer has arrived."""
        self._response = response
        self._num_quiet = 0

    def _look(self) -> None:
        num_bytes = 0 if self._response is None else self._response.content.total_bytes
        self._num_quiet = self._num_quiet + 1 if num_bytes == self._num_bytes else 0
        self._num_bytes = num_bytes
        if self._num_quiet < self._NUM_LOOKS:
            self._timer = self._loop.call_later(self._pause_s, self._look)
        else:
            self._limit.reschedule(self._loop.time())


async def _sent_in_pieces(pieces: Sequence[bytes]) -> AsyncGenerator[bytes | memoryview]:
    """Long pieces are split and short ones joined. Yields to other tasks even if the socket takes everything at once,
    as on one machine, since that copies megabytes."""
    await asyncio.sleep(0)  # making the body took a slice of the event loop's time
    short, num_short = list[bytes](), 0
    for piece in pieces:
        if num_short + len(piece) <= _PIECE_BYTES:
            short.append(piece)
            num_short += len(piece)
            continue
        yield b"".join(short)
        short, num_short = [], 0
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
            await asyncio.sleep(0)
    yield b"".join(short)


def _error_fields(body: bytes) -> tuple[str, str]:
    """(message, code) of an error body in OpenAI's shape or vLLM's older flat one; both empty for others."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return body[:500].decode("utf-8", "replace"), ""
    inner: object = fields.get("error")
    if isinstance(inner, dict):
        fields = cast("dict[str, Any]", inner)
    elif isinstance(inner, str):
        return inner, ""
    return str(fields.get("message") or fields.get("detail") or body[:500].decode("utf-8", "replace")), str(
        fields.get("code") or ""
    )


class EngineClient(ABC):
    """Base of `Engine` implementations. Owns the connections."""

    def __init__(self, http: EngineHttp, model: str | None) -> None:
        """model: served name; None takes the first listed model."""
        self._http = http
        self.url = http.url
        self._model = model
        self._capabilities: EngineCapabilities | None = None
        self._probing = asyncio.Lock()

    @abstractmethod
    async def probe(self) -> EngineCapabilities: ...

    @abstractmethod
    async def chat(self, request: EngineRequest) -> EngineReply: ...

    async def capabilities(self) -> EngineCapabilities:
        async with self._probing:
            return self._capabilities or await self.probe()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """The whole reply, as one delta per choice."""
        for delta in whole_deltas(await self.chat(request)):
            yield delta

    async def check_health(self, timeout_s: float) -> None:
        await self._http.check_health(timeout_s)

    async def close(self) -> None:
        await self._http.close()

    async def _model_name(self) -> str:
        if self._model is None:
            self._model = (await self._http.served_model(self._model)).id
        return self._model


async def server_version(http: EngineHttp, *paths: str) -> str:
    """The `version` from the first of these routes that answers, or an empty string."""
    for path in paths:
        try:
            return str(decode(await http.get(path), dict[str, Any], http.url).get("version", ""))
        except EngineError:
            continue
    return ""
