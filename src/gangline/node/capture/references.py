"""Resolves references in a call: to the reply that it continues, and to turns of earlier replies. They are resolved
before the call is placed, from the session's own records, so that the engine gets the whole conversation.

If a field that the dialect does not know names a reply of the session, it would change the conversation in an unknown
way. Such a call is refused, since without the field it would be another conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gangline.domain.completion import Completion
from gangline.domain.conversation import (
    Message,
    ModelCall,
    Part,
    Text,
    Thinking,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)
from gangline.domain.errors import InvalidRequest, ReplyNotFound
from gangline.domain.ids import RECORD_KEY
from gangline.node.capture.ledger import Ledger
from gangline.node.capture.placing import signed_reply_id

INSTRUCTIONS = "instructions"
"""Name in a record's metadata: the first message was the call's own instructions, which apply to that call alone."""


def resolved(call: ModelCall, ledger: Ledger) -> ModelCall:
    """Returns the call with its whole conversation. Raises: InvalidRequest when it refers to a reply of another
    session."""
    _refuse_unknown_references(call, ledger)
    messages = call.messages
    # Few calls have any, and the loop takes milliseconds for thousands of messages.
    if any(type(part) is Thinking for message in messages for part in message.parts):
        messages = tuple(_whole(message, ledger) for message in messages)
    if call.previous_reply_id is None:
        return msgspec.structs.replace(call, messages=messages)
    earlier = ledger.reply(call.previous_reply_id)
    if earlier is None:
        raise ReplyNotFound(f"Previous response with id '{call.previous_reply_id}' not found.")
    own = 1 if call.leads_with_instructions else 0
    call = msgspec.structs.replace(
        call, messages=(*messages[:own], *_history(earlier, ledger), *messages[own:]), previous_reply_id=None
    )
    if not call.keeps_tools:
        return call
    tools = ledger.tree.tools(earlier)
    return msgspec.structs.replace(call, tools=tools, tool_choice=_choice_among(tools, call.tool_choice))


def _refuse_unknown_references(call: ModelCall, ledger: Ledger) -> None:
    for field, text in call.undeclared.items():
        if ledger.names_reply(RECORD_KEY.findall(text)):
            raise InvalidRequest(
                f"{field!r} is not known here, but refers to an earlier reply of the session: without it this would be "
                "another conversation. Send the whole conversation instead.",
                param=field,
            )


def _choice_among(tools: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolChoice | None:
    """Returns the choice if the tools, unknown when the request was parsed, allow it. Raises: InvalidRequest."""
    if choice is None or (not tools and choice.mode in ("auto", "none")):
        return None
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice: the conversation that goes on has no tools.", param="tool_choice")
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequest(f"tool_choice.name: Tool {choice.name!r} is not offered", param="tool_choice.name")
    return choice


def _history(earlier: Completion, ledger: Ledger) -> tuple[Message, ...]:
    """Returns all messages up to and including the reply, without the instructions, which each call has its own."""
    messages = ledger.tree.messages(earlier)
    return (*(messages[1:] if earlier.metadata.get(INSTRUCTIONS) else messages), earlier.response)


def _whole(message: Message, ledger: Ledger) -> Message:
    """Restore a turn whose thinking is only our record key, from clients that store items at the provider or keep only
    the encrypted part.

    If its other content comes from that one reply, the reply replaces it as sampled. Otherwise only the thinking is
    restored. Raises: InvalidRequest when the turn is only a reference, to nothing in this session.
    """
    keys = {key for part in message.parts if (key := _reference(part))}
    if not keys:
        return message
    replies = {key: ledger.reply(key) for key in keys}
    own_parts = [part for part in message.parts if not _reference(part)]
    if not own_parts and None in replies.values():
        missing = next(key for key in keys if replies[key] is None)
        raise InvalidRequest(f"A message refers to the reply {missing!r}, which is none of this session.")
    only = next(iter(replies.values())) if len(replies) == 1 else None
    if only is not None and _is_part_of(own_parts, only.response.parts):
        return only.response
    parts = [whole for part in message.parts for whole in _thinking_of(part, replies)]
    return Message(message.role, tuple(parts), message.name)


def _reference(part: Part) -> str:
    """Returns the id of the reply that the part refers to; empty if it has content."""
    if not isinstance(part, Thinking) or part.text or not part.signature:
        return ""
    return signed_reply_id(part.signature)


def _is_part_of(parts: Sequence[Part], sampled: Sequence[Part]) -> bool:
    """Calls are compared by their ids, which are ours; other parts by their content."""
    known = {_words(part) for part in sampled}
    return all(_words(part) in known for part in parts)


def _words(part: Part) -> tuple[str, str]:
    """Returns the values by which a part is compared. Replies contain no media or results."""
    if isinstance(part, ToolCall):
        return "call", part.call_id
    return (type(part).__name__, part.text) if isinstance(part, (Text, Thinking)) else ("", "")


def _thinking_of(part: Part, replies: dict[str, Completion | None]) -> list[Part]:
    reply = replies.get(_reference(part))
    return [part] if reply is None else [whole for whole in reply.response.parts if isinstance(whole, Thinking)]
