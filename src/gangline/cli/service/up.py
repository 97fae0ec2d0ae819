"""`gangline up`: the whole service on one machine, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer
from rich.markup import escape

from gangline.cli.options.cluster import (
    ClusterChoice,
    NodeCpusOption,
    NodeDataOption,
    NodeResourcesOption,
    NumNodesOption,
    RayAddressOption,
)
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
from gangline.cli.options.storage import DatabaseOption, KeepDaysOption, KeepGbOption, ResultsOption, StorageChoice
from gangline.cli.processes.serving import AllowedHostOption, PublicUrlOption
from gangline.cli.terminal.output import (
    DataOption,
    JsonOption,
    LogFormatOption,
    console,
    log_to_stderr,
    notes,
    print_json,
    read_log_format,
)
from gangline.client import running
from gangline.domain.errors import InvalidRequest, NodeError, PortUnavailable
from gangline.private import make_private_file, make_private_folder, open_data_folder
from gangline.settings import Settings
from gangline.telemetry.logs import LogFormat

if TYPE_CHECKING:
    from gangline.cli.processes.child import Child
    from gangline.cli.processes.supervisor import Supervisor

__all__ = ["Plan", "bring_up", "register", "run_service", "server_child"]

T = TypeVar("T")

DEFAULT_PORT = 8700
DEFAULT_ENGINE = "embedded:smollm2"
_NODE_ID = "node-1"
_ROOM_WAIT_S = 3600.0
"""How long Ray may take to have room for the first node: a cluster may have to start machines."""

EngineOption = Annotated[
    str,
    typer.Option("--engine", help="URL of a running engine, embedded:MODEL, or scripted:FILE."),
]
EnginesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        help="URL of a running engine, embedded:MODEL, or scripted:FILE. URLs of more engines may follow.",
        show_default=DEFAULT_ENGINE,
    ),
]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to bring up."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int | None = None
    """The server's; None is the usual one, or any free one where that is taken."""
    public_url: str | None = None
    """Of the server, as others reach it."""
    allowed_hosts: tuple[str, ...] = ()
    """More names under which all of it is reached."""
    engine: str = DEFAULT_ENGINE
    more_engines: tuple[str, ...] = ()
    """URLs of running ones beside it."""
    engine_key_env: str | None = None
    engine_kind: str = "auto"
    engine_options: str | None = None
    """Of the engine plug-in, as JSON."""
    affinity_slack: int = 0
    tokenizer: str = "smollm2"
    """Of a scripted engine."""
    control_token: str | None = None
    log_format: LogFormat = "text"
    stages: StageChoice = StageChoice()
    adopt_grace_s: float = 60.0
    engine_wait_s: float = 10.0
    """How long a running engine may take to answer at first."""
    capture: str = "ids"
    sampling: str | None = None
    """The operator's sampling policy, as JSON."""
    call_limits: str | None = None
    """Of a model call, as JSON."""
    storage: StorageChoice = StorageChoice()
    cluster: ClusterChoice | None = None
    """Where nodes run in a Ray cluster; None is one node on this machine."""


def _engine_child(plan: Plan) -> Child | None:
    """The engine to start; None when a running one is named. Raises: InvalidRequest."""
    from gangline.cli.processes.child import Child

    kind, _, what = plan.engine.partition(":")
    if kind in ("http", "https"):
        return None
    if plan.cluster is not None:
        raise InvalidRequest(
            f"the nodes of a cluster need running engines, and {plan.engine!r} would be one of this machine alone. "
            "Give --engine URL, as the nodes' machines reach it."
        )
    if kind == "embedded":
        arguments = ["engine", "--model", what or "smollm2", *_allowed(plan)]
    elif kind == "scripted" and what:
        arguments = ["engine", "--scripted", str(Path(what).resolve()), "--tokenizer", plan.tokenizer, *_allowed(plan)]
    else:
        raise InvalidRequest(
            f"unknown engine {plan.engine!r}. Give the URL of a running engine (http://HOST:PORT), embedded:MODEL "
            "(such as embedded:smollm2), or scripted:FILE."
        )
    return Child("engine", arguments, log_path=_log_path(plan, "engine"), env=os.environ, port=0, ready_timeout_s=1800)


def _allowed(plan: Plan) -> tuple[str, ...]:
    return tuple(argument for host in plan.allowed_hosts for argument in ("--allowed-host", host))


def _option(name: str, value: str | None) -> tuple[str, ...]:
    return () if value is None else (name, value)


def _log_path(plan: Plan, name: str) -> Path:
    return plan.data_dir / "logs" / f"{name}.log"


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _server_port(plan: Plan) -> int:
    """Raises: NodeError when the asked-for port is in use."""
    if plan.port is None:
        return DEFAULT_PORT if _is_free(plan.host, DEFAULT_PORT) else 0
    if plan.port and not _is_free(plan.host, plan.port):
        raise PortUnavailable(
            f"port {plan.port} on {plan.host} is in use, or not ours to take. Choose another with --port, or 0 for any."
        )
    return plan.port


def server_child(plan: Plan, env: Mapping[str, str]) -> Child:
    """Another program may take the usual port after it was found free. Raises: as `_server_port`."""
    from gangline.cli.processes.child import Child

    where = ("--data", str(plan.data_dir), "--host", plan.host, *_option("--public-url", plan.public_url))
    return Child(
        "server",
        ["server", *where, *_allowed(plan), *plan.storage.arguments()],
        log_path=_log_path(plan, "server"),
        env={**env, **plan.storage.environment()},
        port=_server_port(plan),
        may_move=plan.port is None,
    )


async def bring_up(plan: Plan, supervisor: Supervisor, token: str) -> running.Running:
    """Start engine, server and nodes; returns when all are ready, in a cluster when the first node is.

    Raises: what went wrong with the first that failed.
    """
    from gangline.cli.processes.child import Child

    env = {**os.environ, "GANGLINE_TOKEN": token, "GANGLINE_LOG_FORMAT": plan.log_format}
    data = ["--data", str(plan.data_dir)]
    engine = _engine_child(plan)
    server = server_child(plan, env)
    await supervisor.start(*([engine] if engine else []), server)
    engine_url = engine.url if engine else plan.engine
    options = _node_options(plan, engine_url)
    if plan.cluster is None:
        where = (*data, "--host", plan.host, "--id", _NODE_ID, "--server", server.url)
        log_path = _log_path(plan, "node")
        nodes = Child("node", ["node", *where, *options], log_path=log_path, env=env, port=0, may_end=True)
    else:
        where = (*data, "--server", _url_for_cluster(plan, server), *plan.cluster.arguments())
        nodes = Child(
            "cluster",
            ["cluster", *where, "--", *options],
            log_path=_log_path(plan, "cluster"),
            env=env,
            port=None,
            ready_timeout_s=_ROOM_WAIT_S,
        )
    await supervisor.start(nodes)
    return running.Running(
        server_url=server.url,
        node_urls=(nodes.url,) if plan.cluster is None else (),
        control_token=token,
        pid=os.getpid(),
        engine_url=engine_url,
        pids=supervisor.pids(),
    )


def _node_options(plan: Plan, engine_url: str) -> tuple[str, ...]:
    """Of `gangline node`, wherever it runs."""
    return (
        *(argument for url in (engine_url, *plan.more_engines) for argument in ("--engine", url)),
        *("--engine-wait", str(plan.engine_wait_s), *plan.stages.arguments()),
        *("--adopt-grace", str(plan.adopt_grace_s)),
        *("--engine-kind", plan.engine_kind, *_option("--engine-options", plan.engine_options)),
        *("--affinity-slack", str(plan.affinity_slack), *_option("--engine-key-env", plan.engine_key_env)),
        *("--capture", plan.capture, *_option("--sampling", plan.sampling), *_allowed(plan)),
        *_option("--call-limits", plan.call_limits),
    )


def _url_for_cluster(plan: Plan, server: Child) -> str:
    """Of the server; one that listens everywhere stays so here, for only Ray knows this machine's address in it."""
    return plan.public_url or f"http://{f'[{plan.host}]' if ':' in plan.host else plan.host}:{server.port}"


async def run_service(plan: Plan, body: Callable[[running.Running], Awaitable[T]]) -> T:
    """Bring the service up, await `body`, end everything; children that die meanwhile are started again.

    Raises: what `body` raised; GanglineError when the service cannot be started or kept; asyncio.CancelledError after
    SIGTERM, SIGINT or SIGHUP (a second one does not wait for anything).
    """
    from gangline.cli.processes.supervisor import Supervisor

    _make_folders(plan.data_dir)
    with running.held(plan.data_dir):
        token = running.keep_token(plan.data_dir, plan.control_token)
        live: list[running.Running] = []
        supervisor = Supervisor(on_change=lambda: _republish(plan.data_dir, live, supervisor))
        async with _ended_by_signals(supervisor, plan.data_dir):
            live.append(await bring_up(plan, supervisor, token))
            running.publish(plan.data_dir, live[0])
            return await _first_of(body(live[0]), supervisor.keep())


def _republish(data_dir: Path, live: list[running.Running], supervisor: Supervisor) -> None:
    running.publish(data_dir, msgspec.structs.replace(live[0], pids=supervisor.pids()))


def _make_folders(data_dir: Path) -> None:
    try:
        open_data_folder(data_dir)
        make_private_folder(data_dir / "logs")
        make_private_file(data_dir / "up.lock")
    except OSError as error:
        raise NodeError(
            f"cannot write to the data folder {data_dir}: {error.strerror}. Choose one with --data."
        ) from error


@contextlib.asynccontextmanager
async def _ended_by_signals(supervisor: Supervisor, data_dir: Path) -> AsyncGenerator[None]:
    """The first signal cancels the current task, later ones hurry; children are stopped on every way out."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    stopping = signalled = False

    def on_signal() -> None:
        nonlocal stopping, signalled
        signalled = True
        if stopping:
            notes().print("Stopping at once.")
            supervisor.hurry()
        else:
            stopping = True
            notes().print("Stopping; Ctrl-C again to stop at once.")
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        stopping = True
        if "node" in await supervisor.stop(notes().print if signalled else _silently):
            await _reap_after_node(data_dir)
        running.forget(data_dir)
    if signalled:
        raise asyncio.CancelledError  # it came after the body was done, and means what would follow


def _silently(_line: str) -> None:
    return None


async def _reap_after_node(data_dir: Path) -> None:
    from gangline.gateway.node import reap

    await reap(data_dir, _NODE_ID)


async def _first_of(body: Awaitable[T], keeping: Awaitable[None]) -> T:
    """What `body` gives, unless the service breaks before."""
    work, keeper = asyncio.ensure_future(body), asyncio.ensure_future(keeping)
    try:
        await asyncio.wait({work, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await keeper
        return await work
    finally:
        work.cancel()
        keeper.cancel()
        await asyncio.gather(work, keeper, return_exceptions=True)


def up(
    data: DataOption = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            help="Address to listen on. Default: 127.0.0.1; with --cluster, every address.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help=f"The server's; 0 is any free one. Default: {DEFAULT_PORT}, or any if taken."),
    ] = None,
    public_url: PublicUrlOption = None,
    allowed_host: AllowedHostOption = None,
    engine: EnginesOption = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="Tokenizer of a scripted engine: smollm2, a folder, or a name.")
    ] = "smollm2",
    engine_wait: Annotated[
        float, typer.Option("--engine-wait", help="Seconds a running engine may take to be up.")
    ] = 10,
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
    engine_key_env: EngineKeyOption = None,
    engine_kind: EngineKindOption = "auto",
    engine_options: EngineOptionsOption = None,
    affinity_slack: AffinityOption = 0,
    capture: CaptureOption = "ids",
    sampling: SamplingOption = None,
    call_limits: CallLimitsOption = None,
    database: DatabaseOption = None,
    results: ResultsOption = None,
    keep_days: KeepDaysOption = None,
    keep_gb: KeepGbOption = None,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Run the nodes on the machines of a Ray cluster.", rich_help_panel="Cluster"),
    ] = False,
    ray_address: RayAddressOption = None,
    nodes: NumNodesOption = None,
    node_cpus: NodeCpusOption = 1,
    node_resources: NodeResourcesOption = None,
    node_data: NodeDataOption = None,
    log_format: LogFormatOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole service on this machine until Ctrl-C or SIGTERM: engine, server and node.

    With --cluster only the server runs here, and nodes on a Ray cluster that runs already; engines are running ones.
    With --json, prints one line {"server_url", "node_urls", "control_token", "pid"} when it is ready. Other commands
    find it through the data folder. Logs are in DATA/logs.
    """
    settings = Settings.from_environ()
    log_to_stderr(log_format)
    read_capture(capture)
    read_policy(sampling)
    read_call_limits(call_limits)
    read_engine_options(engine_options)
    choice = ClusterChoice(
        ray_address=ray_address,
        num_nodes=nodes,
        node_cpus=node_cpus,
        node_resources=node_resources,
        node_data=node_data,
    )
    first, *more = engine or [DEFAULT_ENGINE]
    plan = Plan(
        data_dir=(data or settings.data_dir).absolute(),
        host=host or ("0.0.0.0" if cluster else "127.0.0.1"),
        port=port,
        public_url=public_url,
        allowed_hosts=tuple(allowed_host or ()),
        engine=first,
        more_engines=_urls(more),
        engine_key_env=engine_key_env,
        engine_kind=engine_kind,
        engine_options=engine_options,
        affinity_slack=affinity_slack,
        tokenizer=tokenizer,
        control_token=settings.control_token,
        log_format=read_log_format(log_format),
        stages=StageChoice(
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
        ),
        adopt_grace_s=adopt_grace,
        engine_wait_s=engine_wait,
        capture=capture,
        sampling=sampling,
        call_limits=call_limits,
        storage=StorageChoice(
            database=database or settings.database_url, results=results, keep_days=keep_days, keep_gb=keep_gb
        ).checked(),
        cluster=choice.checked() if cluster else None,
    )
    if cluster and plan.storage.database is None:
        notes().print("The database is SQLite on this machine, and lost with it: --database postgresql://... is not.")

    async def serve(live: running.Running) -> None:
        _announce(live, plan, as_json)
        await asyncio.Event().wait()

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(run_service(plan, serve))


def _urls(engines: list[str]) -> tuple[str, ...]:
    """Raises: InvalidRequest."""
    for engine in engines:
        if not engine.startswith(("http://", "https://")):
            raise InvalidRequest(f"only the first --engine can be started here; {engine!r} is no URL of a running one.")
    return tuple(engines)


def _announce(live: running.Running, plan: Plan, as_json: bool) -> None:
    if as_json:
        print_json({name: getattr(live, name) for name in ("server_url", "node_urls", "control_token", "pid")})
        return
    out = console()
    out.print("[bold green]Gangline is up.[/]  Ctrl-C ends it.")
    for name, value in (
        ("server", live.server_url),
        ("node", live.node_urls[0] if live.node_urls else "on a Ray cluster; `gangline status` shows them"),
        ("engine", live.engine_url),
        ("data", str(plan.data_dir)),
    ):
        out.print(f"  [bold]{name:<7}[/] {escape(value)}")
    out.print("In another terminal:  gangline status · gangline watch · gangline submit TASK.json --wait")


def register(app: typer.Typer) -> None:
    app.command()(up)
