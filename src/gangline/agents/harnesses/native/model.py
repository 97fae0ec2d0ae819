"""The model client of a native agent: OpenAI Chat over HTTP, without streaming.

vLLM and SGLang refuse a call whose prompt and `max_tokens` together exceed the context, and use the rest of the context
for a call without `max_tokens`. The agent's `max_tokens` is only an upper limit, so it is omitted after the first such
refusal: the conversation only grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from gangline.domain.errors import HarnessError

Message = dict[str, Any]
"""A message of the Chat API, sent back exactly as received."""

_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
_CONTEXT_EXCEEDED = "context_length_exceeded"
_MAX_RETRIES = 2
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0


class CalledTool(msgspec.Struct, frozen=True):
    """One tool call of a reply."""

    call_id: str
    """Empty if the reply has no id."""
    name: str
    arguments: str
    """Exactly as the model wrote them."""


class ModelReply(msgspec.Struct, frozen=True):
    """The model's reply, and how it ended."""

    message: Message
    text: str
    calls: tuple[CalledTool, ...]
    is_cut_off: bool
    """It was cut off by a token limit."""
    has_unread_calls: bool
    """The model wrote tool calls that could not be parsed; they are part of the text."""


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _Call(msgspec.Struct):
    id: str = ""
    function: _Function = msgspec.field(default_factory=_Function)


class _Said(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: msgspec.Raw
    finish_reason: str | None = None
    parse_status: str = "ok"


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Told(msgspec.Struct):
    code: str | None = None


class _Refused(msgspec.Struct):
    error: _Told = msgspec.field(default_factory=_Told)


class ChatModel:
    """Use as a context manager. It has no timeouts: the session's budget ends a call."""

    def __init__(self, base_url: str, api_key: str, fields: Message) -> None:
        """base_url: ends in `/v1`. fields: added to each request, apart from its messages."""
        self._url = f"{base_url}/chat/completions"
        self._fields = dict(fields)
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> ChatModel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._http.close()

    async def ask(self, messages: Sequence[Message]) -> ModelReply:
        """The model's next reply. Transient errors are retried as often as in the official clients.

        Raises: HarnessError if the call is rejected or not answered.
        """
        try:
            return await self._patiently(messages)
        except _ContextExceeded:
            if self._fields.pop("max_tokens", None) is None:
                raise
            return await self._patiently(messages)

    async def _patiently(self, messages: Sequence[Message]) -> ModelReply:
        """Raises: HarnessError."""
        body = msgspec.json.encode({**self._fields, "messages": messages})
        pause_s = _FIRST_PAUSE_S
        for _ in range(_MAX_RETRIES):
            try:
                return await self._ask(body)
            except _Passing as passing:
                await asyncio.sleep(pause_s if passing.retry_after_s is None else passing.retry_after_s)
                pause_s *= 2
        return await self._ask(body)

    async def _ask(self, body: bytes) -> ModelReply:
        try:
            async with self._http.post(self._url, data=body) as response:
                answer = await response.read()
                if response.status != HTTPStatus.OK:
                    raise _refusal(response.status, response.headers.get("retry-after"), answer)
        except (aiohttp.ClientError, OSError) as error:
            raise _Passing(f"the model call was not answered: {error or type(error).__name__}") from error
        try:
            return _reply(msgspec.json.decode(answer, type=_Answer).choices[0])
        except (msgspec.MsgspecError, IndexError) as error:
            raise HarnessError(f"the model call was not answered with a message: {error}") from error


def _reply(choice: _Choice) -> ModelReply:
    """Raises: MsgspecError."""
    message = msgspec.json.decode(choice.message, type=_Said)
    return ModelReply(
        message=msgspec.json.decode(choice.message, type=Message),
        text=message.content or "",
        calls=tuple(
            CalledTool(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        ),
        is_cut_off=choice.finish_reason == "length",
        has_unread_calls=choice.parse_status != "ok",
    )


class _Passing(HarnessError):
    """A model call failed with a transient error."""

    retry_after_s: float | None = None


class _ContextExceeded(HarnessError):
    """Prompt and `max_tokens`, or the prompt alone, exceed the model's context."""


def _refusal(status: int, retry_after: str | None, answer: bytes) -> HarnessError:
    message = f"the model call was refused with {status}: {answer[:500].decode(errors='replace')}"
    if status not in _PASSING and status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return _ContextExceeded(message) if _code(answer) == _CONTEXT_EXCEEDED else HarnessError(message)
    passing = _Passing(message)
    if retry_after is not None and retry_after.isdecimal():
        passing.retry_after_s = min(float(retry_after), _LONGEST_PAUSE_S)
    return passing


def _code(answer: bytes) -> str | None:
    try:
        return msgspec.json.decode(answer, type=_Refused).error.code
    except msgspec.MsgspecError:
        return None
