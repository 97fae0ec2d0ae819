"""One generated row with its solutions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Sample:
    row: dict[str, Any]
    """In the columns of the preset's dataset."""
    right: str
    """A solution that earns 1: the answer (`math`, `stem`), a program (`code`), a patch (`swe`)."""
    wrong: str
    """A solution of the same kind that earns 0."""
    sources: tuple[str, ...] = ()
    """Addresses of the documents with the facts, for `fetch_page` (`stem`)."""


def take_turns(kinds: Sequence[Callable[[random.Random], _T]], number: int, seed: int) -> list[_T]:
    """`number` results of the kinds in rotation, each with its own random generator."""
    return [kinds[at % len(kinds)](random.Random(f"{seed}.{at}")) for at in range(number)]
