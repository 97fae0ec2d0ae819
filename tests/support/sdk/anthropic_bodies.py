"""Canonical -> Anthropic request bodies, for tests only, and conversations that this provider can express."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import strategies as st

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    ModelCall,
    Part,
    SamplingParams,
    Text,
    Thinking,
    ThinkingWish,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolResult,
)


def request_body(call: ModelCall) -> dict[str, Any]:
    first, *rest = call.messages
    has_system = first.role == "system" and bool(first.parts)
    body: dict[str, Any] = {
        "model": call.model,
        "max_tokens": call.sampling.max_tokens,
        "messages": _messages(rest if has_system else call.messages),
        "stream": call.stream,
        "tools": [_tool(tool) for tool in call.tools],
    }
    if has_system:
        body["system"] = [_block(part) for part in first.parts]
    if call.sampling.stop:
        body["stop_sequences"] = list(call.sampling.stop)
    for name in ("temperature", "top_p", "top_k"):
        if getattr(call.sampling, name) is not None:
            body[name] = getattr(call.sampling, name)
    if call.tool_choice is not None:
        body["tool_choice"] = _choice(call.tool_choice, call.parallel_tool_calls)
    if call.response_format is not None:
        body["output_config"] = {
            "format": {"type": "json_schema", "schema": call.response_format["json_schema"]["schema"]}
        }
    if call.thinking.is_on is not None:
        body["thinking"] = {"type": "adaptive" if call.thinking.is_on else "disabled"}
    return body


def _messages(messages: list[Message] | tuple[Message, ...]) -> list[dict[str, Any]]:
    """Tool results, and a user message after them, share one message, as clients send them."""
    out: list[dict[str, Any]] = []
    open_results = False
    for message in messages:
        blocks = [_block(part) for part in message.parts]
        if message.role in ("tool", "user") and open_results:
            out[-1]["content"] += blocks
        else:
            out.append({"role": "user" if message.role == "tool" else message.role, "content": blocks})
        open_results = message.role == "tool"
    return out


def _block(part: Part) -> dict[str, Any]:
    match part:
        case Text():
            return {"type": "text", "text": part.text}
        case Thinking():
            return {"type": "thinking", "thinking": part.text, "signature": part.signature}
        case Image():
            return {"type": "image", "source": _source(part.url)}
        case Document():
            return {"type": "document", "source": _source(part.url), "title": part.name}
        case ToolCall():
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": json.loads(part.arguments)}
        case ToolResult():
            content = [_block(piece) for piece in part.content]
            return {"type": "tool_result", "tool_use_id": part.call_id, "content": content, "is_error": part.is_error}


def _source(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    media_type, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "base64", "media_type": media_type, "data": data}


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
    return fields | {"strict": tool.strict, "cache_control": {"type": "ephemeral"}}


def _choice(choice: ToolChoice, parallel: bool | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": {"required": "any", "named": "tool"}.get(choice.mode, choice.mode)}
    if choice.name is not None:
        fields["name"] = choice.name
    return fields if parallel is None else fields | {"disable_parallel_tool_use": not parallel}


# -- strategies ------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
words = st.text("abcdefgh_-0123", min_size=1, max_size=12)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, _values, max_size=3)
_base64 = st.binary(max_size=12).map(lambda data: base64.b64encode(data).decode())
images = st.builds(
    Image,
    st.builds("data:{};base64,{}".format, st.sampled_from(["image/png", "image/jpeg"]), _base64)
    | st.just("https://example.invalid/a.png"),
)
documents = st.builds(
    Document, st.builds("data:application/pdf;base64,{}".format, _base64), st.none() | texts.filter(bool)
)
_shown = st.builds(Text, texts) | images | documents
_arguments = objects.map(lambda value: json.dumps(value, separators=(",", ":")))
tool_calls = st.builds(ToolCall, words, words, _arguments)
_assistant_parts = st.lists(
    st.builds(Text, texts.filter(bool)) | st.builds(Thinking, texts, st.none() | words) | tool_calls, max_size=4
)
_results = st.builds(ToolResult, words, st.lists(_shown, max_size=3).map(tuple), st.booleans())
_system_texts = st.lists(st.builds(Text, texts), min_size=1, max_size=2)
_message = (
    st.builds(lambda parts: Message("user", tuple(parts)), st.lists(_shown, min_size=1, max_size=3))
    | st.builds(lambda result: Message("tool", (result,)), _results)
    | st.builds(lambda parts: Message("system", tuple(parts)), _system_texts)
    | st.builds(lambda parts: Message("assistant", tuple(parts)), _assistant_parts)
)


def _one_turn_each(messages: list[Message]) -> tuple[Message, ...]:
    """Assistant messages in a row are one turn to this provider, which has no way to tell them apart."""
    kept = [m for i, m in enumerate(messages) if i == 0 or (m.role, messages[i - 1].role) != ("assistant",) * 2]
    only_system = len(kept) == 1 and kept[0].role == "system"
    return (*kept, Message("user", (Text("x"),))) if only_system else tuple(kept)


conversations = st.lists(_message, min_size=1, max_size=6).map(_one_turn_each)
_tools = st.lists(
    st.builds(ToolDefinition, words, st.none() | texts, objects, st.none() | st.booleans()),
    max_size=3,
    unique_by=lambda tool: tool.name,
).map(tuple)


@st.composite
def calls(draw: st.DrawFn) -> ModelCall:
    tools = draw(_tools)
    choice, parallel = None, None
    if tools:
        named = st.sampled_from(tools).map(lambda tool: ToolChoice("named", tool.name))
        choice = draw(st.none() | st.sampled_from(["auto", "none", "required"]).map(ToolChoice) | named)
        parallel = None if choice is None else draw(st.none() | st.booleans())
    schema = draw(st.none() | objects)
    wrapped = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
    return ModelCall(
        dialect="anthropic",
        model=draw(words),
        messages=draw(conversations),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        sampling=SamplingParams(
            max_tokens=draw(st.integers(1, 10_000)),
            temperature=draw(st.none() | st.floats(0, 1)),
            top_p=draw(st.none() | st.floats(0, 1)),
            top_k=draw(st.none() | st.integers(1, 100)),
            stop=tuple(draw(st.lists(texts, max_size=2))),
        ),
        stream=draw(st.booleans()),
        response_format=None if schema is None else wrapped,
        thinking=ThinkingWish(is_on=draw(st.sampled_from([None, True, False]))),
    )
