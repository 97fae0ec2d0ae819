"""Anthropic Messages: content blocks -> canonical parts.

Content without a representation in engines that a model can read (search results, plain-text documents, tools added
later) becomes text. A redacted thought has no text; its data is kept as the signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import Document, Image, Message, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import InvalidRequest
from gangline.wire.dialects.anthropic.tools import Toolbox, tool_definition
from gangline.wire.dialects.anthropic.wire import (
    Base64Source,
    ContentSource,
    DefinedTool,
    DocumentBlock,
    FileSource,
    ImageBlock,
    NamedTool,
    PlainTextSource,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)

_BILLING_HEADER = "x-anthropic-billing-header:"
"""Claude Code's first line of system text. It changes with every request and is not meant for the model. If it stayed,
no call would continue the previous one.
"""

_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

Shown = Text | Image | Document
Content = str | Sequence[Any]


def system_parts(content: Content, where: str, toolbox: Toolbox) -> tuple[tuple[Text, ...], list[str]]:
    """The texts, and the names of dropped blocks. An empty string gives no text."""
    if isinstance(content, str):
        content = [TextBlock(content)] if content else []
    texts: list[Text] = []
    dropped: list[str] = []
    for i, block in enumerate(content):
        text, left_out = _system_text(block, f"{where}.{i}", toolbox)
        texts += [] if text is None else [Text(text)]
        dropped += [f"{where}[{i}]: {left_out}"] if left_out else []
    return tuple(texts), dropped


def _system_text(block: object, where: str, toolbox: Toolbox) -> tuple[str | None, str | None]:
    """(text or None, name of the dropped block or None)"""
    match block:
        case TextBlock() if block.text.startswith(_BILLING_HEADER):
            return block.text.partition("\n")[2] or None, _BILLING_HEADER.rstrip(":")
        case TextBlock():
            return block.text, None
        case ToolAdditionBlock(tool=DefinedTool() as added):
            tool = tool_definition(added.definition, f"{where}.tool.definition")
            toolbox.known[tool.name] = tool
            return toolbox.shown([tool.name]), None
        case ToolAdditionBlock(tool=NamedTool() as added):
            return toolbox.shown([added.name]), None
        case ToolRemovalBlock(tool=NamedTool() as removed):
            return f"The tool {removed.name} is no longer available.", None
        case ToolAdditionBlock() | ToolRemovalBlock():
            return None, "mcp_toolset"
        case _:
            raise _refused(block, where, "a system message holds text and changes of tools")


def user_messages(content: Content, where: str, toolbox: Toolbox) -> list[Message]:
    """One message per tool result, and one for each run of other content around them."""
    if isinstance(content, str):
        return [Message("user", (Text(content),))]
    messages: list[Message] = []
    shown: list[Part] = []
    for i, block in enumerate(content):
        at = f"{where}.content.{i}"
        if not isinstance(block, ToolResultBlock):
            shown += _shown(block, at)
            continue
        if shown:
            messages.append(Message("user", tuple(shown)))
            shown = []
        messages.append(Message("tool", (_tool_result(block, at, toolbox),)))
    if shown or not messages:
        messages.append(Message("user", tuple(shown)))
    return messages


def assistant_parts(content: Content, where: str) -> tuple[Part, ...]:
    """Without empty texts, which is how an empty reply was sent."""
    if isinstance(content, str):
        content = [TextBlock(content)]
    parts = (_assistant_part(block, f"{where}.content.{i}") for i, block in enumerate(content))
    return tuple(part for part in parts if part != Text(""))


def _assistant_part(block: object, where: str) -> Part:
    match block:
        case TextBlock():
            return Text(block.text)
        case ThinkingBlock():
            return Thinking(block.thinking, block.signature)
        case RedactedThinkingBlock():
            return Thinking("", block.data)
        case ToolUseBlock():
            return ToolCall(block.id, block.name, _arguments(block.input, where))
        case _:
            raise _refused(block, where, "an assistant message holds text, thinking and tool_use")


def _arguments(raw: msgspec.Raw, where: str) -> str:
    """As the client wrote them. msgspec does not validate `Raw` values."""
    try:
        if isinstance(msgspec.json.decode(raw), dict):
            return bytes(raw).decode().strip()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    raise InvalidRequest(f"{where}.input: Input should be an object", param=f"{where}.input")


def _tool_result(block: ToolResultBlock, where: str, toolbox: Toolbox) -> ToolResult:
    content = [TextBlock(block.content)] if isinstance(block.content, str) else block.content or ()
    shown: list[Shown] = []
    found = [inner.tool_name for inner in content if isinstance(inner, ToolReferenceBlock)]
    for i, inner in enumerate(content):
        if not isinstance(inner, ToolReferenceBlock):
            shown += _shown(inner, f"{where}.content.{i}")
    shown += [Text(toolbox.shown(found))] if found else []
    return ToolResult(block.tool_use_id, tuple(shown), bool(block.is_error))


def _shown(block: object, where: str) -> list[Shown]:
    match block:
        case TextBlock():
            return [Text(block.text)]
        case ImageBlock():
            return [Image(_url(block.source, _IMAGE_TYPES, f"{where}.source"))]
        case DocumentBlock():
            return _document(block, where)
        case SearchResultBlock():
            head = f"{block.title}\n{block.source}\n"
            return [Text(head + "\n".join(piece.text for piece in block.content))]
        case _:
            raise _refused(block, where, "it does not belong in this message")


def _document(block: DocumentBlock, where: str) -> list[Shown]:
    head: list[Shown] = [Text(block.context)] if block.context else []
    source = block.source
    match source:
        case PlainTextSource():
            title = f"{block.title}\n" if block.title else ""
            return [*head, Text(title + source.data)]
        case ContentSource():
            inner = [TextBlock(source.content)] if isinstance(source.content, str) else source.content
            title_text: list[Shown] = [Text(block.title)] if block.title else []
            pieces = (p for i, piece in enumerate(inner) for p in _shown(piece, f"{where}.source.content.{i}"))
            return [*head, *title_text, *pieces]
        case _:
            return [*head, Document(_url(source, ("application/pdf",), f"{where}.source"), block.title)]


def _url(source: Base64Source | UrlSource | FileSource, media_types: Sequence[str], where: str) -> str:
    match source:
        case UrlSource():
            if source.url.startswith(("https://", "http://")):
                return source.url
            raise InvalidRequest(f"{where}.url: Only HTTP(S) URLs are supported", param=f"{where}.url")
        case Base64Source():
            if source.media_type in media_types:
                return f"data:{source.media_type};base64,{source.data}"
            known = ", ".join(media_types)
            raise InvalidRequest(f"{where}.media_type: Input should be one of {known}", param=f"{where}.media_type")
        case FileSource():
            raise InvalidRequest(
                f"{where}: files are not kept here; send the content as base64 or a URL", param=f"{where}.file_id"
            )


def _refused(block: object, where: str, why: str) -> InvalidRequest:
    kind = block.__struct_config__.tag if isinstance(block, msgspec.Struct) else type(block).__name__
    return InvalidRequest(f"{where}.type: {kind!r} cannot stand here: {why}", param=f"{where}.type")
