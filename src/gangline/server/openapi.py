"""The OpenAPI description, made from the routes and the records' own types."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from pydantic import BaseModel

from gangline import __version__
from gangline.server.problems import Problem
from gangline.server.routing import Route

__all__ = ["describe"]

_REF = "#/components/schemas/"


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1 of `routes`."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Gangline rollout server", "version": __version__},
        "paths": paths,
        "components": {"schemas": _components(routes), "securitySchemes": {"control": _BEARER}},
    }


_BEARER = {"type": "http", "scheme": "bearer", "description": "The control token."}


def _operation(route: Route) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": {"$ref": _REF + "Problem"}}}
    answers: dict[str, Any] = {"200": {"description": "Done", "content": _content(route.answer, route.answer_types)}}
    for status in (*route.errors, *(() if route.open else (403,)), *(() if route.body is None else (415,))):
        answers[str(status)] = {"description": HTTPStatus(status).phrase, "content": problem}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": getattr(route.handler, "__name__", route.path),
        "parameters": _parameters(route),
        "responses": answers,
        "security": [] if route.open else [{"control": []}],
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body, (route.body_type,))}
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    names = [step[1:-1] for step in route.path.split("/") if step.startswith("{")]
    in_path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    in_query = [{"name": q.name, "in": "query", "schema": q.schema, "description": q.doc} for q in route.query]
    return in_path + in_query


def _content(kind: Any, media_types: Sequence[str]) -> dict[str, Any]:
    text = {"type": "string"}
    return {
        media_type: {"schema": text if media_type == "text/plain" else _reference(kind)} for media_type in media_types
    }


def _reference(kind: Any) -> dict[str, Any]:
    if kind is None:
        return {"type": "object"}
    if get_origin(kind) is list:
        return {"type": "array", "items": _reference(get_args(kind)[0])}
    return {"$ref": _REF + kind.__name__}


def _components(routes: Sequence[Route]) -> dict[str, Any]:
    named: list[Any] = [Problem]
    for kind in (kind for route in routes for kind in (route.body, route.answer) if kind is not None):
        named.append(get_args(kind)[0] if get_origin(kind) is list else kind)
    structs = [kind for kind in named if not issubclass(kind, BaseModel)]
    _, schemas = msgspec.json.schema_components(structs, schema_hook=_array, ref_template=_REF + "{name}")
    for model in (kind for kind in named if issubclass(kind, BaseModel)):
        schema = model.model_json_schema(ref_template=_REF + "{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return schemas


def _array(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is np.ndarray or kind is np.ndarray:
        return {"type": "array", "items": {"type": "number"}}
    raise NotImplementedError(f"no schema for {kind!r}")
