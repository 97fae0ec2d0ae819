"""`gangline watch`: shows the live service: stages, groups, throughput, failures."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, notes, print_json, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from gangline.cli.tasks.watching import Watched
    from gangline.domain.errors import GanglineError
    from gangline.domain.views import TaskSummary
    from gangline.wire.client.running import Service
    from gangline.wire.client.server import ServerClient

_LOOK_EVERY_S = 1.0
_TIMEOUT_S = 20.0
"""Longer than the server's longest silence in an event stream."""
_MOST_GROUPS = 50


def watch(
    task: Annotated[str | None, typer.Argument(help="Watch one task, and end when it has ended.")] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch the service live, until Ctrl-C: stages, throughput, groups, failures, engines.

    Continues when the server restarts. Without a terminal, and with --json, it prints one line per event: all events of
    a task, or the service's from now on.
    """
    from gangline.wire.client.running import find_service

    address = find_service(data, server)
    plain = as_json or not console().is_terminal
    run(_print_events(address, task, as_json) if plain else _watch(address, task))


# -- lines ------------------------------------------------------------------------------------------------------------


async def _print_events(address: Service, task_id: str | None, as_json: bool) -> None:
    from gangline.cli.tasks.watching import event_line

    async with _client(address) as client:
        await _find(client, task_id)
        events = client.events(after=_from(task_id), task_id=task_id, on_connection=_tell_outages())
        async with contextlib.aclosing(events):
            async for event in events:
                if as_json:
                    print_json(event)
                else:
                    typer.echo(event_line(event))
                if task_id is not None and event.kind == "task.ended":
                    return


def _tell_outages() -> Callable[[GanglineError | None], None]:
    """Reports each outage once, and once when the server is back, on stderr."""
    away = False

    def tell(error: GanglineError | None) -> None:
        nonlocal away
        if error is not None and not away:
            notes().print(f"{error.message} Trying again.", markup=False, soft_wrap=True)
        elif error is None and away:
            notes().print("The server answers again.")
        away = error is not None

    return tell


def _client(address: Service) -> ServerClient:
    from gangline.wire.client.server import ServerClient

    return ServerClient(address.server_url, address.control_token, timeout_s=_TIMEOUT_S)


async def _find(client: ServerClient, task_id: str | None) -> None:
    """The server must be reachable at first. Raises: ServerUnavailable, Unauthorized, NotFound."""
    if task_id is None:
        await client.status()
    else:
        await client.task(task_id)


def _from(task_id: str | None) -> int | None:
    """Events of a task are shown from its beginning, the service's from now on."""
    return None if task_id is None else 0


# -- the live view ----------------------------------------------------------------------------------------------------


async def _watch(address: Service, task_id: str | None) -> None:
    """Draw until cancelled, or until the task has ended. The last picture of a task stays on the terminal."""
    from rich.live import Live

    from gangline.cli.tasks.watch_view import Picture
    from gangline.cli.tasks.watching import Watched

    watched = Watched()
    picture = Picture(watched)
    out = console()
    out.soft_wrap = False  # the picture fits the terminal
    async with _client(address) as client:
        await _find(client, task_id)
        looking = _Looking(client, watched, task_id)
        listening = asyncio.create_task(looking.listen())
        try:
            with Live(picture, console=out, screen=True, refresh_per_second=4):
                while not await looking.look():
                    await asyncio.wait({listening}, timeout=_LOOK_EVERY_S)
                    if listening.done():
                        await listening
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
    out.print(picture)


class _Looking:
    """Keeps a `Watched` up to date."""

    def __init__(self, client: ServerClient, watched: Watched, task_id: str | None) -> None:
        self._client = client
        self._watched = watched
        self._task_id = task_id

    async def listen(self) -> None:
        """Runs until cancelled. Raises: permanent errors, such as Unauthorized."""
        async for event in self._client.events(after=_from(self._task_id), task_id=self._task_id):
            self._watched.take(event)

    async def look(self) -> bool:
        """Fetch a new state, if the server answers. Returns whether the watched task has ended."""
        from gangline.domain.errors import ServerUnavailable, StoreError

        try:
            status = await self._client.status()
            tasks = await self._tasks()
        except (ServerUnavailable, StoreError) as error:
            self._watched.lost(error.message)
            return False
        self._watched.look(status, tasks)
        return self._task_id is not None and tasks[0].ended_at is not None

    async def _tasks(self) -> list[TaskSummary]:
        """Running tasks first, then the newest others."""
        if self._task_id is not None:
            return [await self._client.task(self._task_id)]
        running = (await self._client.tasks(limit=_MOST_GROUPS, status="running")).tasks
        newest = (await self._client.tasks(limit=_MOST_GROUPS)).tasks
        seen = {task.task_id for task in running}
        return [*running, *(task for task in newest if task.task_id not in seen)][:_MOST_GROUPS]


def register(app: typer.Typer) -> None:
    app.command()(watch)
