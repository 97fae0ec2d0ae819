"""`gangline watch`: the service live: stages, groups, throughput, failures."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.output import DataOption, JsonOption, ServerOption, console, print_json, run

if TYPE_CHECKING:
    from gangline.cli.running import Address
    from gangline.cli.watching import Watched
    from gangline.client import ServerClient

__all__ = ["register", "watch_live"]

_LOOK_EVERY_S = 1.0
_NEWEST_TASKS = 8


def watch(
    task: Annotated[str | None, typer.Argument(help="Watch one task, and end when it has ended.")] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch the service live, until Ctrl-C.

    Where stdout is no terminal, and with --json: one line for each event, all of a task's or the service's from now on.
    """
    from gangline.cli.running import find_server

    address = find_server(data, server)
    plain = as_json or not console().is_terminal
    run(_print_events(address, task, as_json) if plain else _watch(address, task))


async def _print_events(address: Address, task_id: str | None, as_json: bool) -> None:
    from gangline.cli.watching import event_line
    from gangline.client import ServerClient

    async with ServerClient(address.server_url, address.control_token) as client:
        if task_id is not None:
            await client.task(task_id)
        async with contextlib.aclosing(client.events(after=_from(task_id), task_id=task_id)) as events:
            async for event in events:
                if as_json:
                    print_json(event)
                else:
                    typer.echo(event_line(event))
                if task_id is not None and event.kind == "task.ended":
                    return


def _from(task_id: str | None) -> int | None:
    """A task is told from its beginning, the service from now on."""
    return None if task_id is None else 0


async def _watch(address: Address, task_id: str | None) -> None:
    from gangline.client import ServerClient

    async with ServerClient(address.server_url, address.control_token) as client:
        await watch_live(client, task_id)


async def watch_live(client: ServerClient, task_id: str | None) -> None:
    """Draw until cancelled, or until the task has ended."""
    from rich.live import Live

    from gangline.cli.watching import Watched

    watched = Watched()
    listening = asyncio.create_task(_listen(client, watched, task_id))
    try:
        with Live(watched, console=console(), refresh_per_second=4):
            while not await _look(client, watched, task_id):
                await asyncio.wait({listening}, timeout=_LOOK_EVERY_S)
                if listening.done():
                    await listening
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def _listen(client: ServerClient, watched: Watched, task_id: str | None) -> None:
    async for event in client.events(after=_from(task_id), task_id=task_id):
        watched.take(event)


async def _look(client: ServerClient, watched: Watched, task_id: str | None) -> bool:
    """Take a fresh picture. Returns whether the watched task has ended."""
    status = await client.status()
    names = [task_id] if task_id else [task.task_id for task in (await client.tasks(limit=_NEWEST_TASKS)).tasks]
    tasks = [await client.task(name) for name in names]
    watched.look(status, tasks)
    return task_id is not None and tasks[0].ended


def register(app: typer.Typer) -> None:
    app.command()(watch)
