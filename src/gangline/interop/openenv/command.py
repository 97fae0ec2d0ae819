"""`gangline serve`: serves tasks as an OpenEnv environment, with its own service.

Contains the engine that answers a session's model calls with its client's actions. It listens on loopback, for the
node alone. A call identifies its episode by the system message, which is a random key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from aiohttp import web

from gangline.cli.processes.listening_options import AllowedHostOption, HostOption, KeyEnvOption, read_key, url_of
from gangline.cli.tasks.files import by_name, read_tasks, validated
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, console, notes, print_json
from gangline.interop.openenv.episode import Episode, WaitingCall
from gangline.settings.machine import Settings
from gangline.wire.http.same_origin import OwnNames

if TYPE_CHECKING:
    from gangline.wire.client.server import ServerClient

MODEL = "openenv-client"
_MAX_BODY_BYTES = 256 << 20


class _Call(msgspec.Struct):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


def create_engine(episodes: Mapping[str, Episode]) -> web.Application:
    """An OpenAI-compatible server. episodes: by key; read at each call."""

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    async def chat(request: web.Request) -> web.Response:
        call = msgspec.json.decode(await request.read(), type=_Call)
        first = call.messages[0] if call.messages else {}
        episode = episodes.get(str(first.get("content"))) if first.get("role") == "system" else None
        if episode is None:
            error = {"message": "no client plays this session: its episode was closed.", "code": "episode_closed"}
            return web.json_response({"error": error}, status=404)
        waiting = WaitingCall(call.messages, call.tools)
        episode.ask(waiting)
        return web.json_response(_completion(await waiting.reply))

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes([web.get("/v1/models", models), web.get("/health", health), web.post("/v1/chat/completions", chat)])
    return app


def _completion(message: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": message["tool_calls"][0]["id"],
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}],
    }


def serve(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Tasks, as for `gangline submit`.")],
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Clients, and so episodes, at a time.")] = 8,
    name: Annotated[str | None, typer.Option("--name", help="Name of the environment. Default: of the file.")] = None,
    key_env: KeyEnvOption = None,
    allowed_host: AllowedHostOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve tasks as an OpenEnv environment until Ctrl-C: clients act in their sandboxes and get their rewards.

    Starts its own service in DATA/served. With --json, prints one line {"url", "name", "tasks"} when it is ready.
    """
    key = read_key(key_env, host)
    tasks = _tasks(file)
    folder = (data or Settings.from_environ().data_dir).absolute() / "served"
    server = _Server(tasks, name or (Path(file).stem if file != "-" else "tasks"), key, clients, as_json=as_json)
    try:
        asyncio.run(server.run(folder, host, port, OwnNames(host, allowed_hosts=allowed_host or ())))
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(Exit.OK) from None


class _Server:
    """The engine, its service, and the server for clients."""

    def __init__(
        self, tasks: list[tuple[str, dict[str, Any]]], name: str, key: str | None, num_clients: int, *, as_json: bool
    ) -> None:
        self._tasks, self._name, self._key, self._num_clients = tasks, name, key, num_clients
        self._as_json = as_json

    async def run(self, folder: Path, host: str, port: int, names: OwnNames) -> None:
        """Run until a signal. Raises: PortUnavailable, errors of the service."""
        from gangline.cli.options.settings import UP
        from gangline.cli.service.through import with_own
        from gangline.cli.service.up import plan_of
        from gangline.models.engine_server.app import serving
        from gangline.settings.service import resolve

        episodes: dict[str, Episode] = {}

        async def door(client: ServerClient, _token: str | None) -> None:
            await self._open(client, episodes, host, port, names)

        async with serving(create_engine(episodes)) as engine_url:
            given = {"node.engines": (engine_url,), "node.capture": "text", "server.port": 0, "data_dir": folder}
            await with_own(plan_of(resolve(given, defaults=UP.defaults)), door)

    async def _open(self, client: ServerClient, episodes: Any, host: str, port: int, names: OwnNames) -> None:
        from gangline.interop.openenv.app import create_app
        from gangline.interop.openenv.seats import Seats
        from gangline.wire.http.listening import listening

        seats = Seats(client, self._tasks, episodes, max_seats=self._num_clients)
        app = create_app(seats, name=self._name, names=names, key=self._key)
        try:
            async with listening(app, shutdown_s=1.0, host=host, port=port) as (at, bound):
                self._announce(url_of(at, bound))
                await asyncio.Event().wait()
        finally:
            await seats.close()

    def _announce(self, url: str) -> None:
        if self._as_json:
            print_json({"url": url, "name": self._name, "tasks": [name for name, _ in self._tasks]})
            return
        console().print(f"[bold]{len(self._tasks)}[/] tasks at [bold]{url}[/] (OpenEnv)", highlight=False)
        notes().print("Ctrl-C ends it, and all episodes.")


def _tasks(file: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and tasks, as clients play them. Raises: InvalidRequest, UnknownPlugin."""
    from gangline.interop.openenv.episode import played_task

    named = by_name(read_tasks(file), file)
    tasks = [(name, played_task(task, f"{file}, {name}")) for name, task in named.items()]
    for name, task in tasks:
        validated(task, f"{file}, {name}")
    return tasks


def register(app: typer.Typer) -> None:
    app.command()(serve)
