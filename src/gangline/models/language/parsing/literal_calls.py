"""Readers of calls written as program code: LFM2's Python, and Gemma 4's objects with bare keys."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from gangline.models.language.parsing.events import CallEvent, Schemas
from gangline.models.language.parsing.sections import Reading

_BROKEN = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
_NAME = r"[A-Za-z_][\w.\-]*"
_CALL = re.compile(rf"\s*({_NAME})\(\s*")
_ARGUMENT = re.compile(r"\s*(\w+)\s*=\s*")
_VALUE_END = re.compile(rf"\s*(?:,(?=\s*\w+\s*=)|\)(?=\s*(?:\]\s*$|,\s*{_NAME}\()))")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}


def read_lfm2(body: str, schemas: Schemas) -> Reading:
    """`[NAME(key='text', other=1), ...]`"""
    return _python(body, is_escaped=True)


def read_lfm2_raw(body: str, schemas: Schemas) -> Reading:
    """The same for templates that quote text without escaping it."""
    return _python(body, is_escaped=False)


def _python(body: str, *, is_escaped: bool) -> Reading:
    text = body.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return Reading([], body)
    calls: list[CallEvent] = []
    at = 1
    try:
        while text[at:].strip() != "]":
            call, at = _python_call(text, at, is_escaped)
            calls.append(call)
    except _BROKEN:
        return Reading(calls, text[at:])
    return Reading(calls, "")


def _python_call(text: str, at: int, is_escaped: bool) -> tuple[CallEvent, int]:
    """Raises: any of `_BROKEN`."""
    begun = _CALL.match(text, at)
    if begun is None:
        raise ValueError("not a call")
    values: dict[str, Any] = {}
    at = begun.end()
    ended = re.compile(r"\)").match(text, at)
    while ended is None:
        key = _ARGUMENT.match(text, at)
        if key is None or key[1] in values:
            raise ValueError("not an argument")
        values[key[1]], close = _python_value(text, key.end(), is_escaped)
        at = close.end()
        ended = close if close.group().strip() == ")" else None
    at = ended.end()
    comma = re.compile(r"\s*,").match(text, at)
    return CallEvent(begun[1], _json(values)), comma.end() if comma else at


def _python_value(text: str, at: int, is_escaped: bool) -> tuple[Any, re.Match[str]]:
    """The shortest valid value, and the match that ends it."""
    for end in _VALUE_END.finditer(text, at):
        written = text[at : end.start()]
        if written[:1] in "'\"":
            if len(written) < 2 or written[-1] != written[0]:
                continue
            if not is_escaped:
                return written[1:-1], end
        try:
            return _literal(written), end
        except _BROKEN:
            continue
    raise ValueError("a value that does not end")


def _literal(written: str) -> Any:
    """JSON or a Python literal. Raises: any of `_BROKEN`."""
    try:
        return json.loads(written, parse_constant=_refused)
    except ValueError:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unknown escapes
        for char, escape in _ESCAPES.items():
            written = written.replace(char, escape)
        return ast.literal_eval(written)


def _refused(name: str) -> Any:
    raise ValueError(name)


def _json(values: dict[str, Any]) -> str:
    """Raises: ValueError for values without a JSON form."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    if json.loads(text) != values:  # a tuple, or a number as a key
        raise ValueError("not JSON")
    text.encode()  # a lone surrogate is not JSON either
    return text


_QUOTE = '<|"|>'
_GEMMA_CALL = re.compile(r"\s*(?:<\|tool_call>)?\s*call:([^{\s]+)\s*(?=\{)")
_GEMMA_KEY = re.compile(r"\s*([^:,{}\[\]<\"']+?)\s*:")
_GEMMA_WORD = re.compile(r"[^,{}\[\]<>\"'\s]+")
_GEMMA_WORDS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def read_gemma4(body: str, schemas: Schemas) -> Reading:
    """`call:NAME{key:<|"|>text<|"|>,other:[1,true]}`; text in plain quotes, which models sometimes write, is also
    accepted.
    """
    calls: list[CallEvent] = []
    at = 0
    while begun := _GEMMA_CALL.match(body, at):
        try:
            values, end = _gemma_value(body, begun.end())
            arguments = _json(values)
        except _BROKEN:
            break
        calls.append(CallEvent(begun[1], arguments))
        at = end
    rest = body[at:].strip() and body[at:]
    is_inside = body.count(_QUOTE) % 2 == 1
    # Only another call may follow the end of a call; otherwise that end was inside a text.
    return Reading([], body, is_inside) if rest and begun is None else Reading(calls, rest, is_inside)


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """Raises: any of `_BROKEN`."""
    at = _skipped(text, at)
    if text.startswith("{", at) or text.startswith("[", at):
        return _gemma_group(text, at)
    if text[at : at + 1] in ("'", '"') or text.startswith(_QUOTE, at):
        return _gemma_text(text, at)
    word = _GEMMA_WORD.match(text, at)
    if word is None:
        raise ValueError("not a value")
    if word.group() in _GEMMA_WORDS:
        return _GEMMA_WORDS[word.group()], word.end()
    return json.loads(word.group(), parse_constant=_refused), word.end()


def _gemma_group(text: str, at: int) -> tuple[Any, int]:
    is_object, end = text[at] == "{", "}" if text[at] == "{" else "]"
    values: dict[str, Any] = {}
    items: list[Any] = []
    at = _skipped(text, at + 1)
    while not text.startswith(end, at):
        key = ""
        if is_object:
            key, at = _gemma_key(text, at)
        value, at = _gemma_value(text, at)
        if key in values:
            raise ValueError("a key twice")
        items.append(value)
        if is_object:
            values[key] = value
        at = _skipped(text, at)
        if text.startswith(",", at):
            at = _skipped(text, at + 1)
        elif not text.startswith(end, at):
            raise ValueError("neither the next value nor the end")
    return values if is_object else items, at + 1


def _gemma_key(text: str, at: int) -> tuple[str, int]:
    at = _skipped(text, at)
    if text[at : at + 1] in ("'", '"') or text.startswith(_QUOTE, at):
        key, at = _gemma_text(text, at)
        at = _skipped(text, at)
        if not text.startswith(":", at):
            raise ValueError("not a key")
        return key, at + 1
    bare = _GEMMA_KEY.match(text, at)
    if bare is None:
        raise ValueError("not a key")
    return bare[1], bare.end()


def _gemma_text(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, at):
        start = at + len(_QUOTE)
        end = text.index(_QUOTE, start)
        return text[start:end], end + len(_QUOTE)
    found = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL).match(text, at)
    if found is None:
        raise ValueError("a text that does not end")
    return str(_literal(found.group())), found.end()


def _skipped(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
