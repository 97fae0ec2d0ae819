"""gpt-oss's channels: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.

`analysis` is thinking, `final` and `commentary` are text, a message to `functions.NAME` is a call. Markers are special
tokens, so the text must have been decoded with them.
"""

from __future__ import annotations

import re
from typing import Literal

from gangline.models.language.parsing.events import CallEvent, Event, TextEvent, ThinkingEvent, held_length
from gangline.models.language.parsing.json_calls import ends_in_string
from gangline.models.language.parsing.values import is_object

CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_END = re.compile("|".join(re.escape(end) for end in _ENDS))
_HEADER = re.compile(
    r"\s*(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=[^\s<]+)?\s*"
    r"<\|channel\|>\s*(analysis|commentary|final)\s*(?:to=[^\s<]+)?\s*(?:<\|constrain\|>)?\s*\w*\s*"
)


class Harmony:
    """Parses both thinking and calls, which share one grammar. A header without a message stays text."""

    def __init__(self, *, reads_calls: bool) -> None:
        self.num_broken = 0
        self._reads_calls = reads_calls
        self._kind: Literal["thinking", "text", "call"] | None = None
        """None: in a header."""
        self._header = ""
        self._held = ""
        self._call_body: list[str] = []
        """Body of the open call, parsed when it closes."""
        self._num_strings = 0
        """Number of pieces of that body up to a marker inside one of its strings."""

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._kind is None:
            return _shown(TextEvent, held)
        return self._body(held, is_last=True)

    def _step(self, events: list[Event]) -> bool:
        """Process one boundary. False: there is no boundary yet."""
        if self._kind is None:
            header, found, rest = self._held.partition(_MESSAGE)
            if found:
                self._header, self._held, self._kind = header, rest, _kind_of(header)
                events.extend([] if _HEADER.fullmatch(header) else [TextEvent(header + _MESSAGE)])
            return bool(found)
        end = _END.search(self._held)
        if end is not None and self._is_in_string(self._held[: end.start()]):
            self._call_body.append(self._held[: end.end()])
            self._num_strings = len(self._call_body)
            self._held = self._held[end.end() :]
            return True
        if end is not None:
            body, self._held = self._held[: end.start()], self._held[end.start() :]
            # The tag that opens the next header belongs to that header.
            self._held = self._held if end.group() in ("<|start|>", CHANNEL) else self._held[len(end.group()) :]
            events.extend(self._body(body, is_last=True))
            self._kind = None
            return True
        cut = len(self._held) - held_length(self._held, _ENDS)
        body, self._held = self._held[:cut], self._held[cut:]
        events.extend(self._body(body, is_last=False))
        return False

    def _is_in_string(self, body: str) -> bool:
        """Whether a marker after `body` is part of a call's arguments."""
        if self._kind != "call":
            return False
        since = "".join(self._call_body[self._num_strings :]) + body
        return ends_in_string(since, begins_in_string=self._num_strings > 0)

    def _body(self, body: str, *, is_last: bool) -> list[Event]:
        if self._kind == "call":
            self._call_body.append(body)
            return [self._call()] if is_last else []
        return _shown(ThinkingEvent if self._kind == "thinking" else TextEvent, body)

    def _call(self) -> Event:
        body = "".join(self._call_body)
        self._call_body.clear()
        self._num_strings = 0
        name = _RECIPIENT.search(self._header)
        if name is not None and self._reads_calls and is_object(body.strip()):
            return CallEvent(name.group(1), body.strip())
        self.num_broken += self._reads_calls
        return TextEvent(self._header + _MESSAGE + body)


def _kind_of(header: str) -> Literal["thinking", "text", "call"]:
    """`text` if it is not a valid header."""
    known = _HEADER.fullmatch(header)
    if known is not None and "to=" in header:
        return "call"
    return "thinking" if known is not None and known.group(1) == "analysis" else "text"


def _shown(kind: type[TextEvent] | type[ThinkingEvent], text: str) -> list[Event]:
    return [kind(text)] if text else []
