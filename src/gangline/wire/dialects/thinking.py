"""What clients say of thinking, in every dialect, as one wish. Pure.

The rule: a switch or a kind of thinking turns it on or off; a word for the effort turns it on, and `none` off; a budget
of 0 turns it off, and any other on. Where a client says nothing, nothing is sent, and the template decides.
"""

from __future__ import annotations

from gangline.domain.conversation import ThinkingWish

__all__ = ["KINDS", "wish_of_effort"]

KINDS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
"""Word of a `type` -> whether thinking is on. Of other words, such as `auto`, the template decides."""
_UNSAID = ("", "auto", "default", "thinking_level_unspecified")


def wish_of_effort(word: str | None) -> ThinkingWish:
    word = (word or "").lower()
    if word in _UNSAID:
        return ThinkingWish()
    return ThinkingWish(is_on=False) if word == "none" else ThinkingWish(is_on=True, effort=word)
