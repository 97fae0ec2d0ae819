"""`gangline node`: one node, which leases sessions from a server and answers their model calls from an engine."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated

import typer

from gangline.cli.options.node import (
    AdoptGraceOption,
    AffinityOption,
    CallLimitsOption,
    CaptureOption,
    EngineKeyOption,
    EngineKindOption,
    EngineOptionsOption,
    SamplingOption,
    read_call_limits,
    read_capture,
    read_engine_options,
    read_policy,
)
from gangline.cli.options.stages import (
    BreakerFaultsOption,
    BreakerPauseOption,
    DiskReserveOption,
    HookOption,
    HookTimeoutOption,
    InitWorkersOption,
    PostrunWorkersOption,
    PrewarmWorkersOption,
    ReadySlotsOption,
    RunSlotsOption,
    StageChoice,
    StuckAfterOption,
)
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
from gangline.client.running import Service, find_service, refuse_both
from gangline.domain.errors import InvalidRequest
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
        str | None,
        typer.Option(
            "--id", help="Default: node-HOSTNAME. A second node with the same id is refused.", show_default=False
        ),
    ] = None,
    engine_kind: EngineKindOption = "auto",
    engine_options: EngineOptionsOption = None,
    engine_wait: Annotated[float, typer.Option("--engine-wait", help="Seconds the engine may take to be up.")] = 60,
    engine_key_env: EngineKeyOption = None,
    affinity_slack: AffinityOption = 0,
    capture: CaptureOption = "ids",
    sampling: SamplingOption = None,
    call_limits: CallLimitsOption = None,
    run_slots: RunSlotsOption = 16,
    ready_slots: ReadySlotsOption = 8,
    init_workers: InitWorkersOption = 4,
    prewarm_workers: PrewarmWorkersOption = 2,
    postrun_workers: PostrunWorkersOption = 4,
    breaker_faults: BreakerFaultsOption = 8,
    breaker_pause: BreakerPauseOption = 10,
    stuck_after: StuckAfterOption = 60,
    disk_reserve: DiskReserveOption = None,
    hook: HookOption = None,
    hook_timeout: HookTimeoutOption = 60,
    adopt_grace: AdoptGraceOption = 60,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 is any free one.")] = 0,
    public_url: PublicUrlOption = None,
    allowed_host: AllowedHostOption = None,
    no_token: NoTokenOption = False,
    log_format: LogFormatOption = None,
    as_json: JsonOption = False,
    parent: ParentOption = None,
) -> None:
    """Run a node: it leases sessions, runs them in sandboxes, and answers their model calls.

    Prints one line of JSON with its url when it is ready, and serves until SIGTERM or `gangline drain`. The control
    token comes from GANGLINE_TOKEN, else from the data folder of a server on this machine; it is the server's own.
    """
    from gangline.gateway.node import reap
    from gangline.gateway.node import serve as serve_node

    settings = Settings.from_environ()
    stages = StageChoice(
        run_slots=run_slots,
        ready_slots=ready_slots,
        init_workers=init_workers,
        prewarm_workers=prewarm_workers,
        postrun_workers=postrun_workers,
        breaker_faults=breaker_faults,
        breaker_pause=breaker_pause,
        stuck_after=stuck_after,
        disk_reserve=disk_reserve,
        hooks=tuple(hook or ()),
        hook_timeout=hook_timeout,
    )
    address = find_service(data, server)
    token = _token_for(address, settings.control_token, no_token)
    folder, name = data or settings.data_dir, node_id or f"node-{socket.gethostname()}"
    with traces_of("node", settings) as traces:
        serve(
            lambda on_ready: serve_node(
                data_dir=folder,
                node_id=name,
                server_url=address.server_url,
                control_token=token,
                engine_urls=engine,
                engine_kind=engine_kind,
                engine_options=read_engine_options(engine_options),
                engine_wait_s=engine_wait,
                engine_key_env=engine_key_env,
                affinity_slack=affinity_slack,
                capture=read_capture(capture),
                sampling=read_policy(sampling),
                call_limits=read_call_limits(call_limits),
                **stages.options(),
                adopt_grace_s=adopt_grace,
                host=host,
                port=port,
                public_url=public_url,
                allowed_hosts=allowed_host or (),
                on_ready=on_ready,
                on_result=None if traces is None else traces.attempt_ended,
            ),
            kind="node",
            is_open=token is None,
            parent=parent,
            log_format=log_format,
            clean_up=lambda: asyncio.run(reap(folder, name)),
        )


def _token_for(address: Service, given: str | None, no_token: bool) -> str | None:
    """The control token, which the node shares with its server. Raises: InvalidRequest when none is known."""
    if no_token:
        refuse_both(given)
        return None
    if address.control_token is None:
        raise InvalidRequest(
            f"no control token of the server at {address.server_url} is known here, and the node needs the same one. "
            "Set GANGLINE_TOKEN to it (the server's is in its DATA/control_token), or use --data with the server's "
            "folder; for a server that runs with --no-token, give --no-token."
        )
    return address.control_token


def register(app: typer.Typer) -> None:
    app.command()(node)
