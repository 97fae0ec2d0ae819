"""`gangline list`: tasks and sessions, filtered, newest first, page by page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, notes, print_json, run
from gangline.domain.lifecycle import OUTCOMES

if TYPE_CHECKING:
    from gangline.domain.views import SessionPage, TaskPage
    from gangline.wire.client.server import ServerClient

T = TypeVar("T")

listing = typer.Typer(no_args_is_help=True, help="List tasks or sessions, newest first, a page at a time.")

_LimitOption = Annotated[int, typer.Option("--limit", min=1, max=1000, help="Number of entries per page.")]
_BeforeOption = Annotated[
    int | None, typer.Option("--before", help="Entries before this one: the `next` of the previous page.")
]
_SubmitterOption = Annotated[
    str | None,
    typer.Option("--submitter", help="Only tasks of this submitter; an empty name selects tasks without one."),
]


@listing.command()
def tasks(
    status: Annotated[
        str | None, typer.Option("--status", help="Only tasks that are queued, running, ended or cancelled.")
    ] = None,
    submitter: _SubmitterOption = None,
    limit: _LimitOption = 50,
    before: _BeforeOption = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List tasks."""
    wanted: dict[str, Any] = {"status": status, "submitter": submitter, "limit": limit, "before": before}
    page: TaskPage = _ask(data, server, lambda client: client.tasks(**wanted))
    if as_json:
        print_json(page)
        return
    from gangline.cli.terminal.views import groups_table

    console().print(groups_table(page.tasks))
    _tell_next(page.next)


@listing.command()
def sessions(
    state: Annotated[
        str | None, typer.Option("--state", help="Only sessions that are queued, leased or ended.")
    ] = None,
    outcome: Annotated[str | None, typer.Option("--outcome", help=f"Only of one of {', '.join(OUTCOMES)}.")] = None,
    task_id: Annotated[str | None, typer.Option("--task", help="Only the sessions of this task.")] = None,
    node_id: Annotated[
        str | None, typer.Option("--node", help="Only sessions whose current or last node is this one.")
    ] = None,
    submitter: _SubmitterOption = None,
    limit: _LimitOption = 50,
    before: _BeforeOption = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List sessions."""
    wanted: dict[str, Any] = {"state": state, "outcome": outcome, "task_id": task_id, "node_id": node_id}
    wanted |= {"submitter": submitter, "limit": limit, "before": before}
    page: SessionPage = _ask(data, server, lambda client: client.sessions(**wanted))
    if as_json:
        print_json(page)
        return
    from gangline.cli.terminal.views import sessions_table

    console().print(sessions_table(page.sessions))
    _tell_next(page.next)


def _ask(data: Path | None, server: str | None, call: Callable[[ServerClient], Awaitable[T]]) -> T:
    from gangline.wire.client.running import find_service
    from gangline.wire.client.server import ServerClient

    address = find_service(data, server)

    async def ask() -> T:
        async with ServerClient(address.server_url, address.control_token) as client:
            return await call(client)

    return run(ask())


def _tell_next(place: int | None) -> None:
    if place is not None:
        notes().print(f"There are more: --before {place}")


def register(app: typer.Typer) -> None:
    app.add_typer(listing, name="list")
