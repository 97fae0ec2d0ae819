"""Rules by which a program's output equals the expected one. All take linear time."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

__all__ = ["Rule", "same_output", "same_value"]

Rule = Literal["exact", "trimmed", "tokens", "floats"]
"""`exact`: every byte. `trimmed`: lines without whitespace at their ends, and without empty lines at the end. `tokens`:
words between whitespace. `floats`: such words, where two numbers may differ by the tolerance."""


def same_output(rule: Rule, expected: str, found: bytes, tolerance: float) -> bool:
    """tolerance: absolute and relative, for `floats`."""
    if rule == "exact":
        return expected.encode() == found
    text = found.decode(errors="replace")
    if rule == "trimmed":
        return _trimmed(expected) == _trimmed(text)
    words, others = expected.split(), text.split()
    if rule == "tokens" or words == others:
        return words == others
    return len(words) == len(others) and all(
        _near(word, other, tolerance) for word, other in zip(words, others, strict=True)
    )


def same_value(rule: Rule, expected: Any, found: Any, tolerance: float) -> bool:
    """Whether two JSON values are equal; with `floats`, numbers may differ by the tolerance. A boolean is no number."""
    if isinstance(expected, list) and isinstance(found, list):
        ours, theirs = cast("list[Any]", expected), cast("list[Any]", found)
        return len(ours) == len(theirs) and all(
            same_value(rule, one, other, tolerance) for one, other in zip(ours, theirs, strict=True)
        )
    if isinstance(expected, dict) and isinstance(found, dict):
        ours, theirs = cast("dict[str, Any]", expected), cast("dict[str, Any]", found)
        return ours.keys() == theirs.keys() and all(
            same_value(rule, ours[name], theirs[name], tolerance) for name in ours
        )
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if rule == "floats" and isinstance(expected, int | float) and isinstance(found, int | float):
        return _are_near(expected, found, tolerance)
    return bool(expected == found)


def _trimmed(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n").split("\n")


def _near(word: str, other: str, tolerance: float) -> bool:
    if word == other:
        return True
    try:
        return _are_near(float(word), float(other), tolerance)
    except ValueError:
        return False


def _are_near(expected: float, found: float, tolerance: float) -> bool:
    try:
        return math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond the floats
        return expected == found
