"""The page of HTTP: routes and records, read from the descriptions that server and node give of themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web

from gangline.models.engine_server.app import create_app
from gangline.node.calls.proxy import Proxy
from gangline.node.node import TITLE as NODE_TITLE
from gangline.node.node import control_routes
from gangline.server.app import TITLE, all_routes
from gangline.serving.scripted.script import Reply, Script
from gangline.serving.scripted.server import ScriptedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.wire.http.openapi import describe

Schema = dict[str, Any]

_INTRODUCTION = """\
<!-- Made by docs/generate.py from the code; `make docs` makes it again. -->

# HTTP

Server and node share these rules:

- Every route but `/health` needs `Authorization: Bearer CONTROL_TOKEN`. A route marked *session's key* needs that key.
- Errors are problem+json: [Problem](#problem).
- Records are JSON, or MessagePack where `Accept` prefers `application/msgpack`. An empty body is `{}`.
- Routes below `/v1/` refuse unknown query parameters. A number below its minimum is refused; one above its maximum is
  lowered to it.
- `GET /openapi.json` describes everything for machines, with the fields' limits.

*Takes* lists query parameters and the body.
"""
_HARNESS_ROUTES = """
## A node

Agents call these routes with the session's key as `Authorization: Bearer KEY`; `{session}` is the session's id. Errors
have the shape of the provider whose API was called.

"""
_NODE_ROUTES = """
The node's own routes. [Sessions of your own agents](../guides/external-sessions.md) shows them in use.
"""
_ENGINE = """
## An engine server

`gangline engine` serves those of vLLM's routes and fields that Gangline uses; vLLM documents the fields.

"""
_RECORDS = """
## Records

In bodies a field without a type is a string, `integers` is a list of integers, and *required* marks what a body needs.
In answers, and between nodes and server, plain types are left out: `num_*` are integers, `is_*` and `has_*` booleans,
`*_at` seconds since 1970, `*_s` seconds. `?` marks what may be null. `GET /openapi.json` has every type, and the
records of Polar and ProRL Agent.
"""
_HEAD = "| route | what it does | takes | answer |\n|---|---|---|---|"
_FOREIGN = ("Polar", "Prorl")
"""Beginnings of the names of records that other systems describe."""
_OF_NODES = ("post /v1/sessions/{session_id}/result", "post /v1/gradings")
_PLAIN = ("", "integer", "number", "boolean", "strings", "integers", "numbers", "any")
"""Types that a field of an answer is shown without."""
_PLURALS = {"": "strings", "integer": "integers", "number": "numbers", "object": "objects"}
_MIN_SHARED_VALUES = 3
"""An enumeration with as many values is named once, where more than one field has it."""


def http() -> str:
    """docs/reference/http.md"""
    server = describe(all_routes(cast(Any, SimpleNamespace(store=None))), TITLE)
    parts: Any = SimpleNamespace(gate=None, backends=None)
    node = describe(control_routes(parts, *([cast(Any, None)] * 3)), NODE_TITLE)
    engine = create_app(ScriptedSampler(Script(default=Reply(text="x")), TinyTokenizer()))
    schemas: Schema = server["components"]["schemas"] | node["components"]["schemas"]
    types = Types(schemas)
    bodies = _below({name for one in (server, node) for name in _body_records(one)}, schemas)
    lines = [
        _INTRODUCTION,
        "## The server\n",
        _HEAD,
        *_own_routes(server, types),
        _HARNESS_ROUTES + ", ".join(_plain_routes(Proxy().routes())) + ".",
        _NODE_ROUTES,
        _HEAD,
        *_own_routes(node, types),
        _ENGINE + ", ".join(_plain_routes(engine.router.routes())) + ".",
        _RECORDS,
        *types.enumerations(),
        *(
            line
            for name, schema in sorted(schemas.items())
            if not name.startswith(_FOREIGN)
            for line in _record(name, schema, types, name in bodies)
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


class Types:
    """How types of fields are written. schemas: by name."""

    def __init__(self, schemas: Schema) -> None:
        fields = [
            (field, inner)
            for name, one in schemas.items()
            if not name.startswith(_FOREIGN)
            for field, inner in one.get("properties", {}).items()
        ]
        found = Counter(values for _, inner in fields for values in _values_in(inner))
        shared = {values for values, times in found.items() if times > 1 and len(values) >= _MIN_SHARED_VALUES}
        self._names: dict[tuple[str, ...], str] = {}
        for field, inner in fields:
            for values in sorted(shared.intersection(_values_in(inner)) - self._names.keys()):
                self._names[values] = field if field not in self._names.values() else f"{field}s"

    def enumerations(self) -> Iterator[str]:
        """A section for each that several fields have."""
        for values, name in sorted(self._names.items(), key=lambda item: item[1]):
            yield f"#### One of: {name}\n\n{', '.join(f'`{value}`' for value in values)}\n"

    def of(self, schema: Schema) -> str:
        """Empty: a string."""
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[1]
            return f"`{name}`" if name.startswith(_FOREIGN) else f"[{name}](#{name.lower()})"
        if schema.get("type") == "array":
            items = self.of(schema["items"]) if schema.get("items") else "any"
            return _PLURALS.get(items) or f"list of {items}"
        if kinds := schema.get("anyOf") or schema.get("oneOf"):
            names = [self.of(kind) for kind in kinds if kind.get("type") != "null"]
            is_nullable = len(names) < len(kinds)
            named = " or ".join(name or "string" for name in names) if len(names) > 1 or is_nullable else names[0]
            return named + "?" * is_nullable
        if "enum" in schema:
            values = tuple(map(str, schema["enum"]))
            if name := self._names.get(values):
                return f"[{name}](#one-of-{name})"
            return f"`{'|'.join(values)}`"
        if "const" in schema:
            return f"`{schema['const']}`"
        kind = str(schema.get("type", "any"))
        return "" if kind == "string" else kind


def _values_in(schema: Schema) -> Iterator[tuple[str, ...]]:
    if "enum" in schema:
        yield tuple(map(str, schema["enum"]))
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *filter(None, (schema.get("items"),))):
        yield from _values_in(inner)


def _own_routes(description: Schema, types: Types) -> Iterator[str]:
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            query = [f"`{one['name']}`" for one in operation["parameters"] if one["in"] == "query"]
            takes = ", ".join([*query, *filter(None, (_media(operation.get("requestBody", {}), types),))])
            answer = _media(operation["responses"]["200"], types)
            key = " *Session's key.*" if {"session": []} in operation["security"] else ""
            about = one_line(operation["summary"]) + key
            yield f"| `{method.upper()} {path}` | {about} | {takes} | {'' if answer == 'object' else answer} |"


def _media(described: Schema, types: Types) -> str:
    return next((types.of(media["schema"]) for media in described.get("content", {}).values()), "")


def _plain_routes(routes: Any) -> Iterator[str]:
    for route in routes:
        path = route.path if isinstance(route, web.RouteDef) else route.resource.canonical
        if not (isinstance(route, web.AbstractRoute) and route.method == "HEAD"):
            yield f"`{route.method} {path}`"


def _record(name: str, schema: Schema, types: Types, is_body: bool) -> Iterator[str]:
    """Neighbouring fields without a meaning share a line."""
    yield f"#### {name}\n"
    if about := schema.get("description"):
        yield f"{one_line(about)}\n"
    required = set(schema.get("required", ())) if is_body else set[str]()
    described = [
        (_field(field, inner, types, field in required, is_body=is_body), one_line(inner.get("description")))
        for field, inner in schema.get("properties", {}).items()
    ]
    bullet = "- " if any(meaning for _, meaning in described) else ""
    for has_meaning, group in groupby(described, key=lambda one: bool(one[1])):
        if has_meaning:
            yield from (f"- {field}: {meaning}" for field, meaning in group)
        else:
            yield bullet + ", ".join(field for field, _ in group)
    yield ""


def _field(field: str, schema: Schema, types: Types, is_required: bool, *, is_body: bool) -> str:
    kind = types.of(schema)
    if not is_body:
        plain = kind.removesuffix("?")
        return f"`{field}`" + (kind.removeprefix(plain) if plain in (*_PLAIN, "string") else f" {kind}")
    default = schema.get("default")
    has_default = default not in (None, "") and default is not False and not isinstance(default, dict | list | tuple)
    parts = [f"`{field}`", kind, f"= `{default}`" * has_default, "*required*" * is_required]
    return " ".join(filter(None, parts))


def _body_records(description: Schema) -> Iterator[str]:
    """Of bodies that callers write; what nodes and server tell each other is not among them."""
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            if not path.startswith("/v1/nodes/") and f"{method} {path}" not in _OF_NODES:
                yield from _references(operation.get("requestBody", {}))


def _below(names: set[str], schemas: Schema) -> set[str]:
    """These records, and those that their fields have."""
    found: set[str] = set()
    while new := names - found:
        found |= new
        names = {below for name in new for below in _references(schemas.get(name, {}))}
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in cast(Schema, value).items():
            if key == "$ref":
                yield inner.rsplit("/", 1)[1]
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            yield from _references(inner)


def one_line(text: str | None) -> str:
    """For a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")
