"""A dialect's request fields: served, rejected or dropped. The parsers use these tables, and
docs/reference/dialect-fields.md is generated from them.

The rule: a field that carries state, or would change the conversation, is served or rejected. Dropped fields change no
token that an engine here could sample, or only concern the provider, or are hints. A field in no table is rejected if
its name suggests state, since its effect is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_STATE = re.compile(
    r"(?:^|[_.-])(?:assistant|attachment|cached|checkpoint|code_exec|compact|container|context|continu|conversation"
    r"|data_?s(?:ource|tore)|document|fallback|file_ids?$|grounding|histor|instruction|knowledge|mcp|memor|plugin|previous|prompt$|rag(?:$|_)"
    r"|resum|retriev|search|skill|snapshot|state|system(?:$|_)|template|thread|transform|truncat|vector)"
)
_UPPER = re.compile(r"(?<=[a-z0-9])([A-Z])")
_NOTHING = frozenset({"null", "false", "0", '""', "[]", "{}"})


def speaks_of_state(field: str, value: str) -> bool:
    """Whether the name of an undeclared field suggests that it adds to or changes the conversation. value: JSON."""
    words = _UPPER.sub(r"_\1", field).lower()
    return value.strip() not in _NOTHING and _STATE.search(words) is not None


class DeclaredFields(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is in one of the three tables. A field in no table is dropped as unknown, but the call is rejected if
    its name suggests state or it contains the id of a reply of the session.
    """

    served: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    """Field -> values that have no effect."""
    dropped: Mapping[str, str]
    """Field -> why it can be dropped."""
    limits: Mapping[str, str] = {}
    """Served field -> the part of it that is rejected."""

    def refuses(self, field: str, value: Any) -> bool:
        return field in self.refused and value not in self.refused[field]

    def undeclared(self, fields: Iterable[str]) -> list[str]:
        return [name for name in fields if name not in self.served | self.refused.keys() | self.dropped.keys()]
