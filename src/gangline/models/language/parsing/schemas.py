"""The values that a tool's JSON schema allows at one place: kinds, enums and constants, through unions and references.

Enough to distinguish text from JSON; a schema that is invalid or unsupported at a place allows everything there. It
also accepts names that people and other dialects write (`STRING`, `dict`, `nullable`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote

_NAMES = {
    "null": ("null", "none", "nonetype"),
    "boolean": ("boolean", "bool"),
    "integer": ("integer", "int", "int32", "int64", "long"),
    "number": ("number", "float", "double"),
    "array": ("array", "list", "tuple", "set"),
    "object": ("object", "dict", "map"),
}
"""JSON kind -> its names. Any other name is text."""
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
_IMPLIED = {"properties": "object", "patternProperties": "object", "items": "array", "prefixItems": "array"}
"""Keyword -> the kind that it implies in a schema without `type`."""
_NO_REFERENCES: frozenset[str] = frozenset()


def allows(value: object, schema: object, root: object, *, exact: bool = True) -> bool:
    """root: the whole schema, for references.
    exact: also check enum and const, not only the kind.
    """
    return _allows(value, schema, root, exact, _NO_REFERENCES)


def _allows(value: object, schema: object, root: object, exact: bool, seen: frozenset[str]) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    known = cast("Mapping[str, Any]", schema)
    if value is None and known.get("nullable") is True:
        return True
    if not _is_kind(value, known) or (exact and not _is_named(value, known)):
        return False
    reference, seen_here = _reference(known, seen)
    if reference and not _allows(value, _resolved(reference, root), root, exact, seen_here):
        return False
    every = [_allows(value, one, root, exact, seen) for one in _listed(known, "allOf")]
    some = [[_allows(value, one, root, exact, seen) for one in _listed(known, key)] for key in ("anyOf", "oneOf")]
    return all(every) and all(any(branch) for branch in some if branch)


def names_text(text: str, schema: object, root: object) -> bool:
    """Whether an enum or a constant contains exactly this text."""
    return any(isinstance(one, str) and one == text for part in _parts(schema, root) for one in _named(part) or ())


def of_property(schema: object, name: str, root: object) -> object:
    """The schema of one property; None if it is not described."""
    return _of_property(schema, name, root, _NO_REFERENCES)


def _of_property(schema: object, name: str, root: object, seen: frozenset[str]) -> object:
    if not isinstance(schema, Mapping):
        return None
    known = cast("Mapping[str, Any]", schema)
    reference, seen_here = _reference(known, seen)
    found = [_own_property(known, name)]
    found += [_of_property(_resolved(reference, root), name, root, seen_here)] if reference else []
    found += [_of_property(one, name, root, seen) for one in _listed(known, "allOf")]
    for key in ("anyOf", "oneOf"):
        either = [_of_property(one, name, root, seen) for one in _listed(known, key)]
        described = [one for one in either if one is not None]
        found += [{"anyOf": described}] if described else []
    described = [one for one in found if one is not None]
    return {"allOf": described} if len(described) > 1 else described[0] if described else None


def _own_property(schema: Mapping[str, Any], name: str) -> object:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, Mapping) and name in properties:
        return cast("Mapping[str, object]", properties)[name]
    if isinstance(patterns, Mapping):
        for pattern, described in cast("Mapping[str, object]", patterns).items():
            if _matches(pattern, name):
                return described
    others = schema.get("additionalProperties")
    return cast("object", others) if isinstance(others, Mapping) else None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def _parts(schema: object, root: object, seen: frozenset[str] = _NO_REFERENCES) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas that it combines for the same place."""
    if not isinstance(schema, Mapping):
        return
    known = cast("Mapping[str, Any]", schema)
    yield known
    reference, seen_here = _reference(known, seen)
    if reference:
        yield from _parts(_resolved(reference, root), root, seen_here)
    for key in ("allOf", "anyOf", "oneOf"):
        for one in _listed(known, key):
            yield from _parts(one, root, seen)


def _reference(schema: Mapping[str, Any], seen: frozenset[str]) -> tuple[str, frozenset[str]]:
    """`$ref`, and all references followed so far. A cycle ends in `#!`, which does not exist."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return "", seen
    return ("#!" if reference in seen else reference), seen | {reference}


def _resolved(reference: str, root: object) -> object:
    """True if it cannot be resolved. False in a cycle, which allows nothing beyond the rest."""
    if reference == "#!":
        return False
    place: object = root
    for step in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ["?"]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        place = cast("Mapping[str, object]", place).get(key) if isinstance(place, Mapping) else None
    return True if place is None else place


def _listed(schema: Mapping[str, Any], keyword: str) -> list[object]:
    schemas = schema.get(keyword)
    return cast("list[object]", schemas) if isinstance(schemas, list) else []


def _is_kind(value: object, schema: Mapping[str, Any]) -> bool:
    kinds = _kinds(schema)
    kind = _kind(value)
    if kind == "integer" or (isinstance(value, float) and value.is_integer()):
        return kinds is None or bool({"integer", "number"} & kinds)
    return kinds is None or kind in kinds


def _kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """None: any kind."""
    declared: object = schema.get("type")
    names = cast("list[object]", declared) if isinstance(declared, list) else [] if declared is None else [declared]
    kinds = {_KINDS.get(name.strip().lower(), "string") if isinstance(name, str) else "string" for name in names}
    if kinds:
        return kinds
    named = _named(schema)
    if named is not None:
        return {_kind(one) for one in named}
    return {kind for keyword, kind in _IMPLIED.items() if keyword in schema} or None


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    for kind, kind_type in (("integer", int), ("number", float), ("string", str), ("array", list)):
        if isinstance(value, kind_type):
            return kind
    return "object"


def _named(schema: Mapping[str, Any]) -> list[object] | None:
    """The values of an enum or a constant; None if there is neither."""
    if "const" in schema:
        return [schema["const"]]
    return _listed(schema, "enum") or None


def _is_named(value: object, schema: Mapping[str, Any]) -> bool:
    named = _named(schema)
    return named is None or any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in named)
