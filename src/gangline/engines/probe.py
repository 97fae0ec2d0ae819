"""The behaviour of an engine's tokenizer and chat template: digests for certificates, and whether the template appends
turns and renders tools.

Found through the engine's own routes, so that it holds for every engine: fixed conversations are rendered, and the
results are digested or compared. Dates, which some templates write, do not count.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from gangline.domain.conversation import Message, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineError, EngineUnavailable
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import TokenIds, common_prefix_len

__all__ = ["probe_template"]

_TEXT = (
    "The quick brown fox, isn't it? 0123456789 3.14159 1,000,000\n\n\tdef f(x):\n        return {'a': [x, -1]}\n"
    "Größe naïve façade Ελληνικά русский 日本語 中文 한국어 العربية हिन्दी 🙂👩‍👩‍👧\u200b\u00a0 \r\n"
    "fishing fish ing <think> </think> <tool_call> [INST] ###  trailing   "
)
"""Words, numbers, code, scripts, white space, and text that looks like tags: any two tokenizers differ somewhere in
it."""

_TOOL = ToolDefinition(
    name="probe",
    description="Look something up.",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)
_OTHER_TOOL = ToolDefinition(
    name="another",
    description="Write something down.",
    parameters={"type": "object", "properties": {"content": {"type": "string"}}, "required": ["content"]},
)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2} [A-Z][a-z]{2,8} \d{4}|[A-Z][a-z]{2,8} \d{1,2}, \d{4}")


class _Renders(Protocol):
    """The part of `Engine` that is needed."""

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds: ...

    async def detokenize(self, ids: Sequence[int]) -> str: ...


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
    ((_SYSTEM, _USER), (_TOOL,), {}),
    ((_USER, *_calls(), _says("y"), _USER), (_TOOL,), {}),
    ((_USER, *_calls("one")), (_TOOL,), {}),
)


async def probe_template(engine: _Renders) -> TemplateFacts:
    """Empty where the engine has no route for it. Raises: EngineUnavailable when it does not answer at all."""
    (tokenizer, template), (tool_turns, user_turns, keeps, tools, results) = await asyncio.gather(
        asyncio.gather(_tokenizer_digest(engine), _template_digest(engine)),
        asyncio.gather(
            _appends_tool_turns(engine),
            _appends_user_turns(engine),
            _keeps_thinking(engine),
            _renders_tools(engine),
            _renders_tool_results(engine),
        ),
    )
    return TemplateFacts(
        tokenizer_digest=tokenizer,
        template_digest=template,
        appends_tool_turns=tool_turns,
        appends_user_turns=user_turns,
        keeps_thinking=keeps,
        renders_tools=tools,
        renders_tool_results=results,
    )


async def _tokenizer_digest(engine: _Renders) -> str:
    """Digest of the ids of a fixed text, found as the difference of two prompts that differ only by it."""
    with_text, without = await asyncio.gather(_render(engine, (_OTHER,)), _render(engine, (_USER,)))
    if with_text is None or without is None:
        return ""
    start = common_prefix_len(with_text, without)
    end = len(with_text) - common_prefix_len(with_text[start:][::-1], without[start:][::-1])
    return _digest(with_text[start:end].astype("<i4").tobytes())


async def _template_digest(engine: _Renders) -> str:
    """Digest of the texts of fixed conversations; a conversation that the template rejects counts as rejected."""
    texts = await asyncio.gather(*(_rendered_text(engine, *conversation) for conversation in _BY_TEMPLATE))
    if all(text is None for text in texts):
        return ""
    return _digest(msgspec.json.encode([None if text is None else _DATE.sub("DATE", text) for text in texts]))


async def _rendered_text(
    engine: _Renders, messages: tuple[Message, ...], tools: tuple[ToolDefinition, ...], template_kwargs: dict[str, Any]
) -> str | None:
    ids = await _render(engine, messages, tools, template_kwargs)
    if ids is None:
        return None
    try:
        return await engine.detokenize(ids.tolist())
    except EngineError as error:
        _raise_if_silent(error)
        return None


async def _appends_tool_turns(engine: _Renders) -> bool | None:
    """Whether each prompt of a run of calls, with thinking, begins with the one before."""
    turn = _calls("one")
    prompts = await asyncio.gather(
        *(_render(engine, (_USER, *turn * number), (_TOOL,)) for number in range(3)),
    )
    return _each_begins_with_the_last(prompts)


async def _appends_user_turns(engine: _Renders) -> bool | None:
    prompts = await asyncio.gather(_render(engine, (_USER,)), _render(engine, (_USER, _says("y"), _USER)))
    return _each_begins_with_the_last(prompts)


async def _keeps_thinking(engine: _Renders) -> bool | None:
    """Whether thinking before a user's message is still in the prompt after it."""
    return await _differ(
        _render(engine, (_USER, _says("y", "one"), _USER)), _render(engine, (_USER, _says("y", "two"), _USER))
    )


async def _renders_tools(engine: _Renders) -> bool | None:
    """Whether requests with different tools have different prompts. A template that merely notes that there are tools
    does not render them."""
    return await _differ(_render(engine, (_USER,), (_TOOL,)), _render(engine, (_USER,), (_OTHER_TOOL,)))


async def _renders_tool_results(engine: _Renders) -> bool | None:
    return await _differ(
        _render(engine, (_USER, *_calls()), (_TOOL,)), _render(engine, (_USER, *_calls(result="lost")), (_TOOL,))
    )


async def _differ(one: Awaitable[TokenIds | None], two: Awaitable[TokenIds | None]) -> bool | None:
    """None where the engine or its template refuses one of them."""
    first, second = await asyncio.gather(one, two)
    return None if first is None or second is None else not np.array_equal(first, second)


def _each_begins_with_the_last(prompts: Sequence[TokenIds | None]) -> bool | None:
    known = [prompt for prompt in prompts if prompt is not None]
    if len(known) < len(prompts):
        return None
    return all(common_prefix_len(a, b) == len(a) for a, b in itertools.pairwise(known))


async def _render(
    engine: _Renders,
    messages: Sequence[Message],
    tools: Sequence[ToolDefinition] = (),
    template_kwargs: dict[str, Any] | None = None,
) -> TokenIds | None:
    """None where the engine or its template refuses."""
    try:
        return await engine.render(messages, tools, template_kwargs)
    except EngineError as error:
        _raise_if_silent(error)
        return None


def _raise_if_silent(error: EngineError) -> None:
    """Some engines answer 500 where a template fails; an engine that says nothing at all is down."""
    if isinstance(error, EngineUnavailable) and error.details.get("status") is None:
        raise error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
