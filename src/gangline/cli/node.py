"""`gangline node`: one node, which leases sessions from a server and answers their model calls from an engine."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated

import typer

from gangline.cli.node_options import (
    AffinityOption,
    CaptureOption,
    EngineKeyOption,
    EngineKindOption,
    EngineOptionsOption,
    SamplingOption,
    read_capture,
    read_engine_options,
    read_policy,
)
from gangline.cli.output import DataOption, JsonOption, LogFormatOption
from gangline.cli.running import find_server
from gangline.cli.serving import HostOption, ParentOption, PublicUrlOption, serve
from gangline.cli.tracing import traces_of
from gangline.settings import Settings

__all__ = ["register"]


def node(
    engine: Annotated[
        list[str], typer.Option("--engine", help="URL of an inference engine; may be given again.", show_default=False)
    ],
    server: Annotated[
        str | None,
        typer.Option("--server", help="URL of the server. Default: the running one.", show_default=False),
    ] = None,
    data: DataOption = None,
    node_id: Annotated[
        str | None, typer.Option("--id", help="Default: node-HOSTNAME. Must be unique.", show_default=False)
    ] = None,
    engine_kind: EngineKindOption = "auto",
    engine_options: EngineOptionsOption = None,
    engine_wait: Annotated[float, typer.Option("--engine-wait", help="Seconds the engine may take to be up.")] = 60,
    engine_key_env: EngineKeyOption = None,
    affinity_slack: AffinityOption = 0,
    capture: CaptureOption = "ids",
    sampling: SamplingOption = None,
    run_slots: Annotated[int, typer.Option("--run-slots", min=1, help="Sessions whose agent runs at once.")] = 16,
    ready_slots: Annotated[int, typer.Option("--ready-slots", min=1, help="Prepared sandboxes that wait to run.")] = 8,
    init_workers: Annotated[int, typer.Option("--init-workers", min=1, help="Sandboxes prepared at once.")] = 4,
    postrun_workers: Annotated[int, typer.Option("--postrun-workers", min=1, help="Sessions graded at once.")] = 4,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 is any free one.")] = 0,
    public_url: PublicUrlOption = None,
    log_format: LogFormatOption = None,
    as_json: JsonOption = False,
    parent: ParentOption = None,
) -> None:
    """Run a node: it leases sessions, runs them in sandboxes, and answers their model calls.

    Prints one line of JSON with its url when it is ready, and serves until SIGTERM. The control token comes from
    GANGLINE_TOKEN.
    """
    from gangline.gateway.node import reap
    from gangline.gateway.node import serve as serve_node
    from gangline.gateway.pools import PoolSizes

    settings = Settings.from_environ()
    address = find_server(data, server)
    folder, name = data or settings.data_dir, node_id or f"node-{socket.gethostname()}"
    with traces_of("node", settings) as traces:
        serve(
            lambda on_ready: serve_node(
                data_dir=folder,
                node_id=name,
                server_url=address.server_url,
                control_token=address.control_token,
                engine_urls=engine,
                engine_kind=engine_kind,
                engine_options=read_engine_options(engine_options),
                engine_wait_s=engine_wait,
                engine_key_env=engine_key_env,
                affinity_slack=affinity_slack,
                capture=read_capture(capture),
                sampling=read_policy(sampling),
                sizes=PoolSizes(
                    init_workers=init_workers,
                    ready_slots=ready_slots,
                    run_slots=run_slots,
                    postrun_workers=postrun_workers,
                ),
                host=host,
                port=port,
                public_url=public_url,
                on_ready=on_ready,
                on_result=None if traces is None else traces.attempt_ended,
            ),
            kind="node",
            parent=parent,
            log_format=log_format,
            clean_up=lambda: asyncio.run(reap(folder, name)),
        )


def register(app: typer.Typer) -> None:
    app.command()(node)
