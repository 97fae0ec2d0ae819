"""Converts plain-text arguments of a model to JSON by the tool's schema, for all formats without types.

Rules
- A value is text if the schema allows that text, including in a union, behind a reference, and without a schema. It is
  kept byte for byte. So `12` is text for a string or integer, and a number for an integer or "auto".
- `null` and `None` are null if the schema allows null, as in engines, unless an enum contains exactly that text.
- If the schema does not allow text, the value is the JSON as written. Text that is not JSON is parsed as a Python
  literal: `True`, `{'a': None}`, `1_000`, `[1, 2,]`.
- A value that does not fit the schema is kept: as text if text is allowed, else as JSON, else as text. The client sees
  the model's value, and can reject it.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec

from gangline.models.language.parsing.schemas import allows, names_text, of_property

_NULLS = ("null", "None")
_UNREADABLE = (msgspec.MsgspecError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def arguments_text(pairs: Iterable[tuple[str, str]], schema: object) -> str:
    """pairs: names and their texts, without the format's own characters.
    schema: of the tool's arguments; None: unknown.
    """
    values = {name: msgspec.Raw(read_value(text, of_property(schema, name, schema), schema)) for name, text in pairs}
    return msgspec.json.encode(values).decode()


def read_value(text: str, schema: object, root: object) -> bytes:
    """root: the tool's whole schema, in which `schema` names its references.

    The value's JSON.
    """
    stripped = text.strip()
    if stripped in _NULLS and allows(None, schema, root) and not names_text(stripped, schema, root):
        return b"null"
    if not allows(text, schema, root):
        readings = list(_readings(stripped))
        fitting = [written for value, written in readings if allows(value, schema, root)]
        if fitting or (readings and not allows(text, schema, root, exact=False)):
            return (fitting or [readings[0][1]])[0].encode()
    return msgspec.json.encode(text)


def is_object(text: str | bytes) -> bool:
    """Whether `text` is a JSON object."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except _UNREADABLE:
        return False
    return True


def _readings(text: str) -> Iterator[tuple[object, str]]:
    """Possible values of `text` other than text, with their JSON, most likely first."""
    try:
        value = msgspec.json.decode(text)
    except _UNREADABLE:
        yield from _python(text)
        return
    if isinstance(value, str):  # encoded twice
        yield from _readings(value.strip())
    else:
        yield value, text


def _python(text: str) -> Iterator[tuple[object, str]]:
    """Empty if `text` is not a Python literal that JSON can represent."""
    if text.lower() in ("true", "false"):
        yield text.lower() == "true", text.lower()
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes
            value = ast.literal_eval(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        msgspec.json.decode(written)
    except _UNREADABLE:
        return
    if _is_json(value) and not isinstance(value, str):
        yield value, written


def _is_json(value: object) -> bool:
    """Whether JSON can represent all of it: `json.dumps` also accepts tuples, and numbers as keys."""
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return all(isinstance(key, str) and _is_json(item) for key, item in items)
    if isinstance(value, list):
        return all(map(_is_json, cast("list[object]", value)))
    return value is None or isinstance(value, str | int | float)
