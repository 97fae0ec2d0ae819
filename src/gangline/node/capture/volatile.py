"""System text that a client writes anew into every request: the time of day, a billing line.

It would make every call another conversation. By rule it does not count when a call is placed, and the engine receives
the text of the conversation's first call. The client's own text is kept in the record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice

from gangline.domain.conversation import Message, Text

__all__ = ["USUAL_RULES", "VolatileText"]

USUAL_RULES = (
    r"x-anthropic-billing-header:[^\n]*",
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?",
    r"(?:[Tt]oday's|[Cc]urrent) (?:[Dd]ate|[Tt]ime)[^\n]{0,120}",
    r"\d{1,2}:\d{2}(?::\d{2})?(?: ?[AaPp][Mm]\b)?",
)
"""Unless a task says otherwise: a client's billing line, dates, times."""


class VolatileText:
    """The rules of one session."""

    def __init__(self, rules: Iterable[str] | None = None) -> None:
        """`rules`: regular expressions, each tried at any place of a system message's text; None is the usual ones."""
        self.rules = tuple(USUAL_RULES if rules is None else rules)
        self._patterns = [re.compile(rule) for rule in self.rules]

    def without(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub("", text)
        return text

    def has_more_than(self, limit: int, message: Message) -> bool:
        """Whether any rule finds more pieces than that in a system message, as it stands."""
        if message.role not in ("system", "developer"):
            return False
        text = "\n".join(part.text for part in message.parts if isinstance(part, Text))
        return any(next(islice(pattern.finditer(text), limit, None), None) is not None for pattern in self._patterns)

    def found_in(self, message: Message) -> Sequence[str]:
        """The volatile pieces of a system message, rule by rule; none of any other."""
        if message.role not in ("system", "developer"):
            return ()
        found: list[str] = []
        for text in (part.text for part in message.parts if isinstance(part, Text)):
            for pattern in self._patterns:
                found += (match.group() for match in pattern.finditer(text))
                text = pattern.sub("", text)
        return found
