"""Readers of calls whose arguments are pairs of tags: flat, or nested like XML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from gangline.models.language.parsing.events import CallEvent, Schemas
from gangline.models.language.parsing.schemas import allows, of_property
from gangline.models.language.parsing.sections import Reading
from gangline.models.language.parsing.values import read_value


class Pairs:
    """Consecutive `CALL KEY VALUE ... END`.

    A value ends at a tag that is followed by the next key or the end of the call, so other such tags in it are text. A
    value with more opening than closing tags is refused: a closing tag is missing.
    """

    def __init__(self, call: str, call_end: str, key: str, value_end: str) -> None:
        """call: pattern with the group `name`.
        key: pattern with the groups `key` and optionally `kind` (`string` or `true`: the value is text; else it is
        JSON).
        """
        self._call = re.compile(r"\s*" + call)
        self._call_end = re.compile(r"\s*" + re.escape(call_end))
        self._key, self._plain_key = re.compile(r"\s*" + key), re.compile(key)
        self._value_end = value_end
        follows = f"(?=\\s*(?:{key}|{re.escape(call_end)}))"
        self._value = re.compile(f"(.*?){re.escape(value_end)}{follows}", re.DOTALL)

    def __call__(self, body: str, schemas: Schemas) -> Reading:
        calls: list[CallEvent] = []
        at = 0
        while begun := self._call.match(body, at):
            name = _unescaped(begun["name"])
            pairs, end = self._pairs(body, begun.end(), schemas.get(name))
            if pairs is None:
                break
            calls.append(CallEvent(name, msgspec.json.encode(pairs).decode()))
            at = end
        rest = body[at:].strip() and body[at:]
        # An end without a start: the last value contained the end of its call.
        is_cut = begun is None and self._call_end.search(rest)
        return Reading([], body) if is_cut else Reading(calls, rest)

    def _pairs(self, body: str, at: int, schema: object) -> tuple[dict[str, msgspec.Raw] | None, int]:
        """None if the call is malformed."""
        pairs: dict[str, msgspec.Raw] = {}
        while opened := self._key.match(body, at):
            key = _unescaped(opened["key"].strip())
            value = self._value.match(body, opened.end())
            if value is None or key in pairs or not self._is_balanced(value[1]):
                return None, at
            pairs[key] = _typed(value[1], opened.groupdict().get("kind"), of_property(schema, key, schema), schema)
            at = value.end()
        ended = self._call_end.match(body, at)
        return (pairs, ended.end()) if ended else (None, at)

    def _is_balanced(self, value: str) -> bool:
        return len(self._plain_key.findall(value)) <= value.count(self._value_end)


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _typed(text: str, kind: str | None, schema: object, root: object) -> msgspec.Raw:
    if kind in ("string", "true"):
        return msgspec.Raw(msgspec.json.encode(text))
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        return msgspec.Raw(msgspec.json.encode(text[9:-3]))
    if kind is not None and _is_json(text):
        return msgspec.Raw(text.strip().encode())
    return msgspec.Raw(read_value(text, schema, root))


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


_MARK = re.escape("]<]minimax[>[")
_INVOKE = re.compile(rf"\s*{_MARK}<invoke name=\"([^\">]+)\">")
_INVOKE_END = re.compile(rf"\s*{_MARK}</invoke>")
_ELEMENT = re.compile(rf"\s*{_MARK}<([^/>][^>]*)>")
_TEXT = re.compile(rf"(.*?){_MARK}</([^>]*)>", re.DOTALL)
_Element = tuple[str, Any]
"""Tag, and its text or elements."""


def read_minimax_m3(body: str, schemas: Schemas) -> Reading:
    """`]<]minimax[>[` before every tag; a list has elements `item`. Empty objects and lists look like an empty text."""
    calls: list[CallEvent] = []
    at = 0
    while begun := _INVOKE.match(body, at):
        name = begun[1]
        try:
            elements, end = _elements(body, begun.end())
            ended = _INVOKE_END.match(body, end)
            if ended is None:
                break
            arguments = _object(elements, schemas.get(name), schemas.get(name))
        except (ValueError, RecursionError):
            break
        calls.append(CallEvent(name, msgspec.json.encode(arguments).decode()))
        at = ended.end()
    return Reading(calls, body[at:].strip() and body[at:])


def _elements(body: str, at: int) -> tuple[list[_Element], int]:
    """Raises: ValueError if a tag does not close, or there is text between elements."""
    found: list[_Element] = []
    while opened := _ELEMENT.match(body, at):
        tag, start = opened[1], opened.end()
        closed = _TEXT.match(body, start)
        if closed is None:
            raise ValueError("never closed")
        value: Any = closed[1]
        at = closed.end()
        if _ELEMENT.search(value):
            value, end = _elements(body, start)
            closed = re.compile(rf"\s*{_MARK}</([^>]*)>").match(body, end)
            at = closed.end() if closed else at
        if closed is None or closed[2 if isinstance(value, str) else 1] != tag:
            raise ValueError("closed by another tag")
        found.append((tag, value))
    return found, at


def _object(elements: list[_Element], schema: object, root: object) -> dict[str, Any]:
    """Raises: ValueError for a duplicate key."""
    values = {tag: _value(value, of_property(schema, tag, root), root) for tag, value in elements}
    if len(values) != len(elements):
        raise ValueError("a key twice")
    return values


def _value(value: Any, schema: object, root: object) -> Any:
    if isinstance(value, str):
        if not value and not allows("", schema, root):
            return {} if allows({}, schema, root) else [] if allows([], schema, root) else ""
        return msgspec.Raw(read_value(value, schema, root))
    elements = cast("list[_Element]", value)
    if all(tag == "item" for tag, _ in elements) and allows([], schema, root, exact=False):
        items = cast("Mapping[str, Any]", schema).get("items") if isinstance(schema, Mapping) else None
        return [_value(item, items, root) for _, item in elements]
    return _object(elements, schema, root)
