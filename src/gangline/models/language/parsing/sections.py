"""Tool calls between a family's own tags: the tags are data, and a reader parses the text between them.

A section is emitted when it closes: the calls that could be parsed, and the rest as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gangline.models.language.parsing.events import CallEvent, Event, Schemas, TextEvent, held_length


class Reading(NamedTuple):
    """The parsed text of a section."""

    calls: list[CallEvent]
    rest: str
    """Text from the first place that is not a call."""
    is_inside: bool = False
    """The rest ends inside a JSON string: a closing tag after it belongs to that string."""


BodyReader = Callable[[str, Schemas], Reading]


@dataclass(frozen=True)
class Section:
    """The tags of one family. No tag is a prefix of another."""

    read: BodyReader
    opens: tuple[str, ...] = ()
    """Tags before the calls."""
    starts: tuple[str, ...] = ()
    """Start of a call itself, without a tag around the calls or if a model forgot it. It is parsed as part of the
    call.
    """
    closes: tuple[str, ...] = ()
    """Empty: only the end of the reply closes the calls."""
    frame: tuple[str, ...] = ()
    """Tags around the reply's text, which are removed. `{name}` stands for each tool's name."""


class SectionCalls:
    """Implements `CallFormat`."""

    def __init__(self, section: Section, schemas: Schemas, *, reads_calls: bool = True) -> None:
        self.num_broken = 0
        self._section = section
        self._schemas = schemas
        self._frame = list({tag.format(name=name): None for tag in section.frame for name in (*schemas, "")})
        self._tags = [*self._frame, *((*section.opens, *section.starts, *section.closes) if reads_calls else ())]
        self._tag, self._close = _any_of(self._tags), _any_of(section.closes)
        self._held = ""
        self._opened = ""
        """The tag of the open section."""
        self._body: list[str] = []
        """The open section without the text held back, parsed when it closes: a call may contain a whole file."""
        self._first_close = 0
        """Position at which a closing tag was taken for part of a JSON string."""
        self._after_call = False

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        while self._opened:
            body, self._held = "".join(self._body) + self._held, ""
            self._end(body, "", self._read(body), events)
            while self._step(events):
                pass
        held, self._held = self._held, ""
        return [*events, *self._text(held)]

    def _step(self, events: list[Event]) -> bool:
        """Process one tag. False: there is no tag yet."""
        found = (self._close if self._opened else self._tag).search(self._held)
        if found is None:
            return self._release(events)
        before, self._held = self._held[: found.start()], self._held[found.end() :]
        if self._opened:
            self._closed("".join(self._body) + before, found.group(), events)
            return True
        events.extend(self._text(before))
        tag = found.group()
        if tag in self._section.closes:  # the end of a call that ended elsewhere or never began
            self.num_broken += 1
            events.extend(self._text(tag))
        elif tag not in self._frame:
            self._opened = tag
        return True

    def _release(self, events: list[Event]) -> bool:
        """Emit text that can no longer be the beginning of a tag."""
        tags = self._section.closes if self._opened else self._tags
        cut = len(self._held) - held_length(self._held, tags) if tags else len(self._held)
        if self._opened:
            self._body.append(self._held[:cut])
        elif self._after_call and not self._held[:cut].strip():
            return False
        else:
            events.extend(self._text(self._held[:cut]))
        self._held = self._held[cut:]
        return False

    def _read(self, body: str) -> Reading:
        is_start = self._opened in self._section.starts
        return self._section.read(self._opened + body if is_start else body, self._schemas)

    def _closed(self, body: str, tag: str, events: list[Event]) -> None:
        reading = self._read(body)
        if reading.rest and reading.is_inside:
            self._first_close = self._first_close or len(body) + len(tag)
            self._body = [body + tag]
        else:
            self._end(body, tag, reading, events)

    def _end(self, body: str, tag: str, reading: Reading, events: list[Event]) -> None:
        rest = reading.rest.strip()
        if rest and self._first_close:  # it was not inside a JSON string: the section ended there
            whole, cut = body + tag, self._first_close
            closed = self._close.search(whole, cut - max(map(len, self._section.closes)))
            start = closed.start() if closed else cut
            body, tag, self._held = whole[:start], whole[start:cut], whole[cut:] + self._held
            reading = self._read(body)
            rest = reading.rest.strip()
        is_broken = not reading.calls or (rest and bool(self._section.closes or self._tag.search(rest)))
        self.num_broken += bool(is_broken)
        events.extend(reading.calls)
        self._after_call = not rest and bool(reading.calls)
        if not reading.calls:
            events.append(TextEvent(self._opened + body + tag))
        elif rest:
            events.append(TextEvent(reading.rest + tag))
        self._opened, self._first_close = "", 0
        self._body.clear()

    def _text(self, text: str) -> list[Event]:
        if not text or (self._after_call and not text.strip()):
            return []
        self._after_call = False
        return [TextEvent(text)]


def _any_of(tags: Sequence[str]) -> re.Pattern[str]:
    """Matches nothing if there are no tags."""
    return re.compile("|".join(map(re.escape, tags)) or r"(?!)")
