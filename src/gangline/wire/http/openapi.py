"""The OpenAPI description of a service, generated from its routes and the types of their records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, cast, get_args, get_origin

import msgspec
import numpy as np
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from gangline import __version__
from gangline.domain.described import descriptions
from gangline.domain.ids import ID_PATTERN
from gangline.wire.http.negotiation import answer
from gangline.wire.http.problems import Problem
from gangline.wire.http.routes import Route

_REF = "#/components/schemas/"
_KEYS = {"control": "The control token.", "session": "The session's key."}
_PASSWORD = {"type": "http", "scheme": "basic", "description": "The control token as password, with any name."}


def described(routes: Sequence[Route], title: str) -> list[Route]:
    """The routes, plus one that describes them all, at the usual path and under `/v1`."""

    async def openapi(request: web.Request) -> web.StreamResponse:
        return answer(request, describe(everything, title))

    paths = ("/openapi.json", "/v1/openapi.json")
    everything = [*routes, *(Route("GET", path, openapi, "This description.") for path in paths)]
    return everything


def describe(routes: Sequence[Route], title: str) -> dict[str, Any]:
    """OpenAPI 3.1 of `routes`."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    keys = {name: {"type": "http", "scheme": "bearer", "description": doc} for name, doc in _KEYS.items()}
    if any(route.password_too for route in routes):
        keys["password"] = _PASSWORD
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": _components(routes), "securitySchemes": keys},
    }


def _operation(route: Route) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": {"$ref": _REF + "Problem"}}}
    answers: dict[str, Any] = {"200": {"description": "Done", "content": _content(route.answer, route.answer_types)}}
    more = (() if route.opened_by == "nobody" else (403,)) + (() if route.body is None else (413, 415))
    for status in sorted({*route.errors, *more}):
        answers[str(status)] = {"description": HTTPStatus(status).phrase, "content": problem}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "parameters": _parameters(route),
        "responses": answers,
        "security": _security(route),
    }
    if route.body is not None:
        operation["requestBody"] = {"content": _content(route.body, (route.body_type,))}
    return operation


def _security(route: Route) -> list[dict[str, list[str]]]:
    """Alternative credentials for the route."""
    if route.opened_by not in _KEYS:
        return []
    names = [route.opened_by, "password"] if route.password_too else [route.opened_by]
    return [{name: []} for name in names]


def _parameters(route: Route) -> list[dict[str, Any]]:
    names = [step[1:-1] for step in route.path.split("/") if step.startswith("{")]
    in_path = [{"name": name, "in": "path", "required": True, "schema": _ID} for name in names]
    return in_path + [{"name": q.name, "in": "query", "schema": q.schema, "description": q.doc} for q in route.query]


_ID = {"type": "string", "pattern": ID_PATTERN}


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
        schema = model.model_json_schema(ref_template=_REF + "{model}", schema_generator=_WithDocstrings)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return schemas


class _WithDocstrings(GenerateJsonSchema):
    """Adds the docstrings of fields."""

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        made = super().model_schema(schema)
        model = cast("type[BaseModel]", schema["cls"])
        texts = descriptions(model)
        for name, field in model.model_fields.items():
            if name in texts:
                made["properties"][field.alias or name].setdefault("description", texts[name])
        return made


def _array(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is np.ndarray or kind is np.ndarray:
        return {"type": "array", "items": {"type": "number"}}
    raise NotImplementedError(f"no schema for {kind!r}")
