"""`gangline server`: the rollout server alone."""

from __future__ import annotations

from typing import Annotated

import typer

from gangline.cli.output import DataOption, JsonOption
from gangline.cli.serving import HostOption, ParentOption, PublicUrlOption, serve
from gangline.settings import Settings

__all__ = ["register"]


def server(
    data: DataOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 is any free one.")] = 8700,
    public_url: PublicUrlOption = None,
    as_json: JsonOption = False,
    parent: ParentOption = None,
) -> None:
    """Run a rollout server: tasks, groups, leases, results, callbacks.

    Prints one line of JSON with its url when it is ready, and serves until SIGTERM. The control token comes from
    GANGLINE_TOKEN; without one it listens on loopback only.
    """
    from gangline.server.run import serve as serve_server

    settings = Settings.from_environ()
    serve(
        lambda on_ready: serve_server(
            data_dir=data or settings.data_dir,
            host=host,
            port=port,
            public_url=public_url,
            control_token=settings.control_token,
            on_ready=on_ready,
        ),
        kind="server",
        parent=parent,
    )


def register(app: typer.Typer) -> None:
    app.command()(server)
