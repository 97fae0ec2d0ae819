"""Probes the thinking options of a chat template, and whether the template works at all, by rendering.

It tries a list of words, not of models: a word counts if it changes the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gangline.domain.conversation import EFFORTS, Message, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineError
from gangline.domain.node_views import TemplateFacts
from gangline.models.engines.templates.fitting import fit
from gangline.models.engines.templates.renderings import Renderings, Renders
from gangline.models.engines.templates.taken_messages import PROBE_TOOL

_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("reasoning", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_option", "on", "off"),
)
_EFFORT_NAMES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_NO_ROUTE = (404, 405, 501)
"""Statuses of an engine that cannot render, whose template is unknown."""
_NO_EFFORT = "probe"
"""A word that no template knows."""
_TRIED = ("low", "max", _NO_EFFORT)
_KEEPERS: tuple[tuple[str, Any], ...] = (
    ("preserve_thinking", True),
    ("clear_thinking", False),
    ("keep_past_thinking", True),
    ("keep_thinking", True),
    ("preserved_thinking", True),
    ("drop_thinking", False),
    ("truncate_history_thinking", False),
)

_USER = Message("user", (Text("x"),))
_CALLED = (
    _USER,
    Message("assistant", (ToolCall("call00001", "probe", '{"query": "x"}'),)),
    Message("tool", (ToolResult("call00001", (Text("found"),)),)),
)


async def probe_choices(engine: Renders, rendered: Renderings, facts: TemplateFacts) -> dict[str, Any]:
    """Returns more fields of `facts`. Raises: like `Renderings`."""
    called, _ = fit(_CALLED, facts)
    refuses, refuses_tools = await asyncio.gather(
        _refusal(engine, rendered, (_USER,), ()),
        _refusal(engine, rendered, called, (PROBE_TOOL,)),
    )
    if await _prompt(rendered, {}) is None:
        return {"refuses": refuses, "refuses_tools": refuses_tools}
    switch = await _switch(rendered)
    on, off = ({}, {}) if switch is None else ({switch[0]: switch[1]}, {switch[0]: switch[2]})
    efforts, keeper = await asyncio.gather(_efforts(rendered, on), _keeper(rendered, on))
    choices = {"thinking_on": on, "thinking_off": off, "efforts": efforts, "keeps_thinking_with": keeper}
    return choices | {"refuses_tools": refuses_tools}


async def _refusal(
    engine: Renders, rendered: Renderings, messages: tuple[Message, ...], tools: tuple[ToolDefinition, ...]
) -> str:
    """The template's error message; empty if it accepts them, or the engine has no route to render."""
    if await rendered.ids(messages, tools) is not None:
        return ""
    try:
        await engine.render(messages, tools)
    except EngineError as error:
        return "" if error.details.get("status") in _NO_ROUTE else error.message
    return ""


async def _prompt(
    rendered: Renderings, arguments: dict[str, Any], messages: tuple[Message, ...] = (_USER,)
) -> tuple[int, ...] | None:
    """None if the template refuses."""
    ids = await rendered.ids(messages, (), arguments)
    return None if ids is None else tuple(ids.tolist())


async def _prompts(
    rendered: Renderings, arguments: Sequence[dict[str, Any]], messages: tuple[Message, ...] = (_USER,)
) -> list[tuple[int, ...] | None]:
    return list(await asyncio.gather(*(_prompt(rendered, argument, messages) for argument in arguments)))


async def _switch(rendered: Renderings) -> tuple[str, Any, Any] | None:
    """The first argument that switches thinking on and off."""
    rendered_prompts = await _prompts(rendered, [{name: value} for name, *values in _SWITCHES for value in values])
    pairs = zip(_SWITCHES, rendered_prompts[::2], rendered_prompts[1::2], strict=True)
    return next((one for one, on, off in pairs if on is not None and off is not None and on != off), None)


async def _efforts(rendered: Renderings, on: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Argument name -> the accepted words."""
    plain = await _prompt(rendered, on)
    for name in _EFFORT_NAMES:
        if all(prompt == plain for prompt in await _prompts(rendered, [{**on, name: word} for word in _TRIED])):
            continue
        tried = await _prompts(rendered, [{**on, name: word} for word in (*EFFORTS, _NO_EFFORT)])
        words = tuple(word for word, one in zip(EFFORTS, tried, strict=False) if one is not None)
        if tried[-1] is not None and len(set(tried)) == len(tried):
            words = ("low", "medium", "high")  # it accepts any word: models are trained on these
        return {name: words} if words else {}
    return {}


async def _keeper(rendered: Renderings, on: dict[str, Any]) -> dict[str, Any]:
    """The first argument with which the prompt keeps thinking before the last user message; empty if it always or never
    does."""
    one, two = ((_USER, Message("assistant", (Thinking(thought), Text("y"))), _USER) for thought in ("one", "two"))
    choices: list[dict[str, Any]] = [{}, *({name: value} for name, value in _KEEPERS)]
    arguments = [{**on, **choice} for choice in choices]
    prompts = zip(
        choices, await _prompts(rendered, arguments, one), await _prompts(rendered, arguments, two), strict=True
    )
    found = (choice for choice, first, second in prompts if first is not None and first != second)
    return next(found, choices[0])
