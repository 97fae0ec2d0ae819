"""OpenAI Responses: input items -> messages. Consecutive items of the assistant form one turn, as they were sampled."""

from __future__ import annotations

import base64
import mimetypes
import re
from typing import cast

import msgspec

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    Part,
    Role,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from gangline.wire.dialects.responses.fields import Fields, invalid, records, string, text

MALFORMED = "malformed_arguments"
"""The only key of the object that carries arguments that are not a JSON object; it is removed again from their echo."""

# Records of tools that ran at the provider. They cannot be shown to the model, and replies here never contain them.
_HOSTED_ITEMS = frozenset(
    {"code_interpreter_call", "file_search_call", "image_generation_call", "mcp_list_tools", "web_search_call"}
)

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-z]+)[0-9a-f]{2}")

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


def record_key(reply_id: str) -> str:
    """The key in a thinking item, which leads its echo back to the sampled tokens."""
    return base64.b64encode(f"gangline:{reply_id}".encode()).decode()


def flat_name(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def read_input(value: object) -> tuple[tuple[Message, ...], list[str]]:
    """(messages, names of the dropped items). Raises: InvalidRequest."""
    if value is None:
        return (), []
    if isinstance(value, str):
        return (Message("user", (Text(value),)),), []
    history = _History()
    for i, item in enumerate(records(value, "input")):
        _read_item(item, f"input[{i}]", history)
    return history.finished(), history.left_out


class _History:
    """The messages so far. The last one is open while items of the assistant follow each other."""

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self._messages: list[Message] = []
        self._turn: list[Part] | None = None

    def continue_turn(self, *parts: Part) -> None:
        self._turn = [*(self._turn or ()), *parts]

    def refer_to(self, key: Thinking) -> None:
        """All items of a reply have the same key; a turn that consists of the key alone stands for the whole reply."""
        if self._turn is None or key not in self._turn:
            self.continue_turn(key)

    def add(self, message: Message) -> None:
        self._close()
        self._messages.append(message)

    def finished(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._messages)

    def _close(self) -> None:
        if self._turn is not None:
            self._messages.append(Message("assistant", tuple(self._turn)))
        self._turn = None


def _read_item(item: Fields, where: str, history: _History) -> None:
    kind = string(item, "type", where) or ("message" if "role" in item else "")
    match kind:
        case "message":
            _read_message(item, where, history)
        case "reasoning":
            history.continue_turn(Thinking(_thought(item, where), string(item, "encrypted_content", where)))
        case "function_call":
            history.continue_turn(_tool_call(item, where, _arguments(item, where)))
        case "custom_tool_call":
            wrapped = msgspec.json.encode({"input": text(item, "input", where)}).decode()
            history.continue_turn(_tool_call(item, where, wrapped))
        case "function_call_output" | "custom_tool_call_output":
            result = ToolResult(text(item, "call_id", where), _content(item.get("output"), f"{where}.output"))
            history.add(Message("tool", (cast("Part", result),)))
        case _ if kind in _HOSTED_ITEMS:
            history.left_out.append(f"{where}: {kind}")
        case "item_reference":
            history.refer_to(_reply_key(item, where))
        case _:
            raise invalid(f"{where}.type", f"{kind!r} is not supported here.")


def _read_message(item: Fields, where: str, history: _History) -> None:
    content = _content(item.get("content"), f"{where}.content")
    match string(item, "role", where):
        case "system" | "developer" | "user" as role:
            history.add(Message(cast("Role", role), content))
        case "assistant":
            if not all(isinstance(part, Text) for part in content):
                raise invalid(f"{where}.content", "an assistant message has text only.")
            history.continue_turn(*(part for part in content if not isinstance(part, Text) or part.text))
        case role:
            raise invalid(f"{where}.role", f"{role!r} is none of system, developer, user, assistant.")


def _thought(item: Fields, where: str) -> str:
    """The full thought if the client has it, else the summary; ours are the same."""
    whole = records(item.get("content"), f"{where}.content")
    pieces, name = (whole, "content") if whole else (records(item.get("summary"), f"{where}.summary"), "summary")
    return "".join(text(piece, "text", f"{where}.{name}[{i}]") for i, piece in enumerate(pieces))


def _reply_key(item: Fields, where: str) -> Thinking:
    """Our ids are `KIND_REPLYID` plus two digits."""
    item_id = text(item, "id", where)
    found = _ITEM_ID.fullmatch(item_id)
    if found is None:
        raise invalid(f"{where}.id", f"item {item_id!r} not found.")
    return Thinking("", record_key(found[1]))


def _tool_call(item: Fields, where: str, arguments: str) -> ToolCall:
    name = flat_name(string(item, "namespace", where), text(item, "name", where))
    return ToolCall(text(item, "call_id", where), name, arguments)


def _arguments(item: Fields, where: str) -> str:
    arguments = text(item, "arguments", where)
    if MALFORMED not in arguments:
        return arguments
    try:
        fields: object = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    wrapper = cast("Fields", fields) if isinstance(fields, dict) else {}
    raw = wrapper.get(MALFORMED)
    return raw if isinstance(raw, str) and len(wrapper) == 1 else arguments


def _content(value: object, where: str) -> tuple[Text | Image | Document, ...]:
    if value is None:
        raise invalid(where, "missing required parameter.")
    if isinstance(value, str):
        return (Text(value),)
    return tuple(_part(part, f"{where}[{i}]") for i, part in enumerate(records(value, where)))


def _part(part: Fields, where: str) -> Text | Image | Document:
    kind = string(part, "type", where)
    if part.get("file_id") is not None:
        raise invalid(f"{where}.file_id", "there are no stored files here; send the data itself as a data: URL.")
    if kind in _TEXT_PARTS:
        return Text(text(part, "text", where))
    if kind == "refusal":
        return Text(text(part, "refusal", where))
    if kind == "input_image":
        return Image(_url(text(part, "image_url", where), f"{where}.image_url"), string(part, "detail", where))
    if kind == "input_file":
        return _document(part, where)
    raise invalid(f"{where}.type", f"{kind!r} is none of input_text, output_text, refusal, input_image, input_file.")


def _document(part: Fields, where: str) -> Document:
    name = string(part, "filename", where)
    link = string(part, "file_url", where)
    if link is not None:
        return Document(_url(link, f"{where}.file_url"), name)
    data = text(part, "file_data", where)
    if not data.startswith("data:"):  # bare base64
        data = f"data:{mimetypes.guess_type(name or '')[0] or 'application/octet-stream'};base64,{data}"
    return Document(_url(data, f"{where}.file_data"), name)


def _url(url: str, where: str) -> str:
    if url.startswith("data:") and ";base64," in url[:200]:
        return url
    if url.startswith(("https://", "http://")):
        return url
    raise invalid(where, "expected a URL, or data:MEDIA_TYPE;base64,DATA.")
