"""The inverse of the Google dialect's parser, and conversations that this provider can express, for tests."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from gangline.domain.conversation import Document, Image, Message, Part, Text, Thinking, ToolCall, ToolResult

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
some_words = words.filter(bool)
names = st.sampled_from(["ls", "read_file", "mcp__say"])
call_ids = st.integers(0, 99).map("call_{}".format)
_signatures = st.none() | st.sampled_from(["Z2FuZ2xpbmU6YWJj", "AAEC+/8="])

_arguments = st.dictionaries(words, st.integers() | words | st.booleans() | st.none(), max_size=3).map(
    lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False)
)
_images = st.just(Image("data:image/png;base64,iVBORw=="))
_documents = st.builds(Document, st.just("data:application/pdf;base64,JVBERg=="), st.none() | st.just("a.pdf"))
_calls = st.lists(st.builds(ToolCall, call_ids, names, _arguments), max_size=3, unique_by=lambda call: call.call_id)


@st.composite
def _assistants(draw: st.DrawFn) -> Message:
    parts: list[Part] = [*draw(st.lists(st.builds(Thinking, some_words, _signatures), max_size=1))]
    parts += draw(st.lists(some_words.map(Text), max_size=1))
    return Message("assistant", (*parts, *draw(_calls)))


_results = st.builds(
    ToolResult,
    call_ids,
    st.tuples(words.map(Text)) | st.tuples(words.map(Text), _images) | st.tuples(words.map(Text), _documents),
    st.booleans(),
).filter(lambda result: not result.is_error or bool(result.content[0].text))

_users = st.lists(words.map(Text) | _images | _documents, min_size=1, max_size=3).map(
    lambda parts: Message("user", tuple(parts))
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """No two neighbouring assistant messages: Google's wire cannot tell them from one."""
    systems = st.builds(lambda text: Message("system", (Text(text),)), words)
    tools = st.builds(lambda result: Message("tool", (result,)), _results)
    drawn = draw(st.lists(_users | _assistants() | systems | tools, min_size=1, max_size=6))
    return [m for i, m in enumerate(drawn) if not (i and m.role == drawn[i - 1].role == "assistant")]


def google_contents(messages: list[Message]) -> list[dict[str, Any]]:
    called = {part.call_id: part.name for m in messages for part in m.parts if isinstance(part, ToolCall)}
    roles = {"assistant": "model", "tool": "user", "user": "user", "system": "system"}
    return [{"role": roles[m.role], "parts": [_part(part, called) for part in m.parts]} for m in messages]


def _part(part: Part, called: dict[str, str]) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"text": text}
        case Thinking(text, signature):
            return {"text": text, "thought": True} | ({"thoughtSignature": signature} if signature else {})
        case ToolCall(call_id, name, arguments):
            return {"functionCall": {"id": call_id, "name": name, "args": json.loads(arguments)}}
        case ToolResult(call_id, content, is_error):
            text, *media = content
            assert isinstance(text, Text)
            response = {"error" if is_error else "output": text.text}
            name = called.get(call_id, "unknown")
            parts = {"parts": [_part(piece, called) for piece in media]} if media else {}
            return {"functionResponse": {"id": call_id, "name": name, "response": response} | parts}
        case Image() | Document():
            mime_type, _, data = part.url.removeprefix("data:").partition(";base64,")
            named = {"displayName": part.name} if isinstance(part, Document) and part.name else {}
            return {"inlineData": {"mimeType": mime_type, "data": data} | named}
