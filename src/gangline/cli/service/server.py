"""`gangline server`: the rollout server alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options.storage import DatabaseOption, KeepDaysOption, KeepGbOption, ResultsOption, StorageChoice
from gangline.cli.options.tracing import traces_of
from gangline.cli.processes.serving import (
    AllowedHostOption,
    HostOption,
    NoTokenOption,
    ParentOption,
    PublicUrlOption,
    serve,
)
from gangline.cli.terminal.output import DataOption, JsonOption, LogFormatOption
from gangline.client import running
from gangline.settings import Settings

__all__ = ["register"]


def server(
    data: DataOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 picks a free one.")] = 8700,
    public_url: PublicUrlOption = None,
    allowed_host: AllowedHostOption = None,
    no_token: NoTokenOption = False,
    database: DatabaseOption = None,
    results: ResultsOption = None,
    keep_days: KeepDaysOption = None,
    keep_gb: KeepGbOption = None,
    log_format: LogFormatOption = None,
    as_json: JsonOption = False,
    parent: ParentOption = None,
) -> None:
    """Run a rollout server: tasks, groups, leases, results, callbacks.

    Prints one line of JSON with its URL when it is ready, and serves until SIGTERM. The control token comes from
    GANGLINE_TOKEN, else from DATA/control_token, which the first start creates. Other commands find server and token
    through the data folder.
    """
    from gangline.server.run import serve as serve_server

    settings = Settings.from_environ()
    choice = StorageChoice(
        database=database or settings.database_url, results=results, keep_days=keep_days, keep_gb=keep_gb
    )
    storage = choice.checked().storage()
    folder = data or settings.data_dir
    token = running.service_token(folder, settings.control_token, no_token=no_token)
    with traces_of("server", settings) as traces:
        serve(
            lambda on_ready: serve_server(
                data_dir=folder,
                host=host,
                port=port,
                public_url=public_url,
                allowed_hosts=allowed_host or (),
                control_token=token,
                on_ready=lambda url: _tell(folder, url, public_url, token, on_ready),
                storage=storage,
                on_task_ended=None if traces is None else traces.task_ended,
            ),
            kind="server",
            is_open=token is None,
            parent=parent,
            log_format=log_format,
        )


def _tell(folder: Path, url: str, public_url: str | None, token: str | None, on_ready: Callable[[str], None]) -> None:
    """Other commands first, which may be started as soon as our own line is read."""
    urls = (url,) if public_url is None else (url, public_url.rstrip("/"))
    running.publish_server(folder, running.RunningServer(urls=urls, control_token=token, pid=os.getpid()))
    on_ready(url)


def register(app: typer.Typer) -> None:
    app.command()(server)
