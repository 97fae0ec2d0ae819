"""Readers of calls with JSON arguments: objects that contain the name, or a header with the name before them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from gangline.models.language.parsing.events import CallEvent, Schemas
from gangline.models.language.parsing.sections import Reading
from gangline.models.language.parsing.values import is_object

_DECODER = json.JSONDecoder()
_BETWEEN = re.compile(r"[\s,;]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*?)\s*```\s*", re.DOTALL | re.IGNORECASE)
_BROKEN = (ValueError, RecursionError)
_KIMI_NAME = re.compile(r"(?:functions[._])?(.+?)(?:[:_]\d+)?")
_Fields = dict[str, msgspec.Raw]


def read_objects(body: str, schemas: Schemas) -> Reading:
    """`{"name": ..., "arguments": {...}}`: one, several or a list of them; also with `tool_name` and `parameters`."""
    return _objects(body, _named)


def whole_objects(text: str, schemas: Schemas) -> list[CallEvent]:
    """The same; empty if any part of `text` is not a call. A Markdown fence around it is ignored."""
    fenced = _FENCED.fullmatch(text)
    reading = read_objects(fenced.group(1) if fenced else text, schemas)
    return [] if reading.rest else reading.calls


def ends_in_string(text: str, *, begins_in_string: bool = False) -> bool:
    """Whether JSON that continues after `text` continues inside a string."""
    return '"' in _STRING.sub("", '"' + text if begins_in_string else text)


def read_keyed(body: str, schemas: Schemas) -> Reading:
    """`[{NAME: {...}}, ...]`"""
    return _objects(body, _keyed)


def _objects(body: str, call_of: Callable[[_Fields], CallEvent | None]) -> Reading:
    calls: list[CallEvent] = []
    at = _end(_BETWEEN, body, 0)
    while at < len(body):
        try:
            end = _DECODER.raw_decode(body, at)[1]
            read: list[_Fields] | _Fields = msgspec.json.decode(body[at:end], type=list[_Fields] | _Fields)
        except _BROKEN as error:
            return Reading(calls, body[at:], _is_inside(error))
        found = [call_of(fields) for fields in (read if isinstance(read, list) else [read])]
        if None in found:
            return Reading(calls, body[at:])
        calls.extend(call for call in found if call is not None)
        at = _end(_BETWEEN, body, end)
    return Reading(calls, "")


def _named(fields: _Fields) -> CallEvent | None:
    name = _text(fields.get("name") or fields.get("tool_name"))
    arguments = _arguments(fields.get("arguments") or fields.get("parameters"))
    call_id = _text(fields.get("id") or fields.get("tool_call_id"))
    return CallEvent(name, arguments, call_id) if name and arguments else None


def _keyed(fields: _Fields) -> CallEvent | None:
    if len(fields) != 1:
        return None
    ((name, value),) = fields.items()
    arguments = _arguments(value)
    return CallEvent(name, arguments) if name and arguments else None


def _text(raw: msgspec.Raw | None) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str) if raw is not None else None
    except msgspec.MsgspecError:
        return None


def _arguments(raw: msgspec.Raw | None) -> str | None:
    """The JSON of an object, or of an object in a text; None if there is none."""
    if raw is None:
        return None
    written = bytes(raw).decode()
    text = _text(raw) or written
    return text if is_object(text) else None


class Headed:
    """Consecutive `HEADER{...}END`. Nothing between HEADER and END means no arguments."""

    def __init__(self, *forms: tuple[str, str]) -> None:
        """forms: header patterns with the groups `name` and optionally `id`, each with its end."""
        self._forms = [(re.compile(r"\s*" + header), end) for header, end in forms]

    def __call__(self, body: str, schemas: Schemas) -> Reading:
        calls: list[CallEvent] = []
        at = 0
        while body[at:].strip():
            try:
                call, at = self._one(body, at)
            except _BROKEN as error:
                return Reading(calls, body[at:], _is_inside(error))
            calls.append(call)
        return Reading(calls, "")

    def _one(self, body: str, at: int) -> tuple[CallEvent, int]:
        """Raises: ValueError, RecursionError."""
        begun, end = next(
            ((found, end) for header, end in self._forms if (found := header.match(body, at))), (None, "")
        )
        if begun is None:
            raise ValueError("no header")
        start = begun.end()
        if end and body.startswith(end, start):
            arguments, close = "{}", start
        else:
            close = _DECODER.raw_decode(body, start)[1]
            arguments = body[start:close]
        # The reply may have ended after the arguments.
        tail = body[close:]
        rest = tail.lstrip()
        if not is_object(arguments) or (rest and not rest.startswith(end.lstrip())):
            raise ValueError("no arguments")
        found = begun.groupdict()
        used = len(tail) - len(rest) + len(end.lstrip()) if rest else len(tail)
        return CallEvent(found["name"].strip(), arguments, found.get("id") or None), close + used


_MISTRAL = Headed((r"\[TOOL_CALLS\]\s*(?P<name>[^\[{\s]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*(?:\[ARGS\])?\s*", ""))
_KIMI = Headed(
    (
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
        "<|tool_call_end|>",
    )
)


def read_mistral(body: str, schemas: Schemas) -> Reading:
    """`[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}`, whose inner marks are newer, or `[TOOL_CALLS][{...}]`."""
    inside = body.removeprefix("[TOOL_CALLS]")
    if not inside.lstrip().startswith("["):
        return _MISTRAL(body, schemas)
    try:
        end = _DECODER.raw_decode(inside.lstrip())[1] + len(inside) - len(inside.lstrip())
    except _BROKEN:
        return Reading([], inside)
    reading = read_objects(inside[:end], schemas)
    return reading._replace(rest=reading.rest + inside[end:])


def read_kimi(body: str, schemas: Schemas) -> Reading:
    """Models also write the id in the form that clients send back, `functions_NAME_0`."""
    reading = _KIMI(body, schemas)
    return reading._replace(calls=[_with_known_name(call, schemas) for call in reading.calls])


def _with_known_name(call: CallEvent, schemas: Schemas) -> CallEvent:
    shorter = _KIMI_NAME.fullmatch(call.name)
    if call.name in schemas or shorter is None or shorter.group(1) not in schemas:
        return call
    return CallEvent(shorter.group(1), call.arguments, call.call_id)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _is_inside(error: Exception) -> bool:
    return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string")
