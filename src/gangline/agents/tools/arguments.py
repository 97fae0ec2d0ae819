"""Arguments of calls: their JSON schema for the model, and their parsing, both from one struct.

A field without a default is required; the default of an optional one is `msgspec.UNSET`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gangline.agents.tools.contract import ToolFailed

_T = TypeVar("_T", bound=msgspec.Struct)


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON schema of a flat struct, without Python names."""
    _, components = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = components[kind.__name__]
    for field in schema["properties"].values():
        if "enum" in field:
            field["type"] = "string"  # not every engine and template infers it
    return {key: schema[key] for key in ("type", "properties", "required")}


def read(arguments: Mapping[str, Any], kind: type[_T]) -> _T:
    """Arguments as a struct. Numbers may be written as text, and null counts as omitted.

    Raises: ToolFailed for missing, unknown and invalid arguments.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    known = kind.__struct_fields__
    if unknown := sorted(given.keys() - set(known)):
        raise ToolFailed(f"there is no argument {unknown[0]!r}; there are: {', '.join(known) or 'none'}")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ToolFailed(f"the arguments cannot be read: {error}") from None
