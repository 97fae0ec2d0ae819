"""Bodies between `<tool_call>` and `</tool_call>`, in the formats of several model families.

- `HERMES`: `{"name": ..., "arguments": {...}}` (Hermes, Qwen2.5, Qwen3)
- `QWEN3_CODER`: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`, possibly without the tags around it
- `GLM`: `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...` (GLM-4.5 and later)

A value may contain the format's own tags. It is closed by the tag after which the format continues.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from gangline.models.language.parsing.events import CallEvent, Schemas
from gangline.models.language.parsing.json_calls import ends_in_string, whole_objects
from gangline.models.language.parsing.values import arguments_text


@dataclass(frozen=True)
class BodyForm:
    read: Callable[[str, Schemas], list[CallEvent]]
    """The whole body -> its calls; empty if any part of it is not a call."""
    begins: re.Pattern[str]
    """Start of a body. If an opening tag is followed by anything else, it is only mentioned in the text."""
    may_begin: re.Pattern[str]
    """A text that may become the start of a body."""
    ends_in_value: Callable[[str, bool], bool]
    """Whether a value is open after this text, given whether one was open before it. A tag inside a value closes
    nothing.
    """
    nests: bool
    """Whether tags inside values are counted. JSON is the only format that shows the end of a value without that."""
    shows_its_end: bool = True
    """Whether a body can be recognised as complete without the closing tag."""
    bare: str | None = None
    """Start of a body without the opening tag, if the name of an offered tool follows."""


def _ends_in_string(text: str, was_open: bool) -> bool:
    return ends_in_string(text, begins_in_string=was_open)


def _ends_after(opened: str, closed: str, text: str, was_open: bool) -> bool:
    begun, ended = text.rfind(opened), text.rfind(closed)
    return was_open if begun == ended else begun > ended


class _Malformed(Exception):
    pass


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>\s*(?=<function=|\Z)")
_PARAMETER_MARK = re.compile(r"<parameter=|</parameter>|</function>")


def _read_qwen3_coder(body: str, schemas: Schemas) -> list[CallEvent]:
    calls: list[CallEvent] = []
    body, place = body.rstrip(), 0
    if not body.endswith("</function>"):
        return []
    try:
        while place < len(body):
            function = _FUNCTION.match(body, place)
            name = function.group(1).strip() if function else ""
            if function is None or not name:
                raise _Malformed
            arguments, place = _parameters(body, function.end(), schemas.get(name))
            calls.append(CallEvent(name, arguments_text(arguments.items(), schemas.get(name))))
    except _Malformed:
        return []
    return calls


def _parameters(body: str, place: int, schema: object) -> tuple[dict[str, str], int]:
    """The parameters from `place` on, and the position after their function. Raises: _Malformed."""
    described = cast("dict[str, Any]", schema).get("properties") if isinstance(schema, dict) else None
    known = frozenset(cast("dict[str, object]", described)) if isinstance(described, dict) else frozenset[str]()
    values: dict[str, str] = {}
    all_closed = True
    while not (end := _FUNCTION_END.match(body, place)):
        parameter = _PARAMETER.match(body, place)
        name = parameter.group(1).strip() if parameter else ""
        if parameter is None or name in values:
            raise _Malformed
        values[name] = ""
        value, place = _value(body, parameter.end(), known - set(values))
        all_closed = all_closed and body.endswith("</parameter>", 0, place)
        # One line break on either side is part of the format.
        values[name] = value.removeprefix("\n").removesuffix("\n")
    if not all_closed and any(_PARAMETER_MARK.search(value) for value in values.values()):
        raise _Malformed  # a forgotten tag, or a tag inside a value: ambiguous
    return values, end.end()


def _value(body: str, place: int, expected: frozenset[str]) -> tuple[str, int]:
    """expected: names that may still follow.

    A value, and the position after it. A missing `</parameter>` is detected from the text after it. Raises: _Malformed.
    """
    depth, is_torn = 0, False
    for mark in _PARAMETER_MARK.finditer(body, place):
        if mark.group() == "<parameter=":
            following = _PARAMETER.match(body, mark.start())
            is_next = following is not None and following.group(1).strip() in expected
            if is_next and not depth and body[mark.start() - 1] == "\n":
                return body[place : mark.start()], mark.start()
            if is_torn:
                raise _Malformed  # `</parameter>`, then text, then a parameter: the text is ambiguous
            depth += 1
        elif mark.group() == "</function>":
            if not is_torn and _FUNCTION_END.match(body, mark.start()):
                return body[place : mark.start()], mark.start()
        else:
            following = _PARAMETER.match(body, mark.end())
            is_next = following is not None and (not depth or following.group(1).strip() in expected)
            if is_next or _FUNCTION_END.match(body, mark.end()):
                return body[place : mark.start()], mark.end()
            is_torn = is_torn or not depth
            depth = max(0, depth - 1)
    raise _Malformed


_NAME = re.compile(r"\s*([^\s<>{}](?:[^<>{}\n]*[^\s<>{}])?)\s*(?=<arg_key>|\Z)")
_PAIR = re.compile(
    r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>[^<>]*</arg_key>\s*<arg_value>|\Z)",
    re.DOTALL,
)
_TORN = re.compile(r"</arg_value>.*<arg_key>", re.DOTALL)


def _read_glm(body: str, schemas: Schemas) -> list[CallEvent]:
    head = _NAME.match(body)
    if head is None or ("<arg_key>" in body and not body.rstrip().endswith("</arg_value>")):
        return []
    name, place, values = head.group(1), head.end(), dict[str, str]()
    while place < len(body):
        pair = _PAIR.match(body, place)
        if pair is None or pair.group(1).strip() in values or _TORN.search(pair.group(2)):
            return []
        values[pair.group(1).strip()] = pair.group(2)
        place = pair.end()
    return [CallEvent(name, arguments_text(values.items(), schemas.get(name)))]


HERMES = BodyForm(
    whole_objects, re.compile(r"\s*(?:[{\[]|```)"), re.compile(r"\s*`{0,2}\Z"), _ends_in_string, nests=False
)
QWEN3_CODER = BodyForm(
    _read_qwen3_coder,
    re.compile(r"\s*<function="),
    re.compile(r"\s*(?:<(?:f(?:u(?:n(?:c(?:t(?:i(?:o(?:n)?)?)?)?)?)?)?)?)?\Z"),
    partial(_ends_after, "<parameter=", "</parameter>"),
    nests=True,
    bare="<function=",
)
GLM = BodyForm(
    _read_glm,
    re.compile(r"\s*[^\s<>{}`]+[^\S\n]*(?:\n|<arg_key>|</tool_call>)"),
    re.compile(r"\s*(?:[^\s<>{}`]+[^\S\n]*(?:<[a-z_/]*)?)?\Z"),
    partial(_ends_after, "<arg_value>", "</arg_value>"),
    nests=True,
    shows_its_end=False,
)
