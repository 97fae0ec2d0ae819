"""The edit of a fork: another text in the place of the newest message behind its last recorded answer.

The agent does not know of it: it sends its own message with each later request, and each gets the edit again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gangline.domain.conversation import Message, Part, Text, ToolResult

__all__ = ["edited"]


def edited(messages: Sequence[Message], answer_at: int, text: str) -> tuple[Message, ...]:
    """The messages with `text` between the answer, `messages[answer_at]`, and the model's next one.

    It replaces the content of the last tool result there, or the last text where there is none: programs put reminders
    of their own behind results. Without either nothing is replaced.
    """
    end = answer_at + 1
    while end < len(messages) and messages[end].role != "assistant":
        end += 1
    for kind in (ToolResult, Text):
        for place in reversed(range(answer_at + 1, end)):
            parts = messages[place].parts
            for at in reversed(range(len(parts))):
                if isinstance(parts[at], kind):
                    changed = (*parts[:at], _with_text(parts[at], text), *parts[at + 1 :])
                    message = msgspec.structs.replace(messages[place], parts=changed)
                    return (*messages[:place], message, *messages[place + 1 :])
    return tuple(messages)


def _with_text(part: Part, text: str) -> Part:
    return msgspec.structs.replace(part, content=(Text(text),)) if isinstance(part, ToolResult) else Text(text)
