"""The OpenAPI description of a node's own routes, made from them. Model calls are described by their providers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web

from gangline import __version__
from gangline.domain.ids import ID_PATTERN
from gangline.gateway.control import ControlRoute, answer

__all__ = ["describe_node", "described_by_itself"]

_REF = "#/components/schemas/"
_KEYS = {"control": "The control token.", "session": "The session's key."}


def described_by_itself(routes: Sequence[ControlRoute]) -> list[ControlRoute]:
    """The routes, and one that describes them all."""

    async def openapi(request: web.Request) -> web.StreamResponse:
        return answer(request, describe_node(everything))

    everything = [*routes, ControlRoute("GET", "/v1/openapi.json", openapi, "This description.")]
    return everything


def describe_node(routes: Iterable[ControlRoute]) -> dict[str, Any]:
    """OpenAPI 3.1 of `routes`."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Problem": _PROBLEM}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
        if route.body is not None:
            schema = route.body.model_json_schema(ref_template=_REF + "{model}")
            schemas |= schema.pop("$defs", {}) | {route.body.__name__: schema}
    keys = {name: {"type": "http", "scheme": "bearer", "description": doc} for name, doc in _KEYS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Gangline node", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }


def _operation(route: ControlRoute) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": {"$ref": _REF + "Problem"}}}
    done: dict[str, Any] = {"description": "Done", "content": {"application/json": {"schema": {}}}}
    names = [step[1:-1] for step in route.path.split("/") if step.startswith("{")]
    in_path = [{"name": name, "in": "path", "required": True, "schema": _ID} for name in names]
    in_query = [{"name": name, "in": "query", "schema": schema} for name, schema in route.query.items()]
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()} {route.path}",
        "parameters": in_path + in_query,
        "responses": {"200": done}
        | {str(status): {"description": "Refused", "content": problem} for status in _REFUSED},
        "security": [{route.opened_by: []}],
    }
    if route.body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": {"$ref": _REF + route.body.__name__}}}}
    return operation


_ID = {"type": "string", "pattern": ID_PATTERN}
_REFUSED = (400, 401, 403, 404, 409, 413, 415, 429, 502, 503)
_PROBLEM = {
    "type": "object",
    "description": "What went wrong (RFC 9457).",
    "properties": {
        "status": {"type": "integer"},
        "title": {"type": "string"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "boundary": {"type": "string"},
        "retryable": {"type": "boolean"},
    },
}
