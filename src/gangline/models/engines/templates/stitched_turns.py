"""Whether stitched prompts are as rendered: of user turns, and of two rounds of tool calls, behind a system message."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.domain.conversation import Message, Text, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineRefused
from gangline.domain.tokens import TokenIds
from gangline.models.engines.templates.as_rendered import difference
from gangline.models.engines.templates.renderings import Renders
from gangline.models.engines.templates.tails import CannotStitch, Tails, rendered

__all__ = ["tool_turns_as_rendered", "user_turns_as_rendered"]

_SYSTEM = Message("system", (Text("Be brief."),))
_USER = Message("user", (Text("x"),))
_NEXT = Message("user", (Text("And then?"),))
_TOOL = ToolDefinition(
    name="probe",
    description="Look something up.",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)

_Turn = tuple[Message, Message]
"""A reply, and the message that follows it."""


async def user_turns_as_rendered(engine: Renders) -> bool | None:
    """None where nothing can be stitched. Raises: EngineUnavailable."""
    return await _first_known(engine, (), [(Message("assistant", (Text(text),)), _NEXT) for text in ("one", "two")])


async def tool_turns_as_rendered(engine: Renders) -> bool | None:
    """Likewise."""
    return await _first_known(engine, (_TOOL,), [_round("call00001", "one"), _round("call00002", "two")])


def _round(call_id: str, found: str) -> _Turn:
    asked = Message("assistant", (ToolCall(call_id, "probe", '{"query": "x"}'),))
    return asked, Message("tool", (ToolResult(call_id, (Text(found),)),))


async def _first_known(engine: Renders, tools: Sequence[ToolDefinition], turns: Sequence[_Turn]) -> bool | None:
    """With a system message, or without where the template refuses one."""
    for first in ((_SYSTEM, _USER), (_USER,)):
        try:
            return await _as_rendered(engine, tools, first, turns)
        except (EngineRefused, CannotStitch):
            continue
    return None


async def _as_rendered(
    engine: Renders, tools: Sequence[ToolDefinition], first: tuple[Message, ...], turns: Sequence[_Turn]
) -> bool:
    """Raises: EngineRefused, CannotStitch."""
    tails, messages, added = Tails(engine, tools, {}), first, list[TokenIds]()
    front = await rendered(engine, first, tools, {})
    for reply, follows in turns:
        messages = (*messages, reply, follows)
        tail, _ = await tails.after(reply, [follows])
        added.append(tail)
        whole = await rendered(engine, messages, tools, {})
        if difference(whole, front, added, await tails.opening()) is not None:
            return False
    return True
