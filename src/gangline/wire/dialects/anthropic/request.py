"""Anthropic Messages: the request body -> the canonical call.

A user's turn may mix tool results with text: each result becomes a separate message, in order. Consecutive assistant
messages form one turn, as in the provider's API. Hosted tools are omitted and named in `ModelCall.dropped`; content
that cannot be carried (files by id, blocks of hosted tools) is rejected.

A request that continues a `thread` sends only new messages: its system text and tools come from the thread's first
request. If the new messages refer to tools by name, only the provider could resolve them:
`thread_unsupported_request`, on which clients send the whole conversation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Thinking, ThinkingWish
from gangline.domain.errors import InvalidRequest
from gangline.wire.dialects.anthropic.content import assistant_parts, system_parts, user_messages
from gangline.wire.dialects.anthropic.tools import Toolbox, read_tools, tool_choice
from gangline.wire.dialects.anthropic.wire import Body, ContextEdit, KeptTurns, MessageParam, ThreadContinue
from gangline.wire.dialects.bodies import THINKING_KINDS, DeclaredFields, decoded

_BILLING = "it says who pays"
MESSAGES_FIELDS = DeclaredFields(
    served=frozenset(Body.__struct_fields__),
    limits={"context_management": "edits that would take effect are refused, such as `clear_tool_uses_20250919`"},
    refused={
        "compaction": (None,),
        "container": (None,),
        "fallbacks": (None, []),
        "mcp_servers": (None, []),
    },
    dropped={
        "billing_policy": _BILLING,
        "diagnostics": "the reply has no `diagnostics`",
        "fallback_credit_token": _BILLING,
        "inference_geo": "it says where the provider computes",
        "metadata": "it names a user to the provider",
        "service_tier": _BILLING,
        "speed": "it says how fast the provider computes",
    },
)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"required field `(\w+)`")
_INDEX = re.compile(r"\[(\d+)\]")


def parse_messages_call(body: bytes) -> ModelCall:
    """Raises: InvalidRequest; its details name the field as `param`."""
    request = decoded(body, Body, _invalid)
    if request.max_tokens is None:
        raise InvalidRequest("max_tokens: Field required", param="max_tokens")
    return _call(body, request)


def parse_messages_count(body: bytes) -> ModelCall:
    """The body of count_tokens: a call without sampling. Raises: InvalidRequest."""
    return _call(body, decoded(body, Body, _invalid))


def _call(body: bytes, request: Body) -> ModelCall:
    goes_on_from = _previous_message(request)
    if not request.messages and goes_on_from is None:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    unread = _unread(body)
    dropped: list[str] = sorted(unread) + _dropped_settings(request)
    toolbox = read_tools(request.tools or (), held_by_thread=goes_on_from is not None)
    system, system_dropped = system_parts(request.system or "", "system", toolbox)
    messages = _messages(request.messages, toolbox, dropped)
    _refuse_edits(request, messages)
    forced = request.tool_choice
    if forced is not None and forced.type in ("any", "tool") and not request.tools and not toolbox.held_by_thread:
        dropped.append("tool_choice")  # Claude Code offers no tools while it compacts, and keeps its choice
        forced = None
    choice, parallel = tool_choice(forced, toolbox)
    return ModelCall(
        dialect="anthropic",
        model=request.model,
        messages=(Message("system", system), *messages) if system else messages,
        tools=toolbox.offered,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        sampling=_sampling(request),
        stream=bool(request.stream),
        response_format=_response_format(request),
        thinking=_thinking(request),
        dropped=(*dropped, *system_dropped, *toolbox.dropped),
        undeclared={name: bytes(unread[name]).decode() for name in MESSAGES_FIELDS.undeclared(unread)},
        previous_reply_id=goes_on_from,
        keeps_tools=goes_on_from is not None,
    )


def _unread(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields that `Body` does not have. Raises: InvalidRequest for a field that cannot be omitted."""
    fields: dict[str, msgspec.Raw] = decoded(body, dict[str, msgspec.Raw], _invalid)
    unread = {name: value for name, value in fields.items() if name not in MESSAGES_FIELDS.served}
    for name in MESSAGES_FIELDS.refused.keys() & unread.keys():
        if MESSAGES_FIELDS.refuses(name, decoded(unread[name], Any, _invalid)):
            # The provider's wording: Claude Code recognises it and continues without the field.
            raise InvalidRequest(f"The `{name}` parameter is not supported here; leave it out.", param=name)
    return {name: value for name, value in unread.items() if name not in MESSAGES_FIELDS.refused}


def _refuse_edits(request: Body, messages: Iterable[Message]) -> None:
    """Raises: InvalidRequest for an edit that changes the conversation, or would above a threshold that only the
    provider could evaluate.
    """
    num_thinking = sum(any(isinstance(part, Thinking) for part in message.parts) for message in messages)
    for edit in (request.context_management and request.context_management.edits) or ():
        if edit.type == "clear_thinking_20251015" and num_thinking <= _num_kept(edit):
            continue
        # The provider's wording: Claude Code recognises it and continues without the edit.
        raise InvalidRequest(
            f"{request.model} does not support the '{edit.type}' context management strategy: nothing is cleared or "
            "compacted here. Leave the edit out; the model sees the whole conversation that is sent.",
            param="context_management",
        )


def _num_kept(edit: ContextEdit) -> float:
    """Number of turns that keep their thinking. Raises: InvalidRequest."""
    try:
        kept = msgspec.convert({"type": edit.keep} if isinstance(edit.keep, str) else edit.keep or {}, KeptTurns)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"context_management.edits: keep: {error}", param="context_management") from None
    return math.inf if kept.type == "all" else kept.value


def _previous_message(request: Body) -> str | None:
    """The reply that a thread continues. Raises: InvalidRequest if the request repeats content of the thread."""
    if not isinstance(request.thread, ThreadContinue):
        return None
    for name in ("system", "tools"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name}: The thread has it from its beginning; leave it out.", param=name)
    return request.thread.previous_message_id


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    """In the provider's form: `messages.2.content.0.text: Field required`."""
    text = str(error)
    path = _PATH.search(text)
    reason = text[: path.start()] if path else text
    where = _INDEX.sub(r".\1", path.group(1).replace("[...]", "")) if path else ""
    missing = _MISSING.search(reason)
    if missing:
        where, reason = f"{where}.{missing.group(1)}".strip("."), "Field required"
    return InvalidRequest(f"{where or 'body'}: {reason}", param=where or None)


def _messages(params: Iterable[MessageParam], toolbox: Toolbox, dropped: list[str]) -> tuple[Message, ...]:
    messages: list[Message] = []
    for i, param in enumerate(params):
        where, content = f"messages.{i}", param.content
        dropped += [f"messages[{i}].{name}" for name in ("output_config", "clear_at") if getattr(param, name)]
        if content is None:
            if param.role != "system" or param.output_config is None:
                raise InvalidRequest(f"{where}.content: Field required", param=f"{where}.content")
            continue
        match param.role:
            case "user":
                messages += user_messages(content, where, toolbox)
            case "system":
                parts, left_out = system_parts(content, f"{where}.content", toolbox)
                messages += [Message("system", parts)] if parts or not left_out else []
                dropped += left_out
            case "assistant":
                parts = assistant_parts(content, where)
                if messages and messages[-1].role == "assistant":
                    parts = (*messages.pop().parts, *parts)
                messages.append(Message("assistant", parts))
    return tuple(messages)


def _sampling(request: Body) -> SamplingParams:
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=tuple(request.stop_sequences or ()),
    )


def _response_format(request: Body) -> dict[str, Any] | None:
    """In OpenAI Chat's form, which engines accept."""
    chosen = request.output_config.format if request.output_config else None
    chosen = chosen or request.output_format
    if chosen is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": chosen.schema, "strict": True}}


def _thinking(request: Body) -> ThinkingWish:
    """The effort applies to the whole reply and does not turn thinking on or off."""
    effort = None if request.output_config is None else request.output_config.effort
    return ThinkingWish(
        is_on=None if request.thinking is None else THINKING_KINDS.get(request.thinking.type), effort=effort
    )


def _dropped_settings(request: Body) -> list[str]:
    """Known settings that engines do not have."""
    found: list[str] = []
    if request.thinking is not None:
        found += [name for name in ("budget_tokens", "display") if getattr(request.thinking, name) is not None]
        found = [f"thinking.{name}" for name in found]
    return found
