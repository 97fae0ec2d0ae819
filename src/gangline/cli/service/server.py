"""`gangline server`: runs only the rollout server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gangline.cli.options.settings import SERVER, with_settings
from gangline.cli.options.tracing import traces_of
from gangline.cli.processes.serving import ParentOption, serve
from gangline.cli.terminal.output import JsonOption
from gangline.settings.service import Resolved, ServerSettings
from gangline.wire.client import running

if TYPE_CHECKING:
    from gangline.server.run import Storage

_DAY_S = 86_400.0


@with_settings(SERVER)
def server(settings: Resolved, as_json: JsonOption = False, parent: ParentOption = None) -> None:
    """Run a rollout server: tasks, groups, leases, results, callbacks.

    Prints one line of JSON with its URL when it is ready, and serves until SIGTERM. The control token comes from
    GANGLINE_TOKEN, else from DATA/control_token, which the first start creates. Other commands find server and token
    through the data folder.
    """
    from gangline.server.run import serve as serve_server

    wanted, machine = settings.server, settings.machine
    folder = machine.data_dir
    token = running.service_token(folder, machine.control_token, no_token=wanted.no_token)
    with traces_of("server", machine) as traces:
        serve(
            lambda on_ready: serve_server(
                data_dir=folder,
                host=wanted.host,
                port=wanted.port,
                public_url=wanted.public_url,
                allowed_hosts=wanted.allowed_hosts,
                control_token=token,
                on_ready=lambda url: _tell(folder, url, wanted.public_url, token, on_ready),
                storage=_storage(wanted, machine.database_url),
                on_task_ended=None if traces is None else traces.task_ended,
            ),
            kind="server",
            is_open=token is None,
            parent=parent,
            log_format=machine.log_format,
        )


def _storage(wanted: ServerSettings, database_url: str | None) -> Storage:
    from gangline.server.run import Storage
    from gangline.store.sql.retention import Keep

    keep = Keep(
        for_s=None if wanted.keep_days is None else wanted.keep_days * _DAY_S,
        max_bytes=None if wanted.keep_gb is None else int(wanted.keep_gb * 1e9),
    )
    return Storage(database_url=database_url, results_url=wanted.results, keep=keep)


def _tell(folder: Path, url: str, public_url: str | None, token: str | None, on_ready: Callable[[str], None]) -> None:
    """Record the address for other commands before reporting readiness, after which they may start at once."""
    urls = (url,) if public_url is None else (url, public_url.rstrip("/"))
    running.publish_server(folder, running.RunningServer(urls=urls, control_token=token, pid=os.getpid()))
    on_ready(url)


def register(app: typer.Typer) -> None:
    app.command()(server)
