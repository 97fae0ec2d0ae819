"""Arguments that a model wrote as plain text -> JSON, by the tool's schema: for all formats without types of their own.

Rules
- A value is text wherever the schema allows that text: in a union too, behind a reference, and without a schema. It
  stays byte for byte. So `12` is text for a string or integer, and a number for an integer or "auto".
- `null` and `None` are null where the schema allows null, as engines read them, unless an enum names that very text.
- Where the schema wants no text, the value is JSON, as it was written. What is not JSON is read as Python writes it:
  `True`, `{'a': None}`, `1_000`, `[1, 2,]`.
- What fits the schema in no way is kept: as text where it may be text, else as JSON, else as text. A client sees what
  its model wrote, and can refuse it.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec

from gangline.models.language.parsing.schemas import allows, names_text, of_property

__all__ = ["arguments_text", "is_object", "read_value"]

_NULLS = ("null", "None")
_UNREADABLE = (msgspec.MsgspecError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def arguments_text(pairs: Iterable[tuple[str, str]], schema: object) -> str:
    """
    pairs: names and their texts, without what belongs to the format.
    schema: of the tool's arguments; None: unknown.
    """
    values = {name: msgspec.Raw(read_value(text, of_property(schema, name, schema), schema)) for name, text in pairs}
    return msgspec.json.encode(values).decode()


def read_value(text: str, schema: object, root: object) -> bytes:
    """
    root: the tool's whole schema, in which `schema` names its references.

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
    """What `text` may be other than text, with its JSON: the likeliest first."""
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
    """Nothing where `text` is no Python literal that JSON has too."""
    if text.lower() in ("true", "false"):
        yield text.lower() == "true", text.lower()
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        msgspec.json.decode(written)
    except _UNREADABLE:
        return
    if _is_json(value) and not isinstance(value, str):
        yield value, written


def _is_json(value: object) -> bool:
    """Whether JSON has all of it: `json.dumps` takes tuples, and numbers as keys, too."""
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return all(isinstance(key, str) and _is_json(item) for key, item in items)
    if isinstance(value, list):
        return all(map(_is_json, cast("list[object]", value)))
    return value is None or isinstance(value, str | int | float)
