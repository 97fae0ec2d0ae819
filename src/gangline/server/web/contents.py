"""The messages of a session's calls, in order, with long texts truncated in the middle."""

from __future__ import annotations

import msgspec

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
from gangline.server.web.outline import OpenedSession

MAX_PART_CHARS = 200_000
"""Maximum characters of a message part, unless the full text is requested."""


class CallContent(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of one call."""

    number: int
    new_messages: tuple[Message, ...]
    """Messages of the request that are new relative to its parent's conversation: tool results, the user's next
    message.
    """
    response: Message
    tools: tuple[ToolDefinition, ...]
    """Empty if they are the same as the parent's."""
    num_cut_chars: int
    """Number of characters left out in all parts."""


def call_contents(session: OpenedSession, first: int, limit: int, *, full: bool = False) -> list[CallContent]:
    """Calls `first` to `first + limit`. full: do not truncate text."""
    contents: list[CallContent] = []
    for number, call in list(enumerate(session.calls))[first : first + limit]:
        cutter = _Cutter(None if full else MAX_PART_CHARS)
        contents.append(
            CallContent(
                number=number,
                new_messages=tuple(map(cutter.message, call.new_messages)),
                response=cutter.message(call.response),
                tools=call.tools,
                num_cut_chars=cutter.num_cut,
            )
        )
    return contents


def shortened(message: Message) -> Message:
    """The message with long texts truncated in the middle."""
    return _Cutter(MAX_PART_CHARS).message(message)


class _Cutter:
    """Truncates long texts, and counts the characters left out."""

    def __init__(self, max_chars: int | None) -> None:
        self._max_chars = max_chars
        self.num_cut = 0

    def message(self, message: Message) -> Message:
        if self._max_chars is None:
            return message
        return msgspec.structs.replace(message, parts=tuple(map(self._part, message.parts)))

    def _part(self, part: Part) -> Part:
        match part:
            case Text():
                return Text(self._text(part.text))
            case Thinking():
                return Thinking(self._text(part.text))
            case ToolCall():
                return msgspec.structs.replace(part, arguments=self._text(part.arguments))
            case ToolResult():
                return msgspec.structs.replace(part, content=tuple(map(self._result_piece, part.content)))
            case _:
                return self._media(part)

    def _result_piece(self, piece: Text | Image | Document) -> Text | Image | Document:
        return Text(self._text(piece.text)) if isinstance(piece, Text) else self._media(piece)

    def _media(self, part: Image | Document) -> Image | Document:
        return msgspec.structs.replace(part, url=self._text(part.url))

    def _text(self, text: str) -> str:
        assert self._max_chars is not None
        if len(text) <= self._max_chars:
            return text
        half, left_out = self._max_chars // 2, len(text) - self._max_chars
        self.num_cut += left_out
        return f"{text[:half]}\n[... {left_out} characters are left out here ...]\n{text[-half:]}"
