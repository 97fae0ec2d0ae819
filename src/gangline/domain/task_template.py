"""Task templates: a task's body in which `{name}` is a placeholder for a field.

In a text, `{name}` is replaced by the field's text, or by its JSON if the field is not text. A text that consists of
`{name}` alone becomes the field itself if that is a list, an object or null. Braces around anything else stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def filled(template: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template with the fields inserted. Placeholders inside a field stay."""
    return {name: _filled(value, fields) for name, value in template.items()}


def _filled(value: Any, fields: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return _filled_text(value, fields)
    if isinstance(value, dict):
        return filled(cast("dict[str, Any]", value), fields)
    if isinstance(value, list):
        return [_filled(inner, fields) for inner in cast("list[Any]", value)]
    return value


def _filled_text(text: str, fields: Mapping[str, Any]) -> Any:
    whole = _FIELD.fullmatch(text)
    if whole is not None and isinstance(fields.get(whole[1], text), list | dict | None):
        return fields[whole[1]]
    return _FIELD.sub(lambda found: _text(fields, found[1], found[0]), text)


def _text(fields: Mapping[str, Any], name: str, otherwise: str) -> str:
    if name not in fields:
        return otherwise
    value = fields[name]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
