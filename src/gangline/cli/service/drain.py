"""`gangline drain`: let nodes finish their sessions, take no more, and exit."""

from __future__ import annotations

import typer

from gangline.cli.service.node_addresses import NodesOption, ask_nodes
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json, run
from gangline.cli.terminal.tables import FactTable


def drain(
    data: DataOption = None, server: ServerOption = None, node: NodesOption = None, as_json: JsonOption = False
) -> None:
    """Drain nodes: they take no more sessions, and exit when their current ones have ended.

    Use it before maintenance of a machine. `gangline status` shows the remaining sessions; `gangline up` does not
    restart a drained node. To end a node at once, send it SIGTERM: its sessions return to the queue and start over
    elsewhere.
    """
    answers = run(ask_nodes(data, node, lambda client: client.drain(), server))
    if as_json:
        print_json(answers)
        return
    table = FactTable("node", "init#", "ready#", "run#", "postrun#", "of callers#")
    for url, status in answers.items():
        table.add_row(url, *(str(number) for number in status.stages.values()), str(status.num_external_sessions))
    console().print(table)


def register(app: typer.Typer) -> None:
    app.command()(drain)
