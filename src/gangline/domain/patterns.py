"""Checks a task's regular expressions at submit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

_SRE: Any = import_module("re._parser")  # the syntax tree of `re`, which has no public name
_REPEATS = (_SRE.MAX_REPEAT, _SRE.MIN_REPEAT)


def checked_pattern(pattern: str) -> str:
    """Raises: ValueError when it is not a regular expression, or its time certainly doubles with each character."""
    try:
        re.compile(pattern)
        parsed = cast("Sequence[Any]", _SRE.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:200]!r} is not a regular expression: {error}") from error
    if _doubles(parsed, can_fail_after=False):
        raise ValueError(
            f"{pattern[:200]!r} repeats what is a repetition itself, such as (a+)+: its time doubles with each "
            "character of the text. Write a+ instead"
        )
    return pattern


def _doubles(items: Sequence[Any], *, can_fail_after: bool) -> bool:
    """Whether an endless repetition of just an endless repetition is retried because a later part fails."""
    for number, (kind, argument) in enumerate(items):
        can_fail = can_fail_after or any(map(_can_fail, items[number + 1 :]))
        if kind in _REPEATS and can_fail and _is_endless(argument) and _is_only_endless(argument[2]):
            return True
        if any(_doubles(part, can_fail_after=can_fail) for part in _parts(argument)):
            return True
    return False


def _can_fail(item: Any) -> bool:
    """Whether a part can make a match fail."""
    kind, argument = item
    if kind in _REPEATS:
        return argument[0] > 0
    if kind is _SRE.SUBPATTERN:
        return any(map(_can_fail, argument[3]))
    return kind is not _SRE.BRANCH or all(any(map(_can_fail, one)) for one in argument[1])


def _is_endless(repeat: Any) -> bool:
    return bool(repeat[1] == _SRE.MAXREPEAT)


def _is_only_endless(items: Sequence[Any]) -> bool:
    if len(items) != 1:
        return False
    kind, argument = items[0]
    if kind is _SRE.SUBPATTERN:
        return _is_only_endless(argument[3])
    return kind in _REPEATS and _is_endless(argument)


def _parts(argument: Any) -> list[Sequence[Any]]:
    """Returns the sequences inside an item of any kind."""
    if isinstance(argument, _SRE.SubPattern):
        return [cast("Sequence[Any]", argument)]
    if isinstance(argument, list | tuple):
        return [part for one in cast("Sequence[Any]", argument) for part in _parts(one)]
    return []
