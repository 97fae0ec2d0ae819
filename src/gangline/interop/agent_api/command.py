"""`gangline serve-agent`: serves an agent through OpenAI's Responses API, on top of a running service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.processes.listening_options import AllowedHostOption, HostOption, KeyEnvOption, read_key, url_of
from gangline.cli.service.through import with_running
from gangline.cli.tasks.files import read_tasks, validated
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import (
    DataOption,
    JsonOption,
    ServerOption,
    console,
    log_to_stderr,
    notes,
    print_json,
    run,
)
from gangline.domain.errors import InvalidRequest
from gangline.wire.client.running import find_service
from gangline.wire.http.same_origin import OwnNames

if TYPE_CHECKING:
    from gangline.wire.client.server import ServerClient


def serve_agent(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="One task, as for `gangline submit`: the agent's.")],
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any free one.")] = 8001,
    sessions: Annotated[int, typer.Option("--sessions", min=1, help="Sessions at a time.")] = 64,
    key_env: KeyEnvOption = None,
    allowed_host: AllowedHostOption = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve an agent by OpenAI's Responses API until Ctrl-C: each request is a session, its answer the whole run.

    The task file defines the agent, its sandbox, limits and grading; a request provides the instruction and sampling
    parameters. For NeMo Gym's remote_agent, and other clients of `POST /v1/responses`. With --json, prints one line
    {"url"} when it is ready.
    """
    key = read_key(key_env, host)
    template = _template(file)
    names = OwnNames(host, allowed_hosts=allowed_host or ())
    service = find_service(data, server)
    log_to_stderr()

    async def door(client: ServerClient, _token: str | None) -> None:
        from gangline.interop.agent_api.app import create_app, shaped_error
        from gangline.wire.http.listening import listening

        app = create_app(client, template, names=names, key=key, max_sessions=sessions)
        async with listening(app, shutdown_s=1.0, shape=shaped_error, host=host, port=port) as bound:
            _announce(url_of(*bound), as_json=as_json)
            await asyncio.Event().wait()

    try:
        run(with_running(service, door))
    except typer.Exit:
        raise typer.Exit(Exit.OK) from None


def _template(file: str) -> dict[str, Any]:
    """Raises: InvalidRequest, UnknownPlugin."""
    tasks = read_tasks(file)
    if len(tasks) != 1:
        raise InvalidRequest(f"{file}: give one task, whose agent is served; there are {len(tasks)}.")
    (task,) = tasks
    validated({**task, "instruction": task.get("instruction") or "to be told", "num_samples": 1}, file)
    return {name: value for name, value in task.items() if name != "task_id"}


def _announce(url: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"url": url})
        return
    console().print(f"The agent is at [bold]{url}/v1/responses[/].", highlight=False)
    notes().print("Ctrl-C ends it, and the sessions that it has begun.")


def register(app: typer.Typer) -> None:
    app.command(name="serve-agent")(serve_agent)
