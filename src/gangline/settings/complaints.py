"""Errors of settings, for people: the key, its line in gangline.toml, and the nearest valid name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from gangline.settings.fields import leaves_of

__all__ = ["explained", "line_of", "nearest"]

_MOST = 8
_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"""\s*([\w."'-]+)\s*=""")


def explained(
    error: ValidationError, table: str, model: type[BaseModel], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Path in gangline.toml and complaint of each error, at most eight. known: keys of all tables."""
    for item in error.errors(include_url=False)[:_MOST]:
        steps = [str(step) for step in item["loc"]]
        path = ".".join([*([table] if table else []), *steps])
        if item["type"] == "extra_forbidden":
            yield path, f"unknown key {steps[-1]!r}{_inside(table, steps)}.{_hint(steps, table, model, known)}"
        else:
            message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
            yield path, f"{path}: {message}, got {_shown(item['input'])}"


def _inside(table: str, steps: list[str]) -> str:
    inside = ".".join([*([table] if table else []), *steps[:-1]])
    return f" in [{inside}]" if inside else " above the tables"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _hint(steps: list[str], table: str, model: type[BaseModel], known: Collection[str]) -> str:
    if len(steps) > 1:
        inner: Any = leaves_of({table: model})[".".join([*([table] if table else []), steps[0]])].kind
        return nearest(steps[-1], getattr(inner, "model_fields", ()))
    leaves = leaves_of({table: model}).values()
    spelled = {leaf.option.removeprefix("--").replace("-", "_"): leaf.name for leaf in leaves}
    names = {**spelled, **{leaf.name: leaf.name for leaf in leaves}}
    if found := difflib.get_close_matches(steps[0], names, n=1):
        return f" Did you mean {names[found[0]]!r}?"
    elsewhere = {key.rpartition(".")[2]: key for key in known}
    if found := difflib.get_close_matches(steps[0], elsewhere, n=1):
        inside, _, name = elsewhere[found[0]].rpartition(".")
        return f" Did you mean {name!r} {f'in [{inside}]' if inside else 'above the tables'}?"
    return "" if known or table else " Most settings belong in a table, such as [node]."


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean ...?`, or nothing."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def line_of(text: str, path: str) -> int | None:
    """Number of the line where a key, or the innermost part of its path that has a line, is set; None when unknown.

    tomllib reports no lines; this one reads headers and the beginnings of lines.
    """
    table, best, length = "", None, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = found = _plain(header[1])
        elif key := _KEY.match(line):
            found = f"{table}.{_plain(key[1])}".removeprefix(".")
        else:
            continue
        if f"{path}.".startswith(f"{found}.") and len(found) > length:
            best, length = number, len(found)
        elif f"{found}.".startswith(f"{path}.") and length < len(path):
            best, length = number, len(path)
    return best


def _plain(name: str) -> str:
    return re.sub(r"[\s\"']", "", name)
