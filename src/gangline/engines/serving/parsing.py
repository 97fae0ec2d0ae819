"""What a model's reply text means: reasoning, content, tool calls; incrementally.

A parser is fed text in any cut and answers events. Text that may be the beginning of a tag is held back; a tool
call comes out whole when its tag closes. Nothing sampled is lost: a call that does not parse stays text.
Only white space right after a call, and before a think block, is dropped.

Formats: `qwen3` reasoning (`<think>...</think>`), `hermes` tool calls (`<tool_call>{json}</tool_call>`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gangline.engines.serving.sampler import ChatTokenizer
from gangline.engines.serving.text import held_length

__all__ = [
    "CallEvent",
    "ContentEvent",
    "Event",
    "Parsers",
    "ReasoningEvent",
    "ReplyParser",
    "opens_reasoning",
]

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ContentEvent:
    text: str


@dataclass(frozen=True)
class ReasoningEvent:
    text: str


@dataclass(frozen=True)
class CallEvent:
    name: str
    arguments: str
    """JSON text of an object, byte for byte as sampled."""


Event = ContentEvent | ReasoningEvent | CallEvent


@dataclass(frozen=True)
class Parsers:
    """Which formats to read out of replies."""

    tool: Literal["hermes"] | None
    reasoning: Literal["qwen3"] | None

    @classmethod
    def detect(cls, tokenizer: ChatTokenizer) -> Parsers:
        """Render a probe with a call and a thought in it and look which tags the template writes."""
        tool = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
        call: dict[str, Any] = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": {}}}
        user = {"role": "user", "content": "x"}
        called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        thought = {"role": "assistant", "content": "x", "reasoning": "y", "reasoning_content": "y"}
        writes_calls = _CALL in _probe(tokenizer, [user, called], [tool])
        writes_thoughts = _THINK in _probe(tokenizer, [user, thought], None)
        return cls("hermes" if writes_calls else None, "qwen3" if writes_thoughts else None)


def opens_reasoning(tokenizer: ChatTokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt itself opened the think block, so that the reply begins inside it."""
    return tokenizer.decode(prompt_ids[-8:]).rstrip().endswith(_THINK)


class ReplyParser:
    """One reply: reasoning split off first, tool calls out of the rest."""

    def __init__(self, parsers: Parsers, *, in_reasoning: bool = False) -> None:
        self._reasoning = _Qwen3Reasoning(inside=in_reasoning) if parsers.reasoning else None
        self._calls = _HermesCalls() if parsers.tool else None

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = [ContentEvent(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._extract_calls(events)

    def finish(self) -> list[Event]:
        """What is still held back. Call once, after the last text."""
        held = self._extract_calls(self._reasoning.finish()) if self._reasoning else []
        return held + (self._calls.finish() if self._calls else [])

    def _extract_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        parsed: list[Event] = []
        for event in events:
            parsed.extend(self._calls.feed(event.text) if isinstance(event, ContentEvent) else [event])
        return parsed


class _Qwen3Reasoning:
    """Splits `<think>` off; a block that never closes is reasoning to its end."""

    def __init__(self, *, inside: bool) -> None:
        self._state: Literal["start", "inside", "after"] = "inside" if inside else "start"
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        text, self._held = self._held + text, ""
        if self._state == "start":
            begun = text.lstrip()
            if not begun.startswith(_THINK) and _THINK.startswith(begun):
                self._held = text
                return []
            self._state = "inside" if begun.startswith(_THINK) else "after"
            text = begun[len(_THINK) :] if self._state == "inside" else text
        if self._state == "after":
            return [ContentEvent(text)] if text else []
        return self._inside(text)

    def _inside(self, text: str) -> list[Event]:
        thought, closed, content = text.partition(_THINK_END)
        if closed:
            self._state = "after"
        else:
            cut = len(text) - held_length(text, _THINK_END)
            thought, self._held = text[:cut], text[cut:]
        events: list[Event] = [ReasoningEvent(thought)] if thought else []
        return [*events, ContentEvent(content)] if content else events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [ReasoningEvent(held) if self._state == "inside" else ContentEvent(held)]


class _HermesCalls:
    def __init__(self) -> None:
        self._held = ""
        self._in_call = False
        self._after_call = False

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while True:
            before, tag, rest = self._held.partition(_CALL_END if self._in_call else _CALL)
            if not tag:
                return events if self._in_call else [*events, *self._release()]
            events.extend(self._close(before + tag) if self._in_call else self._content(before))
            self._held = rest
            self._in_call = not self._in_call

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._in_call:  # a model may stop right after the JSON
            return self._close(held)
        return self._content(held)

    def _release(self) -> list[Event]:
        """Emit what cannot be the beginning of a call any more."""
        cut = len(self._held) - held_length(self._held, _CALL)
        if self._after_call and not self._held[:cut].strip():
            return []
        text, self._held = self._held[:cut], self._held[cut:]
        return self._content(text)

    def _content(self, text: str) -> list[Event]:
        if not text or (self._after_call and not text.strip()):
            return []
        self._after_call = False
        return [ContentEvent(text)]

    def _close(self, body: str) -> list[Event]:
        call = _read_call(body.removesuffix(_CALL_END))
        self._after_call = call is not None
        return [ContentEvent(_CALL + body)] if call is None else [call]


class _CallBody(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


def _read_call(text: str) -> CallEvent | None:
    try:
        body = msgspec.json.decode(text.strip(), type=_CallBody)
        msgspec.json.decode(body.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    return CallEvent(body.name, bytes(body.arguments).decode())


def _probe(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    try:
        return tokenizer.decode(tokenizer.render(messages, tools=tools, add_generation_prompt=False))
    except Exception:  # a template may refuse calls or thoughts in any way it likes: then it writes no tags
        return ""
