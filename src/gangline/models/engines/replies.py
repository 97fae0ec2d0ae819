"""OpenAI's chat replies as engines write them: the parts shared by all engines. Pure.

Token ids are converted from and to JSON without a Python object for each: a prompt of 20,000 ids is most of an answer,
and of the next request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import orjson
import simdjson
from numpy.typing import NDArray

from gangline.domain.completion import VersionSpan
from gangline.domain.conversation import Message, ToolCall, Usage
from gangline.domain.errors import EngineMalformed
from gangline.domain.reply import TokenLogprob
from gangline.domain.tokens import TokenIds, token_ids
from gangline.models.engines.contract import assistant_message

WireT = TypeVar("WireT")


_OLD_FORM = -1
"""Index of the single call written as `function_call`."""

_NULL = b"null"
NO_IDS = msgspec.Raw(_NULL)
"""The value of an id field that the engine leaves out."""

CUT_OUT = b"0"
"""The placeholder for the list removed by `cut_out_ids`."""

LARGEST_ID = np.iinfo(np.int32).max
TokenId = Annotated[int, msgspec.Meta(ge=0, le=int(LARGEST_ID))]
"""An id in an engine's answer. An answer with any other number is refused, since it cannot be trained on."""

_PIECE_BYTES = 32 << 10
"""Bytes parsed at once, which keeps the parser's memory in the caches. Parsing holds the GIL, so other threads wait for
it."""


class SentIds(NamedTuple):
    """Exact ids of a request, [T], and their JSON. An engine that repeats them writes the same text. Comparing texts
    certifies each id at a twentieth of the cost of parsing."""

    ids: TokenIds
    text: bytes

    @classmethod
    def of(cls, ids: TokenIds) -> Self:
        return cls(ids, orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY))


def cut_out_ids(body: bytes, field: str) -> tuple[bytes, memoryview | bytes]:
    """Returns the JSON document with `CUT_OUT` in place of its single list of ids named `field`, and the list.
    Searching is faster than a decoder that skips the list. Without exactly one such list, returns the body unchanged
    and nothing.

    The list may belong to another object: check the place of `CUT_OUT` in the decoded document. The name inside a
    string cannot be mistaken for a field, since its quotes are escaped.
    """
    name = b'"%b":' % field.encode()
    at = body.find(name)
    start = at + len(name)
    if body[start : start + 1] == b" ":
        start += 1
    end = body.find(b"]", start) + 1
    if at < 0 or not end or body[start : start + 1] != b"[" or body.find(name, end) >= 0:
        return body, b""
    view = memoryview(body)
    return b"".join((view[:start], CUT_OUT, view[end:])), view[start:end]


def ids_from_json(raw: msgspec.Raw, sent: SentIds | None = None) -> TokenIds | None:
    """A JSON list of ids -> [T]; None for null. Raises: EngineMalformed for anything else.

    sent: the ids of the request, which the list may repeat.
    """
    text = bytes(raw)
    if text == _NULL:
        return None
    if sent is not None and text == sent.text:
        return sent.ids
    ids = plain_ids(text)
    if ids is not None:
        return ids
    try:
        return token_ids(msgspec.json.decode(text, type=list[TokenId]))
    except (msgspec.MsgspecError, OverflowError) as error:
        start = text[:80].decode("utf-8", "replace")
        raise EngineMalformed(f"the engine's answer has no token ids: {error}; got {start!r}") from error


def plain_ids(text: bytes) -> TokenIds | None:
    """A JSON list of ids -> [T], without a Python object for each; None for anything else."""
    if text[:1] != b"[" or text[-1:] != b"]" or text.find(b"[", 1) >= 0:  # the parser would flatten lists of lists
        return None
    try:
        pieces = [_integers(piece) for piece in _pieces(text)]
    except (ValueError, TypeError, RuntimeError):  # the last one for integers beyond 64 bits
        return None
    if len(pieces) > 1 and not all(map(len, pieces)):  # the whole list ends with a comma
        return None
    ids = np.concatenate(pieces)
    if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_ID):
        return None
    return ids.astype(np.int32)


def _integers(text: bytes) -> NDArray[np.int64]:
    """Parse the numbers of a JSON list. Raises: ValueError, TypeError, RuntimeError."""
    found = simdjson.Parser().parse(text)
    if not isinstance(found, simdjson.Array):
        raise TypeError
    return np.frombuffer(found.as_buffer(of_type="i"), dtype=np.int64)


def _pieces(text: bytes) -> Iterator[bytes]:
    """The list as shorter lists, split at commas."""
    start = 1
    while len(text) - start > _PIECE_BYTES and (end := text.find(b",", start + _PIECE_BYTES)) >= 0:
        yield b"[%b]" % text[start:end]
        start = end + 1
    yield text if start == 1 else b"[" + text[start:]


class WireFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    """Some servers write an object instead of text."""


class WireToolCall(msgspec.Struct, gc=False):
    index: int | None = None
    """Only in streams, and some servers leave it out there too."""
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
    """The log-probs only. Texts, bytes and other candidates are skipped, since only a client that requests them needs
    them."""

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
            # Python servers write NaN, which is not valid JSON; one such log-prob must not invalidate the whole reply.
            return msgspec.json.decode(msgspec.json.encode(json.loads(body)), type=kind)  # NaN becomes null
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        start = body[:120].decode("utf-8", "replace")
        raise EngineMalformed(f"engine {url} answered with no chat reply: {error}; got {start!r}") from error


def message_of(message: WireMessage | None) -> Message:
    """The assistant's turn; its tool calls keep the engine's ids. Raises: EngineMalformed for a call without a name."""
    found = message or WireMessage()
    calls = [ToolCall(call.id or "", *function_of(call)) for call in found.calls]
    if not all(call.name for call in calls):
        raise EngineMalformed("the engine's reply has a tool call without a name")
    return assistant_message(thinking_of(found), found.content or "", calls)


def function_of(call: WireToolCall) -> tuple[str, str]:
    """(name, arguments as text) of a call or a piece of one; empty if missing."""
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
    # OpenAI's value for "very unlikely": a client must get a number.
    value = -9999.0 if entry.logprob is None or not np.isfinite(entry.logprob) else entry.logprob
    return entry.token, value, None if entry.bytes is None else tuple(entry.bytes)


def version_spans(spans: list[WireSpan] | None) -> tuple[VersionSpan, ...]:
    """Versions that are not numbers (`v7` counts as 7) are left out as unknown."""
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
