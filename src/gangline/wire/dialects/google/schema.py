"""Google's `Schema` (a subset of OpenAPI 3.0 with upper-case types) -> JSON schema.

Source: Gemini API reference, `Schema`.
"""

from __future__ import annotations

from typing import Any, cast

from gangline.wire.dialects.google.fields import invalid

_RENAMED = {
    "any_of": "anyOf",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "additional_properties": "additionalProperties",
    "ref": "$ref",
    "defs": "$defs",
}

_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})

# Fields without meaning in a JSON schema.
_LEFT_OUT = frozenset({"nullable", "propertyOrdering", "property_ordering"})


def json_schema(schema: object, where: str) -> dict[str, Any]:
    """A JSON schema is returned unchanged. Raises: InvalidRequest."""
    if not isinstance(schema, dict):
        raise invalid(where, "Invalid value, expected a schema object.")
    given = cast("dict[str, Any]", schema)
    written: dict[str, Any] = {}
    for name, value in given.items():
        name = _RENAMED.get(name, name)
        if name not in _LEFT_OUT and value is not None:
            written[name] = _field(name, value, f"{where}.{name}")
    return _nullable(written) if given.get("nullable") is True else written


def _field(name: str, value: Any, where: str) -> Any:
    match name:
        case "type":
            return _type(value, where)
        case "properties" | "$defs":
            if not isinstance(value, dict):
                raise invalid(where, "Invalid value, expected an object of schemas.")
            named = cast("dict[str, Any]", value)
            return {key: json_schema(inner, f"{where}.{key}") for key, inner in named.items()}
        case "anyOf":
            if not isinstance(value, list):
                raise invalid(where, "Invalid value, expected a list of schemas.")
            return [json_schema(inner, f"{where}[{i}]") for i, inner in enumerate(cast("list[Any]", value))]
        case "items" | "additionalProperties" if isinstance(value, dict):
            return json_schema(cast("object", value), where)
        case _ if name in _COUNTS and isinstance(value, str) and value.isdecimal() and value.isascii():
            return int(value[:18])  # int64 is a string in proto JSON
        case _:
            return value


def _type(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value.lower()
    if isinstance(value, list) and all(isinstance(one, str) for one in cast("list[Any]", value)):
        return [one.lower() for one in cast("list[str]", value)]
    raise invalid(where, "Invalid value (TYPE_STRING).")


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if isinstance(kind, str):
        schema["type"] = [kind, "null"]
        if isinstance(schema.get("enum"), list):
            schema["enum"] = [*schema["enum"], None]
    elif isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return schema
