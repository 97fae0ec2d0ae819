"""Text from users and tools that differs between two runs of one harness: random ids, durations, dates.

A rule is a regular expression. Its group `handle` is a value that the model could name later, such as a process id; its
group `value` is the part of the match that may differ. Without either, the whole match may differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

USUAL_RULES = (
    r"(?m)^[-dlbcps][-rwxsStT]{9}[.+@]? +\d+ +\S+ +\S+ +\d+ (?P<value>[A-Z][a-z]{2} +\d{1,2} +(?:\d{2}:\d{2}|\d{4})) ",
)
"""For every harness: the times in the output of `ls -l`."""

_STAND_IN = "\0"


class Tolerance:
    """The rules of one harness, and the default ones."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._patterns = [re.compile(rule) for rule in (*USUAL_RULES, *rules)]

    def without(self, text: str) -> str:
        """Returns `text` with a placeholder for each value that may differ."""
        for pattern in self._patterns:
            text = pattern.sub(_with_stand_in, text)
        return text

    def handles(self, text: str) -> list[str]:
        """Returns values that may differ and that a model could name in a later call."""
        named = (pattern for pattern in self._patterns if "handle" in pattern.groupindex)
        return [match["handle"] for pattern in named for match in pattern.finditer(text)]


def _with_stand_in(match: re.Match[str]) -> str:
    groups = match.re.groupindex
    name = "handle" if "handle" in groups else "value" if "value" in groups else 0
    start, end = match.span(name)
    return match.string[match.start() : start] + _STAND_IN + match.string[end : match.end()]
