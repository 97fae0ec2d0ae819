"""`gangline drain`: let nodes take no more sessions, and end when those that they have are over."""

from __future__ import annotations

import typer
from rich.table import Table

from gangline.cli.node_addresses import NodesOption, ask_nodes
from gangline.cli.output import DataOption, JsonOption, console, print_json, run

__all__ = ["register"]


def drain(data: DataOption = None, node: NodesOption = None, as_json: JsonOption = False) -> None:
    """Let nodes take no more sessions, and end when those that they have are over.

    Before a machine goes down for a while. `gangline status` shows what is left; a drained node is not started again by
    `gangline up`. To end a node at once, send it SIGTERM: its sessions go back to the queue, and begin anew elsewhere.
    """
    answers = run(ask_nodes(data, node, lambda client: client.drain()))
    if as_json:
        print_json(answers)
        return
    table = Table("node", "init", "ready", "run", "postrun", "of callers", box=None)
    for url, status in answers.items():
        table.add_row(url, *(str(number) for number in status["stages"].values()), str(status["num_external_sessions"]))
    console().print(table)


def register(app: typer.Typer) -> None:
    app.command()(drain)
