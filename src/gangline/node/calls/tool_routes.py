"""Serves the tools of a session's environments to the agent's program: MCP over streamable HTTP, with the session's
key.

Every answer is one JSON document. There are no streams, and no state except the environment's: a client that connects
twice plays the same episode.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

import msgspec
from aiohttp import web

from gangline.domain.environment import CallResult, SessionEnvironment
from gangline.domain.errors import GanglineError, InvalidRequest, NotFound, Unauthorized
from gangline.node.calls.session import ModelSession, key_digest
from gangline.wire.http.listening import read_body

_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
_MAX_BODY_BYTES = 8 << 20
_PARSE_ERROR, _INVALID_REQUEST, _UNKNOWN_METHOD, _INVALID_PARAMS = -32700, -32600, -32601, -32602


class _Message(msgspec.Struct):
    method: str = ""
    id: int | str | None = None
    params: dict[str, Any] = {}


class _Called(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None


class ToolRoutes:
    def __init__(self, session: Callable[[str], ModelSession]) -> None:
        """session: returns the session with an id. Raises: NotFound."""
        self._session = session

    async def answer(self, request: web.Request) -> web.Response:
        try:
            environment = self._environment(request)
            if request.method != "POST":
                return web.Response(status=HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})
            body = await read_body(request, _MAX_BODY_BYTES)
        except GanglineError as error:
            return web.json_response({"error": {"code": error.code, "message": error.message}}, status=error.status)
        try:
            message = msgspec.json.decode(body, type=_Message)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return _reply(None, _error(_PARSE_ERROR, f"the message cannot be read: {error}"), HTTPStatus.BAD_REQUEST)
        if message.id is None:  # a notification or a response: no request of ours waits for one
            return web.Response(status=HTTPStatus.ACCEPTED)
        return _reply(message.id, await _done(environment, message))

    def _environment(self, request: web.Request) -> SessionEnvironment:
        """Raises: Unauthorized, with the same message for a wrong key and an unknown session; NotFound."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        try:
            session = self._session(request.match_info["session"])
        except NotFound:
            session = None
        is_key = scheme.lower() == "bearer" and session is not None
        if session is None or not is_key or not hmac.compare_digest(session.key_digest, key_digest(given.strip())):
            raise Unauthorized("The tools of a session need its key, as `Authorization: Bearer KEY`.")
        environment = session.environments.get(name := request.match_info["environment"])
        if environment is None:
            raise NotFound(f"the session has no environment {name!r} with tools.")
        return environment


async def _done(environment: SessionEnvironment, message: _Message) -> dict[str, Any]:
    match message.method:
        case "initialize":
            asked = message.params.get("protocolVersion")
            return {
                "result": {
                    "protocolVersion": asked if asked in _VERSIONS else _VERSIONS[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "gangline", "version": "1"},
                }
            }
        case "ping":
            return {"result": {}}
        case "tools/list":
            tools = [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
                for tool in environment.tools
            ]
            return {"result": {"tools": tools}}
        case "tools/call":
            return await _called(environment, message.params)
        case _:
            return _error(_UNKNOWN_METHOD, f"the method {message.method[:100]!r} is not served here")


async def _called(environment: SessionEnvironment, params: Mapping[str, Any]) -> dict[str, Any]:
    try:
        asked = msgspec.convert(params, _Called)
        result = await environment.call(asked.name, asked.arguments or {})
    except msgspec.ValidationError as error:
        return _error(_INVALID_PARAMS, f"params: {error}")
    except InvalidRequest as error:
        return _error(_INVALID_PARAMS, error.message)
    except GanglineError as error:
        result = CallResult(content=({"type": "text", "text": f"error: {error.message}"},), is_error=True)
    found: dict[str, Any] = {"content": list(result.content), "isError": result.is_error}
    if result.structured is not None:
        found["structuredContent"] = result.structured
    return {"result": found}


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def _reply(id_: int | str | None, answer: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    body = msgspec.json.encode(cast("dict[str, Any]", {"jsonrpc": "2.0", "id": id_, **answer}))
    return web.Response(body=body, status=status, content_type="application/json")
