"""Probes which forms of conversation a template accepts: each is rendered, and the prompt is searched for its texts.

A template supports a form when it accepts it and the prompt contains every text, in the conversation's order. Some
templates silently drop a message, and some move late system messages to the front, where they would change the context
that the model has already seen. Neither counts as support.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gangline.domain.conversation import Message, Role, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.models.engines.templates.renderings import Renderings

PROBE_TOOL = ToolDefinition(
    name="probe",
    description="Look something up.",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)
_NINE = ("call00001", "call00002")
"""The most restricted form: nine of [a-zA-Z0-9]."""
_OWN = ("call_0123456789abcdef0000", "call_0123456789abcdef0001")
"""In the node's format."""


def _say(role: Role, text: str) -> Message:
    return Message(role, (Text(text),))


def _call(*call_ids: str, text: str = "", thought: str = "") -> Message:
    parts = (*((Thinking(thought),) if thought else ()), *((Text(text),) if text else ()))
    return Message("assistant", (*parts, *(ToolCall(call_id, "probe", '{"query": "x"}') for call_id in call_ids)))


def _result(text: str, call_id: str = _NINE[0]) -> Message:
    return Message("tool", (ToolResult(call_id, (Text(text),)),))


_USER, _REPLY = _say("user", "alpha"), _say("assistant", "bravo")
_CALL, _RESULT = _call(_NINE[0]), _result("charlie")
_FIRST, _SECOND = _say("system", "sierra"), _say("system", "tango")

_FORMS: dict[str, tuple[tuple[Message, ...], ...]] = {
    "takes_system": ((_FIRST, _USER),),
    "takes_system_alone": ((_FIRST,),),
    "takes_several_system": ((_FIRST, _SECOND, _USER),),
    "takes_late_system": (
        (_FIRST, _USER, _SECOND),
        (_USER, _SECOND),
        (_FIRST, _USER, _REPLY, _SECOND, _say("user", "delta")),
        (_FIRST, _USER, _REPLY, _say("user", "delta"), _SECOND),
    ),
    "takes_neighbours": ((_USER, _say("user", "delta")),),
    "takes_reply_first": ((_REPLY, _USER),),
    "takes_empty_replies": ((_USER, _say("assistant", ""), _say("user", "delta")),),
}
"""Fact -> conversations without tools; it holds if all of them are accepted."""

_CALL_FORMS: dict[str, tuple[tuple[Message, ...], ...]] = {
    "takes_system_after_results": ((_USER, _CALL, _RESULT, _SECOND),),
    "takes_user_after_results": ((_USER, _CALL, _RESULT, _say("user", "delta")),),
    "takes_parallel_calls": ((_USER, _call(*_NINE), _RESULT, _result("delta", _NINE[1])),),
    "takes_results_without_calls": ((_USER, _REPLY, _RESULT), (_USER, _RESULT)),
}
"""The same, with tools."""


async def taken_messages(rendered: Renderings) -> dict[str, Any]:
    """Name of a fact in `TemplateFacts` -> its value. Facts are left out if even the plainest form is refused."""
    bare, with_tools, calls = await asyncio.gather(
        _takes(rendered, (_USER,), ()),
        _takes(rendered, (_USER,), (PROBE_TOOL,)),
        rendered.ids((_USER, _CALL, _RESULT), (PROBE_TOOL,)),
    )
    found: dict[str, Any] = {}
    if bare is not False or with_tools is not False:
        tools = () if bare is not False else (PROBE_TOOL,)  # some templates render nothing without tools
        found |= await _taken(rendered, _FORMS, tools)
    if calls is not None:
        found |= await _of_calls(rendered)
        if await _takes(rendered, (_USER, _CALL, _RESULT), (PROBE_TOOL,)) is not False:
            found |= await _taken(rendered, _CALL_FORMS, (PROBE_TOOL,))
    return found


async def _taken(
    rendered: Renderings, forms: dict[str, tuple[tuple[Message, ...], ...]], tools: tuple[ToolDefinition, ...]
) -> dict[str, bool | None]:
    names = [name for name, conversations in forms.items() for _ in conversations]
    answers = await asyncio.gather(
        *(_takes(rendered, conversation, tools) for conversations in forms.values() for conversation in conversations)
    )
    together: dict[str, bool | None] = {}
    for name, answer in zip(names, answers, strict=True):
        before = together.get(name, True)
        together[name] = False if False in (before, answer) else None if None in (before, answer) else True
    return together


async def _takes(rendered: Renderings, messages: tuple[Message, ...], tools: tuple[ToolDefinition, ...]) -> bool | None:
    """None: accepted, but the engine does not show the prompt's text."""
    if await rendered.ids(messages, tools) is None:
        return False
    prompt = await rendered.text(messages, tools)
    if prompt is None:
        return None
    places = [prompt.find(text) for message in messages for text in _texts(message)]
    return -1 not in places and places == sorted(places)


def _texts(message: Message) -> list[str]:
    pieces = [one for part in message.parts for one in (part.content if isinstance(part, ToolResult) else (part,))]
    return [piece.text for piece in pieces if isinstance(piece, Text) and piece.text]


async def _of_calls(rendered: Renderings) -> dict[str, Any]:
    """Forms around calls that the template accepts. Their texts are not searched: many templates leave out a reply's
    text next to its calls, which no change of the messages can fix."""
    own = (_USER, _call(_OWN[0]), _result("charlie", _OWN[0]))
    other = (_USER, _call(_NINE[1]), _result("charlie", _NINE[1]))
    all_said = (_USER, _call(_NINE[0], text="bravo", thought="tango"), _RESULT)
    each_alone = [(_USER, _call(_NINE[0], text="bravo"), _RESULT), (_USER, _call(_NINE[0], thought="tango"), _RESULT)]
    unanswered = (_USER, _CALL, _say("user", "delta"))
    asked = (own, all_said, *each_alone, unanswered)
    prompts = await asyncio.gather(*(rendered.ids(one, (PROBE_TOOL,)) for one in asked))
    takes_own, takes_all, takes_text, takes_thought, takes_unanswered = (prompt is not None for prompt in prompts)
    return {
        "call_ids": "any" if takes_own else "nine",
        "prints_call_ids": await rendered.differ((_USER, _CALL, _RESULT), other, (PROBE_TOOL,)),
        "takes_calls_without_results": takes_unanswered,
        "takes_text_and_thinking_with_calls": takes_all or not (takes_text and takes_thought),
        "renders_current_thinking": await rendered.differ(
            each_alone[1], (_USER, _call(_NINE[0], thought="delta"), _RESULT), (PROBE_TOOL,)
        ),
    }
