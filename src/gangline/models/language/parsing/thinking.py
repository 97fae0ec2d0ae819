"""Thinking between two tags at the beginning of a reply, such as `<think>` and `</think>`.

Models may forget to close the block before a call (Qwen3.5 often does). A tag that is a special token ends the block.
`<tool_call>` may be part of the thought: it counts only for a call at the end of a block that never closes, as in
engines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from gangline.models.language.parsing.events import Event, TextEvent, ThinkingEvent, held_length

THINK_TAGS: dict[str, tuple[str, str]] = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "hunyuan": ("<think:opensource>", "</think:opensource>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "muse": ("to=self<|message|>", "<|eom|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "solar": ("<|think|>", "<|end|>"),
}
"""Name of a format -> opening and closing tag. `deepseek_r1`: replies begin inside the block."""

_CALL = "<tool_call>"
_CALL_ENDS = ("</tool_call>", "</function>")
_BEGUN_CALL = re.compile(r"(?<![`\"])" + _CALL + r"\s*(?:\{|<function=|[^\s<>{}`]+\s*<arg_key>)")


def opens_thought(text: str, thinking: str | None) -> bool:
    """Whether a prompt that ends with `text` has opened the thought of its reply."""
    tags = THINK_TAGS.get(thinking or "")
    return tags is not None and text.rstrip().endswith(tags[0].rstrip())


class ThinkTags:
    """Splits the block off. A block that never closes is thinking to its end. Any later tag is text."""

    def __init__(
        self, thinking: str, *, opened: bool = False, also_ends: Sequence[str] = (), last_call_ends: bool = False
    ) -> None:
        """opened: the prompt has already opened the block.
        also_ends: tags of calls, before which models forget to close the block.
        last_call_ends: calls of the form `<tool_call>` are parsed from the text.
        """
        always = thinking == "deepseek_r1"
        self._open, self._close = THINK_TAGS[thinking]
        self._ends = (self._close, *also_ends)
        self._state: Literal["start", "inside", "after"] = "inside" if opened and not always else "start"
        self._otherwise: Literal["inside", "after"] = "inside" if always else "after"
        self._held = ""
        self._last_call_ends = last_call_ends
        self._since_call: list[str] = []
        """Thinking since the first `<tool_call>`, which is held back."""

    def feed(self, text: str) -> list[Event]:
        text, self._held = self._held + text, ""
        if self._state == "start":
            begun = text.lstrip()
            if not begun.startswith(self._open) and self._open.startswith(begun):
                self._held = text
                return []
            self._state = "inside" if begun.startswith(self._open) else self._otherwise
            text = begun[len(self._open) :] if begun.startswith(self._open) else text
        if self._state == "after":
            return [TextEvent(text)] if text else []
        return self._inside(text)

    def _inside(self, text: str) -> list[Event]:
        found = [at for end in self._ends if (at := text.find(end)) >= 0]
        if found:
            self._state = "after"
            at = min(found)
            thought, after = text[:at], text[at:].removeprefix(self._close)
        else:
            cut = len(text) - held_length(text, (*self._ends, _CALL) if self._last_call_ends else self._ends)
            thought, after, self._held = text[:cut], "", text[cut:]
        thought = self._before_call(thought)
        if found:
            thought += "".join(self._since_call)
            self._since_call.clear()
        events: list[Event] = [ThinkingEvent(thought)] if thought else []
        return [*events, TextEvent(after)] if after else events

    def _before_call(self, thought: str) -> str:
        """The part that can be emitted; the rest is held back."""
        begun = 0 if self._since_call else thought.find(_CALL) if self._last_call_ends else -1
        if begun < 0:
            return thought
        self._since_call.append(thought[begun:])
        return thought[:begun]

    def finish(self) -> list[Event]:
        held, self._held = "".join(self._since_call) + self._held, ""
        inside = self._state == "inside" or (self._state == "start" and self._otherwise == "inside")
        call = _BEGUN_CALL.search(held) if self._since_call and held.rstrip().endswith(_CALL_ENDS) else None
        cut = call.start() if call else len(held) if inside else 0
        events: list[Event] = [ThinkingEvent(held[:cut])] if cut else []
        return [*events, TextEvent(held[cut:])] if held[cut:] else events
