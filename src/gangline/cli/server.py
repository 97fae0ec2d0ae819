"""`gangline server`: the rollout server alone."""

from __future__ import annotations

from typing import Annotated

import typer

from gangline.cli.output import DataOption, JsonOption, LogFormatOption
from gangline.cli.serving import HostOption, ParentOption, PublicUrlOption, serve
from gangline.cli.storage_options import DatabaseOption, KeepDaysOption, KeepGbOption, ResultsOption, StorageChoice
from gangline.cli.tracing import traces_of
from gangline.settings import Settings

__all__ = ["register"]


def server(
    data: DataOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 is any free one.")] = 8700,
    public_url: PublicUrlOption = None,
    database: DatabaseOption = None,
    results: ResultsOption = None,
    keep_days: KeepDaysOption = None,
    keep_gb: KeepGbOption = None,
    log_format: LogFormatOption = None,
    as_json: JsonOption = False,
    parent: ParentOption = None,
) -> None:
    """Run a rollout server: tasks, groups, leases, results, callbacks.

    Prints one line of JSON with its url when it is ready, and serves until SIGTERM. The control token comes from
    GANGLINE_TOKEN; without one it listens on loopback only.
    """
    from gangline.server.run import serve as serve_server

    settings = Settings.from_environ()
    choice = StorageChoice(
        database=database or settings.database_url, results=results, keep_days=keep_days, keep_gb=keep_gb
    )
    storage = choice.checked().storage()
    with traces_of("server", settings) as traces:
        serve(
            lambda on_ready: serve_server(
                data_dir=data or settings.data_dir,
                host=host,
                port=port,
                public_url=public_url,
                control_token=settings.control_token,
                on_ready=on_ready,
                storage=storage,
                on_task_ended=None if traces is None else traces.task_ended,
            ),
            kind="server",
            parent=parent,
            log_format=log_format,
        )


def register(app: typer.Typer) -> None:
    app.command()(server)
