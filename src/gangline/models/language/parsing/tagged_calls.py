"""Tool calls between `<tool_call>` and `</tool_call>`, whose bodies `call_bodies` parses.

A tag opens a call if it is followed by the start of a body and not quoted in text. Any other tag is only mentioned, as
in "write `<tool_call>` first".

A call is closed by the first tag outside of values with which the body can be parsed. Before the opening tag of another
call, and at the end of the reply, the closing tag may be missing if the body shows that it is complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gangline.models.language.parsing.call_bodies import BodyForm
from gangline.models.language.parsing.events import CallEvent, Event, Schemas, TextEvent, held_length

CALL, _CALL_END = "<tool_call>", "</tool_call>"
_TAGS = (CALL, _CALL_END)
_TAG = re.compile("|".join(_TAGS))


@dataclass
class _OpenCall:
    opener: str
    body: str = ""
    """Text up to the last tag."""
    since: list[str] = field(default_factory=list[str])
    """Text since then, parsed when a tag arrives: a call may contain a whole file."""
    in_value: bool = False
    nested: list[int] = field(default_factory=list[int])
    """Start positions of calls inside a value, as in a file of examples."""


class TaggedCalls:
    """A call is emitted whole when it closes: only then is it known to be one. Otherwise it stays text, including
    tags.
    """

    def __init__(self, form: BodyForm, schemas: Schemas) -> None:
        self.num_broken = 0
        self._form = form
        self._schemas = schemas
        bare = [f"{form.bare}{name}>" for name in schemas if "<" not in name] if form.bare else []
        self._openers = (CALL, *bare)
        self._opener = re.compile("|".join(map(re.escape, self._openers)))
        self._held = ""
        self._line = ""
        """The text of the current line, since the last call."""
        self._after_call = False
        self._call: _OpenCall | None = None
        self._any_tag_closes = False

    def feed(self, text: str) -> list[Event]:
        self._held += text
        return self._events(is_last=False)

    def finish(self) -> list[Event]:
        events = self._events(is_last=True)
        while self._call is not None:
            events.extend(self._at_the_end(self._call))
            events.extend(self._events(is_last=True))
        return events

    def _events(self, *, is_last: bool) -> list[Event]:
        events: list[Event] = []
        while self._in_call(self._call, events) if self._call else self._in_text(events, is_last=is_last):
            pass
        return events

    def _in_text(self, events: list[Event], *, is_last: bool) -> bool:
        """Process one opening tag. False: there is no tag yet."""
        opener = self._opener.search(self._held)
        if opener is None:
            events.extend(self._text(len(self._held) if is_last else self._end_of_text()))
            return False
        rest = self._held[opener.end() :]
        is_bare = opener.group() != CALL
        if not is_last and not is_bare and self._form.may_begin.match(rest):
            events.extend(self._text(opener.start()))
            return False
        if self._is_quoted(self._held[: opener.start()]) or not (is_bare or self._form.begins.match(rest)):
            events.extend(self._text(opener.end()))
            return True
        events.extend(self._text(opener.start()))
        self._held = rest
        self._call = _OpenCall(opener.group())
        return True

    def _end_of_text(self) -> int:
        """Position from which the held text could still become an opening tag."""
        begun = self._held.rfind("<")
        tail = self._held[begun:]
        return begun if begun >= 0 and any(opener.startswith(tail) for opener in self._openers) else len(self._held)

    def _is_quoted(self, before: str) -> bool:
        line = (self._line + before).rpartition("\n")[2]
        return line.endswith(("`", '"')) and line.count(line[-1]) % 2 == 1

    def _text(self, end: int) -> list[Event]:
        """The held text up to `end`. White space after a call is held until the next text is known."""
        text = self._held[:end]
        if not text or (self._after_call and not text.strip()):
            return []
        self._held = self._held[end:]
        self._after_call = False
        self._line = (self._line + text).rpartition("\n")[2]
        return [TextEvent(text)]

    def _in_call(self, call: _OpenCall, events: list[Event]) -> bool:
        """Process one tag. False: there is no tag yet."""
        tag = _TAG.search(self._held)
        end = tag.start() if tag else len(self._held) - held_length(self._held, _TAGS)
        call.since.append(self._held[:end])
        self._held = self._held[end:]
        if tag is None:
            return False
        since = "".join(call.since)
        call.body += since
        call.since.clear()
        call.in_value = self._form.ends_in_value(since, call.in_value)
        if self._closes(call, tag.group(), events):
            self._call = None
        else:
            call.body += tag.group()
            self._held = self._held[len(tag.group()) :]
        return True

    def _closes(self, call: _OpenCall, tag: str, events: list[Event]) -> bool:
        """False: the tag belongs to a value."""
        if tag != CALL and self._closes_nested(call):
            call.in_value = True
            return False
        calls = self._read(call.opener, call.body) if self._form.nests or not call.in_value else []
        if not calls and call.in_value and not self._any_tag_closes:
            if tag == CALL and self._form.nests:
                call.nested.append(len(call.body) + len(CALL))
            return False
        end = "" if tag == CALL else tag
        self._held = self._held[len(end) :]
        events.extend(self._called(calls) if calls else self._broken(call.opener + call.body + end))
        return True

    def _closes_nested(self, call: _OpenCall) -> bool:
        """Whether a closing tag after the body ends a whole call in a value. Other opening tags there were only
        words.
        """
        while call.nested:
            if self._form.read(call.body[call.nested.pop() :], self._schemas):
                return True
        return False

    def _at_the_end(self, call: _OpenCall) -> list[Event]:
        """Resolve an open call at the end of the reply. From then on any tag closes a call, so that this terminates."""
        body = call.body + "".join(call.since) + self._held
        self._call, self._held, self._any_tag_closes = None, "", True
        calls = self._read(call.opener, body) if self._form.shows_its_end else []
        if calls:
            return self._called(calls)
        self._held = body
        return self._broken(call.opener)

    def _read(self, opener: str, body: str) -> list[CallEvent]:
        return self._form.read(body if opener == CALL else opener + body, self._schemas)

    def _called(self, calls: list[CallEvent]) -> list[Event]:
        self._after_call, self._line = True, ""
        return list[Event](calls)

    def _broken(self, text: str) -> list[Event]:
        self.num_broken += 1
        self._after_call = False
        self._line = (self._line + text).rpartition("\n")[2]
        return [TextEvent(text)]
