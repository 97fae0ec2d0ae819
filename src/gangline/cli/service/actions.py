"""`gangline actions`: the log of control actions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, console, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gangline.cli.terminal.tables import FactTable
    from gangline.store.audit import Action


def actions(
    last: Annotated[int, typer.Option("--last", min=1, help="Number of actions to show, newest last.")] = 50,
    refused: Annotated[
        bool, typer.Option("--refused", help="Show refused requests instead: those without a valid control token.")
    ] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the log of control actions on the server and the nodes: caller, action, time, status.

    Reads the logs in the data folder. Tokens are shown as digests.
    """
    from gangline.settings.machine import Settings
    from gangline.store.audit import read_actions

    folder = data or Settings.from_environ().data_dir
    found = read_actions([folder / "server" / "actions", *folder.glob("nodes/*/actions")], refused=refused)[-last:]
    if as_json:
        for action in found:
            print_json(action)
    elif found:
        console().print(_table(found))
    else:
        console().print(f"no {'refusals' if refused else 'actions'} in {folder}", markup=False)


def _table(found: Sequence[Action]) -> FactTable:
    from gangline.cli.terminal.tables import Column, FactTable, prose

    table = FactTable(Column("when (UTC)", 1), "where", "who", prose("from", 2), prose("what"), "status#")
    for action in found:
        when = datetime.fromtimestamp(action.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        what = f"{action.method} {action.path}" + (f" ({action.subject})" if action.subject else "")
        origin = action.address + (f" for {action.forwarded_for}" if action.forwarded_for else "")
        table.add_row(when, action.where, action.who, origin, what, str(action.status))
    return table


def register(app: typer.Typer) -> None:
    app.command()(actions)
