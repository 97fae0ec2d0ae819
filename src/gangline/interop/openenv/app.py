"""OpenEnv's protocol on top of seats: the WebSocket `/ws`, MCP at `/mcp`, and the HTTP routes.

An episode belongs to a WebSocket, or to a session opened by `openenv/session/create`. `POST /reset` has neither, so its
episode ends with the request, as in OpenEnv's own server; `POST /step` could only act in a new episode and is refused.

Source: `openenv` 0.10.0, `core/env_server/http_server.py`, whose own clients and checks test this module.

MCP's JSON-RPC is OpenEnv's variant, with its methods for sessions over HTTP.
`openenv/session/create` opens a seat, which `tools/list` and `tools/call` identify by `session_id`. Over a WebSocket
they use the connection's own seat. Source: `openenv` 0.10.0, `mcp_handler` in `core/env_server/http_server.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
from aiohttp import WSMsgType, web

from gangline import __version__
from gangline.domain.errors import Conflict, GanglineError, InvalidRequest, TooMany
from gangline.interop.openenv.schemas import ACTION, OBSERVATION, STATE, observation, openapi, tool_list
from gangline.interop.openenv.seats import Seat, Seats
from gangline.wire.http.keys import require_key
from gangline.wire.http.problems import in_problems
from gangline.wire.http.same_origin import OwnNames

_MAX_MESSAGE_BYTES = 16 << 20


class _Message(msgspec.Struct):
    type: str = ""
    data: dict[str, Any] = {}


def create_app(seats: Seats, *, name: str, names: OwnNames, key: str | None = None) -> web.Application:
    """The application. It does not close the seats.

    name: the environment's. names: host names of this server. key: the bearer token that every client must send, except
    to `/health`; None: no authentication.
    """
    app = web.Application(client_max_size=_MAX_MESSAGE_BYTES, middlewares=[_guard(names, key)])
    routes = _Routes(seats, name)
    app.add_routes(routes.routes())
    return app


def _guard(names: OwnNames, key: str | None) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        async def checked(request: web.Request) -> web.StreamResponse:
            names.check(request)
            if request.path != "/health":
                require_key(request, key)
            return await handler(request)

        return await in_problems(checked, path=request.path)(request)

    return guard


class _Routes:
    def __init__(self, seats: Seats, name: str) -> None:
        self._seats = seats
        self._name = name

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/metadata", self.metadata),
            web.get("/schema", self.schema),
            web.get("/openapi.json", self.openapi),
            web.get("/state", self.state),
            web.post("/reset", self.reset),
            web.post("/step", self.step),
            web.post("/mcp", self.mcp),
            web.get("/ws", self.socket),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def metadata(self, _request: web.Request) -> web.Response:
        tasks = self._seats.names
        about = f"{len(tasks)} tasks in sandboxes of Gangline; reset with `task` or `seed` to choose one."
        return web.json_response({"name": self._name, "description": about, "version": __version__, "tasks": tasks})

    async def schema(self, _request: web.Request) -> web.Response:
        return web.json_response({"action": ACTION, "observation": OBSERVATION, "state": STATE})

    async def openapi(self, _request: web.Request) -> web.Response:
        paths: dict[str, list[str]] = {}
        for route in self.routes():
            if route.path != "/ws":
                paths.setdefault(route.path, []).append(route.method.lower())
        return web.json_response(openapi(self._name, paths))

    async def state(self, _request: web.Request) -> web.Response:
        return web.json_response(_state(None))

    async def reset(self, request: web.Request) -> web.Response:
        data = _object(await request.read())
        seat = await self._seats.open()
        try:
            return web.json_response(await _reset(seat, data))
        finally:
            await self._seats.leave(seat)

    async def step(self, _request: web.Request) -> web.Response:
        raise Conflict("a step over HTTP has no episode: connect to /ws, as OpenEnv's clients do.")

    async def mcp(self, request: web.Request) -> web.Response:
        return web.json_response(await answer_rpc(self._seats, await request.read()))

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        """A client's connection. Its episode ends with it, unless a session of `/mcp` holds it."""
        socket = web.WebSocketResponse(max_msg_size=_MAX_MESSAGE_BYTES, heartbeat=60.0)
        await socket.prepare(request)
        held = self._seats.find(request.query.get("session_id"))
        try:
            seat = held or await self._seats.open()
        except TooMany as error:
            await socket.send_json(_error(error.message, "CAPACITY_REACHED"))
            await socket.close()
            return socket
        seat.is_attached = True
        try:
            await self._serve(socket, seat)
        finally:
            seat.is_attached = False
            if held is None:
                await self._seats.leave(seat)
        return socket

    async def _serve(self, socket: web.WebSocketResponse, seat: Seat) -> None:
        async for frame in socket:
            if frame.type is not WSMsgType.TEXT:
                continue
            try:
                message = msgspec.json.decode(cast("str", frame.data), type=_Message)
            except msgspec.ValidationError as error:
                await socket.send_json(_error(str(error), "VALIDATION_ERROR"))
            except msgspec.DecodeError as error:
                await socket.send_json(_error(f"Invalid JSON: {error}", "INVALID_JSON"))
            else:
                if message.type == "close":
                    break
                await socket.send_json(await self._answer(seat, message))
        await socket.close()

    async def _answer(self, seat: Seat, message: _Message) -> dict[str, Any]:
        """The answer to one message, or an error as an answer."""
        try:
            match message.type:
                case "reset":
                    return {"type": "observation", "data": await _reset(seat, message.data)}
                case "step":
                    return {"type": "observation", "data": await _step(seat, message.data)}
                case "state":
                    return {"type": "state", "data": _state(seat)}
                case "mcp":
                    return {"type": "mcp", "data": await answer_rpc(self._seats, message.data, seat)}
                case unknown:
                    return _error(f"Unknown message type: {unknown}", "UNKNOWN_TYPE")
        except InvalidRequest as error:
            return _error(error.message, "VALIDATION_ERROR")
        except GanglineError as error:
            return _error(error.message, "EXECUTION_ERROR")


async def _reset(seat: Seat, data: dict[str, Any]) -> dict[str, Any]:
    seen = await seat.reset(data.get("task"), data.get("seed"))
    tools = [] if seen.done else (await seat.opened()).tools
    return observation(seen, text=seen.text, tools=tool_list(tools))


async def _step(seat: Seat, action: dict[str, Any]) -> dict[str, Any]:
    """Raises: InvalidRequest for a malformed action, errors of the service."""
    kind, tool, arguments = action.get("type"), action.get("tool_name"), action.get("arguments", {})
    if kind == "list_tools":
        episode = await seat.opened()
        return {"observation": {"tools": tool_list(episode.tools)}, "reward": None, "done": False}
    if kind != "call_tool" or not isinstance(tool, str) or not isinstance(arguments, dict):
        raise InvalidRequest(
            'an action is {"type": "call_tool", "tool_name": NAME, "arguments": {...}} or {"type": "list_tools"}.'
        )
    seen = await seat.act(tool, cast("dict[str, Any]", arguments))
    return observation(seen, tool_name=tool, result=seen.text)


def _state(seat: Seat | None) -> dict[str, Any]:
    episode = seat.episode if seat else None
    if episode is None:
        return {"episode_id": None, "step_count": 0, "task": None}
    return {"episode_id": episode.episode_id, "step_count": episode.num_steps, "task": episode.name}


def _object(body: bytes) -> dict[str, Any]:
    """Raises: InvalidRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}") from error


def _error(message: str, code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


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
