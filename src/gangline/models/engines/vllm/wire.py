"""vLLM's OpenAI routes as bytes: request bodies, reply bodies, server-sent events. Pure.

Source: vLLM 0.32/0.33 `entrypoints/openai` protocols; tested against 0.32.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Generic, TypeVar, cast

import msgspec

from gangline.domain.conversation import Message, ModelCall, ToolDefinition
from gangline.domain.errors import EngineMalformed
from gangline.domain.reply import TokenLogprob
from gangline.domain.tokens import Logprobs, TokenIds, logprobs
from gangline.models.engines.contract import EngineChoice, EngineReply, EngineRequest
from gangline.models.engines.evidence import Found, WireEvidence
from gangline.models.engines.fields import (
    NEUTRAL_SAMPLING,
    body_of,
    call_fields,
    message_fields,
    messages_fields,
)
from gangline.models.engines.replies import (
    CUT_OUT,
    NO_IDS,
    ModelCard,
    ModelList,
    SentIds,
    TokenId,
    WireLogprobs,
    WireMessage,
    WireSpan,
    WireUsage,
    WireValues,
    cut_out_ids,
    decode,
    ids_from_json,
    ids_of,
    logprob_values,
    message_of,
    token_logprobs,
    usage_of,
    version_spans,
)
from gangline.models.language.tools import tool_fields

__all__ = [
    "AnyChoice",
    "ModelCard",
    "ModelList",
    "ShownReply",
    "WireReply",
    "chat_body",
    "decode",
    "decode_reply",
    "engine_reply",
    "message_fields",
    "read_reply",
    "render_body",
    "rendered_ids",
    "reply_type",
    "score_body",
    "scores_of",
]


LogprobsT = TypeVar("LogprobsT", WireLogprobs, WireValues)
ChoiceT = TypeVar("ChoiceT")
T = TypeVar("T")

_LARGE_BYTES = 512 << 10


class _Choice(msgspec.Struct, Generic[LogprobsT], gc=False):
    index: int = 0
    message: WireMessage | None = None
    delta: WireMessage | None = None
    logprobs: LogprobsT | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    weight_versions: list[WireSpan] | None = None


class _PlainChoice(_Choice[WireValues], gc=False):
    """With log-probs as numbers only."""


class _ShownChoice(_Choice[WireLogprobs], gc=False):
    """With log-probs for a client that requested them."""


class _Reply(msgspec.Struct, Generic[ChoiceT], gc=False):
    choices: list[ChoiceT] = []
    usage: WireUsage | None = None
    prompt_token_ids: msgspec.Raw = NO_IDS
    error: dict[str, Any] | str | None = None
    message: str | None = None
    """The error in vLLM's older form, which has no `error`."""

    @property
    def is_error(self) -> bool:
        return self.error is not None or (self.message is not None and not self.choices)


AnyChoice = _PlainChoice | _ShownChoice


class WireReply(_Reply[_PlainChoice], gc=False):
    """A whole reply, one chunk of a stream, or an error in place of either."""


class ShownReply(_Reply[_ShownChoice], gc=False):
    """The same for a client that requested log-probs."""


class _Rendered(msgspec.Struct):
    tokens: msgspec.Raw


def chat_body(
    request: EngineRequest,
    model: str,
    messages: Sequence[bytes],
    sent: SentIds | None,
    *,
    stream: bool,
    evidence: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """The body of `POST /v1/chat/completions`, in pieces: the call, and everything that makes it trainable.

    messages: the call's, from `messages_in_turns`. sent: its exact ids, from `sent_ids`. evidence: request fields, from
    `WireEvidence.fields`.
    """
    call = request.call
    body = (
        NEUTRAL_SAMPLING
        | call_fields(call)
        | {
            "model": model,
            "stream": stream,
            "logprobs": True,
            "top_logprobs": call.num_top_logprobs or 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": False,  # tokens are returned as text, whatever the server's options
            "return_weight_versions": True,
            # Without it vLLM leaves out ids and log-probs too; the harness's view is decided on the way back.
            "include_reasoning": True,
        }
    )
    if stream:
        body["stream_options"] = {"include_usage": True}
    body |= evidence or {}
    if sent is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": msgspec.Raw(sent.text)}
    return body_of(body, messages)


def render_body(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[ToolDefinition],
    template_kwargs: dict[str, Any] | None,
    add_generation_prompt: bool,
) -> bytes:
    """The body of `POST /tokenize`."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages_fields(messages),
        "add_generation_prompt": add_generation_prompt,
    }
    if tools:
        body["tools"] = [tool_fields(tool) for tool in tools]
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    return msgspec.json.encode(body)


async def rendered_ids(answer: bytes, url: str) -> TokenIds:
    """Ids in an answer of `POST /tokenize`: [T]. Raises: EngineMalformed when it is malformed."""

    def read() -> TokenIds:
        ids = ids_from_json(decode(answer, _Rendered, url).tokens)
        if ids is None:
            raise EngineMalformed(f"engine {url} answered no tokens to a request for them")
        return ids

    return await _apart(read, len(answer))


def reply_type(call: ModelCall) -> type[WireReply] | type[ShownReply]:
    """The type to decode: only a client that requests log-probs needs more than the numbers."""
    return WireReply if call.num_top_logprobs is None else ShownReply


async def read_reply(
    body: bytes, kind: type[WireReply] | type[ShownReply], url: str, sent: SentIds | None, evidence: WireEvidence | None
) -> tuple[EngineReply, bool]:
    """A whole reply, and whether it is the engine's error. Raises: EngineMalformed when the body is not a reply.

    evidence: None if not needed.
    """

    def read() -> tuple[EngineReply, bool]:
        wire = decode_reply(body, kind if evidence is None else _with_evidence(kind, evidence), url)
        try:
            return engine_reply(wire, sent, evidence), wire.is_error
        except ValueError as error:
            raise EngineMalformed(f"engine {url} answered {error}") from error

    return await _apart(read, len(body))


async def _apart(read: Callable[[], T], num_bytes: int) -> T:
    """Reads the ids of a long prompt in a thread, during which NumPy lets the event loop run."""
    return await asyncio.to_thread(read) if num_bytes > _LARGE_BYTES else read()


def decode_reply(body: bytes, kind: type[WireReply] | type[ShownReply], url: str) -> WireReply | ShownReply:
    """A whole reply. Raises: EngineMalformed when the body is not a reply."""
    rest, ids = cut_out_ids(body, "prompt_token_ids")
    reply = decode(rest, kind, url)
    if not ids:
        return reply
    if bytes(reply.prompt_token_ids) != CUT_OUT:  # the list belonged to another object
        return decode(body, kind, url)
    reply.prompt_token_ids = msgspec.Raw(ids)
    return reply


def _with_evidence(
    kind: type[WireReply] | type[ShownReply], evidence: WireEvidence
) -> type[WireReply] | type[ShownReply]:
    choice = _PlainChoice if kind is WireReply else _ShownChoice
    return _whole_reply(kind, evidence.extended(choice))


@cache
def _whole_reply(
    kind: type[WireReply] | type[ShownReply], choice: type[AnyChoice]
) -> type[WireReply] | type[ShownReply]:
    made = msgspec.defstruct(kind.__name__, [("choices", list[choice], [])], bases=(kind,), gc=False)
    return cast("type[WireReply] | type[ShownReply]", made)


def engine_reply(
    reply: WireReply | ShownReply, sent: SentIds | None = None, evidence: WireEvidence | None = None
) -> EngineReply:
    """evidence: None if the choices have no evidence. Raises: ValueError when evidence of a choice cannot be read."""
    return EngineReply(
        prompt_ids=ids_from_json(reply.prompt_token_ids, sent),
        choices=tuple(_choice(choice, evidence) for choice in reply.choices),
        usage=usage_of(reply.usage),
    )


def _choice(choice: AnyChoice, evidence: WireEvidence | None) -> EngineChoice:
    found = Found({}) if evidence is None else evidence.read(choice)
    values = logprob_values(choice.logprobs) if found.logprobs is None else found.logprobs
    return EngineChoice(
        index=choice.index,
        message=message_of(choice.message),
        finish_reason=choice.finish_reason,
        stop_reason=_stop_reason(choice),
        sampled_ids=ids_of(choice.token_ids),
        logprobs=None if values is None else logprobs(values),
        version_spans=version_spans(choice.weight_versions),
        token_logprobs=_shown_logprobs(choice),
        evidence=found.values,
    )


def _shown_logprobs(choice: AnyChoice) -> tuple[TokenLogprob, ...]:
    return token_logprobs(choice.logprobs) if isinstance(choice.logprobs, WireLogprobs) else ()


def _stop_reason(choice: AnyChoice) -> str | None:
    return None if choice.stop_reason is None else str(choice.stop_reason)


class _ScoredToken(msgspec.Struct):
    logprob: float | None = None


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _ScoredToken] | None] = []


class _ScoredReply(msgspec.Struct):
    choices: list[_ScoredChoice]


def score_body(model: str, ids: TokenIds) -> bytes:
    fields = {"model": model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    return msgspec.json.encode(fields)


def scores_of(body: bytes, ids: TokenIds, url: str) -> Logprobs:
    """[T], NaN where the engine reports none. Raises: EngineMalformed."""
    choices = decode(body, _ScoredReply, url).choices
    entries = choices[0].prompt_logprobs if choices else []
    if len(entries) != len(ids):
        raise EngineMalformed(f"engine {url} returned {len(entries)} prompt log-probs for {len(ids)} ids")
    found = ((entry or {}).get(str(one)) for entry, one in zip(entries, ids.tolist(), strict=True))
    return logprobs(math.nan if one is None or one.logprob is None else one.logprob for one in found)
