"""OpenAI's chat replies as engines write them: the parts that all of them share. Pure."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import numpy as np

from gangline.domain.completion import VersionSpan
from gangline.domain.conversation import Message, ToolCall, Usage
from gangline.domain.errors import EngineMalformed
from gangline.domain.reply import TokenLogprob
from gangline.domain.tokens import TokenIds, token_ids
from gangline.models.engines.contract import assistant_message

__all__ = [
    "ModelCard",
    "ModelList",
    "WireFunction",
    "WireLogprobs",
    "WireMessage",
    "WireSpan",
    "WireToolCall",
    "WireUsage",
    "WireValues",
    "decode",
    "function_of",
    "ids_of",
    "logprob_values",
    "message_of",
    "thinking_of",
    "token_logprobs",
    "usage_of",
    "version_spans",
]

WireT = TypeVar("WireT")


_OLD_FORM = -1
"""Index of the one call that is written as `function_call`."""


class WireFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    """Some servers write the object itself."""


class WireToolCall(msgspec.Struct, gc=False):
    index: int | None = None
    """Only in streams; some servers leave it out there, too."""
    id: str | None = None
    function: WireFunction | None = None


class WireMessage(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[WireToolCall] | None = None
    function_call: WireFunction | None = None
    """OpenAI's form before `tool_calls`."""

    @property
    def calls(self) -> list[WireToolCall]:
        if self.function_call is not None and not self.tool_calls:
            return [WireToolCall(_OLD_FORM, None, self.function_call)]
        return self.tool_calls or []


class WireTopLogprob(msgspec.Struct, gc=False):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class WireTokenLogprob(WireTopLogprob, gc=False):
    top_logprobs: list[WireTopLogprob] | None = None


class WireLogprobs(msgspec.Struct, gc=False):
    content: list[WireTokenLogprob] | None = None


class _WireValue(msgspec.Struct, gc=False):
    logprob: float | None = None


class WireValues(msgspec.Struct, gc=False):
    """The log-probs alone: texts, bytes and other candidates are skipped, for only a client that asks wants them."""

    content: list[_WireValue] | None = None


class WireSpan(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class _CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _SampledTokens(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class WireUsage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _CachedTokens | None = None
    completion_tokens_details: _SampledTokens | None = None
    reasoning_tokens: int | None = None
    """SGLang's place for it."""


class ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]


def decode(body: bytes, kind: type[WireT], url: str) -> WireT:
    """Raises: EngineMalformed when the body does not have the expected form."""
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            # Python servers write NaN, which is no JSON; one such log-prob must not cost the whole reply.
            return msgspec.json.decode(msgspec.json.encode(json.loads(body)), type=kind)  # NaN becomes null
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        start = body[:120].decode("utf-8", "replace")
        raise EngineMalformed(f"engine {url} answered with no chat reply: {error}; got {start!r}") from error


def message_of(message: WireMessage | None) -> Message:
    """The assistant's turn; its tool calls have the engine's ids. Raises: EngineMalformed for a call without a name."""
    found = message or WireMessage()
    calls = [ToolCall(call.id or "", *function_of(call)) for call in found.calls]
    if not all(call.name for call in calls):
        raise EngineMalformed("the engine's reply has a tool call without a name")
    return assistant_message(thinking_of(found), found.content or "", calls)


def function_of(call: WireToolCall) -> tuple[str, str]:
    """(name, arguments as text) of a call, or of the piece of one; empty where it has none."""
    function = call.function or WireFunction()
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return function.name or "", arguments or ""


def thinking_of(message: WireMessage) -> str:
    return message.reasoning or message.reasoning_content or ""


def ids_of(values: list[int] | None) -> TokenIds | None:
    return None if values is None else token_ids(values)


def logprob_values(found: WireLogprobs | WireValues | None) -> list[float] | None:
    content = found.content if found is not None else None
    if content is None:
        return None
    return [np.nan if entry.logprob is None else entry.logprob for entry in content]


def token_logprobs(found: WireLogprobs | None) -> tuple[TokenLogprob, ...]:
    content = found.content if found is not None else None
    return tuple(
        TokenLogprob(*_shown(entry), tuple(TokenLogprob(*_shown(top)) for top in entry.top_logprobs or ()))
        for entry in content or ()
    )


def _shown(entry: WireTopLogprob) -> tuple[str, float, tuple[int, ...] | None]:
    # As OpenAI writes "very unlikely": a client must get a number.
    value = -9999.0 if entry.logprob is None or not np.isfinite(entry.logprob) else entry.logprob
    return entry.token, value, None if entry.bytes is None else tuple(entry.bytes)


def version_spans(spans: list[WireSpan] | None) -> tuple[VersionSpan, ...]:
    """Versions that are no numbers (`v7` counts as 7) are left out: unknown."""
    numbered = [(str(span.version).removeprefix("v"), span) for span in spans or ()]
    return tuple(VersionSpan(int(text), span.start, span.end) for text, span in numbered if text.isdecimal())


def usage_of(usage: WireUsage | None) -> Usage | None:
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
    details = usage.completion_tokens_details
    thinking = usage.reasoning_tokens if details is None else details.reasoning_tokens
    return Usage(
        num_prompt_tokens=usage.prompt_tokens,
        num_sampled_tokens=usage.completion_tokens or 0,
        num_cached_tokens=cached or 0,
        num_thinking_tokens=thinking or 0,
    )
