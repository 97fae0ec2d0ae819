"""`gangline up`: runs the whole service on one machine, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from pathlib import Path

import typer
from rich.markup import escape

from gangline.cli.options.settings import UP, with_settings
from gangline.cli.processes.serving import WatchedOption
from gangline.cli.service.bring_up import DEFAULT_PORT, Plan, ended_with, run_service
from gangline.cli.terminal.output import JsonOption, console, log_to_stderr, notes, print_json
from gangline.domain.errors import GanglineError, InvalidRequest
from gangline.settings.service import Resolved
from gangline.wire.client import running


@with_settings(UP)
def up(
    settings: Resolved,
    parent: WatchedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole service on this machine until Ctrl-C or SIGTERM: engine, server and node.

    With --nodes several nodes run here, each with its own slots. With --cluster only the server runs here; the nodes
    run on an existing Ray cluster and use running engines. With --json, prints one line {"server_url", "node_urls",
    "control_token", "pid"} when it is ready. Other commands find the service through the data folder. Logs are in
    DATA/logs.
    """
    log_to_stderr(settings.machine.log_format)
    plan = plan_of(settings)
    if plan.cluster is not None and settings.machine.database_url is None:
        notes().print("The database is SQLite on this machine, and lost with it: --database postgresql://... is not.")

    async def serve(live: running.Running) -> None:
        _announce(live, plan, as_json)
        await _say_what_templates_lack(live)
        await asyncio.Event().wait()

    def say(line: str) -> None:
        if plan.log_format == "text":
            notes().print(line, markup=False, soft_wrap=True)

    nodes = "nodes" if plan.cluster else "a node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes"
    say(f"Starting {plan.engine or 'no engine'}, a server and {nodes}; their logs are in {plan.data_dir / 'logs'}.")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(ended_with(parent, run_service(plan, serve, say)))


def plan_of(settings: Resolved) -> Plan:
    """The service that these settings describe. Raises: InvalidRequest."""
    machine, on_cluster = settings.machine, settings.up.on_cluster
    engine, *more = settings.node.engines or ("",)
    host = "0.0.0.0" if on_cluster and settings.is_default("server.host") else settings.server.host
    node = settings.node.model_copy(
        update={
            "host": host if settings.is_default("node.host") else settings.node.host,
            "allowed_hosts": tuple(dict.fromkeys((*settings.server.allowed_hosts, *settings.node.allowed_hosts))),
            "no_token": False,
        }
    )
    num_nodes = 1 if on_cluster else settings.cluster.num_nodes or 1
    if num_nodes > 1 and node.public_url is not None:
        raise InvalidRequest(
            f"node.public_url is the URL of one node, and each of {num_nodes} nodes has its own. Leave it out, and set "
            "node.host to an address that other machines reach."
        )
    if num_nodes > 1 and machine.gpus:
        raise InvalidRequest(
            f"GANGLINE_GPUS names the GPUs of one node, and here are {num_nodes}. Start them by `gangline node`, each "
            "with its own GPUs."
        )
    return Plan(
        data_dir=machine.data_dir.absolute(),
        port=None if settings.is_default("server.port") else settings.server.port,
        server=settings.server.model_copy(update={"host": host, "no_token": False}),
        engine=engine,
        more_engines=_urls(more),
        tokenizer=settings.up.tokenizer,
        node=node,
        num_nodes=num_nodes,
        cluster=settings.cluster if on_cluster else None,
        control_token=machine.control_token,
        log_format=machine.log_format,
        environment=settings.environment(),
    )


def _urls(engines: list[str]) -> tuple[str, ...]:
    """Raises: InvalidRequest."""
    for engine in engines:
        if not engine.startswith(("http://", "https://")):
            raise InvalidRequest(
                f"only the first --engine can be started here; {engine!r} is not a URL of a running one."
            )
    return tuple(engines)


def _announce(live: running.Running, plan: Plan, as_json: bool) -> None:
    if as_json:
        print_json({name: getattr(live, name) for name in ("server_url", "node_urls", "control_token", "pid")})
        return
    out = console()
    out.print("[bold green]Gangline is up.[/]  Ctrl-C ends it.")
    moved = plan.port is None and not live.server_url.endswith(f":{DEFAULT_PORT}")
    data = "" if plan.data_dir == Path.cwd() / ".gangline" else f" --data {shlex.quote(str(plan.data_dir))}"
    for name, value in (
        ("server", live.server_url + (f"  (port {DEFAULT_PORT} is taken)" if moved else "")),
        *(("node", url) for url in live.node_urls or ("on a Ray cluster; `gangline status` shows them",)),
        ("engine", live.engine_url or "none yet: `gangline backend add`, or a trainer"),
        ("data", str(plan.data_dir)),
        ("page", f"gangline open{data}"),
    ):
        out.print(f"  [bold]{name:<7}[/] {escape(value)}")
    out.print("In another terminal:  gangline status · gangline watch · gangline submit TASK.json --wait")


async def _say_what_templates_lack(live: running.Running) -> None:
    from gangline.wire.client.node import NodeClient

    for url in live.node_urls:
        with contextlib.suppress(GanglineError):  # a node that has just died is restarted, and its views then report it
            async with NodeClient(url, live.control_token) as client:
                for backend in await client.backends():
                    for lack in backend.template_lacks:
                        notes().print(f"{backend.model}: {lack}", style="yellow", markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(up)
