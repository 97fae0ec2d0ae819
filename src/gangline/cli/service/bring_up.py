"""The whole service as children of one process: engine, server, and nodes, of this machine or of a cluster.

`Plan` describes the service. `run_service` starts it, keeps it running during a body, and stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gangline.cli.terminal.output import notes
from gangline.domain.errors import InvalidRequest, NodeError, PortUnavailable
from gangline.machine.private import make_private_file, make_private_folder, open_data_folder
from gangline.machine.telemetry.logs import LogFormat
from gangline.settings.node import NodeSettings
from gangline.settings.service import ClusterSettings, ServerSettings, write_tables
from gangline.store.journal.marker import check_journal
from gangline.wire.client import running

if TYPE_CHECKING:
    from gangline.cli.processes.child import Child
    from gangline.cli.processes.supervisor import Supervisor

T = TypeVar("T")

DEFAULT_PORT = 8700
DEFAULT_ENGINE = "embedded:smollm2"
DEFAULT_NODE = NodeSettings(node_id="node-1", engine_wait_s=10.0)
"""A running engine named to `gangline up` is expected to be up."""
_ROOM_WAIT_S = 3600.0
"""Seconds until Ray must have resources for the first node: a cluster may have to start machines."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The service to start."""

    data_dir: Path
    port: int | None = None
    """The server's port; None is the default one, or any free one if that is taken."""
    server: ServerSettings = ServerSettings()
    """Its port is ignored."""
    engine: str = DEFAULT_ENGINE
    """Empty if `node.engines_later`."""
    more_engines: tuple[str, ...] = ()
    """URLs of additional running engines."""
    tokenizer: str = "smollm2"
    """Tokenizer of a scripted engine."""
    node: NodeSettings = DEFAULT_NODE
    """Settings of each node; their engines are ignored."""
    num_nodes: int = 1
    """Nodes on this machine, if `cluster` is None."""
    cluster: ClusterSettings | None = None
    """Settings for nodes in a Ray cluster."""
    control_token: str | None = None
    log_format: LogFormat = "text"
    environment: Mapping[str, str] = {}
    """Additional variables of all children."""


def _engine_child(plan: Plan) -> Child | None:
    """The engine to start; None if a running one is named. Raises: InvalidRequest."""
    from gangline.cli.processes.child import Child

    if plan.node.engines_later:
        return None
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
    return Child(
        "engine", arguments, log_path=_log_path(plan, "engine"), env=_environment(plan), port=0, ready_timeout_s=1800
    )


def _allowed(plan: Plan) -> tuple[str, ...]:
    return tuple(argument for host in plan.server.allowed_hosts for argument in ("--allowed-host", host))


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
    """Raises: NodeError when the requested port is in use."""
    if plan.port is None:
        return DEFAULT_PORT if _is_free(plan.server.host, DEFAULT_PORT) else 0
    if plan.port and not _is_free(plan.server.host, plan.port):
        raise PortUnavailable(
            f"port {plan.port} on {plan.server.host} is in use, or not ours to take. Choose another with --port, or 0 "
            "for any."
        )
    return plan.port


def _environment(plan: Plan) -> dict[str, str]:
    return {**os.environ, **plan.environment, "GANGLINE_LOG_FORMAT": plan.log_format}


def server_child(plan: Plan, env: Mapping[str, str]) -> Child:
    """Another program may take the default port after the check. Raises: like `_server_port`."""
    from gangline.cli.processes.child import Child

    return Child(
        "server",
        ["server", "--data", str(plan.data_dir)],
        log_path=_log_path(plan, "server"),
        env=env,
        port=_server_port(plan),
        may_move=plan.port is None,
        tables=write_tables(server=plan.server),
    )


async def bring_up(plan: Plan, supervisor: Supervisor, token: str) -> running.Running:
    """Start engine, server and nodes. Returns when all are ready, or with a cluster when the first node is.

    Raises: the first error of any of them.
    """
    env = {**_environment(plan), "GANGLINE_TOKEN": token}
    engine = _engine_child(plan)
    server = server_child(plan, env)
    first = [engine, server] if engine else [server]
    nodes: list[Child] = []
    if plan.cluster is None:
        nodes = [_node_child(plan, number, engine, server, env) for number in range(plan.num_nodes)]
        await supervisor.start(*first, *nodes)
    else:
        await supervisor.start(*first)
        await supervisor.start(_cluster_child(plan, plan.cluster, _node_settings(plan, plan.engine), server, env))
    return running.Running(
        server_url=server.url,
        node_urls=tuple(node.url for node in nodes),
        control_token=token,
        pid=os.getpid(),
        engine_url=engine.url if engine else plan.engine,
        pids=supervisor.pids(),
    )


def _node_settings(plan: Plan, engine_url: str) -> NodeSettings:
    return plan.node.model_copy(update={"engines": (engine_url, *plan.more_engines) if engine_url else ()})


def _node_id(plan: Plan, number: int) -> str:
    """node-1, node-2 and so on, or ids derived from the given one."""
    first = str(plan.node.node_id)
    return first if number == 0 else f"{first.removesuffix('-1')}-{number + 1}"


def _node_child(plan: Plan, number: int, engine: Child | None, server: Child, env: Mapping[str, str]) -> Child:
    """It runs its imports while engine and server start, and receives their addresses when both are ready.

    number: from 0.
    """
    from gangline.cli.processes.child import Child

    async def settings() -> bytes:
        engine_url = await engine.address() if engine else plan.engine
        return write_tables({"server_url": await server.address()}, node=_node_settings(plan, engine_url))

    name = "node" if number == 0 else f"node-{number + 1}"
    return Child(
        name,
        ["node", "--data", str(plan.data_dir), "--id", _node_id(plan, number)],
        log_path=_log_path(plan, name),
        env=env,
        port=plan.node.port and plan.node.port + number,
        may_end=True,
        tables=settings,
    )


def _cluster_child(
    plan: Plan, cluster: ClusterSettings, node: NodeSettings, server: Child, env: Mapping[str, str]
) -> Child:
    from gangline.cli.processes.child import Child

    return Child(
        "cluster",
        ["cluster", "--data", str(plan.data_dir), "--server", _url_for_cluster(plan, server)],
        log_path=_log_path(plan, "cluster"),
        env=env,
        port=None,
        ready_timeout_s=_ROOM_WAIT_S,
        tables=write_tables(cluster=cluster, node=node),
    )


def _url_for_cluster(plan: Plan, server: Child) -> str:
    """URL of the server. A wildcard address is kept, since only Ray knows this machine's address in the cluster."""
    return (
        plan.server.public_url
        or f"http://{f'[{plan.server.host}]' if ':' in plan.server.host else plan.server.host}:{server.port}"
    )


def _silently(_line: str) -> None:
    return None


async def run_service(
    plan: Plan,
    body: Callable[[running.Running], Awaitable[T]],
    say: Callable[[str], None] = _silently,
) -> T:
    """Start the service, await `body`, end everything; children that die meanwhile are restarted.

    say: called with messages for people while it starts.
    Raises: errors of `body`; GanglineError when the service cannot be started or kept running; asyncio.CancelledError
    after SIGTERM, SIGINT or SIGHUP (a second signal stops without waiting).
    """
    from gangline.cli.processes.supervisor import Supervisor

    _make_folders(plan.data_dir)
    _check_database(plan)
    if plan.cluster is None:
        _warn_of_full_disk(plan)
        for number in range(plan.num_nodes):  # before the server brings its database up to date
            check_journal(plan.data_dir / "nodes" / _node_id(plan, number) / "journal")
    with running.held(plan.data_dir):
        token = running.keep_token(plan.data_dir, plan.control_token)
        live: list[running.Running] = []
        supervisor = Supervisor(on_change=lambda: _republish(plan.data_dir, live, supervisor), say=say)
        async with _ended_by_signals(supervisor, plan):
            live.append(await bring_up(plan, supervisor, token))
            running.publish(plan.data_dir, live[0])
            return await _first_of(body(live[0]), supervisor.keep())


def _check_database(plan: Plan) -> None:
    """Raises: OtherVersion."""
    named, own = {**os.environ, **plan.environment}.get("GANGLINE_DATABASE"), plan.data_dir / "server" / "gangline.db"
    if named or own.exists():
        from gangline.store.sql.database import check_database

        check_database(named or own)


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


def _warn_of_full_disk(plan: Plan) -> None:
    """A node without its disk reserve takes no session, so warn users who wait for one."""
    from gangline.node.health.disk_guard import DiskGuard

    disk = DiskGuard(plan.data_dir, plan.node.disk_reserve_bytes()).state()
    if disk.is_low:
        notes().print(
            f"No session begins yet: the disk of {plan.data_dir} has {disk.free_bytes / (1 << 30):.1f} GiB and "
            f"{disk.free_files:,} files free, and the node keeps {disk.reserve_bytes / (1 << 30):.1f} GiB and "
            f"{disk.reserve_files:,} files. Free some space, or choose another folder with --data.",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


@contextlib.asynccontextmanager
async def _ended_by_signals(supervisor: Supervisor, plan: Plan) -> AsyncGenerator[None]:
    """The first signal cancels the current task, later ones hurry. Children are stopped on every exit."""
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
        killed = await supervisor.stop(notes().print if signalled else _silently)
        if any(name.startswith("node") for name in killed):
            await _reap_after_nodes(plan)
        running.forget(plan.data_dir)
    if signalled:
        raise asyncio.CancelledError  # the signal came after the body, and cancels later work


async def ended_with(parent: int | None, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the process `parent` has ended, for any reason, even if it is not its child.

    Raises: errors of `work`; NodeError.
    """
    if parent is None:
        return await work
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        task.cancel()
        return await task
    except OSError as error:
        why = f"--parent {parent}: this system does not tell when a process ends ({error.strerror})."
        raise NodeError(why) from error

    def ended() -> None:
        loop.remove_reader(descriptor)
        if not task.cancelling():  # what it ends then is not cut short
            task.cancel()

    loop.add_reader(descriptor, ended)
    try:
        return await task
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _reap_after_nodes(plan: Plan) -> None:
    from gangline.node.node import reap

    for number in range(plan.num_nodes):
        await reap(plan.data_dir, _node_id(plan, number))


async def _first_of(body: Awaitable[T], keeping: Awaitable[None]) -> T:
    """The result of `body`, unless the service fails first."""
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
