"""Reads a Google JSON body: both spellings of a name, and errors that name the field as Google does.

Google's services accept proto3 JSON: `generationConfig` and `generation_config` are one field, a single object stands
for a list of one, numbers may be strings, `null` means absent. Fields that were never read are reported at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.wire.dialects.bodies import DeclaredFields

_UPPER = re.compile(r"(?<!^)([A-Z])")
_INT32 = 1 << 31

T = TypeVar("T")


def invalid(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {reason}", param=where)


def decode_body(body: bytes) -> dict[str, Any]:
    """Raises: InvalidRequest."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"Invalid JSON payload received. {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("Invalid JSON payload received. The body must be an object.")
    return cast("dict[str, Any]", value)


@lru_cache(maxsize=256)
def _snake(name: str) -> str:
    return _UPPER.sub(r"_\1", name).lower()


class Fields:
    """One JSON object of the body, at `where`. Fields are read by their camelCase names.

    Every reader returns None for a field that is absent or null. Raises: InvalidRequest, naming the field.
    """

    def __init__(self, value: object, where: str = "") -> None:
        if not isinstance(value, dict):
            raise invalid(where or "body", "Invalid value, expected an object.")
        self.where = where
        self._values = cast("dict[str, Any]", value)
        self._taken: set[str] = set()

    def at(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            name = _snake(name)
            value = self._values.get(name)
        if value is not None:
            self._taken.add(name)
        return value

    def text(self, name: str) -> str | None:
        return self._typed(name, "TYPE_STRING", lambda value: value if isinstance(value, str) else None)

    def flag(self, name: str) -> bool:
        return bool(self._typed(name, "TYPE_BOOL", lambda value: value if isinstance(value, bool) else None))

    def number(self, name: str) -> float | None:
        return self._typed(name, "TYPE_FLOAT", _number)

    def integer(self, name: str) -> int | None:
        return self._typed(name, "TYPE_INT32", _integer)

    def object(self, name: str) -> Fields | None:
        value = self.take(name)
        return None if value is None else Fields(value, self.at(name))

    def raw_object(self, name: str) -> dict[str, Any] | None:
        """The unchanged object, whose keys are data, not fields."""
        return self._typed(name, "an object", _object)

    def items(self, name: str) -> list[tuple[Any, str]]:
        """Each entry and its path; empty if the field is absent."""
        value = self.take(name)
        if value is None:
            return []
        entries = cast("list[Any]", value) if isinstance(value, list) else [value]
        return [(entry, f"{self.at(name)}[{i}]") for i, entry in enumerate(entries)]

    def texts(self, name: str) -> tuple[str, ...]:
        entries = self.items(name)
        for entry, where in entries:
            if not isinstance(entry, str):
                raise invalid(where, "Invalid value (TYPE_STRING).")
        return tuple(entry for entry, _ in entries)

    def left(self) -> list[str]:
        """Paths of the fields that were given but not read."""
        values = self._values.items()
        return [self.at(name) for name, value in values if name not in self._taken and value is not None]

    def unread(self, declared: DeclaredFields) -> dict[str, str]:
        """Path -> JSON text of the fields that were neither read nor declared."""
        dropped = {spelling for name in declared.dropped for spelling in (name, _snake(name))}
        left = {name: value for name, value in self._values.items() if name not in self._taken | dropped}
        return {self.at(name): msgspec.json.encode(value).decode() for name, value in left.items()}

    def _typed(self, name: str, kind: str, read: Callable[[Any], T | None]) -> T | None:
        value = self.take(name)
        if value is None:
            return None
        typed = read(value)
        if typed is None:
            raise invalid(self.at(name), f"Invalid value ({kind}).")
        return typed


def _object(value: Any) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value.encode(), type=float)
        except (msgspec.DecodeError, UnicodeError):
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value)


def _integer(value: Any) -> int | None:
    number = _number(value)
    if number is None or not number.is_integer() or not -_INT32 <= number < _INT32:
        return None
    return int(number)
