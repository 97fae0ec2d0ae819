"""Fields of a decoded body: of the right type, or an error that names the field as OpenAI does (`input[2].role`)."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from gangline.domain.errors import InvalidRequest

Fields = dict[str, Any]

_KINDS: dict[type[Any], str] = {
    type(None): "null",
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
}


def invalid(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {reason}", param=where)


def decode_body(body: bytes) -> Fields:
    """Raises: InvalidRequest."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return cast("Fields", fields)


def record(value: object, where: str) -> Fields:
    if not isinstance(value, dict):
        raise invalid(where, f"expected an object, got {_kind(value)}.")
    return cast("Fields", value)


def optional_record(fields: Fields, name: str, where: str = "") -> Fields | None:
    value = fields.get(name)
    return None if value is None else record(value, _at(where, name))


def records(value: object, where: str) -> list[Fields]:
    """Absent counts as empty."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(where, f"expected an array, got {_kind(value)}.")
    return [record(entry, f"{where}[{i}]") for i, entry in enumerate(cast("list[object]", value))]


def string(fields: Fields, name: str, where: str = "") -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise invalid(_at(where, name), f"expected a string, got {_kind(value)}.")


def text(fields: Fields, name: str, where: str = "") -> str:
    """A required string; it may be empty."""
    value = string(fields, name, where)
    if value is None:
        raise invalid(_at(where, name), "missing required parameter.")
    return value


def flag(fields: Fields, name: str, where: str = "") -> bool | None:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise invalid(_at(where, name), f"expected a boolean, got {_kind(value)}.")


def integer(fields: Fields, name: str, least: int, most: int = 2**63 - 1) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(name, f"expected an integer, got {_kind(value)}.")
    if not least <= value <= most:
        raise invalid(name, f"expected an integer between {least} and {most}, got {value}.")
    return value


def number(fields: Fields, name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid(name, f"expected a number, got {_kind(value)}.")
    return value


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a number")
