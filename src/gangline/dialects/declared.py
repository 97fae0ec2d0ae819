"""A dialect's request fields: served, rejected or dropped. The parsers read these tables, and
docs/reference/dialect-fields.md is made from them.

The rule: a field that carries state, or that would change the conversation, is served or rejected. Dropped fields are
those that change no token an engine here could sample, those that the provider itself would act on, and hints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

__all__ = ["DeclaredFields"]


class DeclaredFields(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is in one of the three. A field that is in none is dropped as unknown; where it names a reply of the
    session, the call is refused."""

    served: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    """Field -> the values at which it changes nothing."""
    dropped: Mapping[str, str]
    """Field -> why nothing is lost without it."""

    def refuses(self, field: str, value: Any) -> bool:
        return field in self.refused and value not in self.refused[field]

    def undeclared(self, fields: Iterable[str]) -> list[str]:
        return [name for name in fields if name not in self.served | self.refused.keys() | self.dropped.keys()]
