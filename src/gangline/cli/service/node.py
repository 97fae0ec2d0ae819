"""`gangline node`: runs one node, which leases sessions from a server and answers their model calls with an engine."""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import socket
from collections.abc import Callable

import typer

from gangline.cli.options.settings import NODE, with_settings
from gangline.cli.options.tracing import traces_of
from gangline.cli.processes.serving import ParentOption, serve
from gangline.cli.terminal.output import JsonOption
from gangline.domain.errors import GanglineError, InvalidRequest
from gangline.settings.service import Resolved
from gangline.wire.client.running import Service, find_service, refuse_both

_log = logging.getLogger("gangline.node")


def _import_node() -> None:
    """Half of a node's start, done while its server and its engine start."""
    importlib.import_module("gangline.node.node")


@with_settings(NODE, meanwhile=_import_node)
def node(settings: Resolved, as_json: JsonOption = False, parent: ParentOption = None) -> None:
    """Run a node: it leases sessions, runs them in sandboxes, and answers their model calls.

    Prints one line of JSON with its URL when it is ready, and serves until SIGTERM or `gangline drain`. SIGUSR1 drains
    it too: Slurm, Kubernetes and systemd can send that before they end a process. The control
    token comes from GANGLINE_TOKEN, else from the data folder of a server on this machine; it is the server's own.
    """
    from gangline.node.node import reap
    from gangline.node.node import serve as serve_node

    wanted, machine = settings.node, settings.machine
    if not wanted.engines and not wanted.engines_later:
        raise InvalidRequest(
            "a node needs an engine: give its URL with --engine, or as `engines` in [node]; or --engines-later where a "
            "trainer gives them."
        )
    address = find_service(settings.option("data_dir"), settings.option("server_url"))
    token = _token_for(address, machine.control_token, wanted.no_token)
    name = wanted.node_id or f"node-{socket.gethostname()}"
    with traces_of("node", machine) as traces:
        serve(
            lambda on_ready: serve_node(
                wanted,
                data_dir=machine.data_dir,
                node_id=name,
                server_url=address.server_url,
                control_token=token,
                on_ready=_drained_by_signal(on_ready, token),
                on_result=None if traces is None else traces.attempt_ended,
            ),
            kind="node",
            is_open=token is None,
            parent=parent,
            log_format=machine.log_format,
            clean_up=lambda: asyncio.run(reap(machine.data_dir, name)),
        )


def _drained_by_signal(on_ready: Callable[[str], None], token: str | None) -> Callable[[str], None]:
    """Returns `on_ready` that also makes SIGUSR1 drain the node, as `gangline drain` does."""
    asking: list[asyncio.Task[None]] = []

    async def drain(url: str) -> None:
        from gangline.wire.client.node import NodeClient

        try:
            async with NodeClient(url, token) as node:
                await node.drain()
        except GanglineError as error:
            _log.error("node.not_drained message=%s", error.message)

    def ready(url: str) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: asking.append(loop.create_task(drain(url))))
        on_ready(url)

    return ready


def _token_for(address: Service, given: str | None, no_token: bool) -> str | None:
    """The control token, which the node shares with its server. Raises: InvalidRequest when no token is known."""
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
