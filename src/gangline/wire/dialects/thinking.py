"""Thinking settings of all dialects, as one wish. Pure.

The rule: a switch or a kind of thinking turns it on or off; an effort turns it on, and the effort `none` off; a budget
of 0 turns it off, and any other on. If a client sends no setting, none is sent on, and the template decides.
"""

from __future__ import annotations

from gangline.domain.conversation import ThinkingWish

KINDS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
"""Value of `type` -> whether thinking is on. For other values, such as `auto`, the template decides."""
_UNSAID = ("", "auto", "default", "thinking_level_unspecified")


def wish_of_effort(word: str | None) -> ThinkingWish:
    word = (word or "").lower()
    if word in _UNSAID:
        return ThinkingWish()
    return ThinkingWish(is_on=False) if word == "none" else ThinkingWish(is_on=True, effort=word)
