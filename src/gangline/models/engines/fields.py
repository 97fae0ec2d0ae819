"""The canonical call as fields of OpenAI's chat request, which every engine reads. Pure.

Content that OpenAI's format cannot represent is put where a model can see it: a custom tool as a function of one
string, its grammar in the description; a tool result's error flag as the first word of its text. A text document
becomes text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import msgspec

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    ModelCall,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from gangline.domain.tokens import TokenIds
from gangline.machine.event_loop import Turn
from gangline.models.engines.replies import SentIds
from gangline.models.language.tools import tool_fields

_SLICE_CHARS = 256 << 10
_SLICE_PARTS = 128

_encoder = msgspec.json.Encoder()

_MEDIA_AS_TEXT = ("text/", "application/json", "application/xml")


NEUTRAL_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The default of every dialect, sent explicitly. Otherwise vLLM and SGLang would use the model's `generation_config`
(Qwen3's: temperature 0.6, top-k 20), which the record would not show."""


def call_fields(call: ModelCall) -> dict[str, Any]:
    """All fields of the call but messages, model and stream. Fields without a value are left out."""
    fields = msgspec.structs.asdict(call.sampling) | {
        "stop": list(call.sampling.stop) or None,
        "n": call.num_choices if call.num_choices > 1 else None,
        "response_format": call.response_format,
        "chat_template_kwargs": call.template_kwargs or None,
    }
    if call.tools:
        fields["tools"] = [tool_fields(tool) for tool in call.tools]
        fields["parallel_tool_calls"] = call.parallel_tool_calls
        if call.tool_choice is not None:
            named = {"type": "function", "function": {"name": call.tool_choice.name}}
            fields["tool_choice"] = named if call.tool_choice.mode == "named" else call.tool_choice.mode
    return {name: value for name, value in fields.items() if value is not None}


def sent_ids(prompt_ids: TokenIds | None, call: ModelCall) -> SentIds | None:
    """Exact ids to send with a call's messages. None if there are no ids, or if they cannot represent a message."""
    return None if prompt_ids is None or has_media(call.messages) else SentIds.of(prompt_ids)


def has_media(messages: Sequence[Message]) -> bool:
    """Whether a message contains a part that token ids cannot represent: an image, or a document that is not text."""
    return media_in(messages) is not None


def has_documents(messages: Sequence[Message]) -> bool:
    """Whether a message contains a document that is not text."""
    pieces = (
        piece
        for message in messages
        for part in message.parts
        for piece in (part.content if isinstance(part, ToolResult) else (part,))
    )
    return any(isinstance(piece, Document) and _document_text(piece.url) is None for piece in pieces)


def media_in(messages: Sequence[Message]) -> str | None:
    """The `MEDIA` kind in the messages; images if both occur."""
    found = None
    for message in messages:
        for part in message.parts:
            if isinstance(part, (Text, ToolCall, Thinking)):
                continue
            for piece in part.content if isinstance(part, ToolResult) else (part,):
                if isinstance(piece, Image):
                    return "images"
                if isinstance(piece, Document) and _document_text(piece.url) is None:
                    found = "documents"
    return found


def messages_fields(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """One entry per message. A message with several tool results becomes one entry per result, then one for the
    rest."""
    return [fields for message in messages for fields in _split(message)]


async def messages_in_turns(messages: Sequence[Message]) -> list[bytes]:
    """The same as JSON, in pieces, since joining a long conversation would block the event loop. Yields to other tasks
    of the loop between pieces."""
    turn, pieces, comma = Turn(), [b"["], b""
    for message in messages:
        is_long = _is_long(message)
        for fields in _split(message):
            if turn.is_over:
                await turn.give()
            if is_long:
                pieces.append(comma)
                for piece in _in_slices(fields):
                    pieces.append(piece)
                    await turn.give()
            else:
                pieces.append(comma + _encoder.encode(fields))
            comma = b","
    pieces.append(b"]")
    await turn.give()
    return pieces


def body_of(fields: Mapping[str, Any], messages: Sequence[bytes]) -> list[bytes]:
    """The body of a request in pieces: `fields`, at least one, and the messages from `messages_in_turns`."""
    return [b'{"messages":', *messages, b"," + _encoder.encode(fields)[1:]]


def _is_long(message: Message) -> bool:
    return len(message.parts) > _SLICE_PARTS or any(
        len(part.text) > _SLICE_CHARS
        if isinstance(part, Text)
        else not isinstance(part, ToolCall) or len(part.arguments) > _SLICE_CHARS
        for part in message.parts
    )


def _in_slices(value: Any) -> Iterator[bytes]:
    """JSON in pieces, each of which encodes quickly."""
    if isinstance(value, str) and len(value) > _SLICE_CHARS:
        yield b'"'
        for start in range(0, len(value), _SLICE_CHARS):
            yield _encoder.encode(value[start : start + _SLICE_CHARS])[1:-1]
        yield b'"'
    elif value and isinstance(value, dict):
        for number, (name, inner) in enumerate(cast("dict[str, Any]", value).items()):
            yield (b"," if number else b"{") + _encoder.encode(name) + b":"
            yield from _in_slices(inner)
        yield b"}"
    elif value and isinstance(value, list):
        for number, inner in enumerate(cast("list[Any]", value)):
            yield b"," if number else b"["
            yield from _in_slices(inner)
        yield b"]"
    else:
        yield _encoder.encode(value)


def _split(message: Message) -> list[dict[str, Any]]:
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if not results or (len(results) == 1 and len(message.parts) == 1):
        return [message_fields(message)]
    rest = tuple(part for part in message.parts if not isinstance(part, ToolResult))
    split = [message_fields(Message("tool", (result,))) for result in results]
    if rest:
        role = "user" if message.role == "tool" else message.role
        split.append(message_fields(Message(role, rest, message.name)))
    return split


def message_fields(message: Message) -> dict[str, Any]:
    """A message in OpenAI's format. `developer` becomes `system`, since some templates drop unknown roles."""
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role}
    pieces, calls, thoughts = list[Text | Image | Document](), list[ToolCall](), list[str]()
    for part in message.parts:
        if type(part) is Text:  # first, and by exact type, for speed: a message may have thousands
            pieces.append(part)
        elif isinstance(part, ToolCall):
            calls.append(part)
        elif isinstance(part, Thinking):
            thoughts.append(part.text)
        elif isinstance(part, ToolResult):
            fields["tool_call_id"] = part.call_id
            pieces.extend(_marked(part) if part.is_error else part.content)
        else:
            pieces.append(part)
    fields["content"] = None if calls and not pieces else _content(pieces)
    if calls:
        fields["tool_calls"] = [_tool_call_fields(call) for call in calls]
    if thoughts:
        # Both names, since servers and templates differ.
        fields["reasoning"] = fields["reasoning_content"] = "".join(thoughts)
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _marked(result: ToolResult) -> tuple[Text | Image | Document, ...]:
    """The content of an error result, marked as an error in its text."""
    first = result.content[0] if result.content else Text("")
    if not isinstance(first, Text):
        return Text("Error:"), *result.content
    if first.text.lstrip().lower().startswith("error"):
        return result.content
    return Text(f"Error: {first.text}".rstrip()), *result.content[1:]


def _content(pieces: Sequence[Text | Image | Document]) -> str | list[dict[str, Any]]:
    if len(pieces) == 1 and isinstance(pieces[0], Text):
        return pieces[0].text
    return [
        {"type": "text", "text": piece.text} if isinstance(piece, Text) else _media_fields(piece) for piece in pieces
    ] or ""


def _media_fields(piece: Image | Document) -> dict[str, Any]:
    match piece:
        case Image(url, detail):
            image = {"url": url} | ({"detail": detail} if detail is not None else {})
            return {"type": "image_url", "image_url": image}
        case Document(url, name):
            text = _document_text(url)
            if text is not None:
                return {"type": "text", "text": text}
            named = {"filename": name} if name is not None else {}
            return {"type": "file", "file": {"file_data": url} | named}


def _document_text(url: str) -> str | None:
    """Text of a `data:` URL that contains text; None for any other."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().startswith(tuple(f"data:{kind}" for kind in _MEDIA_AS_TEXT)):
        return None
    try:
        raw = base64.b64decode(data, validate=True) if head.lower().endswith(";base64") else unquote_to_bytes(data)
        return raw.decode()
    except (binascii.Error, ValueError):
        return None


def _tool_call_fields(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
