"""Parses a reply's text, in arbitrary pieces, into events.

Laws
- For any division of the text into pieces, the events add up to the same thinking, text and calls.
- A call is emitted whole, once it is known to be one: its arguments are a JSON object. A call that cannot be parsed
  stays text, and `status` reports it, as for anything else that looks like a call: see `marks`.
- Nothing sampled is lost except the tags of parsed parts, and white space after a call and before a think block.

Llama 3's tool calls: a reply that consists only of JSON, `{"name": ..., "parameters": {...}}`, separated by `;`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from gangline.domain.completion import ParseStatus
from gangline.domain.errors import InvalidRequest
from gangline.models.language.parsing.call_bodies import GLM, HERMES, QWEN3_CODER
from gangline.models.language.parsing.events import CallEvent, CallFormat, Event, Schemas, TextEvent
from gangline.models.language.parsing.families import SECTIONS
from gangline.models.language.parsing.harmony import Harmony
from gangline.models.language.parsing.json_calls import whole_objects
from gangline.models.language.parsing.marks import lost_calls
from gangline.models.language.parsing.sections import SectionCalls
from gangline.models.language.parsing.tagged_calls import TaggedCalls
from gangline.models.language.parsing.thinking import ThinkTags

ThinkingFormat = Literal[
    "qwen3",
    "deepseek_r1",
    "harmony",
    "apertus",
    "apriel",
    "cohere",
    "gemma4",
    "hunyuan",
    "kimi_k3",
    "minimax_m3",
    "mistral",
    "muse",
    "seed_oss",
    "solar",
]
ToolFormat = Literal[
    "hermes",
    "qwen3_coder",
    "glm",
    "llama3_json",
    "harmony",
    "apertus",
    "cohere",
    "deepseek_v3",
    "deepseek_v4",
    "functionary",
    "gemma4",
    "gigachat",
    "hunyuan",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "lfm2_raw",
    "minicpm",
    "minimax_m1",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "muse",
    "nemotron_v2",
    "seed_oss",
    "solar",
]
# Formats whose marks are ordinary tokens, not special ones.
_PLAIN_THINKING = frozenset({None, "qwen3", "deepseek_r1"})
_PLAIN_TOOLS = frozenset({None, "hermes", "qwen3_coder", "glm"})
_OFTEN_PLAIN_TOOLS = frozenset({"llama3_json", "functionary", "minicpm", "minimax_m1", "minimax_m2", "nemotron_v2"})

_PYTHON_TAG = "<|python_tag|>"


class LlamaJson:
    """Calls have no end mark, so a reply that begins like a call is held back to its end."""

    def __init__(self, schemas: Schemas) -> None:
        self.num_broken = 0
        self._schemas = schemas
        self._held: list[str] = []
        self._state: Literal["start", "call", "text"] = "start"

    def feed(self, text: str) -> list[Event]:
        if self._state == "text":
            return [TextEvent(text)]
        self._held.append(text)
        if self._state == "start":
            begun = "".join(self._held).lstrip()
            if begun.startswith(("{", _PYTHON_TAG)):
                self._state = "call"
            elif not _PYTHON_TAG.startswith(begun):
                self._state = "text"
                return self._released()
        return []

    def finish(self) -> list[Event]:
        held = "".join(self._held).strip()
        calls = whole_objects(held.removeprefix(_PYTHON_TAG), self._schemas)
        if calls:
            return list[Event](calls)
        # JSON without the tag may be the answer itself.
        self.num_broken += held.startswith(_PYTHON_TAG) or _names_one(held, self._schemas)
        return self._released()

    def _released(self) -> list[Event]:
        held = "".join(self._held)
        self._held.clear()
        return [TextEvent(held)] if held else []


def _names_one(text: str, names: Schemas) -> bool:
    return text.lstrip().startswith("{") and any(json.dumps(name) in text for name in names)


_CALLS = {
    "hermes": partial(TaggedCalls, HERMES),
    "qwen3_coder": partial(TaggedCalls, QWEN3_CODER),
    "glm": partial(TaggedCalls, GLM),
    "llama3_json": LlamaJson,
}


@dataclass(frozen=True)
class Parsers:
    """The formats to parse in replies. None: that part stays text."""

    tools: ToolFormat | None = None
    thinking: ThinkingFormat | None = None

    @classmethod
    def named(cls, names: Mapping[str, Any]) -> Parsers:
        """From `{"thinking": ..., "tools": ...}`; "none" means None. Raises: InvalidRequest."""
        unknown = sorted(set(names) - {"thinking", "tools"})
        if unknown:
            raise InvalidRequest(f"parsers: {unknown[0]!r} is neither thinking nor tools.")
        thinking = _one_of("thinking", names.get("thinking"), get_args(ThinkingFormat))
        tools = _one_of("tools", names.get("tools"), get_args(ToolFormat))
        if (thinking == "harmony") != (tools == "harmony"):
            raise InvalidRequest("parsers: harmony is one grammar; name it for thinking and for tools.")
        return cls(tools=tools, thinking=thinking)

    def __bool__(self) -> bool:
        return self.tools is not None or self.thinking is not None

    @property
    def need_special_tokens(self) -> bool:
        """Whether the marks are special tokens, which are usually omitted when decoding."""
        return self.thinking not in _PLAIN_THINKING or self.tools not in _PLAIN_TOOLS

    @property
    def read_plain_text(self) -> bool:
        """Whether the text of a chat route, decoded without special tokens, still contains the marks."""
        return self.thinking in _PLAIN_THINKING | {"apriel"} and self.tools in _PLAIN_TOOLS | _OFTEN_PLAIN_TOOLS


def _one_of(what: str, name: object, known: tuple[str, ...]) -> Any:
    if name in (None, "none"):
        return None
    if name not in known:
        raise InvalidRequest(f"parsers: {what} must be none or one of {', '.join(known)}; got {name!r}.")
    return name


class ReplyParser:
    """Parses one reply: first splits off thinking, then extracts tool calls from the rest."""

    def __init__(
        self, parsers: Parsers, *, in_thinking: bool = False, schemas: Schemas | None = None, reads_calls: bool = True
    ) -> None:
        """in_thinking: the prompt has opened the think block.
        schemas: the offered tools', for formats without value types.
        reads_calls: False leaves calls in the text, for callers that want no calls.
        """
        self._num_calls = 0
        self._thinking, self._calls = _formats(parsers, in_thinking, schemas or {}, reads_calls)
        self._names = frozenset(schemas or {})
        self._reads_calls = reads_calls
        self._left_over: tuple[list[str], list[str]] = [], []
        """Text and thinking so far, with a line break in place of each parsed call."""
        self._lost_calls = False

    @property
    def num_calls(self) -> int:
        """Number of calls parsed so far."""
        return self._num_calls

    @property
    def status(self) -> ParseStatus:
        if not (self._num_broken() or self._lost_calls):
            return "ok"
        return "partial" if self._num_calls else "failed"

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        return self._counted(self._read(self._thinking.feed(text) if self._thinking else [TextEvent(text)]))

    def finish(self) -> list[Event]:
        """The text held back so far. Call once, after the last text."""
        held = self._read(self._thinking.finish()) if self._thinking else []
        events = self._counted(held + (self._calls.finish() if self._calls else []))
        if self._reads_calls:
            text, thinking = map("".join, self._left_over)
            self._lost_calls = lost_calls(text, thinking, num_calls=self._num_calls, names=self._names)
        return events

    def _read(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        read: list[Event] = []
        for event in events:
            read.extend(self._calls.feed(event.text) if isinstance(event, TextEvent) else [event])
        return read

    def _counted(self, events: list[Event]) -> list[Event]:
        text, thinking = self._left_over
        for event in events:
            if isinstance(event, CallEvent):
                self._num_calls += 1
                text.append("\n")
            elif self._reads_calls:
                (text if isinstance(event, TextEvent) else thinking).append(event.text)
        return events

    def _num_broken(self) -> int:
        of_thinking = self._thinking.num_broken if isinstance(self._thinking, Harmony) else 0
        return of_thinking + (self._calls.num_broken if self._calls else 0)


def _formats(
    parsers: Parsers, in_thinking: bool, schemas: Schemas, reads_calls: bool
) -> tuple[ThinkTags | Harmony | None, CallFormat | None]:
    if parsers.thinking == "harmony":
        return Harmony(reads_calls=reads_calls and parsers.tools == "harmony"), None
    section = SECTIONS.get(parsers.tools or "")
    begins = (*section.opens, *section.starts) if section and reads_calls else ()
    make = _CALLS.get(parsers.tools or "") if reads_calls else None
    calls = make(schemas) if make is not None else None
    if section is not None:
        calls = SectionCalls(section, schemas, reads_calls=reads_calls)
    if parsers.thinking is None:
        return None, calls
    tagged = isinstance(calls, TaggedCalls)
    return ThinkTags(parsers.thinking, opened=in_thinking, also_ends=begins, last_call_ends=tagged), calls
