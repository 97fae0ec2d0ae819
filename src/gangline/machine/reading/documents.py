"""Parses untrusted JSON, TOML and YAML within limits of time and memory. Errors name the place."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.files import read_text
from gangline.machine.reading.paths import SourcePath
from gangline.settings.installation import extra_command

MAX_DOCUMENT_BYTES = 256 << 10
"""Size limit of a file that describes a task."""
_MAX_DEPTH = 100
_MAX_KEY_PARTS = 64
_MAX_DIGITS = 1000
_MAX_YAML_CHARS = 4 << 20
"""Size limit of a document after its aliases are expanded."""
_NAME = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_NAME}(?:[ \t]*+\.[ \t]*+{_NAME}){{{_MAX_KEY_PARTS}}}")
"""`tomllib` uses memory quadratic in the number of a key's parts."""


def parsed_json(text: str, where: str = "") -> Any:
    """where: prefix of the error's message. Raises: InvalidRequest, also for a duplicate key in an object."""
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not JSON: {_why(error)}".lstrip()) from error
    _check_depth(document, where)
    return document


def is_more_than_one(error: InvalidRequest) -> bool:
    """Whether the text begins with a complete document, as JSON lines do."""
    return getattr(error.__cause__, "msg", None) == "Extra data"


def parsed_toml(text: str, where: str) -> dict[str, Any]:
    """Raises: InvalidRequest."""
    if _LONG_KEY.search(text):
        raise InvalidRequest(f"{where} is not TOML that can be read: a key has more than {_MAX_KEY_PARTS} parts.")
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not TOML: {_why(error)}") from error
    _check_depth(document, where)
    return document


def read_toml(path: SourcePath) -> dict[str, Any]:
    """Raises: InvalidRequest, naming the file."""
    return parsed_toml(read_text(path, MAX_DOCUMENT_BYTES), str(path))


def read_yaml(path: SourcePath, *, as_texts: bool = False) -> Any:
    """as_texts: return scalars as the text in the file. Raises: InvalidRequest, naming the file."""
    try:
        import yaml  # noqa: PLC0415 - of the extra `importers`
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{path} is YAML. Run: {extra_command('importers')}") from error
    base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Texts(base):
        yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own table, without numbers, truth values and dates
            first: [(tag, rule) for tag, rule in rules if tag.endswith((":null", ":merge"))]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    text = read_text(path, MAX_DOCUMENT_BYTES)
    try:
        _check_yaml(cast("Any", yaml).parse(text, base), str(path))
        return yaml.load(text, Texts if as_texts else base)
    except (yaml.YAMLError, ValueError, TypeError, LookupError) as error:
        raise InvalidRequest(f"{path} is not YAML: {_why(error)}") from error


def _check_yaml(events: Any, where: str) -> None:
    """Raises: InvalidRequest for a document that is too deep, or whose aliases expand too much."""
    sizes: dict[str, int | None] = {}
    open_: list[tuple[str | None, int]] = []  # anchor and size of each collection around
    size = 0
    for event in events:
        kind = type(event).__name__
        if kind in ("MappingStartEvent", "SequenceStartEvent"):
            if event.anchor:
                sizes[event.anchor] = None
            open_.append((event.anchor, size))
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            anchor, before = open_.pop()
            size += 1
            if anchor:
                sizes[anchor] = size - before
        elif kind == "AliasEvent":
            if sizes.get(event.anchor, 0) is None:
                raise InvalidRequest(f"{where}: the alias *{event.anchor} holds itself.")
            size += sizes.get(event.anchor) or 0
        elif kind == "ScalarEvent":
            if len(event.value) > _MAX_DIGITS and not event.value.strip("0123456789:_+-.eE"):
                raise InvalidRequest(f"{where}: has a number of more than {_MAX_DIGITS:,} digits.")
            size += 1 + len(event.value)
            if event.anchor:
                sizes[event.anchor] = 1 + len(event.value)
        if len(open_) > _MAX_DEPTH:
            raise InvalidRequest(f"{where}: is nested more than {_MAX_DEPTH} deep.")
        if size > _MAX_YAML_CHARS:
            raise InvalidRequest(f"{where}: its aliases unpack to more than {_MAX_YAML_CHARS >> 20} MiB.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {twice[:100]!r} twice")
    return found


def _check_depth(document: Any, where: str) -> None:
    """Raises: InvalidRequest."""
    level: list[Any] = [document]
    for _ in range(_MAX_DEPTH + 1):
        level = [inner for one in level for inner in _inside(one) if isinstance(inner, dict | list)]
        if not level:
            return
    raise InvalidRequest(f"{where} is nested more than {_MAX_DEPTH} deep".lstrip())


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _why(error: Exception) -> str:
    return f"it is nested more than {_MAX_DEPTH} deep" if isinstance(error, RecursionError) else str(error)
