"""The inverse of the Responses dialect, for tests: canonical conversations as a client would send them, and what a
client gathers from a reply."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    Part,
    Text,
    Thinking,
    ToolCall,
    ToolDefinition,
    ToolResult,
)

CUSTOM = "patch"
INNER = ("mcp", "look")

TOOLS = [
    {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": True},
    {"type": "custom", "name": CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "web_search"},
    {"type": "namespace", "name": INNER[0], "tools": [{"type": "function", "name": INNER[1]}]},
]


def input_items(messages: list[Message]) -> list[dict[str, Any]]:
    return [item for message in messages for item in _items(message)]


def _items(message: Message) -> list[dict[str, Any]]:
    if message.role == "assistant":
        turn = [_assistant_item(part) for part in message.parts]
        return turn or [{"type": "message", "role": "assistant", "content": []}]
    if message.role == "tool":
        return [_output_item(part) for part in message.parts if isinstance(part, ToolResult)]
    return [{"type": "message", "role": message.role, "content": [_content(part) for part in message.parts]}]


def _assistant_item(part: Part) -> dict[str, Any]:
    match part:
        case Thinking(text, signature):
            summary = [{"type": "summary_text", "text": text}]
            return {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": signature}
        case ToolCall(call_id, name, arguments) if name == CUSTOM:
            text = json.loads(arguments)["input"]
            return {"type": "custom_tool_call", "call_id": call_id, "name": name, "input": text}
        case ToolCall(call_id, name, arguments) if name == "__".join(INNER):
            named = {"namespace": INNER[0], "name": INNER[1]}
            return {"type": "function_call", "call_id": call_id, **named, "arguments": arguments}
        case ToolCall(call_id, name, arguments):
            return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
        case Text(text):
            return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        case _:
            raise AssertionError(part)


def _output_item(result: ToolResult) -> dict[str, Any]:
    output = [_content(part) for part in result.content]
    return {"type": "function_call_output", "call_id": result.call_id, "output": output}


def _content(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "input_text", "text": text}
        case Image(url, detail):
            return {"type": "input_image", "image_url": url, "detail": detail}
        case Document(url, name) if url.startswith("data:"):
            return {"type": "input_file", "file_data": url, "filename": name}
        case Document(url, name):
            return {"type": "input_file", "file_url": url, "filename": name}
        case _:
            raise AssertionError(part)


def gathered(output: list[dict[str, Any]], tools: tuple[ToolDefinition, ...]) -> Message:
    """The assistant's turn, as a client reads it off the finished items: thinking, text, calls."""
    thoughts = [item.get("content") or item["summary"] for item in output if item["type"] == "reasoning"]
    thinking = [piece["text"] for pieces in thoughts for piece in pieces]
    text = [piece["text"] for item in output if item["type"] == "message" for piece in item["content"]]
    names = {(tool.namespace, tool.local_name or tool.name): tool.name for tool in tools}
    calls: list[Part] = []
    for item in output:
        if item["type"] in ("function_call", "custom_tool_call"):
            custom = item["type"] == "custom_tool_call"
            arguments = json.dumps({"input": item["input"]}) if custom else item["arguments"]
            name = names.get((item.get("namespace"), item["name"]), item["name"])
            calls.append(ToolCall(item["call_id"], name, arguments))
    parts: list[Part] = [Thinking("".join(thinking))] if any(thinking) else []
    parts += [Text("".join(text))] if any(text) else []
    return Message("assistant", (*parts, *calls))


# -- conversations -------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, json_values, max_size=3).map(json.dumps)
_free = texts.map(lambda text: json.dumps({"input": text}, ensure_ascii=False, separators=(",", ":")))
_ids = st.text("abc_0", min_size=1, max_size=6)
tool_calls = (
    st.builds(ToolCall, _ids, st.sampled_from(["shell", "unknown"]), arguments | texts)
    | st.builds(ToolCall, _ids, st.just("__".join(INNER)), arguments)
    | st.builds(ToolCall, _ids, st.just(CUSTOM), _free)
)
_text_parts = texts.map(Text)
_images = st.builds(
    Image, st.sampled_from(["data:image/png;base64,aGk=", "https://x/y.png"]), st.none() | st.just("low")
)
_documents = st.builds(
    Document, st.sampled_from(["data:application/pdf;base64,aGk=", "https://x/y.pdf"]), st.none() | st.just("y.pdf")
)
_content_parts = st.lists(_text_parts | _images | _documents, max_size=3).map(tuple)
_said = st.builds(Message, st.sampled_from(["system", "developer", "user"]), _content_parts)
_results = st.builds(lambda call_id, parts: Message("tool", (ToolResult(call_id, parts),)), _ids, _content_parts)
_turns = st.lists(
    st.builds(Thinking, texts, st.none() | _ids) | texts.filter(bool).map(Text) | tool_calls, max_size=4
).map(lambda parts: Message("assistant", tuple(parts)))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """System anywhere, turns of any parts in any order; two turns never touch: this API could not tell them apart."""
    messages: list[Message] = []
    for _ in range(draw(st.integers(1, 6))):
        touching = bool(messages) and messages[-1].role == "assistant"
        messages.append(draw(_said | _results if touching else _said | _results | _turns))
    return messages
