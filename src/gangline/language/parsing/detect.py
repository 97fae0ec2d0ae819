"""Which formats a model writes: its chat template is asked, by rendering a call and a thought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gangline.language.contract import ChatTokenizer
from gangline.language.parsing.harmony import CHANNEL
from gangline.language.parsing.parser import Parsers, ToolFormat
from gangline.language.parsing.tagged_calls import CALL
from gangline.language.parsing.thinking import THINK

__all__ = ["detect_parsers", "opens_thinking"]

_USER = {"role": "user", "content": "x"}
_THOUGHT = {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "y", "thinking": "y"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "p", "parameters": {"type": "object", "properties": {}}},
}


def detect_parsers(tokenizer: ChatTokenizer) -> Parsers:
    """Nothing where the template writes no tags that are known here, or refuses calls and thoughts."""
    arguments = {"key_of_probe": "value_of_probe"}
    call = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    # What the tools alone bring is subtracted: templates explain their format in the system text.
    with_tools = _probe(tokenizer, [_USER], [_TOOL])
    told = _probe(tokenizer, [_USER, called], [_TOOL])
    if CHANNEL in told:
        return Parsers("harmony", "harmony")
    thinks = THINK in _probe(tokenizer, [_USER, _THOUGHT], None)
    return Parsers(_tool_format(told.removeprefix(with_tools)), "qwen3" if thinks else None)


def _tool_format(told: str) -> ToolFormat | None:
    call = told[told.rfind(CALL) :] if CALL in told else ""
    if call:
        return "qwen3_coder" if "<function=probe>" in call else "glm" if "<arg_key>" in call else "hermes"
    compact = "".join(told.split())
    return "llama3_json" if '{"name":"probe","parameters":{"key_of_probe"' in compact else None


def opens_thinking(tokenizer: ChatTokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt itself opened the think block, so that the reply begins inside it."""
    return tokenizer.decode(prompt_ids[-8:]).rstrip().endswith(THINK)


def _probe(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    try:
        return tokenizer.decode(tokenizer.render(messages, tools=tools, add_generation_prompt=False))
    except Exception:  # a template may refuse calls or thoughts in any way it likes: then it writes no tags
        return ""
