"""`gangline node`: one node, which leases sessions from a server and answers their model calls from an engine."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from gangline.cli.output import DataOption, JsonOption
from gangline.cli.running import find_server
from gangline.cli.serving import HostOption, ParentOption, serve
from gangline.settings import Settings

__all__ = ["register"]


def node(
    engine: Annotated[str, typer.Option("--engine", help="URL of the inference engine.", show_default=False)],
    server: Annotated[
        str | None,
        typer.Option("--server", help="URL of the server. Default: the running one.", show_default=False),
    ] = None,
    data: DataOption = None,
    node_id: Annotated[
        str | None, typer.Option("--id", help="Default: node-HOSTNAME. Must be unique.", show_default=False)
    ] = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 is any free one.")] = 0,
    as_json: JsonOption = False,
    parent: ParentOption = None,
) -> None:
    """Run a node: it leases sessions, runs them in sandboxes, and answers their model calls.

    Prints one line of JSON with its url when it is ready, and serves until SIGTERM. The control token comes from
    GANGLINE_TOKEN.
    """
    from gangline.gateway.node import serve as serve_node

    settings = Settings.from_environ()
    address = find_server(data, server)
    serve(
        lambda on_ready: serve_node(
            data_dir=data or settings.data_dir,
            node_id=node_id or f"node-{socket.gethostname()}",
            server_url=address.server_url,
            control_token=address.control_token,
            engine_url=engine,
            host=host,
            port=port,
            on_ready=on_ready,
        ),
        kind="node",
        parent=parent,
    )


def register(app: typer.Typer) -> None:
    app.command()(node)
