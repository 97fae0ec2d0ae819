"""`gangline status` and `gangline cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json, run
from gangline.domain.errors import NotFound

if TYPE_CHECKING:
    from gangline.domain.views import SessionView, TaskView
    from gangline.wire.client.running import Service

_NEWEST_TASKS = 20


def status(
    task: Annotated[str | None, typer.Argument(help="A task; without one, the whole service.")] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the service at a glance, or one task with its sessions."""
    from gangline.wire.client.running import find_service

    address = find_service(data, server)
    run(_show_service(address, as_json) if task is None else _show_task(address, task, as_json))


async def _show_service(address: Service, as_json: bool) -> None:
    from gangline.wire.client.server import ServerClient

    async with ServerClient(address.server_url, address.control_token) as client:
        status = await client.status()
        page = await client.tasks(limit=_NEWEST_TASKS)
    if as_json:
        print_json({"status": status, "tasks": page.tasks})
    else:
        from gangline.cli.terminal.views import status_view

        console().print(status_view(status, page.tasks))


async def _show_task(address: Service, task_id: str, as_json: bool) -> None:
    from gangline.wire.client.server import ServerClient

    async with ServerClient(address.server_url, address.control_token) as client:
        task = await client.task(task_id)
    if as_json:
        print_json(task)
    else:
        from gangline.cli.terminal.views import groups_table, sessions_table

        console().print(groups_table([task]), "", sessions_table(task.sessions))


def cancel(
    name: Annotated[str, typer.Argument(metavar="TASK|SESSION")],
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a task with all its sessions, or one session. Ended sessions are unchanged."""
    from gangline.wire.client.running import find_service

    cancelled = run(_cancel(find_service(data, server), name))
    if as_json:
        print_json(cancelled)
    else:
        console().print(f"{name}: {_cancelled_text(cancelled)}", markup=False)


def _cancelled_text(one: TaskView | SessionView) -> str:
    """A task or session that had already ended is unchanged."""
    if "cancelled" in (getattr(one, "status", None), getattr(one, "outcome", None)) or one.ended_at is None:
        return "cancelled"
    return "had ended; there was nothing to cancel"


async def _cancel(address: Service, name: str) -> TaskView | SessionView:
    from gangline.wire.client.server import ServerClient

    async with ServerClient(address.server_url, address.control_token) as client:
        try:
            return await client.cancel(name)
        except NotFound:
            pass
        try:
            return await client.cancel_session(name)
        except NotFound:
            raise NotFound(f"no task and no session is called {name!r}; `gangline status` lists the tasks.") from None


def register(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(cancel)
