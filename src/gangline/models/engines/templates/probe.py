"""Probes the behaviour of an engine's tokenizer and chat template: digests for certificates, whether the template
appends turns and renders tools, and which forms of messages it accepts.

Uses the engine's own routes, so it works for every engine: it renders fixed conversations, and digests or compares the
results. Dates, which some templates write, are ignored.

It also checks whether an engine's ids include the end of a turn, since a row without it does not teach a model to stop,
and whether stitched prompts match the template's rendering, for user turns and for two rounds of tool calls after a
system message.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.conversation import (
    Message,
    ModelCall,
    SamplingParams,
    Text,
    Thinking,
    ToolCall,
    ToolDefinition,
    ToolResult,
)
from gangline.domain.errors import EngineError, EngineRefused
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import TokenIds, common_prefix_len
from gangline.models.engines.contract import Engine, EngineRequest
from gangline.models.engines.templates.as_rendered import difference
from gangline.models.engines.templates.choices import probe_choices
from gangline.models.engines.templates.renderings import Renderings, Renders, unless_refused
from gangline.models.engines.templates.tails import CannotStitch, Tails, rendered
from gangline.models.engines.templates.taken_messages import PROBE_TOOL, taken_messages
from gangline.models.engines.templates.taken_tools import refusal_of_some_tools

_TEXT = (
    "The quick brown fox, isn't it? 0123456789 3.14159 1,000,000\n\n\tdef f(x):\n        return {'a': [x, -1]}\n"
    "Größe naïve façade Ελληνικά русский 日本語 中文 한국어 العربية हिन्दी 🙂👩‍👩‍👧\u200b\u00a0 \r\n"
    "fishing fish ing <think> </think> <tool_call> [INST] ###  trailing   "
)
"""Words, numbers, code, scripts, white space, and text that looks like tags: any two tokenizers differ somewhere in
it."""

_OTHER_TOOL = ToolDefinition(
    name="another",
    description="Write something down.",
    parameters={"type": "object", "properties": {"content": {"type": "string"}}, "required": ["content"]},
)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2} [A-Z][a-z]{2,8} \d{4}|[A-Z][a-z]{2,8} \d{1,2}, \d{4}")

_ASKED = Message("user", (Text("Say: done."),))
_MAX_TOKENS = 2
"""The next token is the end of turn. With a limit of one, engines report that the length ended the reply."""
_WAIT_S = 10.0
_NEXT = Message("user", (Text("And then?"),))
_TOOL = ToolDefinition(
    name="probe",
    description="Look something up.",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)

_Turn = tuple[Message, Message]
"""A reply, and the message that follows it."""


async def user_turns_as_rendered(engine: Renders) -> bool | None:
    """None if prompts cannot be stitched. Raises: EngineUnavailable."""
    return await _first_known(engine, (), [(Message("assistant", (Text(text),)), _NEXT) for text in ("one", "two")])


async def tool_turns_as_rendered(engine: Renders) -> bool | None:
    """The same for two rounds of tool calls."""
    return await _first_known(engine, (_TOOL,), [_round("call00001", "one"), _round("call00002", "two")])


def _round(call_id: str, found: str) -> _Turn:
    asked = Message("assistant", (ToolCall(call_id, "probe", '{"query": "x"}'),))
    return asked, Message("tool", (ToolResult(call_id, (Text(found),)),))


async def _first_known(engine: Renders, tools: Sequence[ToolDefinition], turns: Sequence[_Turn]) -> bool | None:
    """With a system message, or without one if the template refuses it."""
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


async def reports_ends(engine: Engine) -> bool | None:
    """Whether sampled ids include the end of a turn, tested with a prompt that lacks only that end. For engines that
    take ids.

    None: the model did not end there, or the engine or its template refuses, or takes too long.
    """
    whole, longer = [
        await unless_refused(engine.render((_ASKED, Message("assistant", (Text(sample),)), _ASKED)))
        for sample in ("Done.", "Done. More.")
    ]
    if whole is None or longer is None:
        return None
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=1.0, top_k=1)
    call = ModelCall(dialect="probe", model="", messages=(_ASKED,), sampling=sampling)
    request = EngineRequest(call=call, prompt_ids=whole[: common_prefix_len(whole, longer)])
    try:
        async with asyncio.timeout(_WAIT_S):
            reply = await engine.chat(request)
    except (EngineError, TimeoutError):
        return None
    choice = reply.choices[0] if reply.choices else None
    if choice is None or choice.sampled_ids is None or choice.finish_reason != "stop":
        return None
    shown = await unless_refused(engine.detokenize(choice.sampled_ids.tolist()))
    text = "".join(part.text for part in choice.message.parts if isinstance(part, Text | Thinking))
    return None if shown is None else shown.strip() != text.strip()


def _says(text: str, thought: str = "") -> Message:
    return Message("assistant", (Thinking(thought), Text(text)) if thought else (Text(text),))


def _calls(thought: str = "", result: str = "found") -> tuple[Message, Message]:
    """A call, and its result."""
    call = ToolCall("call00001", "probe", '{"query": "x"}')
    asked = Message("assistant", (Thinking(thought), call) if thought else (call,))
    return asked, Message("tool", (ToolResult("call00001", (Text(result),)),))


_USER = Message("user", (Text("x"),))
_OTHER = Message("user", (Text(_TEXT),))

_SYSTEM = Message("system", (Text("Be brief."),))
_BY_TEMPLATE: tuple[tuple[tuple[Message, ...], tuple[ToolDefinition, ...], dict[str, Any]], ...] = (
    ((_SYSTEM, _USER, _says("y"), _USER), (), {}),
    ((_USER, _says("y", "one"), _USER), (), {}),
    ((_USER,), (), {"enable_thinking": False}),
    ((_SYSTEM, _USER), (PROBE_TOOL,), {}),
    ((_USER, *_calls(), _says("y"), _USER), (PROBE_TOOL,), {}),
    ((_USER, *_calls("one")), (PROBE_TOOL,), {}),
)


async def probe_template(engine: Renders, sampler: Engine | None = None) -> TemplateFacts:
    """Empty if the engine has no route for it.

    sampler: an engine that takes ids, to sample from.

    Raises: EngineUnavailable when it does not answer, or is too busy.
    """
    rendered = Renderings(engine)
    (tokenizer, template), (tool_turns, user_turns, keeps, tools, results), taken = await asyncio.gather(
        asyncio.gather(_tokenizer_digest(rendered), _template_digest(rendered)),
        asyncio.gather(
            _appends_tool_turns(rendered),
            _appends_user_turns(rendered),
            # whether thinking is kept before a user message, and after it
            rendered.differ((_USER, _says("y", "one"), _USER), (_USER, _says("y", "two"), _USER)),
            # A template that only mentions the presence of tools does not render them.
            rendered.differ((_USER,), (_USER,), (PROBE_TOOL,), (_OTHER_TOOL,)),
            rendered.differ((_USER, *_calls()), (_USER, *_calls(result="lost")), (PROBE_TOOL,)),
        ),
        taken_messages(rendered),
    )
    facts = TemplateFacts(
        tokenizer_digest=tokenizer,
        template_digest=template,
        appends_tool_turns=tool_turns,
        appends_user_turns=user_turns,
        keeps_thinking=keeps,
        renders_tools=tools,
        renders_tool_results=results,
        **taken,
        refuses_some_tools=await refusal_of_some_tools(engine, rendered),
        user_turns_as_rendered=await unless_refused(user_turns_as_rendered(engine)),
        tool_turns_as_rendered=await unless_refused(tool_turns_as_rendered(engine)),
        reports_ends=None if sampler is None else await reports_ends(sampler),
    )
    return msgspec.structs.replace(facts, **await probe_choices(engine, rendered, facts))


async def _tokenizer_digest(rendered: Renderings) -> str:
    """Digest of the ids of a fixed text, computed as the difference of two prompts that differ only by it."""
    with_text, without = await asyncio.gather(rendered.ids((_OTHER,)), rendered.ids((_USER,)))
    if with_text is None or without is None:
        return ""
    start = common_prefix_len(with_text, without)
    end = len(with_text) - common_prefix_len(with_text[start:][::-1], without[start:][::-1])
    return _digest(with_text[start:end].astype("<i4").tobytes())


async def _template_digest(rendered: Renderings) -> str:
    """Digest of the texts of fixed conversations. A rejected conversation counts as rejected."""
    texts = await asyncio.gather(*(rendered.text(*conversation) for conversation in _BY_TEMPLATE))
    if all(text is None for text in texts):
        return ""
    return _digest(msgspec.json.encode([None if text is None else _DATE.sub("DATE", text) for text in texts]))


async def _appends_tool_turns(rendered: Renderings) -> bool | None:
    """Whether each prompt of a run of calls, with thinking, begins with the previous one."""
    turn = _calls("one")
    prompts = await asyncio.gather(*(rendered.ids((_USER, *turn * number), (PROBE_TOOL,)) for number in range(3)))
    return _each_begins_with_the_last(prompts)


async def _appends_user_turns(rendered: Renderings) -> bool | None:
    prompts = await asyncio.gather(rendered.ids((_USER,)), rendered.ids((_USER, _says("y"), _USER)))
    return _each_begins_with_the_last(prompts)


def _each_begins_with_the_last(prompts: Sequence[TokenIds | None]) -> bool | None:
    known = [prompt for prompt in prompts if prompt is not None]
    if len(known) < len(prompts):
        return None
    return all(common_prefix_len(a, b) == len(a) for a, b in itertools.pairwise(known))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
