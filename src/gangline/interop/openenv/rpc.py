"""MCP's JSON-RPC in OpenEnv's variant, with its methods for sessions over HTTP.

`openenv/session/create` opens a seat, which `tools/list` and `tools/call` identify by `session_id`. Over a WebSocket
they use the connection's own seat. Source: `openenv` 0.10.0, `mcp_handler` in `core/env_server/http_server.py`.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from gangline.domain.errors import GanglineError, InvalidRequest
from gangline.interop.openenv.schemas import tool_list
from gangline.interop.openenv.seats import Seat, Seats

_PARSE_ERROR = -32700
_INVALID_REQUEST = -32600
_METHOD_NOT_FOUND = -32601
_INVALID_PARAMS = -32602
_SERVER_ERROR = -32000


class _Request(msgspec.Struct):
    jsonrpc: str
    method: str
    params: dict[str, Any] = {}
    id: str | int | None = None


async def answer_rpc(seats: Seats, request: bytes | dict[str, Any], seat: Seat | None = None) -> dict[str, Any]:
    """The response. seat: the connection's, if there is one."""
    try:
        call = _read(request)
    except msgspec.ValidationError as error:
        return _failed(None, _INVALID_REQUEST, f"Invalid request: {error}")
    except msgspec.DecodeError as error:
        return _failed(None, _PARSE_ERROR, f"Parse error: {error}")
    try:
        result = await _done(seats, call, seat)
    except InvalidRequest as error:
        return _failed(call.id, _INVALID_PARAMS, error.message)
    except GanglineError as error:
        return _failed(call.id, _SERVER_ERROR, error.message)
    if result is None:
        return _failed(call.id, _METHOD_NOT_FOUND, f"Method not found: {call.method}")
    return {"jsonrpc": "2.0", "id": call.id, "result": result}


def _read(request: bytes | dict[str, Any]) -> _Request:
    if isinstance(request, bytes):
        return msgspec.json.decode(request, type=_Request)
    return msgspec.convert(request, type=_Request)


async def _done(seats: Seats, call: _Request, seat: Seat | None) -> dict[str, Any] | None:
    """The result; None for an unknown method. Raises: InvalidRequest, errors of the service."""
    match call.method:
        case "openenv/session/create":
            return {"session_id": (seat or await seats.open()).session_id}
        case "openenv/session/close":
            return await _closed(seats, call.params)
        case "tools/list":
            episode = await _named(seats, call.params, seat).opened()
            return {"tools": tool_list(episode.tools)}
        case "tools/call":
            name, arguments = call.params.get("name"), call.params.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise InvalidRequest("tools/call takes `name`, a text, and `arguments`, an object.")
            seen = await _named(seats, call.params, seat).act(name, cast("dict[str, Any]", arguments))
            return {"data": seen.text, "done": seen.done, "reward": seen.reward, "metadata": seen.metadata}
        case _:
            return None


async def _closed(seats: Seats, params: dict[str, Any]) -> dict[str, Any]:
    seat = _named(seats, params, None)
    await seats.leave(seat)
    return {"session_id": seat.session_id, "closed": True}


def _named(seats: Seats, params: dict[str, Any], seat: Seat | None) -> Seat:
    """Raises: InvalidRequest."""
    found = seat or seats.find(params.get("session_id"))
    if found is None:
        raise InvalidRequest(
            f"Unknown session_id: {params.get('session_id')!r}. `openenv/session/create` opens a session."
        )
    return found


def _failed(number: str | int | None, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
