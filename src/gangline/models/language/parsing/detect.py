"""Detects a model's formats from its chat template, by rendering a call and a thought.

The call format is the one that parses the rendered call back, so formats cannot be confused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.parsing.events import CallEvent
from gangline.models.language.parsing.families import SECTIONS
from gangline.models.language.parsing.harmony import CHANNEL
from gangline.models.language.parsing.parser import Parsers, ReplyParser, ThinkingFormat, ToolFormat
from gangline.models.language.parsing.thinking import THINK_TAGS, opens_thought

_USER = {"role": "user", "content": "x"}
_THOUGHT = "thought_of_probe"
_THINKING = {"reasoning": _THOUGHT, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
_THOUGHTS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "x", **_THINKING},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": "x"}]},
    {"role": "assistant", "content": {"blocks": [{"type": "thoughts", "text": _THOUGHT}]}},
]
_OF_FAMILY: dict[str, ThinkingFormat] = {name: name for name in get_args(ThinkingFormat) if name in SECTIONS}
_ARGUMENTS = {"key_of_probe": "value\\n'of'_probe"}
"""Contains characters that some templates escape and others do not."""
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "p",
        "parameters": {"type": "object", "properties": {"key_of_probe": {"type": "string", "description": "k"}}},
    },
}


def detect_parsers(tokenizer: ChatTokenizer) -> Parsers:
    """Empty if the template writes no known tags, or refuses calls and thoughts."""
    # Text from the tools alone is subtracted: templates explain their format in the system text.
    with_tools = _probe(tokenizer, [_USER], [_TOOL])
    prompt = _probe(tokenizer, [_USER, _called(_ARGUMENTS)], [_TOOL])
    prompt = prompt or _probe(tokenizer, [_USER, _called(json.dumps(_ARGUMENTS))], [_TOOL])
    if CHANNEL in prompt:
        return Parsers("harmony", "harmony")
    tools = _tool_format(prompt.removeprefix(with_tools))
    # A template may omit thoughts from its history, while replies have its family's tags.
    return Parsers(tools, _thinking_format(tokenizer) or _OF_FAMILY.get(tools or ""))


def _called(arguments: object) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _tool_format(prompt: str) -> ToolFormat | None:
    for name in get_args(ToolFormat):
        if name not in ("harmony", "llama3_json") and _reads(name, prompt):
            return name
    # A Llama call is a whole reply, enclosed in the turn's own marks.
    is_llama = '{"name":"probe","parameters":{"key_of_probe"' in "".join(prompt.split())
    return "llama3_json" if is_llama else None


def _reads(name: ToolFormat, prompt: str) -> bool:
    parser = ReplyParser(Parsers(name), schemas={"probe": _TOOL["function"]["parameters"]})
    calls = [event for event in parser.feed(prompt) + parser.finish() if isinstance(event, CallEvent)]
    return any(call.name == "probe" and json.loads(call.arguments) == _ARGUMENTS for call in calls)


def _thinking_format(tokenizer: ChatTokenizer) -> ThinkingFormat | None:
    """Detected from a thought after its tag, else from both tags in any text, or from a prompt that opens the
    thought.
    """
    texts = [_probe(tokenizer, [_USER, thought], None) for thought in _THOUGHTS]
    # Some templates write thoughts only with a call.
    texts.append(_probe(tokenizer, [_USER, _called(_ARGUMENTS) | _THINKING], [_TOOL]))
    for switches in ({}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False}):
        texts.append(_probe(tokenizer, [_USER], None, add_generation_prompt=True, template_kwargs=switches))
    known = [name for name in get_args(ThinkingFormat) if name in THINK_TAGS]
    for name in known:
        if any(
            opens_thought(before, name) for before, found, _ in (text.partition(_THOUGHT) for text in texts) if found
        ):
            return name
    for name in known:
        if any(opens_thought(text, name) or all(tag in text for tag in THINK_TAGS[name]) for text in texts):
            return name
    return None


def opens_thinking(tokenizer: ChatTokenizer, prompt_ids: Sequence[int], thinking: str | None = "qwen3") -> bool:
    """Whether the prompt itself opened the think block, so that the reply begins inside it."""
    return thinking is not None and opens_thought(tokenizer.decode(prompt_ids[-8:]), thinking)


def _probe(
    tokenizer: ChatTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool = False,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    try:
        ids = tokenizer.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )
        return tokenizer.decode(ids)
    except Exception:  # a template may refuse calls or thoughts with any error: then it writes no tags
        return ""
