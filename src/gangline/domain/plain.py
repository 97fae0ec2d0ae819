"""Converts values from graders, agents and plug-ins to plain data that MessagePack and JSON can represent.

Numbers of NumPy, torch, `decimal` and `fractions` become Python's; arrays, sets, dataclasses, structs and models become
lists and dicts. A value without a plain form becomes text: a number that is not finite or needs more than 64 bits, a
value that is nested too deep, any other object. Nothing here raises.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Set
from decimal import Decimal
from enum import Enum
from numbers import Integral, Real
from typing import Any, cast

import msgspec

_MAX_DEPTH = 100
_MAX_BYTES = 4 << 20
"""For all texts and values together. The rest is left out, with a note."""
_VALUE_BYTES = 32
_LEFT_OUT = "(the rest is left out: there is too much)"


def plain(value: object) -> Any:
    return _Plain().of(value, _MAX_DEPTH)


def plain_text(text: str) -> str:
    """Returns the text with lone surrogates, from cut texts and file names that are not UTF-8, as `\\udXXX`."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def plain_number(value: object) -> float | None:
    """Returns the value as a finite number, whatever library's type it has; None if it is not one."""
    try:
        mask = getattr(value, "mask", False)
        if not callable(mask) and bool(mask):
            return None  # NumPy's missing value: its `item` is the masked data
        # Arrays and tensors have it: their number, if they contain just one.
        item = getattr(value, "item", None)
        held = item() if callable(item) else value
        number = float(held) if isinstance(held, (Real, Decimal)) else math.nan
    except Exception:
        return None
    return number if math.isfinite(number) else None


class _Plain:
    """Converts one value within the remaining room."""

    def __init__(self) -> None:
        self._room_bytes = _MAX_BYTES
        self._inside: set[int] = set()
        """Ids of the values that contain the current one."""

    def of(self, value: object, depth: int) -> Any:
        """`depth`: how many more levels may be nested."""
        self._room_bytes -= _VALUE_BYTES
        try:
            return self._simple(value, depth)
        except Exception:  # foreign methods, and the recursion limit
            return self._shown(value)

    def _simple(self, value: object, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Integral):
            whole = int(value)
            return whole if -(1 << 63) <= whole < 1 << 64 else self._text(str(whole))
        if isinstance(value, (Real, Decimal)):
            number = plain_number(value)
            return self._shown(value) if number is None else number
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._text(bytes(cast("bytes", value)).decode("utf-8", "backslashreplace"))
        return self._holding(value, depth)

    def _holding(self, value: object, depth: int) -> Any:
        if depth == 0 or id(value) in self._inside:
            return f"({type(value).__name__}, nested too deep)" if depth == 0 else "(a value that is around this one)"
        self._inside.add(id(value))
        try:
            return self._opened(value, depth - 1)
        finally:
            self._inside.discard(id(value))

    def _opened(self, value: object, depth: int) -> Any:
        if (fields := _fields(value)) is not None:
            return self._mapping(fields, depth)
        if isinstance(value, Enum):
            return self.of(value.value, depth)
        to_list = None if isinstance(value, type) else getattr(value, "tolist", None)
        if callable(to_list):
            return self.of(to_list(), depth) if getattr(value, "nbytes", 0) <= _MAX_BYTES else self._shown(value)
        if isinstance(value, Set):
            return sorted(self._several(cast("Set[object]", value), depth), key=repr)
        if isinstance(value, Collection):
            return self._several(cast("Collection[object]", value), depth)
        return self._shown(value)

    def _several(self, values: Iterable[object], depth: int) -> list[Any]:
        found: list[Any] = []
        for value in values:
            if self._room_bytes <= 0:
                return [*found, _LEFT_OUT]
            found.append(self.of(value, depth))
        return found

    def _mapping(self, fields: Mapping[object, object], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in fields.items():
            if self._room_bytes <= 0:
                return found | {"...": _LEFT_OUT}
            key = self._text(name) if isinstance(name, str) else self._shown(name)
            while key in found:  # 1 and "1" are two keys
                key += "'"
            found[key] = self.of(value, depth)
        return found

    def _text(self, text: str) -> str:
        room, self._room_bytes = max(self._room_bytes, 0), self._room_bytes - len(text)
        return plain_text(text) if len(text) <= room else plain_text(text[:room]) + " (cut)"

    def _shown(self, value: object) -> str:
        """Returns an object's own text form."""
        try:
            if isinstance(value, BaseException):
                return self._text(f"{type(value).__name__}: {value}")
            iso = None if isinstance(value, type) else getattr(value, "isoformat", None)
            return self._text(str(iso()) if callable(iso) else str(value))
        except Exception:
            return f"({type(value).__name__}, which cannot be shown)"


def _fields(value: object) -> Mapping[object, object] | None:
    """Returns the fields of a mapping or a record; None for other values."""
    if isinstance(value, Mapping):
        return cast("Mapping[object, object]", value)
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    # Pydantic models, without importing pydantic: every command's errors come through here.
    is_model = not isinstance(value, type) and isinstance(getattr(type(value), "model_fields", None), Mapping)
    return dict(cast("Any", value)) if is_model else None
