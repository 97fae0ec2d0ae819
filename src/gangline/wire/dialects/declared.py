"""A dialect's request fields: served, rejected or dropped. The parsers read these tables, and
docs/reference/dialect-fields.md is made from them.

The rule: a field that carries state, or that would change the conversation, is served or rejected. Dropped fields are
those that change no token an engine here could sample, those that the provider itself would act on, and hints. A field
that no table has is rejected where its name speaks of state, since nobody here knows what it would do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

__all__ = ["DeclaredFields", "speaks_of_state"]

_STATE = re.compile(
    r"(?:^|[_.-])(?:assistant|attachment|cached|checkpoint|code_exec|compact|container|context|continu|conversation"
    r"|data_?s(?:ource|tore)|document|fallback|file_ids?$|grounding|histor|instruction|knowledge|mcp|memor|plugin|previous|prompt$|rag(?:$|_)"
    r"|resum|retriev|search|skill|snapshot|state|system(?:$|_)|template|thread|transform|truncat|vector)"
)
_UPPER = re.compile(r"(?<=[a-z0-9])([A-Z])")
_NOTHING = frozenset({"null", "false", "0", '""', "[]", "{}"})


def speaks_of_state(field: str, value: str) -> bool:
    """Whether an undeclared field, by its name, would bring or change a part of the conversation. value: JSON."""
    words = _UPPER.sub(r"_\1", field).lower()
    return value.strip() not in _NOTHING and _STATE.search(words) is not None


class DeclaredFields(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is in one of the three. A field that is in none is dropped as unknown; where its name speaks of state,
    or it names a reply of the session, the call is refused."""

    served: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    """Field -> the values at which it changes nothing."""
    dropped: Mapping[str, str]
    """Field -> why nothing is lost without it."""
    limits: Mapping[str, str] = {}
    """Served field -> what of it is refused."""

    def refuses(self, field: str, value: Any) -> bool:
        return field in self.refused and value not in self.refused[field]

    def undeclared(self, fields: Iterable[str]) -> list[str]:
        return [name for name in fields if name not in self.served | self.refused.keys() | self.dropped.keys()]
